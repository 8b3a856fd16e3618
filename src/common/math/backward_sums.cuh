// The sums of dQ in fp32, to which many CTAs add, and the kernel that makes dQ of them.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/backward_rows.cuh"
#include "common/math/backward_work.cuh"
#include "common/math/varlen_tiles.cuh"

namespace archflash::math {

// Where a fragment of 16 rows and 8 columns starts in a block of the sums, in floats. A fragment
// lies as the 32 lanes of a warp hold it after mma.sync: element i of lane l at 32 * i + l, which
// is row l/4 + 8 * (i/2), column 2 * (l%4) + i%2.
template <int COLUMNS>
__device__ __forceinline__ int dq_fragment(int row_tile, int column_tile) {
  return (row_tile * (COLUMNS / 8) + column_tile) * 128;
}

// The number of a block among those of all heads. A sequence starts with a block of its own.
__device__ __forceinline__ int64_t dq_block_number(const BackwardParams& params, int batch,
                                                   int head, int row, int block_rows) {
  const AttentionParams& attention = params.attention;
  int64_t heads = head;
  int block = row / block_rows;
  if (attention.cu_seqlens_q_gmem == nullptr) {
    heads += static_cast<int64_t>(batch) * attention.heads_q;
  } else {
    block += varlen_tile_start(attention.cu_seqlens_q_gmem, batch, block_rows);
  }
  return heads * params.dq_sums.blocks + block;
}
__device__ __forceinline__ int64_t dq_block_number(const BackwardParams& params,
                                                   const BackwardWork& work, const Passing& block,
                                                   int block_rows) {
  return dq_block_number(params, work.batch, work.head * params.attention.heads_per_kv + block.head,
                         block.row, block_rows);
}

// dQ of a block of the sums for each CTA.
template <DType DTYPE>
__device__ __forceinline__ void backward_dq(const BackwardParams& params) {
  const AttentionParams& attention = params.attention;
  const DqSums& sums = params.dq_sums;
  int head = blockIdx.x / sums.blocks;
  const int block = blockIdx.x % sums.blocks;
  int batch = 0, first_row = block * sums.block_rows, rows = attention.nq, start = 0;
  if (attention.cu_seqlens_q_gmem == nullptr) {
    batch = head / attention.heads_q;
    head %= attention.heads_q;
  } else {
    const int* cu_q = attention.cu_seqlens_q_gmem;
    batch = find_varlen_sequence(cu_q, attention.batch, sums.block_rows, block);
    if (batch < 0) return;
    first_row -= varlen_tile_start(cu_q, batch, sums.block_rows) * sums.block_rows;
    start = sequence_start(cu_q, batch, attention.nq);
    rows = sequence_start(cu_q, batch + 1, attention.nq) - start;
  }
  const int chunks = sums.columns / 8;
  const int chunk = threadIdx.x % chunks;
  if (8 * chunk >= attention.d) return;
  const float* block_gmem =
      sums.gmem + static_cast<int64_t>(blockIdx.x) * sums.block_rows * sums.columns + chunk * 128;
  const int64_t head_start =
      (attention.cu_seqlens_q_gmem == nullptr ? batch : 0) * params.dq.batch +
      head * params.dq.head + 8 * chunk;
  const int end = min(rows - first_row, sums.block_rows);
#pragma unroll 2
  for (int row = threadIdx.x / chunks; row < end; row += BACKWARD_DQ_THREADS / chunks) {
    const float* row_gmem = block_gmem + row / 16 * (chunks * 128) + row / 8 % 2 * 64 + row % 8 * 4;
    const float4 even = *reinterpret_cast<const float4*>(row_gmem);
    const float4 odd = *reinterpret_cast<const float4*>(row_gmem + 32);
    const float s = params.scale;
    float x[8] = {even.x * s, odd.x * s, even.y * s, odd.y * s,
                  even.z * s, odd.z * s, even.w * s, odd.w * s};
    store_gradient_chunk<DTYPE>(
        params.dq, head_start + (static_cast<int64_t>(start) + first_row + row) * params.dq.row, x);
  }
}

}  // namespace archflash::math

// Defines an entry point, which plan_backward.cpp of a folder launches by NAME.
#define ARCHFLASH_BACKWARD_DQ_KERNEL(NAME, DTYPE)                              \
  extern "C" __global__ void __launch_bounds__(archflash::BACKWARD_DQ_THREADS) \
      NAME(const __grid_constant__ archflash::BackwardParams params) {         \
    archflash::math::backward_dq<DTYPE>(params);                               \
  }
