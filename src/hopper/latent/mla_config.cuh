// The tile of the kernel for latent caches (mla_fwd.cuh), and its parameter. Compile-time numbers
// only, in plain C++: the kernel and plan_mla.cpp both include them.
#pragma once

#include <cstdint>

#include "common/device/slab_tile.cuh"
#include "common/dtype.h"
#include "common/mma_sync/params.h"
#include "common/tensor_map.h"

namespace archflash::hopper {

struct MlaParams {
  mma_sync::CacheParams call;
  const void* qv_gmem;  // as attention.q_gmem, with dv columns; strides in elements
  int64_t qv_batch, qv_head, qv_row;
  // The caches as (columns of a slab, rows of a block, slabs, heads, blocks), where a block is a
  // page, or without a page table a sequence. A box has one slab of K, and of V box_slabs.
  TensorMap k_map, v_map;
  int32_t box_rows;  // rows of a box of these maps: 64, or those of a page that has fewer
  int32_t box_slabs;
};

constexpr int MLA_FEWEST_BOX_ROWS = 16;

template <DType DTYPE_>
struct MlaConfig {
  using Params = MlaParams;
  static constexpr bool GATHERS = false;    // rows come by TMA, in the order of the cache
  static constexpr bool PACKED = false;     // gathered rows are float8 with scales
  static constexpr bool TRANSFORMS = true;  // it can transform scores
  static constexpr bool PAIRS = false;      // two CTAs with one list convert half of its rows each
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = 64;     // of q and K
  static constexpr int HEAD_DIM_V = 512;  // of qv and V
  static constexpr int WARPGROUP = 128;   // threads
  static constexpr int WARPGROUPS = 2;    // consumers
  static constexpr int WARPS = 4 * WARPGROUPS;
  static constexpr int CONSUMER_THREADS = WARPGROUP * WARPGROUPS;
  static constexpr int THREADS = CONSUMER_THREADS + WARPGROUP;
  static constexpr int WARP_ROWS = 16;
  static constexpr int BLOCK_Q = 64;
  static constexpr int BLOCK_K = 64;
  static constexpr int STAGES = 2;
  static constexpr int CTAS_PER_SM = 1;
  static constexpr bool CAN_SPLIT = true;
  // Named barriers; 1 is that of both warpgroups.
  static constexpr int SCORES_BARRIER = 2, START_BARRIER = 3;

  // Every thread starts with 168 registers, as __launch_bounds__ demands; then the producer's
  // warpgroup gives some back to the consumers (setmaxnreg).
  static constexpr int PRODUCER_REGISTERS = 40;
  static constexpr int CONSUMER_REGISTERS = 232;
  static_assert(PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= 168 * (WARPGROUPS + 1));

  // What a warpgroup multiplies and takes exponentials of: the scores of a block for 64 rows, half
  // of the columns of V. As row_softmax.cuh and device/online_softmax.cuh ask.
  struct Group {
    static constexpr DType DTYPE = DTYPE_;
    static constexpr bool FP8 = false;
    static constexpr int PACK = 1;
    static constexpr int M_TILES = 1;
    static constexpr int BLOCK_K = MlaConfig::BLOCK_K;
    static constexpr int STEP_KEYS = BLOCK_K;
    static constexpr int HEAD_DIM_V = MlaConfig::HEAD_DIM_V / 2;
  };

  // A block of latent rows lies in shared memory as slabs of 64 columns: the columns of V, then
  // those of K alone. It comes and goes in three parts: the half of V that warpgroup 0 multiplies,
  // that of warpgroup 1, and K.
  using QTile = device::SlabTile<HEAD_DIM_V, BLOCK_Q>;
  using RowTile = device::SlabTile<HEAD_DIM_V + HEAD_DIM, BLOCK_K>;
  using PTile = device::SlabTile<BLOCK_K, BLOCK_Q>;
  static constexpr int PARTS = 3;
  static constexpr int V_SLABS = HEAD_DIM_V / RowTile::SLAB;
  static constexpr int HALF_SLABS = V_SLABS / 2;
  static constexpr int HALF_BYTES = HALF_SLABS * RowTile::SLAB_BYTES;

  // Shared memory, in bytes: qv | ring of latent rows | P of each warpgroup | bases of each | row
  // sums of each | barriers | MlaTile.
  static constexpr int Q_SMEM = 0;
  static constexpr int ROWS_SMEM = Q_SMEM + QTile::BYTES;
  static constexpr int P_SMEM = ROWS_SMEM + STAGES * RowTile::BYTES;
  static constexpr int BASE_SMEM = P_SMEM + WARPGROUPS * PTile::BYTES;
  static constexpr int SUM_SMEM = BASE_SMEM + WARPGROUPS * BLOCK_Q * 4;
  static constexpr int BARRIER_SMEM = SUM_SMEM + WARPGROUPS * BLOCK_Q * 4;
  // Full and empty of each part of each stage, P of each warpgroup, each part of a ragged block.
  static constexpr int BARRIERS = 2 * STAGES * PARTS + WARPGROUPS + PARTS;
  static constexpr int TILE_SMEM = BARRIER_SMEM + (8 * BARRIERS + 15) / 16 * 16;
  static constexpr int TILE_BYTES = 64;
  static constexpr int SHARED_BYTES = TILE_SMEM + TILE_BYTES;
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

}  // namespace archflash::hopper
