// What dropout makes of a warp's scores in the backward pass on mma.sync, where keys are rows.
#pragma once

#include <cstdint>

#include "common/device/backward_work.cuh"
#include "common/device/dropout.cuh"
#include "common/device/kept_factors.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/min.cuh"

namespace archflash::mma_sync {

// Turns the scores into P, dropped weights 0, and dP into dS, as exponentiate_backward() does
// without dropout: dS = P (dP - delta), where dP of a dropped weight is 0 and that of the others is
// scaled. All of dS is divided by that scale, which comes with the factors of dK and dQ, and so
// does the scale of P in P^T dO with that of dV. of_delta: 1 / scale.
//
// A lane has 32 keys by 16 queries of which each group of 4 keys and 2 queries shares the bits of
// one Philox. query, key: the lane's first ones.
template <class C, class Scores, class TermsOf>
__device__ __forceinline__ void exponentiate_dropping(Scores& s_rmem, Scores& dp_rmem,
                                                      float exp2_scale,
                                                      const device::Dropout& dropout,
                                                      float of_delta, int query, int key,
                                                      const TermsOf& terms_of) {
  const device::KeptFactors kept(dropout.threshold);
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
            float& s = s_rmem[m][n][2 * r + i];
            float& dp = dp_rmem[m][n][2 * r + i];
            const device::RowTerms terms = terms_of(m, n, r, i);
            // device::probability() by one instruction for its comparison.
            const float p =
                ptx::ex2_approx_ftz(ptx::min_nan(fmaf(s, exp2_scale, -terms.lse_log2), 0.0f));
            const float factor = kept.of(bits.words[n % 2 * 2 + m], r);
            dp = p * fmaf(dp, factor, -terms.delta * of_delta);
            s = p * factor;
          }
        }
      }
    }
  }
}

}  // namespace archflash::mma_sync
