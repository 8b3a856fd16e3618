// The second kernel of a call whose keys are split: it combines the partial results that the shares
// of a row left in the workspace (common/partials.h) into the output row and its LSE. Each warp
// computes one row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/dtype.h"
#include "common/partials.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::device {

constexpr unsigned ALL_LANES = 0xFFFFFFFFu;

// The largest base among the shares in which a row sees a key; -inf if there is none. The whole
// warp calls it with the same row.
__device__ __forceinline__ float find_largest_base(const Partials& partials, int64_t row) {
  float largest = MINUS_INFINITY;
  for (int split = threadIdx.x % 32; split < partials.splits; split += 32) {
    const PartialEnd end = partials.ends_gmem[partials.index(split, row)];
    if (end.sum != 0.0f) largest = fmaxf(largest, end.base);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, lanes));
  return largest;
}

// OUT is the output's type. dv may be at most HEAD_DIM_V.
template <DType OUT, int HEAD_DIM_V = 256>
__device__ __forceinline__ void combine_splits(const CombineParams& params) {
  constexpr int COLUMNS = 4;  // neighbouring columns of a lane
  constexpr int STEPS = HEAD_DIM_V / 32 / COLUMNS;
  constexpr int AT_ONCE = 16 / STEPS;  // shares whose outputs are loaded together
  const AttentionParams& attention = params.attention;
  const Partials& partials = params.partials;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * COMBINE_WARPS + threadIdx.x / 32;
  if (row >= partials.rows) return;
  const int row_of_head = static_cast<int>(row % attention.nq);
  const int* cu_q = attention.cu_seqlens_q_gmem;
  // A row of a packed tensor that belongs to no sequence counts as one that sees no key. No share
  // has written to its part of the workspace.
  const bool owned =
      cu_q == nullptr || (row_of_head >= sequence_start(cu_q, 0, attention.nq) &&
                          row_of_head < sequence_start(cu_q, attention.batch, attention.nq));
  const int splits = owned ? partials.splits : 0;
  const int64_t batch_head = row / attention.nq;
  const int64_t batch = batch_head / attention.heads_q;  // 0 for packed sequences
  const int head = static_cast<int>(batch_head % attention.heads_q);

  const float base = owned ? find_largest_base(partials, row) : MINUS_INFINITY;
  float sum = 0.0f;
  float4 o_rmem[STEPS] = {};
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < splits; first += 32) {
    // Each lane finds the weight of one share.
    PartialEnd end{0.0f, 0.0f};
    if (first + lane < splits) end = partials.ends_gmem[partials.index(first + lane, row)];
    // The base is NaN if inputs of the row were not finite. The weight, and the row, are then NaN.
    const float of_lane = end.sum == 0.0f ? 0.0f : ptx::ex2_approx_ftz(end.base - base);
    sum = fmaf(end.sum, of_lane, sum);
    const unsigned seen = __ballot_sync(ALL_LANES, end.sum != 0.0f);
    // The loads of AT_ONCE shares are under way together: there are few warps to hide their
    // latency.
#pragma unroll 1
    for (int i = 0; i < min(32, splits - first); i += AT_ONCE) {
      float4 x_rmem[AT_ONCE][STEPS] = {};
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        // A share in which the row sees no key has left no outputs.
        if ((seen >> (i + j) & 1) == 0) continue;
        const float* share = partials.rows_gmem + partials.index(first + i + j, row) * attention.dv;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const int column = COLUMNS * (lane + 32 * step);
          if (column < attention.dv)
            x_rmem[j][step] = *reinterpret_cast<const float4*>(share + column);
        }
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const float weight = __shfl_sync(ALL_LANES, of_lane, i + j);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const float4 x = x_rmem[j][step];
          float4& o = o_rmem[step];
          o = {fmaf(x.x, weight, o.x), fmaf(x.y, weight, o.y), fmaf(x.z, weight, o.z),
               fmaf(x.w, weight, o.w)};
        }
      }
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);

  const RowEnd end = finish_row_to_base_2(base, sum, load_sink(attention, head));
  using Number = std::conditional_t<OUT == DType::F32, float, uint16_t>;
  Number* out_gmem = static_cast<Number*>(attention.out_gmem) + batch * attention.out_batch +
                     head * attention.out_head + row_of_head * attention.out_row;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int column = COLUMNS * (lane + 32 * step);
    if (column >= attention.dv) continue;
    const float4 o = o_rmem[step];
    if constexpr (OUT == DType::F32) {
      *reinterpret_cast<float4*>(out_gmem + column) = {o.x * end.factor, o.y * end.factor,
                                                       o.z * end.factor, o.w * end.factor};
    } else {
      ptx::st_global_v2_b32(out_gmem + column,
                            ptx::cvt_rn_x2_f32<OUT>(o.x * end.factor, o.y * end.factor),
                            ptx::cvt_rn_x2_f32<OUT>(o.z * end.factor, o.w * end.factor));
    }
  }
  if (attention.lse_gmem != nullptr && lane == 0) attention.lse_gmem[row] = end.lse;
}

}  // namespace archflash::device
