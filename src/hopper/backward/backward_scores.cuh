// P and dS of a block, in the registers of a warpgroup: masks, softcap, exponentials, dropout, and
// the derivative of the softmax.
#pragma once

#include <cstdint>

#include "common/device/backward_masks.cuh"
#include "common/device/backward_softcap.cuh"
#include "common/ptx/cvt_relu.cuh"
#include "common/ptx/min.cuh"
#include "hopper/backward/backward_products.cuh"
#include "hopper/forward/drop_weights.cuh"

namespace archflash::hopper {

// Sets to 0 what belongs to a key and a query that does not see it, as none sees a key behind the
// end. Selecting (not multiplying) makes the old value irrelevant, even if it was NaN. It is rarely
// called, so it keeps no register for itself.
template <class C>
__device__ __forceinline__ void clear_unseen(KeysByQueries<C>& x_rmem, const BackwardWork& work,
                                             int block_row) {
  const device::VisibleKeys& visible = work.visible;
  const int thread = ptx::mov_tid_x_volatile();
  const int first_key =
      work.first_row + thread / 32 % C::KEY_WARPS * C::WARP_ROWS + thread % 32 / 4;
  const int first_query = block_row + thread % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + 8 * r;
    const int first = visible.first(key) - first_query;
    const int last = (key < work.own_rows ? visible.last(key) : -1) - first_query;
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = 8 * n + i;
        if (query < first || query > last) x_rmem[n][2 * r + i] = 0.0f;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void cap_scores(KeysByQueries<C>& s_rmem,
                                           const AttentionParams& params) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s_rmem[n][i] = device::cap_score(s_rmem[n][i], params);
  }
}

// P = 2^(S - LSE), which may lie in the registers of S. terms: as consume() has them.
template <class C>
__device__ __forceinline__ void exponentiate_scores(KeysByQueries<C>& p_rmem,
                                                    KeysByQueries<C>& s_rmem, const float2* terms,
                                                    const AttentionParams& attention) {
  if constexpr (C::SOFTCAP) cap_scores<C>(s_rmem, attention);
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
    const float2 lse = terms[4 * n];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float exponent =
            fmaf(s_rmem[n][2 * r + i], attention.exp2_scale, -(i == 0 ? lse.x : lse.y));
        // P is at most 1. The LSE of huge scores is rounded, which must not make P infinite.
        p_rmem[n][2 * r + i] = ptx::ex2_approx_ftz(ptx::min_nan(exponent, 0.0f));
      }
    }
  }
}

// Gives what is dropped of P, which is at least 0, the sign of negative numbers. key, query: the
// lane's first ones.
template <class C>
__device__ __forceinline__ void mark_dropped(KeysByQueries<C>& p_rmem,
                                             const device::Dropout& dropout, int key, int query) {
  const uint32_t threshold = dropout.threshold * 0x10001;
  const auto mark = [](float& p, uint32_t flags) {
    p = __uint_as_float(__float_as_uint(p) | (~flags & 0x80000000));
  };
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; n += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const device::DropoutBits bits = dropout.bits(query + 8 * n + i, key);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // queries 8 apart
        const uint32_t of_keys = key & 16 ? bits.words[2 * half + 1] : bits.words[2 * half];
        const uint32_t flags = kept_flags(of_keys, threshold);
        mark(p_rmem[n + half][i], flags << 16);
        mark(p_rmem[n + half][2 + i], flags);  // 8 keys on
      }
    }
  }
}

// dS of a block of which mark_dropped() has marked P, over the factor of the weights that are kept:
// P * dP of those that are, minus P * delta of all. kept_share: what delta is multiplied by.
template <class C>
__device__ __forceinline__ void differentiate_kept(KeysByQueries<C>& ds_rmem,
                                                   const KeysByQueries<C>& p_rmem,
                                                   const KeysByQueries<C>& dp_rmem,
                                                   const float2* terms, float kept_share) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
    const float2 delta = terms[C::BLOCK / 2 + 4 * n];
    const float deltas[2] = {delta.x * kept_share, delta.y * kept_share};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float p = p_rmem[n][i];
      ds_rmem[n][i] = fmaf(fmaxf(p, 0.0f), dp_rmem[n][i], -(fabsf(p) * deltas[i % 2]));
    }
  }
}

// dS = P * (dP - delta), the gradient of a score before its scale. With a softcap it is that of the
// score before softcap.
template <class C>
__device__ __forceinline__ float differentiate_score(float p, float dp, float delta, float lse,
                                                     float uncap) {
  const float ds = p * (dp - delta);
  if constexpr (!C::SOFTCAP) return ds;
  return ds * device::softcap_derivative(p, lse, uncap);
}

// dS of a block. terms: as consume() has them.
template <class C>
__device__ __forceinline__ void differentiate(KeysByQueries<C>& ds_rmem,
                                              const KeysByQueries<C>& p_rmem,
                                              const KeysByQueries<C>& dp_rmem, const float2* terms,
                                              float uncap) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
    const float2 lse = C::SOFTCAP ? terms[4 * n] : float2{};
    const float2 delta = terms[C::BLOCK / 2 + 4 * n];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ds_rmem[n][2 * r + i] =
            differentiate_score<C>(p_rmem[n][2 * r + i], dp_rmem[n][2 * r + i],
                                   i == 0 ? delta.x : delta.y, i == 0 ? lse.x : lse.y, uncap);
      }
    }
  }
}

// Sets dS to 0 where P is, so that the value of a hidden key, NaN perhaps, does not matter.
template <class C>
__device__ __forceinline__ void clear_where_p_is_0(KeysByQueries<C>& ds_rmem,
                                                   const KeysByQueries<C>& p_rmem) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (p_rmem[n][i] == 0.0f) ds_rmem[n][i] = 0.0f;
    }
  }
}

// NEGATIVE_TO_0: what is below 0 becomes 0.
template <class C, bool NEGATIVE_TO_0 = false>
__device__ __forceinline__ void round_to_16_bits(KeysByQueries16<C>& rounded_rmem,
                                                 const KeysByQueries<C>& x_rmem) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* const x = &x_rmem[n][2 * r];
      rounded_rmem[n / 2][n % 2 * 2 + r] = NEGATIVE_TO_0
                                               ? ptx::cvt_rn_relu_x2_f32<C::DTYPE>(x[0], x[1])
                                               : ptx::cvt_rn_x2_f32<C::DTYPE>(x[0], x[1]);
    }
  }
}

}  // namespace archflash::hopper
