// The role score, eight warps: S -> P, dP -> dS, a thread for each key; at the end dK and dV ->
// gradients.
#pragma once

#include <cstdint>

#include "blackwell_dc/backward_params.h"
#include "blackwell_dc/backward_pipeline.cuh"
#include "common/backward_params.h"
#include "common/device/backward_round_loads.cuh"
#include "common/device/backward_rounds.cuh"
#include "common/device/backward_softcap.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/uniform.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/f32x2.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/min.cuh"
#include "common/ptx/tcgen05.cuh"

namespace archflash::blackwell_dc::backward {

using device::BackwardWork;
using device::BlockNote;
using device::CtaWork;
using device::release;
using device::RingPosition;
using device::uniform;

// The queries of a block that a thread works on.
template <class C>
using Queries = float[C::GROUP_QUERIES];

// Writes, or adds, a key's row of a gradient times `factor`; without `any` the gradient is 0.
template <class C>
__device__ __forceinline__ void store_gradient(const GradientParams& gradient,
                                               const BackwardWork& work, uint32_t sum_tmem,
                                               bool any, int columns, float factor) {
  const int row = work.first_row + static_cast<int>(threadIdx.x) % C::ROWS;
  const int64_t start = work.batch * gradient.batch + work.head * gradient.head +
                        (static_cast<int64_t>(work.own_start) + row) * gradient.row;
#pragma unroll 1
  for (int column = 0; column < C::HEAD_DIM; column += 16) {
    float sums[16] = {};
    if (any) {
      ptx::tcgen05_ld(sums, sum_tmem + column);
      ptx::tcgen05_wait_ld(sums);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row >= work.own_rows || column + 8 * half >= columns) continue;
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = sums[8 * half + i] * factor;
      device::store_gradient_chunk<C::DTYPE>(gradient, start + column + 8 * half, x);
    }
  }
}

