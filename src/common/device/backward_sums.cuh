// The sums of dQ in fp32, to which many CTAs add, and the kernel that makes dQ of them.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/backward_rows.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/varlen_tiles.cuh"
#include "common/ptx/grid_dependency.cuh"

namespace archflash::device {

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

// Clears, by all threads of the grid, what the main kernel expects to be zero: the turns, or where
// CTAs take none the sums.
__device__ __forceinline__ void clear_dq_sums(const BackwardParams& params) {
  const AttentionParams& attention = params.attention;
  const DqSums& sums = params.dq_sums;
  const int64_t batches = attention.cu_seqlens_q_gmem == nullptr ? attention.batch : 1;
  const int64_t blocks = batches * attention.heads_q * sums.blocks;
  const bool turns = sums.turns_gmem != nullptr;
  // The last turns of 16 bytes are padding of the workspace.
  clear_by_grid(turns ? static_cast<void*>(sums.turns_gmem) : sums.gmem,
                blocks * 4 * (turns ? 1 : sums.block_rows * sums.columns));
}

// A block of the sums: rows first_row on of a sequence of `rows` rows, which starts at row `start`
// of its tensor.
struct SummedBlock {
  int batch, head;  // of a packed tensor: batch 0; negative: no sequence has this block
  int first_row, rows, start;
};

__device__ __forceinline__ SummedBlock find_summed_block(const BackwardParams& params, int index) {
  const AttentionParams& attention = params.attention;
  const DqSums& sums = params.dq_sums;
  const int head = index / sums.blocks, block = index % sums.blocks;
  SummedBlock found{head / attention.heads_q, head % attention.heads_q, block * sums.block_rows,
                    attention.nq, 0};
  const int* cu_q = attention.cu_seqlens_q_gmem;
  if (cu_q == nullptr) return found;
  found = {0, head, found.first_row, 0, 0};
  const int batch = find_varlen_sequence(cu_q, attention.batch, sums.block_rows, block);
  if (batch < 0) {
    found.batch = -1;
    return found;
  }
  found.first_row -= varlen_tile_start(cu_q, batch, sums.block_rows) * sums.block_rows;
  found.start = sequence_start(cu_q, batch, attention.nq);
  found.rows = sequence_start(cu_q, batch + 1, attention.nq) - found.start;
  return found;
}

// dQ of a block of the sums for each CTA.
template <DType DTYPE>
__device__ __forceinline__ void backward_dq(const BackwardParams& params) {
  ptx::griddepcontrol_wait();  // all CTAs have added to the sums
  const DqSums& sums = params.dq_sums;
  const SummedBlock of_cta = find_summed_block(params, blockIdx.x);
  if (of_cta.batch < 0) return;
  const int chunks = sums.columns / 8;
  const int chunk = threadIdx.x % chunks, first = threadIdx.x / chunks;
  const int rows_at_a_time = BACKWARD_DQ_THREADS / chunks;
  // With 12 chunks some threads are left over.
  if (8 * chunk >= params.attention.d || first >= rows_at_a_time) return;
  // In turns the first CTA writes a block; one to which none has come stays as it was.
  const bool any = sums.turns_gmem == nullptr || sums.turns_gmem[blockIdx.x] != 0;
  const float* block_gmem =
      sums.gmem + static_cast<int64_t>(blockIdx.x) * sums.block_rows * sums.columns + chunk * 128;
  const int64_t head_start =
      of_cta.batch * params.dq.batch + of_cta.head * params.dq.head + 8 * chunk;
  const int end = min(of_cta.rows - of_cta.first_row, sums.block_rows);
#pragma unroll 2
  for (int row = first; row < end; row += rows_at_a_time) {
    const float* row_gmem = block_gmem + row / 16 * (chunks * 128) + row / 8 % 2 * 64 + row % 8 * 4;
    float4 even = {}, odd = {};
    if (any) {
      even = *reinterpret_cast<const float4*>(row_gmem);
      odd = *reinterpret_cast<const float4*>(row_gmem + 32);
    }
    const float s = params.scale;
    float x[8] = {even.x * s, odd.x * s, even.y * s, odd.y * s,
                  even.z * s, odd.z * s, even.w * s, odd.w * s};
    store_gradient_chunk<DTYPE>(
        params.dq,
        head_start + (static_cast<int64_t>(of_cta.start) + of_cta.first_row + row) * params.dq.row,
        x);
  }
}

}  // namespace archflash::device

// Define entry points, which plan_backward.cpp of a folder launches by NAME.
#define ARCHFLASH_BACKWARD_ROWS_KERNEL(NAME, DTYPE)                                             \
  extern "C" __global__ void __launch_bounds__(archflash::BACKWARD_ROWS_THREADS)                \
      NAME(const __grid_constant__ archflash::BackwardParams params) {                          \
    archflash::ptx::griddepcontrol_wait(); /* what comes before this pass is done */            \
    archflash::ptx::griddepcontrol_launch_dependents();                                         \
    archflash::device::backward_rows<DTYPE>(params,                                             \
                                            [&] { archflash::device::clear_dq_sums(params); }); \
  }
