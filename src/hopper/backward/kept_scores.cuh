// Main kernels of the backward pass keep dS of each head in the workspace, in the order of wgmma's
// registers, for a launch that adds it up to the gradient of attn_mask (mask_sums.cuh): that takes
// less time than to add it by atomics, and the order of the sums is fixed.
#pragma once

#include <cstdint>

#include "common/mask_params.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/special_registers.cuh"
#include "hopper/backward/backward_params.h"

namespace archflash::hopper {

constexpr int DENSE_SCORES = MASK_BLOCK * MASK_BLOCK / DENSE_THREADS;
// A block lies as chunks of 16 bytes: the first one of each thread, then the second one.
constexpr int DENSE_16_BIT_CHUNKS = DENSE_SCORES / 8, DENSE_F32_CHUNKS = DENSE_SCORES / 4;

// Keeps a thread's scores of a block. head: of q, of all sequences.
template <class C>
__device__ __forceinline__ void keep_scores(const float (&x_rmem)[C::BLOCK / 8][4],
                                            const KeptScoresParams& kept, int head, int row_block,
                                            int key_block) {
  const int thread = ptx::mov_tid_x_volatile() % DENSE_THREADS;
  const int64_t block =
      static_cast<int64_t>(head * kept.row_blocks + row_block) * kept.key_blocks + key_block;
  if (thread == 0 && kept.is_kept_gmem != nullptr) kept.is_kept_gmem[block] = 1;
  uint4* const gmem =
      static_cast<uint4*>(kept.gmem) + block * (DENSE_16_BIT_CHUNKS * DENSE_THREADS) + thread;
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; n += 2) {
    const auto word = [&](int i, int r) {
      return ptx::cvt_rn_x2_f32<C::DTYPE>(x_rmem[n + i][2 * r], x_rmem[n + i][2 * r + 1]);
    };
    gmem[n / 2 * DENSE_THREADS] = uint4{word(0, 0), word(0, 1), word(1, 0), word(1, 1)};
  }
}

}  // namespace archflash::hopper
