// The end of a CTA of a decoding call (decode_fwd.cuh) whose tile's shares of the keys are a
// cluster: the warps' results become those of the CTA, in its shared memory, and each CTA joins all
// CTAs' for some of the columns.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/mma_sync/decode_config.cuh"
#include "common/mma_sync/decode_merge.cuh"
#include "common/mma_sync/decode_params.h"
#include "common/mma_sync/decode_query.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::mma_sync {

// Neighbouring threads have a row, as in merge_warps(). v_factor: of the numbers of V.
template <class C>
__device__ __forceinline__ void join_shares(unsigned char* shared, const DecodeParams& params,
                                            const DecodeContext& cta, float v_factor) {
  constexpr int THREADS_OF_ROW = C::THREADS / C::BLOCK_Q, COLUMNS = 4;
  constexpr int AT_ONCE = COLUMNS * THREADS_OF_ROW;  // columns of a row
  const AttentionParams& attention = params.attention;
  const int row_of_tile = threadIdx.x / THREADS_OF_ROW;
  const int thread_of_row = threadIdx.x % THREADS_OF_ROW;
  const device::FewRow row = few_row<C>(attention, cta, row_of_tile);
  float4* of_row = reinterpret_cast<float4*>(shared) +
                   (row_of_tile * C::OUT_STRIDE + COLUMNS * thread_of_row) / 4;
  PartialEnd own{0.0f, 0.0f};
  if (row.wanted) {
    const WarpsOfRow<C> warps(shared, row_of_tile);
    own = {warps.base, warps.sum};
#pragma unroll
    for (int first = 0; first < C::HEAD_DIM_V; first += AT_ONCE) {
      float4* to = of_row + first / 4;
      *to = warps.outputs(to);  // nobody else reads what is overwritten
    }
  }
  if (thread_of_row == 0) reinterpret_cast<PartialEnd*>(shared + C::JOINED_SMEM)[row_of_tile] = own;
  // The CTA's results are there, before other CTAs of the cluster read them.
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  const uint32_t own_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  uint32_t of_share[C::MOST_JOINED];
  PartialEnd ends[C::MOST_JOINED];
#pragma unroll
  for (int i = 0; i < C::MOST_JOINED; ++i) {
    of_share[i] = ptx::mapa_shared_cluster(own_smem, min(i, cta.shares - 1));
    const float2 end =
        ptx::ld_shared_cluster_v2_f32(of_share[i] + C::JOINED_SMEM + 8 * row_of_tile);
    ends[i] = {end.x, i < cta.shares ? end.y : 0.0f};
  }
  float base = device::LOWEST, sum = 0.0f, weight[C::MOST_JOINED];
#pragma unroll
  for (int i = 0; i < C::MOST_JOINED; ++i) {
    if (ends[i].sum != 0.0f) base = fmaxf(base, ends[i].base);
  }
#pragma unroll
  for (int i = 0; i < C::MOST_JOINED; ++i) {
    weight[i] = ends[i].sum == 0.0f ? 0.0f : ptx::ex2_approx_ftz(ends[i].base - base);
    sum = fmaf(ends[i].sum, weight[i], sum);
  }
  const device::RowEnd end =
      device::finish_row_to_base_2<C::MASKED>(base, sum, device::load_sink(attention, row.head));
  const float factor = v_factor * end.factor;
  constexpr int MOST_STEPS = (C::HEAD_DIM_V / AT_ONCE + 1) / 2;  // of a CTA, where shares are two
  const auto column_of = [&](int step) {
    return AT_ONCE * (cta.share + step * cta.shares) + COLUMNS * thread_of_row;
  };
  const auto is_wanted = [&](int step) { return row.wanted && column_of(step) < attention.dv; };
  uint32_t outputs[MOST_STEPS][2];
#pragma unroll
  for (int step = 0; step < MOST_STEPS; ++step) {
    if (!is_wanted(step)) continue;
    const int offset = 4 * (row_of_tile * C::OUT_STRIDE + column_of(step));
    float4 x[C::MOST_JOINED] = {};
#pragma unroll
    for (int i = 0; i < C::MOST_JOINED; ++i) {
      if (i < cta.shares) x[i] = ptx::ld_shared_cluster_v4_f32(of_share[i] + offset);
    }
    float4 o = {};
#pragma unroll
    for (int i = 0; i < C::MOST_JOINED; ++i) {
      o = {fmaf(x[i].x, weight[i], o.x), fmaf(x[i].y, weight[i], o.y), fmaf(x[i].z, weight[i], o.z),
           fmaf(x[i].w, weight[i], o.w)};
    }
    outputs[step][0] = ptx::cvt_rn_x2_f32<C::DTYPE>(o.x * factor, o.y * factor);
    outputs[step][1] = ptx::cvt_rn_x2_f32<C::DTYPE>(o.z * factor, o.w * factor);
  }
  // No CTA ends while others read its memory. Stores come behind it, which would have to be waited
  // for.
  ptx::barrier_cluster_arrive();
  auto* row_gmem = static_cast<uint16_t*>(attention.out_gmem) + row.batch * attention.out_batch +
                   row.head * attention.out_head + row.packed * attention.out_row;
#pragma unroll
  for (int step = 0; step < MOST_STEPS; ++step) {
    if (is_wanted(step))
      ptx::st_global_v2_b32(row_gmem + column_of(step), outputs[step][0], outputs[step][1]);
  }
  if (row.wanted && attention.lse_gmem != nullptr && thread_of_row == 0 && cta.share == 0)
    attention.lse_gmem[row.lse_index(attention)] = end.lse;
  ptx::barrier_cluster_wait();
}

}  // namespace archflash::mma_sync
