// What dropout makes of a warp's scores in the backward pass on mma.sync, where keys are rows.
#pragma once

#include <cstdint>

#include "common/device/backward_work.cuh"
#include "common/device/dropout.cuh"
#include "common/device/kept_factors.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/min.cuh"

namespace archflash::mma_sync {

// Calls of(s, dp, word, m, n, r, i) for each of a lane's scores and its dP. `word` has the random
// bits of the element in its half r. The others are those of terms_of() in attention_bwd.cuh.
//
// A lane has 32 keys by 16 queries of which each group of 4 keys and 2 queries shares the bits of
// one Philox. query, key: the lane's first ones.
template <class C, class Scores, class Of>
__device__ __forceinline__ void for_each_dropping(Scores& s_rmem, Scores& dp_rmem,
                                                  const device::Dropout& dropout, int query,
                                                  int key, const Of& of) {
#pragma unroll
  for (int pair = 0; pair < C::BLOCK / 8; pair += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const device::DropoutBits bits = dropout.bits(query + 8 * pair + i, key);
#pragma unroll
      for (int n = pair; n < pair + 2; ++n) {
#pragma unroll
        for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            of(s_rmem[m][n][2 * r + i], dp_rmem[m][n][2 * r + i], bits.words[n % 2 * 2 + m], m, n,
               r, i);
          }
        }
      }
    }
  }
}

// Turns the scores into P, dropped weights 0, and dP into dS, as exponentiate_backward() does
// without dropout: dS = P (dP - delta), where dP of a dropped weight is 0 and that of the others is
// scaled. All of dS is divided by that scale, which comes with the factors of dK and dQ, and so
// does the scale of P in P^T dO with that of dV. of_delta: 1 / scale.
template <class C, class Scores, class TermsOf>
__device__ __forceinline__ void exponentiate_dropping(Scores& s_rmem, Scores& dp_rmem,
                                                      float exp2_scale,
                                                      const device::Dropout& dropout,
                                                      float of_delta, int query, int key,
                                                      const TermsOf& terms_of) {
  const device::KeptFactors kept(dropout.threshold);
  for_each_dropping<C>(s_rmem, dp_rmem, dropout, query, key,
                       [&](float& s, float& dp, uint32_t word, int m, int n, int r, int i) {
                         const device::RowTerms terms = terms_of(m, n, r, i);
                         // device::probability() by one instruction for its comparison.
                         const float p = ptx::ex2_approx_ftz(
                             ptx::min_nan(fmaf(s, exp2_scale, -terms.lse_log2), 0.0f));
                         const float factor = kept.of(word, r);
                         dp = p * fmaf(dp, factor, -terms.delta * of_delta);
                         s = p * factor;
                       });
}

// Sets dP of the dropped weights of a block of P to 0, and makes these weights negative, so that
// their sign tells until dS has been found.
template <class C, class Scores>
__device__ __forceinline__ void mark_dropped(Scores& p_rmem, Scores& dp_rmem,
                                             const device::Dropout& dropout, int query, int key) {
  const device::KeptFactors kept(dropout.threshold);
  for_each_dropping<C>(p_rmem, dp_rmem, dropout, query, key,
                       [&](float& p, float& dp, uint32_t word, int, int, int r, int) {
                         const bool keeps = kept.keeps(word, r);
                         dp = keeps ? dp : 0.0f;
                         p = keeps ? p : -p;
                       });
}

// Sets what mark_dropped() has marked to 0.
template <class C, class Scores>
__device__ __forceinline__ void clear_dropped(Scores& p_rmem) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p_rmem[m][n][i] = ptx::max_nan(p_rmem[m][n][i], 0.0f);
    }
  }
}

}  // namespace archflash::mma_sync
