// The tile sizes of the kernels for calls in which every query sees every key
// (common/mma_sync/dense_fwd.cuh).
#pragma once

#include "ampere/config.cuh"

namespace archflash::ampere {

// Tile, of whose columns the products take the first COLUMNS_ alone: those behind them are neither
// copied nor read.
template <class Tile, int COLUMNS_>
struct FirstColumns : Tile {
  static constexpr int COLUMNS = COLUMNS_;
  static_assert(COLUMNS % 16 == 0 && COLUMNS <= Tile::COLUMNS, "mma.sync: 16 columns at a time");
};

// A Config for head dimensions up to D, in the shared memory of its larger one.
template <class Base, int D>
struct NarrowConfig : Base {
  static constexpr int HEAD_DIM = D;
  static constexpr int HEAD_DIM_V = D;
  using QKTile = FirstColumns<typename Base::QKTile, D>;
  using QTile = QKTile;
  using KTile = QKTile;
  using VTile = FirstColumns<typename Base::VTile, D>;
};

// clang-format off
//                             head_dim       m_    block step                       CTAs
//                           q,k   v   warps tiles _k   _keys stages Q in           per SM
template <DType T>
using D32Dense       = D32Large<T>;
template <DType T>
using D32DenseMedium = D32Medium<T>;
template <DType T>
using D32DenseFew    = LateConfig<
                       Config<T,  32,  32, 4, 1,  256,  128,  2,     QIn::Registers, 2>>;
template <DType T>
using D64DenseShort  = Config<T,  64,  64, 4, 2,   64,   32,  2,     QIn::Shared,    3>;
template <DType T>
using D64Dense       = D64Large<T>;
template <DType T>
using D64DenseFew    = Config<T,  64,  64, 4, 1,  128,  128,  2,     QIn::Registers, 2>;
template <DType T>
using D80Dense       = NarrowConfig<D96Large<T>, 80>;
template <DType T>
using D96Dense       = D96Large<T>;
template <DType T>
using D96DenseFew    = Config<T,  96,  96, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
template <DType T>
using D80DenseFew    = NarrowConfig<D96DenseFew<T>, 80>;
template <DType T>
using D128Dense      = LateConfig<D128Large<T>>;
template <DType T>
using D128DenseFew   = Config<T, 128, 128, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
template <DType T>
using D160Dense      = Config<T, 160, 160, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
template <DType T>
using D192Dense      = LateConfig<
                       Config<T, 192, 192, 4, 1,   64,   64,  1,     QIn::Shared,    2>>;
template <DType T>
using D256Dense      = D256Large<T>;

// For GPUs with less shared memory: 99 KB, and Medium 163.
template <DType T>
using D64DenseSmall  = Config<T,  64,  64, 4, 2,  128,  128,  1,     QIn::Shared,    2>;
template <DType T>
using D80DenseSmall  = NarrowConfig<D96Medium<T>, 80>;
template <DType T>
using D96DenseSmall  = D96Medium<T>;
template <DType T>
using D128DenseSmall = D128Small<T>;
template <DType T>
using D128DenseMedium = LateConfig<D128Medium<T>>;
template <DType T>
using D256DenseMedium = D256Medium<T>;
// clang-format on

}  // namespace archflash::ampere
