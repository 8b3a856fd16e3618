// The tile sizes of the backward kernels for lists of keys (list_bwd.cuh). Compile-time numbers
// only, in plain C++: the kernels and plan_backward.cpp include them.
#pragma once

#include "common/device/slab_tile.cuh"
#include "common/image_dtype.h"

namespace archflash::hopper {

// A CTA owns up to 128 rows of one list, 64 for each of its two warpgroups, and visits its keys in
// blocks of 64.
template <DType DTYPE_, int HEAD_DIM_, int HEAD_DIM_V_ = HEAD_DIM_, bool KEEPS_ = false>
struct ListBackwardConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = HEAD_DIM_, HEAD_DIM_V = HEAD_DIM_V_;
  // Whether dK and dV of each entry are kept (KeptKeys), not added in any order.
  static constexpr bool KEEPS = KEEPS_;
  static constexpr int GROUP_ROWS = 64;  // of a warpgroup: wgmma multiplies 64 rows at a time
  static constexpr int BLOCK_Q = 2 * GROUP_ROWS;
  static constexpr int BLOCK_K = 64;
  static constexpr int THREADS = 256;
  static constexpr int CTAS_PER_SM = 1;
  static constexpr int STAGES = 2;
  // Whether the next scores are multiplied while dK and dV are added. Else registers would spill.
  static constexpr bool ADDS_LATE = HEAD_DIM <= 128;

  using QTile = device::SlabTile<HEAD_DIM, BLOCK_Q>;
  using DoutTile = device::SlabTile<HEAD_DIM_V, BLOCK_Q>;
  using KTile = device::SlabTile<HEAD_DIM, BLOCK_K>;
  using VTile = device::SlabTile<HEAD_DIM_V, BLOCK_K>;
  using ScoreTile = device::SlabTile<BLOCK_Q, BLOCK_K>;  // of P and of dS; its rows are keys

  // Shared memory: Q, dO | K, V of each stage | P, dS | positions of keys | context. In bytes.
  static constexpr int DOUT_SMEM = QTile::BYTES;
  static constexpr int STAGES_SMEM = DOUT_SMEM + DoutTile::BYTES;
  static constexpr int STAGE_BYTES = KTile::BYTES + VTile::BYTES;
  static constexpr int P_SMEM = STAGES_SMEM + STAGES * STAGE_BYTES;
  static constexpr int DS_SMEM = P_SMEM + ScoreTile::BYTES;
  static constexpr int POSITIONS_SMEM = DS_SMEM + ScoreTile::BYTES;
  static constexpr int POSITION_BLOCKS = 4;  // added, multiplied, copied, looked up
  static constexpr int CONTEXT_SMEM = POSITIONS_SMEM + POSITION_BLOCKS * BLOCK_K * 4;
  static constexpr int CONTEXT_BYTES = 160;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + CONTEXT_BYTES;

  static_assert(HEAD_DIM_V <= HEAD_DIM, "the sums of either warpgroup fit those of dK");
  static_assert(SHARED_BYTES <= 227 * 1024, "CUDA: at most 227 KiB of shared memory in a CTA");
};

using D64Lists = ListBackwardConfig<DTYPE, 64>;
using D128Lists = ListBackwardConfig<DTYPE, 128>;
using D192Lists = ListBackwardConfig<DTYPE, 192, 128>;
using D64KeptLists = ListBackwardConfig<DTYPE, 64, 64, true>;
using D128KeptLists = ListBackwardConfig<DTYPE, 128, 128, true>;
using D192KeptLists = ListBackwardConfig<DTYPE, 192, 128, true>;

}  // namespace archflash::hopper
