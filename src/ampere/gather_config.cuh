// The tile sizes of the kernels for lists of keys (gather_fwd.cuh, mla_gather_fwd.cuh), and their
// parameters. Compile-time numbers only, in plain C++: the kernels and plan.cpp include them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ampere/mla_config.cuh"
#include "common/device/swizzled_tile.cuh"
#include "common/image_dtype.h"
#include "common/key_lists.h"
#include "common/mma_sync/config.cuh"
#include "common/mma_sync/params.h"
#include "common/packed_rows.h"

namespace archflash::ampere {

struct GatherParams {
  mma_sync::CacheParams call;
  KeyLists lists;
  int32_t row_warps;  // warps that share out the rows of a tile: 1, 2 or 4
  int32_t unused;
};

struct MlaGatherParams {
  MlaParams mla;
  KeyLists lists;
  PackedRows packed;  // of the cache, where the kernel is for packed rows
  int32_t unused;
};

// Where the keys of a block lie, in shared memory: of the block that is multiplied, the one that is
// copied and the one that is looked up. A key has three numbers (device::KeyPlace).
constexpr int PLACE_BLOCKS = 3;
constexpr int place_bytes(int block_k) { return PLACE_BLOCKS * block_k * 12; }
constexpr int GATHER_CONTEXT_BYTES = 160;

// A CTA owns up to BLOCK_Q rows of one list and visits its keys in blocks of BLOCK_K. Each warp has
// 16 of the rows, and of each block the keys of its own steps of STEP_KEYS.
template <DType DTYPE_, int HEAD_DIM_, int BLOCK_K_, int STEP_KEYS_, mma_sync::QIn Q_IN,
          int CTAS_PER_SM_>
struct GatherConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_;
  static constexpr int WARPS = 4;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int WARP_ROWS = 16;
  static constexpr int BLOCK_Q = WARPS * WARP_ROWS;
  static constexpr int BLOCK_K = BLOCK_K_;
  static constexpr int STEP_KEYS = STEP_KEYS_;
  static constexpr int STEPS = BLOCK_K / STEP_KEYS;  // of a block
  static constexpr int STAGES = 2;
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;
  static constexpr bool CAN_SPLIT = true;
  static constexpr bool Q_IN_REGISTERS = Q_IN == mma_sync::QIn::Registers;

  using Tile = device::SwizzledTile<HEAD_DIM>;
  // What the products and device/online_softmax.cuh ask of a warp.
  struct Warp {
    static constexpr DType DTYPE = DTYPE_;
    static constexpr int HEAD_DIM_V = HEAD_DIM_;
    static constexpr int M_TILES = 1;
    static constexpr int WARP_ROWS = 16;
    static constexpr int STEP_KEYS = STEP_KEYS_;
    static constexpr int QK_PACK = 1, V_PACK = 1;
    static constexpr bool Q_IN_REGISTERS = GatherConfig::Q_IN_REGISTERS;
    static constexpr bool ROWS_ALONE = true;
    using QTile = Tile;
    using KTile = Tile;
    using VTile = Tile;
  };

  // Shared memory: K, V of each stage | Q | places of keys | context. In the end the stages hold
  // what warps with the same rows have found. In bytes.
  static constexpr int K_BYTES = BLOCK_K * Tile::ROW_BYTES;
  static constexpr int STAGE_BYTES = 2 * K_BYTES;
  static constexpr int Q_SMEM = STAGES * STAGE_BYTES;
  static constexpr int Q_BYTES = Q_IN_REGISTERS ? 0 : BLOCK_Q * Tile::ROW_BYTES;
  static constexpr int PLACES_SMEM = Q_SMEM + Q_BYTES;
  static constexpr int CONTEXT_SMEM = PLACES_SMEM + place_bytes(BLOCK_K);
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + GATHER_CONTEXT_BYTES;
  // A warp's outputs, bases and sums.
  static constexpr int WARP_FLOATS = 32 * (HEAD_DIM_V / 2 + 4);

  static_assert(STEPS * STEP_KEYS == BLOCK_K && BLOCK_K <= THREADS, "a thread looks a key up");
  static_assert((std::min(STEPS, WARPS) - 1) * WARP_FLOATS * 4 <= STAGES * STAGE_BYTES,
                "what warps add up fits the stages");
  static_assert(SHARED_BYTES <= 99 * 1024,
                "CUDA: at most 99 KiB of shared memory in a CTA (8.6, 8.9, 12.x)");
};

// clang-format off
//                              head_dim block_k step  Q                           CTAs per SM
using D64Gather  = GatherConfig<DTYPE,  64, 128,  32, mma_sync::QIn::Registers, 2>;
using D128Gather = GatherConfig<DTYPE, 128,  64,  16, mma_sync::QIn::Registers, 2>;
using D256Gather = GatherConfig<DTYPE, 256,  32,  16, mma_sync::QIn::Shared,    1>;
// clang-format on

// The kernel for latent rows is that of mla_config.cuh, whose keys come from lists. PACKED: rows
// are float8 with their scales. They are copied as they are to the place of the second stage, and
// converted to those of the first one.
template <DType DTYPE, bool PACKED_ = false>
struct MlaGatherConfig : MlaConfig<DTYPE> {
  using Mla = MlaConfig<DTYPE>;
  static constexpr bool PACKED = PACKED_;
  static constexpr int PACKED_SMEM = Mla::STAGE_BYTES;
  static constexpr int PACKED_ROW_BYTES = 656;     // from one row to the next
  static constexpr int PACKED_SCALES_BYTES = 640;  // where the scales of "fp8_584" lie in a row
  static constexpr int PLACES_SMEM = Mla::CONTEXT_SMEM;
  static constexpr int CONTEXT_SMEM = PLACES_SMEM + place_bytes(Mla::BLOCK_K);
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + GATHER_CONTEXT_BYTES;

  static_assert(Mla::BLOCK_K * PACKED_ROW_BYTES <= Mla::STAGE_BYTES);
  static_assert(SHARED_BYTES <= 99 * 1024,
                "CUDA: at most 99 KiB of shared memory in a CTA (8.6, 8.9, 12.x)");
};

}  // namespace archflash::ampere
