// The second kernel of a decoding call whose keys are split (mma_sync/decode_fwd.cuh). It computes
// what device/combine_splits.cuh computes, for few rows with many shares: one or all warps of a CTA
// share out the shares of a row, so that few loads follow one another, and where the GPU can do it,
// its CTAs are there before the last share ends.
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
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::device {

// What one or several warps have found of a row: the largest base of the shares, and relative to
// it the sum and the outputs of a lane, which has 4 columns of each 128.
template <int STEPS>
struct CombinedShares {
  float base = MINUS_INFINITY, sum = 0.0f;
  float4 o[STEPS] = {};

  __device__ __forceinline__ void add(const float4& x, float weight, int step) {
    float4& to = o[step];
    to = {fmaf(x.x, weight, to.x), fmaf(x.y, weight, to.y), fmaf(x.z, weight, to.z),
          fmaf(x.w, weight, to.w)};
  }
};

// The shares first, first + stride, ... of a row, by a warp.
template <int STEPS>
__device__ __forceinline__ CombinedShares<STEPS> combine_every(const Partials& partials,
                                                               int64_t row, int first, int stride,
                                                               int splits, int dv, float scale) {
  constexpr int AT_ONCE = 12 / STEPS;  // shares whose outputs are loaded together
  constexpr unsigned ALL = 0xFFFFFFFFu;
  const int lane = threadIdx.x % 32;
  CombinedShares<STEPS> all;
  for (; first < splits; first += 32 * stride) {
    // Each lane finds the weight of one share.
    const int own = first + lane * stride;
    PartialEnd end{0.0f, 0.0f};
    if (own < splits) end = partials.ends_gmem[partials.index(own, row)];
    float base = end.sum == 0.0f ? MINUS_INFINITY : end.base;
    // fmaxf drops a NaN, which a row has whose inputs were not finite: its weight is NaN below.
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2)
      base = fmaxf(base, __shfl_xor_sync(ALL, base, lanes));
    const unsigned seen = __ballot_sync(ALL, end.sum != 0.0f);
    if (seen == 0) continue;
    base = fmaxf(base, all.base);
    const float before = all.sum == 0.0f ? 0.0f : ptx::ex2_approx_ftz((all.base - base) * scale);
    all.sum *= before;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      float4& o = all.o[step];
      o = {o.x * before, o.y * before, o.z * before, o.w * before};
    }
    all.base = base;
    const float of_lane = end.sum == 0.0f ? 0.0f : ptx::ex2_approx_ftz((end.base - base) * scale);
    float sum = end.sum * of_lane;
    const int shares = min(32, (splits - first + stride - 1) / stride);
#pragma unroll 1
    for (int i = 0; i < shares; i += AT_ONCE) {
      float4 x[AT_ONCE][STEPS] = {};
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        // A share in which the row sees no key has left no outputs.
        if (i + j >= 32 || (seen >> (i + j) & 1) == 0) continue;
        const float* share =
            partials.rows_gmem + partials.index(first + (i + j) * stride, row) * dv;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
          const int column = 4 * (lane + 32 * step);
          if (column < dv) x[j][step] = *reinterpret_cast<const float4*>(share + column);
        }
      }
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) {
        const float weight = __shfl_sync(ALL, of_lane, (i + j) % 32);
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
          all.add(x[j][step], i + j < 32 ? weight : 0.0f, step);
      }
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL, sum, lanes);
    all.sum += sum;
  }
  return all;
}

// Where a row goes.
struct CombinedRow {
  int64_t batch;  // 0 for packed sequences
  int head;
  int64_t row;  // of the tensor
  int64_t lse_index;
};

// Writes a row.
template <DType OUT, int STEPS>
__device__ __forceinline__ void store_combined(const AttentionParams& attention,
                                               const CombinedShares<STEPS>& all,
                                               const CombinedRow& row, float scale) {
  const int lane = threadIdx.x % 32;
  const RowEnd end =
      finish_row_to_base_2(all.base * scale, all.sum, load_sink(attention, row.head));
  using Element = std::conditional_t<OUT == DType::F32, float, uint16_t>;
  Element* out_gmem = static_cast<Element*>(attention.out_gmem) + row.batch * attention.out_batch +
                      row.head * attention.out_head + row.row * attention.out_row;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int column = 4 * (lane + 32 * step);
    if (column >= attention.dv) continue;
    float4 o = all.o[step];
    o = {o.x * end.factor, o.y * end.factor, o.z * end.factor, o.w * end.factor};
    if constexpr (OUT == DType::F32) {
      ptx::st_global_v4_b32(out_gmem + column, __float_as_uint(o.x), __float_as_uint(o.y),
                            __float_as_uint(o.z), __float_as_uint(o.w));
    } else {
      ptx::st_global_v2_b32(out_gmem + column, ptx::cvt_rn_x2_f32<OUT>(o.x, o.y),
                            ptx::cvt_rn_x2_f32<OUT>(o.z, o.w));
    }
  }
  if (attention.lse_gmem != nullptr && lane == 0) attention.lse_gmem[row.lse_index] = end.lse;
}

