// The end of a CTA of a decoding call (decode_fwd.cuh): what its warps have found is merged, and
// written.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/quad.cuh"
#include "common/mma_sync/decode_config.cuh"
#include "common/mma_sync/decode_params.h"
#include "common/mma_sync/decode_query.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"

namespace archflash::mma_sync {

// Writes a warp's outputs, and base and sum of its rows, for merge_warps().
template <class C>
__device__ __forceinline__ void store_warp(unsigned char* shared,
                                           const device::Outputs<typename C::Warp>& o_rmem,
                                           const device::RowState<typename C::Warp>& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* rows = reinterpret_cast<float*>(shared + warp * C::WARP_BYTES);
  PartialEnd* ends = reinterpret_cast<PartialEnd*>(shared + C::ENDS_SMEM) + warp * C::BLOCK_Q;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = lane / 4 + 8 * r;
    const float sum = device::sum_of_quad(state.sum[0][r]);
    if (lane % 4 == 0) ends[row] = {state.base[0][r], sum};
    float* own = rows + row * C::OUT_STRIDE;
    if constexpr (C::FP8_CACHE) {
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
        const float *even = &o_rmem[0][n][2 * r], *odd = &o_rmem[0][n + 1][2 * r];
        *reinterpret_cast<float4*>(own + 8 * n + 4 * (lane % 4)) = {even[0], odd[0], even[1],
                                                                    odd[1]};
      }
    } else {
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        *reinterpret_cast<float2*>(own + 8 * n + 2 * (lane % 4)) = {o_rmem[0][n][2 * r],
                                                                    o_rmem[0][n][2 * r + 1]};
      }
    }
  }
}

// What the warps of a CTA have found of a row: base and sum of all, and how much each counts.
template <class C>
struct WarpsOfRow {
  float base = device::LOWEST, sum = 0.0f, weight[C::WARPS];

  __device__ __forceinline__ WarpsOfRow(const unsigned char* shared, int row_of_tile) {
    PartialEnd ends[C::WARPS];
#pragma unroll
    for (int warp = 0; warp < C::WARPS; ++warp) {
      ends[warp] = reinterpret_cast<const PartialEnd*>(
          shared + C::ENDS_SMEM)[warp * C::BLOCK_Q + row_of_tile];
      if (ends[warp].sum != 0.0f) base = fmaxf(base, ends[warp].base);
    }
#pragma unroll
    for (int warp = 0; warp < C::WARPS; ++warp) {
      weight[warp] = ends[warp].sum == 0.0f ? 0.0f : ptx::ex2_approx_ftz(ends[warp].base - base);
      sum = fmaf(ends[warp].sum, weight[warp], sum);
    }
  }
  // Four columns of its outputs. of_first: where those of the first warp lie.
  __device__ __forceinline__ float4 outputs(const float4* of_first) const {
    float4 o = {};
#pragma unroll
    for (int warp = 0; warp < C::WARPS; ++warp) {
      const float4 x = of_first[warp * C::WARP_BYTES / 16];
      o = {fmaf(x.x, weight[warp], o.x), fmaf(x.y, weight[warp], o.y), fmaf(x.z, weight[warp], o.z),
           fmaf(x.w, weight[warp], o.w)};
    }
    return o;
  }
};

// Adds up what the warps of a CTA have found, and writes it: to the workspace if the keys are
// split, else to the output. Neighbouring threads have a row. v_factor: of the numbers of V.
template <class C>
__device__ __forceinline__ void merge_warps(const unsigned char* shared, const DecodeParams& params,
                                            const DecodeContext& cta, float v_factor) {
  constexpr int THREADS_OF_ROW = C::THREADS / C::BLOCK_Q, COLUMNS = 4;
  const AttentionParams& attention = params.attention;
  const int row_of_tile = threadIdx.x / THREADS_OF_ROW;
  const int thread_of_row = threadIdx.x % THREADS_OF_ROW;
  const device::FewRow row = few_row<C>(attention, cta, row_of_tile);
  if (!row.wanted) return;
  const WarpsOfRow<C> warps(shared, row_of_tile);
  const float base = warps.base, sum = warps.sum;

  const Partials& partials = params.partials;
  float* partial_gmem = nullptr;
  uint16_t* row_gmem = nullptr;
  float factor = v_factor;
  const bool by_length = !C::PLAIN && params.share_ctas > 0;
  int64_t row_of_all = 0;
  if (partials.wanted()) {
    row_of_all =
        C::PLAIN || params.few_rows == 0
            ? row.lse_index(attention)
            : (static_cast<int64_t>(row.batch) * attention.heads_q + row.head) * params.few_rows +
                  row.row;
    if (by_length && cta.share == 0 && thread_of_row == 0)
      params.shares_gmem[row_of_all] = cta.shares;
  }
  if (partials.wanted() && !(by_length && cta.shares == 1)) {
    const int64_t index = partials.index(cta.share, row_of_all);
    if (thread_of_row == 0) partials.ends_gmem[index] = {base, sum};
    if (sum == 0.0f) return;  // the combining kernel does not read the outputs
    partial_gmem = partials.rows_gmem + index * attention.dv;
  } else {
    const device::RowEnd end =
        device::finish_row_to_base_2<C::MASKED>(base, sum, device::load_sink(attention, row.head));
    if (attention.lse_gmem != nullptr && thread_of_row == 0)
      attention.lse_gmem[row.lse_index(attention)] = end.lse;
    factor *= end.factor;
    row_gmem = static_cast<uint16_t*>(attention.out_gmem) + row.batch * attention.out_batch +
               row.head * attention.out_head + row.packed * attention.out_row;
  }
#pragma unroll
  for (int first = 0; first < C::HEAD_DIM_V; first += COLUMNS * THREADS_OF_ROW) {
    const int column = first + COLUMNS * thread_of_row;
    if (column >= attention.dv) break;
    float4 o = warps.outputs(reinterpret_cast<const float4*>(shared) +
                             (row_of_tile * C::OUT_STRIDE + column) / 4);
    o = {o.x * factor, o.y * factor, o.z * factor, o.w * factor};
    if (partial_gmem != nullptr) {
      *reinterpret_cast<float4*>(partial_gmem + column) = o;
    } else {
      ptx::st_global_v2_b32(row_gmem + column, ptx::cvt_rn_x2_f32<C::DTYPE>(o.x, o.y),
                            ptx::cvt_rn_x2_f32<C::DTYPE>(o.z, o.w));
    }
  }
}

}  // namespace archflash::mma_sync
