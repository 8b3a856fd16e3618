// The tile sizes of the kernels for calls in which every query sees every key
// (common/mma_sync/dense_fwd.cuh).
#pragma once

#include "ampere/config.cuh"
#include "common/image_dtype.h"

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
using D32Dense       = D32Large;
using D32DenseMedium = D32Medium;
using D32DenseFew    = LateConfig<
                       Config<DTYPE,  32,  32, 4, 1,  256,  128,  2,     QIn::Registers, 2>>;
using D64DenseShort  = Config<DTYPE,  64,  64, 4, 2,   64,   32,  2,     QIn::Shared,    3>;
using D64Dense       = D64Large;
using D64DenseFew    = Config<DTYPE,  64,  64, 4, 1,  128,  128,  2,     QIn::Registers, 2>;
using D80Dense       = NarrowConfig<D96Large, 80>;
using D96Dense       = D96Large;
using D96DenseFew    = Config<DTYPE,  96,  96, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
using D80DenseFew    = NarrowConfig<D96DenseFew, 80>;
using D128Dense      = LateConfig<D128Large>;
using D128DenseFew   = Config<DTYPE, 128, 128, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
using D160Dense      = Config<DTYPE, 160, 160, 4, 1,   64,   64,  2,     QIn::Registers, 2>;
using D192Dense      = LateConfig<
                       Config<DTYPE, 192, 192, 4, 1,   64,   64,  1,     QIn::Shared,    2>>;
using D256Dense      = D256Large;

// With dropout: 128 rows, and 64 that make twice as many tiles.
using D64DenseDropout = mma_sync::DropoutConfig<
                       Config<DTYPE,  64,  64, 4, 2,   64,   64,  2,     QIn::Shared,    2>>;
using D64DenseFewDropout = mma_sync::DropoutConfig<
                       Config<DTYPE,  64,  64, 4, 1,   64,   64,  2,     QIn::Registers, 3>>;

// For GPUs with less shared memory: 99 KB, and Medium 163.
using D64DenseSmall  = Config<DTYPE,  64,  64, 4, 2,  128,  128,  1,     QIn::Shared,    2>;
using D80DenseSmall  = NarrowConfig<D96Medium, 80>;
using D96DenseSmall  = D96Medium;
using D128DenseSmall = D128Small;
using D128DenseMedium = LateConfig<D128Medium>;
using D256DenseMedium = D256Medium;
// clang-format on

}  // namespace archflash::ampere
