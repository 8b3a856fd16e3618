// The kernel behind main kernels that keep dS: it adds up what sequences and heads share to the
// gradient of attn_mask, always in the same order.
#pragma once

#include <cstdint>

#include "common/device/masks.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/backward/kept_scores.cuh"
#include "hopper/backward/mask_sums_params.h"

namespace archflash::hopper {

// Adds up the kept scores of all sequences and heads that share an element of the mask. A group of
// DENSE_THREADS threads has a part of a block, 16 rows or keys of it. Where few share one, a CTA
// has all parts of a block; where more do, it has one part, and each group every so many-th of
// them.
template <DType DTYPE>
__device__ __forceinline__ void sum_mask_gradients(const MaskSumsParams& params) {
  constexpr int PARTS = DENSE_16_BIT_CHUNKS, GROUPS = SUMMING_THREADS / DENSE_THREADS;
  static_assert(PARTS == GROUPS);
  constexpr int SCORES = DENSE_SCORES / PARTS;
  constexpr int AT_A_TIME = 4;
  __shared__ float sums_smem[GROUPS - 1][SCORES][DENSE_THREADS];
  const KeptScoresParams& kept = params.kept;
  const MaskGradientParams& dmask = params.dmask;
  const bool shares = params.shares != 0;
  const int group = static_cast<int>(threadIdx.x) / DENSE_THREADS;
  const int part = shares ? static_cast<int>(blockIdx.x % PARTS) : group;
  const unsigned block = shares ? blockIdx.x / PARTS : blockIdx.x;
  const int key_blocks = (params.nk + MASK_BLOCK - 1) / MASK_BLOCK;
  const int row_blocks = (params.nq + MASK_BLOCK - 1) / MASK_BLOCK;
  const int key_block = static_cast<int>(block % key_blocks);
  const unsigned rows = block / key_blocks;
  const int row_block = static_cast<int>(rows % row_blocks);
  const int slice = static_cast<int>(rows / row_blocks);
  const int heads = dmask.head != 0 ? params.heads : 1;  // of the mask
  const int batch = slice / heads, head = slice - batch * heads;
  const int64_t of_head = static_cast<int64_t>(kept.row_blocks) * kept.key_blocks;
  const int64_t first = (batch * static_cast<int64_t>(params.heads) + head) * of_head +
                        row_block * kept.key_blocks + key_block;
  // What is added up lies so many blocks apart: the heads of a sequence and those of the next one
  // follow one another, and one head of all sequences comes once in each.
  const int64_t step = dmask.head != 0 ? params.heads * of_head : of_head;
  const int count = (dmask.head != 0 ? 1 : params.heads) * (dmask.batch != 0 ? 1 : params.batch);
  const int begin = shares ? group : 0, every = shares ? GROUPS : 1;
  const int thread = threadIdx.x % DENSE_THREADS;
  const uint4* const gmem = static_cast<const uint4*>(kept.gmem) + part * DENSE_THREADS + thread;
  ptx::griddepcontrol_wait();  // all that is kept is written
  float sums[SCORES] = {};
#pragma unroll 1
  for (int start = begin; start < count; start += every * AT_A_TIME) {
    uint4 chunks[AT_A_TIME];
    bool is_kept[AT_A_TIME];
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      const int number = start + i * every;
      is_kept[i] = number < count &&
                   (kept.is_kept_gmem == nullptr || kept.is_kept_gmem[first + number * step] != 0);
    }
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      chunks[i] = uint4{0, 0, 0, 0};
      if (is_kept[i])
        chunks[i] = gmem[(first + (start + i * every) * step) * (PARTS * DENSE_THREADS)];
    }
#pragma unroll
    for (int i = 0; i < AT_A_TIME; ++i) {
      const uint32_t words[4] = {chunks[i].x, chunks[i].y, chunks[i].z, chunks[i].w};
#pragma unroll
      for (int s = 0; s < SCORES; ++s) sums[s] += device::added_of_half<DTYPE>(words[s / 2], s % 2);
    }
  }
  if (shares) {
    if (group > 0) {
#pragma unroll
      for (int s = 0; s < SCORES; ++s) sums_smem[group - 1][s][thread] = sums[s];
    }
    __syncthreads();  // the sums of the other groups are there
    if (group > 0) return;
#pragma unroll
    for (int s = 0; s < SCORES; ++s) {
#pragma unroll
      for (int of = 0; of < GROUPS - 1; ++of) sums[s] += sums_smem[of][s][thread];
    }
  }
  // A thread has pairs of neighbours along the one side of a block, and of the other side two
  // numbers, 8 apart.
  const int along = 16 * part + thread % 4 * 2, across = thread / 32 * 16 + thread % 32 / 4;
  const bool by_rows = params.by_rows != 0;
  const int query = row_block * MASK_BLOCK + (by_rows ? across : along);
  const int key = key_block * MASK_BLOCK + (by_rows ? along : across);
  float* const dmask_gmem =
      dmask.gmem + batch * dmask.batch + head * dmask.head + query * dmask.row + key * dmask.key;
#pragma unroll
  for (int s = 0; s < SCORES; ++s) {
    const int i = s / 4 * 8 + s % 2, r = s / 2 % 2 * 8;
    const int row = by_rows ? r : i, column = by_rows ? i : r;
    if (query + row >= params.nq || key + column >= params.nk) continue;
    float& element = dmask_gmem[row * dmask.row + column * dmask.key];
    element = params.adds != 0 ? element + sums[s] : sums[s];
  }
}

}  // namespace archflash::hopper
