// The terms of query rows in CTAs of fused_bwd.cuh that see all keys of their queries. The delta of
// a query, sum(dO O) - dLSE, is sum(P dP) - dLSE over its keys: the products that the CTA has
// anyway, so that neither O is read nor another launch needed.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/backward_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/backward_work.cuh"
#include "common/mma_sync/fused_products.cuh"
#include "common/ptx/cp_async_4.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// Starts the copies of the LSE of a block of queries, and behind it of its gradient, which may be
// missing and is 0 then. The first `end` queries exist.
template <class C>
__device__ __forceinline__ void start_lse(const BackwardParams& params,
                                          const device::BackwardWork& cta,
                                          const device::Passing& block, uint32_t lse_smem,
                                          int end) {
  const AttentionParams& attention = params.attention;
  const int thread = ptx::mov_tid_x_volatile();
  if (thread >= C::BLOCK) return;
  const int head = cta.head * attention.heads_per_kv + block.head;
  const int64_t place = cta.batch * attention.lse_batch + head * attention.lse_head +
                        cta.passing_start + block.row + thread;
  const auto start = [&](uint32_t to_smem, const float* first_gmem, bool exists) {
    ptx::cp_async_ca_4(to_smem + 4 * thread, exists ? first_gmem + place : attention.lse_gmem,
                       exists ? 4 : 0);
  };
  start(lse_smem, attention.lse_gmem, thread < end);
  start(lse_smem + 4 * C::BLOCK, params.dlse_gmem, thread < end && params.dlse_gmem != nullptr);
}

// Turns a warp's scores into P. lse: of the lane's first query.
template <class C>
__device__ __forceinline__ void exponentiate_own(BlockScores<ScoresOfWarp<C>>& s_rmem,
                                                 float exp2_scale, const float* lse) {
#pragma unroll
  for (int n = 0; n < C::PART / 8; ++n) {
    const float2 two = *reinterpret_cast<const float2*>(lse + 8 * n);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_query = i == 0 ? two.x : two.y;
      // A row that sees no key has P = 0.
      const float lse_log2 =
          of_query == device::MINUS_INFINITY ? -device::MINUS_INFINITY : of_query * device::LOG2_E;
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& s = s_rmem[m][n][2 * r + i];
          s = device::probability(fmaf(s, exp2_scale, -lse_log2));
        }
      }
    }
  }
}

// Writes for each query of share `part` of a block the sum of P dP over the warp's keys.
template <class C>
__device__ __forceinline__ void store_deltas(float* deltas,
                                             const BlockScores<ScoresOfWarp<C>>& p_rmem,
                                             const BlockScores<ScoresOfWarp<C>>& dp_rmem,
                                             int key_warp, int part, int lane) {
  constexpr int QUERIES = C::PART / 4;  // of a lane
  float sums[QUERIES];
#pragma unroll
  for (int query = 0; query < QUERIES; ++query) {
    sums[query] = 0.0f;
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int i = 2 * r + query % 2;
        sums[query] = fmaf(p_rmem[m][query / 2][i], dp_rmem[m][query / 2][i], sums[query]);
      }
    }
  }
  // The 8 lanes that have keys of the same queries add up: with each step a lane hands half of its
  // sums to another one.
  int first = 0;
#pragma unroll
  for (int step = 1; step <= 4; step *= 2) {
    const int lanes = 16 / step, half = QUERIES / (2 * step);
    const bool high = (lane & lanes) != 0;
    if (high) first += half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float kept = high ? sums[i + half] : sums[i], given = high ? sums[i] : sums[i + half];
      sums[i] = kept + __shfl_xor_sync(device::FULL_WARP, given, lanes);
    }
  }
#pragma unroll
  for (int i = 0; i < QUERIES / 8; ++i) {
    const int of_lane = first + i;
    const int query = part * C::PART + of_lane / 2 * 8 + lane % 4 * 2 + of_lane % 2;
    deltas[query * C::KEY_WARPS + key_warp] = sums[i];
  }
}

// Writes sums of 0, for a warp whose keys no query of the block sees.
template <class C>
__device__ __forceinline__ void clear_deltas(float* deltas, int key_warp, int part, int lane) {
#pragma unroll
  for (int query = 0; query < C::PART; query += 32)
    deltas[(part * C::PART + query + lane) * C::KEY_WARPS + key_warp] = 0.0f;
}

// Turns a warp's dP into dS = P (dP - delta), with dropout divided by its scale, 1 / of_dlse; P may
// be negative then (mark_dropped). dlse: of the lane's first query.
template <class C>
__device__ __forceinline__ void subtract_deltas(BlockScores<ScoresOfWarp<C>>& dp_rmem,
                                                const BlockScores<ScoresOfWarp<C>>& p_rmem,
                                                const float* deltas, const float* dlse,
                                                float of_dlse, int part, int lane) {
#pragma unroll
  for (int n = 0; n < C::PART / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int query = part * C::PART + 8 * n + lane % 4 * 2 + i;
      float delta = -dlse[8 * n + i];
      if constexpr (C::DROPS) delta *= of_dlse;
#pragma unroll
      for (int warp = 0; warp < C::KEY_WARPS; ++warp) delta += deltas[query * C::KEY_WARPS + warp];
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& dp = dp_rmem[m][n][2 * r + i];
          const float p = p_rmem[m][n][2 * r + i];
          dp = (C::DROPS ? fabsf(p) : p) * (dp - delta);
        }
      }
    }
  }
}

}  // namespace archflash::mma_sync