template <DType OUT, int STEPS>
__device__ __forceinline__ void combine_row(const CombineSharesParams& params,
                                            unsigned char* shared, int64_t row, int splits,
                                            const CombinedRow& to) {
  const AttentionParams& attention = params.attention;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float scale = OUT == DType::F32 ? params.base_scale : 1.0f;
  const bool alone = params.warps_of_row == 1;
  const CombinedShares<STEPS> own =
      combine_every<STEPS>(params.partials, row, alone ? 0 : warp, alone ? 1 : COMBINE_WARPS,
                           splits, attention.dv, scale);
  if (alone) {
    store_combined<OUT>(attention, own, to, scale);
    return;
  }
  // All warps' results are merged by the first one.
  float4* outputs = reinterpret_cast<float4*>(shared);
  PartialEnd* ends = reinterpret_cast<PartialEnd*>(outputs + COMBINE_WARPS * STEPS * 32);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) outputs[(warp * STEPS + step) * 32 + lane] = own.o[step];
  if (lane == 0) ends[warp] = {own.base, own.sum};
  __syncthreads();  // all warps have stored theirs, before they are merged
  if (warp != 0) return;
  CombinedShares<STEPS> all;
#pragma unroll
  for (int i = 0; i < COMBINE_WARPS; ++i) {
    if (ends[i].sum != 0.0f) all.base = fmaxf(all.base, ends[i].base);
  }
#pragma unroll
  for (int i = 0; i < COMBINE_WARPS; ++i) {
    const float weight =
        ends[i].sum == 0.0f ? 0.0f : ptx::ex2_approx_ftz((ends[i].base - all.base) * scale);
    all.sum = fmaf(ends[i].sum, weight, all.sum);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      all.add(outputs[(i * STEPS + step) * 32 + lane], weight, step);
  }
  store_combined<OUT>(attention, all, to, scale);
}

// OUT is the output's type. dv may be at most 256. Where Params has shares_gmem, rows may have
// shares of their own number, and those of one share are complete.
template <DType OUT, class Params = CombineSharesParams>
__device__ __forceinline__ void combine_shares(const Params& params) {
  __shared__ __align__(16) unsigned char shared[COMBINE_WARPS * (2 * 32 * 16 + 8)];
  const AttentionParams& attention = params.attention;
  const Partials& partials = params.partials;
  const int rows_of_cta = COMBINE_WARPS / params.warps_of_row;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_of_cta +
                      static_cast<int>(threadIdx.x) / 32 / params.warps_of_row;
  if (row >= partials.rows) return;
  const int* cu_q = attention.cu_seqlens_q_gmem;
  CombinedRow to;
  int splits = partials.splits;
  if (params.few_rows == 0) {
    const int64_t batch_head = row / attention.nq;
    to.batch = batch_head / attention.heads_q;
    to.head = static_cast<int>(batch_head % attention.heads_q);
    to.row = row % attention.nq;
    to.lse_index = row;
    // A row of a packed tensor that belongs to no sequence counts as one that sees no key. No share
    // has written to its part of the workspace.
    const bool owned =
        cu_q == nullptr || (to.row >= sequence_start(cu_q, 0, attention.nq) &&
                            to.row < sequence_start(cu_q, attention.batch, attention.nq));
    if (!owned) splits = 0;
  } else {
    const int row_of_sequence = static_cast<int>(row % params.few_rows);
    const int64_t batch_head = row / params.few_rows;
    const int sequence = static_cast<int>(batch_head / attention.heads_q);
    const int first = sequence_start(cu_q, sequence, attention.nq);
    const int rows = sequence_start(cu_q, sequence + 1, attention.nq) - first;
    if (row_of_sequence >= rows || rows > params.few_rows) return;
    to.batch = 0;
    to.head = static_cast<int>(batch_head % attention.heads_q);
    to.row = first + row_of_sequence;
    to.lse_index = to.head * attention.lse_head + to.row;
  }
  ptx::griddepcontrol_wait();
  if constexpr (requires { params.shares_gmem; }) {
    if (params.shares_gmem != nullptr && splits > 0) {
      // Nobody writes the number of a row that belongs to no sequence because cu_seqlens decrease.
      splits = min(max(params.shares_gmem[row], 0), partials.splits);
      if (splits == 1) return;
    }
  }
  if (attention.dv <= 128) {
    combine_row<OUT, 1>(params, shared, row, splits, to);
  } else {
    combine_row<OUT, 2>(params, shared, row, splits, to);
  }
}

}  // namespace archflash::device
