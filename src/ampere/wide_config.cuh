// The tile sizes of the kernels for head dimensions above 256 (wide_fwd.cuh). Compile-time numbers
// only, in plain C++: the kernels and plan.cpp both include them.
#pragma once

#include "common/device/swizzled_tile.cuh"
#include "common/image_dtype.h"
#include "common/mask_params.h"

namespace archflash::ampere {

// Where a warp keeps its RowState between one softmax and the next: in shared memory where
// registers are few.
enum class StateIn { Registers, Shared };

// d and dv may be at most HEAD_DIM.
template <DType DTYPE_, int HEAD_DIM_, int BLOCK_K_, StateIn STATE_IN>
struct WideConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM;
  static constexpr int ROW_COLUMNS = HEAD_DIM;
  static constexpr int WARPS = 8;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int WARP_ROWS = 16;  // of a pair of warps
  static constexpr int BLOCK_Q = WARPS / 2 * WARP_ROWS;
  static constexpr int BLOCK_K = BLOCK_K_;
  static constexpr int STAGES = 1;       // V is copied during Q K^T, and the next K during P V
  static constexpr int CTAS_PER_SM = 1;  // 8 warps with up to 255 registers fill an SM
  // What the main loop of mma_sync and device/few_rows.cuh ask.
  static constexpr int M_TILES = 1, QK_PACK = 1, V_PACK = 1, KEY_GROUPS = 1;
  static constexpr int STEP_KEYS = BLOCK_K;
  static constexpr bool Q_IN_REGISTERS = false;  // the main loop loads none
  static constexpr bool V_WITH_K = false;
  static constexpr bool CAN_SPLIT = true;
  static constexpr bool CACHE = true;
  static constexpr bool FP8_CACHE = false;
  static constexpr bool MASKED = false;  // see WideMaskedConfig

  using Tile = device::SwizzledTile<HEAD_DIM>;  // of K and of V
  using QKTile = Tile;
  using QTile = Tile;
  using VTile = Tile;

  // What one warp multiplies and exponentiates (pair.cuh).
  struct Warp {
    static constexpr DType DTYPE = DTYPE_;
    static constexpr int M_TILES = 1;
    static constexpr int WARP_ROWS = 16;
    static constexpr int WARPS_OF_ROW = 2;
    static constexpr int STEP_KEYS = BLOCK_K;
    static constexpr int HEAD_DIM_V = WideConfig::HEAD_DIM_V / 2;
    static constexpr int V_PACK = 1;
    static constexpr bool ROWS_ALONE = true;
    using VTile = Tile;
  };

  // Shared memory: K | V | scores of each warp | CacheContext | sums | bases. Offsets and sizes in
  // bytes. Q is in registers.
  static constexpr int Q_SMEM = 0, K_SMEM = 0;
  static constexpr int V_SMEM = BLOCK_K * Tile::ROW_BYTES;
  static constexpr int SCORES_SMEM = 2 * V_SMEM;
  static constexpr int SCORES_BYTES = WARP_ROWS * BLOCK_K * 4;  // of a warp
  static constexpr int CONTEXT_SMEM = SCORES_SMEM + WARPS * SCORES_BYTES;
  static constexpr int CONTEXT_BYTES = 96;
  // The sums of each lane, and the bases of a warp's rows.
  static constexpr bool STATE_IN_SHARED = STATE_IN == StateIn::Shared;
  static constexpr int SUM_SMEM = CONTEXT_SMEM + CONTEXT_BYTES;
  static constexpr int BASE_SMEM = SUM_SMEM + (STATE_IN_SHARED ? 8 * THREADS : 0);
  static constexpr int SHARED_BYTES = BASE_SMEM + (STATE_IN_SHARED ? 4 * WARPS * WARP_ROWS : 0);

  static_assert(HEAD_DIM % 128 == 0, "each warp of a pair has whole swizzle groups of V");
  static_assert(SHARED_BYTES <= (BLOCK_K == 32 ? 99 : 163) * 1024,
                "CUDA: shared memory of a CTA (8.6, 8.9, 12.x; 8.0)");
};

// A WideConfig whose kernel reads masks as data, and no cache.
template <class Base>
struct WideMaskedConfig : Base {
  static constexpr bool MASKED = true;
  static constexpr bool CACHE = false;
  // The scores whose masks a warp finds.
  struct MaskedHalf : Base::Warp {
    static constexpr int STEP_KEYS = Base::BLOCK_K / 2;
    static constexpr bool LOADS_ADDED_LATE = false;  // device/lane_masks.cuh
  };
  static constexpr int MASK_SMEM = (Base::SHARED_BYTES + 15) / 16 * 16;
  // Behind the rest, each pair of warps has a number for each of its scores, four bytes of flags
  // and room to align them (PairMasks in wide_masks.cuh).
  static constexpr int SHARED_BYTES =
      MASK_SMEM + Base::WARPS / 2 * (Base::WARP_ROWS * Base::BLOCK_K * 4 + 16);
  static_assert(MASK_BLOCK % Base::BLOCK_Q == 0 && MASK_BLOCK % Base::BLOCK_K == 0,
                "a tile lies in one block of block_mask");
};

// clang-format off
//                               head block
//                               _dim _k  state in
using D384Large = WideConfig<DTYPE, 384, 64, StateIn::Registers>;
using D384      = WideConfig<DTYPE, 384, 32, StateIn::Registers>;
using D512Large = WideConfig<DTYPE, 512, 64, StateIn::Shared>;
using D512      = WideConfig<DTYPE, 512, 32, StateIn::Registers>;
using D512Masked = WideMaskedConfig<
                  WideConfig<DTYPE, 512, 32, StateIn::Shared>>;
// clang-format on

}  // namespace archflash::ampere