template <class C>
__device__ __forceinline__ void score(const BackwardKernelParams& params, const CtaWork& work,
                                      unsigned char* shared, uint32_t shared_smem) {
  using DsTile = typename C::DsTile;
  constexpr int QUERIES = C::GROUP_QUERIES, PART = 32;  // a part is what one tcgen05.ld brings
  static_assert(QUERIES == 2 * PART);
  const AttentionParams& attention = params.backward.attention;
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int group = warp / 4;
  const int key_of_tile = threadIdx.x % C::ROWS;
  const int key = work.first_row + key_of_tile;
  const uint32_t lanes_tmem = uniform(ptx::tmem_lanes_of_warp(warp));
  const uint32_t s_tmem = lanes_tmem + C::S_COLUMN + group * QUERIES;
  const uint32_t dp_tmem = lanes_tmem + C::DP_COLUMN + group * QUERIES;
  const auto blocks = static_cast<uint32_t>(uniform(work.blocks));
  const float scale = attention.exp2_scale;
  RingPosition<C::Q_STAGES> q_ring;
#pragma unroll 1
  for (uint32_t number = 0; number < blocks; ++number) {
    ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);  // the terms are there
    const float* of_stage =
        reinterpret_cast<const float*>(shared + C::TERMS_SMEM + q_ring.stage * C::TERMS_BYTES);
    const float4* lse = reinterpret_cast<const float4*>(of_stage + group * QUERIES);
    const float4* delta = reinterpret_cast<const float4*>(of_stage + C::BLOCK + group * QUERIES);
    const BlockNote note = *reinterpret_cast<const BlockNote*>(of_stage + 2 * C::BLOCK);
    const bool masks = uniform(note.masked_warps) >> warp % 4 & 1;
    // The queries of this thread that see its key: none if it lies behind the end.
    const int first_query = note.row + group * QUERIES;
    const int first = work.visible.first(key) - first_query;
    const int last = (key < work.own_rows ? work.visible.last(key) : -1) - first_query;

    Queries<C> p_rmem;
    ptx::mbarrier_wait_parity(barriers.s_ready(), number & 1);  // S is complete
    ptx::tcgen05_fence_after_thread_sync();
    {
      float s_rmem[2][PART];
      ptx::tcgen05_ld(s_rmem[0], s_tmem);
      ptx::tcgen05_ld(s_rmem[1], s_tmem + PART);
      ptx::tcgen05_wait_ld(s_rmem);
#pragma unroll
      for (int i = 0; i < QUERIES; ++i) p_rmem[i] = s_rmem[i / PART][i % PART];
    }
    const bool capped = attention.rule.softcap != 0.0f;
    if (capped) {
#pragma unroll
      for (int i = 0; i < QUERIES; ++i) p_rmem[i] = device::cap_score(p_rmem[i], attention);
    }
#pragma unroll
    for (int i = 0; i < QUERIES; i += 4) {
      const float4 of_rows = lse[i / 4];
      const float2 low =
          ptx::fma_rn_f32x2({p_rmem[i], p_rmem[i + 1]}, {scale, scale}, {-of_rows.x, -of_rows.y});
      const float2 high = ptx::fma_rn_f32x2({p_rmem[i + 2], p_rmem[i + 3]}, {scale, scale},
                                            {-of_rows.z, -of_rows.w});
      // P is at most 1. The LSE of huge scores is rounded, which must not make P infinite.
      p_rmem[i] = ptx::ex2_approx_ftz(ptx::min_nan(low.x, 0.0f));
      p_rmem[i + 1] = ptx::ex2_approx_ftz(ptx::min_nan(low.y, 0.0f));
      p_rmem[i + 2] = ptx::ex2_approx_ftz(ptx::min_nan(high.x, 0.0f));
      p_rmem[i + 3] = ptx::ex2_approx_ftz(ptx::min_nan(high.y, 0.0f));
    }
    // Selecting (not multiplying) makes the old value irrelevant, even if it was NaN.
    if (masks) {
#pragma unroll
      for (int i = 0; i < QUERIES; ++i) {
        if (i < first || i > last) p_rmem[i] = 0.0f;
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t words[PART / 2];
#pragma unroll
      for (int i = 0; i < PART / 2; ++i) {
        words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(p_rmem[part * PART + 2 * i],
                                                p_rmem[part * PART + 2 * i + 1]);
      }
      ptx::tcgen05_st(s_tmem + part * (PART / 2), words);
    }
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    release(barriers.p_ready());

    // dS = P * (dP - delta), the gradient of the scores before their scale. With a softcap it is
    // that of the scores before softcap.
    if (capped) {
#pragma unroll
      for (int i = 0; i < QUERIES; ++i) {
        p_rmem[i] *= device::softcap_derivative(p_rmem[i], reinterpret_cast<const float*>(lse)[i],
                                                params.uncap);
      }
    }
    ptx::mbarrier_wait_parity(barriers.dp_ready(), number & 1);  // dP is complete
    ptx::tcgen05_fence_after_thread_sync();
    if constexpr (!C::DQ_OVER_DS) ptx::mbarrier_wait_parity(barriers.ds_empty(), (number & 1) ^ 1);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float dp_rmem[PART];
      ptx::tcgen05_ld(dp_rmem, dp_tmem + part * PART);
      ptx::tcgen05_wait_ld(dp_rmem);
#pragma unroll
      for (int i = 0; i < PART; i += 4) {
        const float4 of_rows = delta[(part * PART + i) / 4];
        const float* p = &p_rmem[part * PART + i];
        const float2 low = ptx::mul_rn_f32x2(
            {p[0], p[1]}, ptx::sub_rn_f32x2({dp_rmem[i], dp_rmem[i + 1]}, {of_rows.x, of_rows.y}));
        const float2 high = ptx::mul_rn_f32x2(
            {p[2], p[3]},
            ptx::sub_rn_f32x2({dp_rmem[i + 2], dp_rmem[i + 3]}, {of_rows.z, of_rows.w}));
        dp_rmem[i] = low.x, dp_rmem[i + 1] = low.y;
        dp_rmem[i + 2] = high.x, dp_rmem[i + 3] = high.y;
      }
      if (masks) {
#pragma unroll
        for (int i = 0; i < PART; ++i) {
          if (part * PART + i < first || part * PART + i > last) dp_rmem[i] = 0.0f;
        }
      }
      uint32_t words[PART / 2];
#pragma unroll
      for (int i = 0; i < PART / 2; ++i)
        words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(dp_rmem[2 * i], dp_rmem[2 * i + 1]);
      ptx::tcgen05_st(dp_tmem + part * (PART / 2), words);
#pragma unroll
      for (int i = 0; i < PART / 8; ++i) {
        const int chunk = (group * QUERIES + part * PART) / 8 + i;
        *reinterpret_cast<uint4*>(shared + C::DS_SMEM + DsTile::offset(key_of_tile, chunk)) =
            uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
      }
    }
    ptx::fence_proxy_async_shared();  // the stores come before the tensor cores' reads
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    release(barriers.ds_ready());
    release(barriers.q_empty(q_ring.stage));
    q_ring.advance();
  }
  if (blocks > 0) {
    ptx::mbarrier_wait_parity(barriers.sums_ready(), 0);
    ptx::tcgen05_fence_after_thread_sync();
  }
  const bool of_k = group == 0;
  store_gradient<C>(of_k ? params.backward.dk : params.backward.dv, work,
                    lanes_tmem + (of_k ? C::DK_COLUMN : C::DV_COLUMN), blocks > 0,
                    of_k ? attention.d : attention.dv, of_k ? params.backward.scale : 1.0f);
  ptx::tcgen05_fence_before_thread_sync();
}

}  // namespace archflash::blackwell_dc::backward
