// The online softmax of a warpgroup's rows, a block of keys at a time, in registers: row maxima,
// exponentials, row sums, and P as an operand of the second product.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ptx/mov.cuh"
#include "hopper/forward/products.cuh"

namespace archflash::hopper {

template <class C>
using Weights = std::conditional_t<C::FP8, device::WeightsE4m3, device::Weights16>;

// The largest of a lane's first KEYS scores in each of its two rows.
template <class C, int KEYS>
__device__ __forceinline__ void lane_maxima(const device::Scores<C>& s_rmem, float (&max)[2]) {
  constexpr int HALF = KEYS / 16;  // two maxima of a row are found side by side
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float halves[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* first = &s_rmem[0][half * HALF][2 * r];
      halves[half] = fmaxf(first[0], first[1]);
#pragma unroll
      for (int n = 1; n < HALF; ++n)
        halves[half] = fmaxf(halves[half], fmaxf(first[4 * n], first[4 * n + 1]));
    }
    max[r] = fmaxf(halves[0], halves[1]);
  }
}

// Multiplies the first KEYS scores by the scale. They are rounded as their base is, so that the
// largest of a row gives exactly P = 1.
template <class C, int KEYS>
__device__ __forceinline__ void scale_scores(device::Scores<C>& s_rmem, float exp2_scale) {
#pragma unroll
  for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s_rmem[0][n][i] = __fmul_rn(s_rmem[0][n][i], exp2_scale);
  }
}

// Raises the bases of a warp's rows if these scores require it, by the rules of Weights, and
// rescales their sums; then `raised` is called with the corrections that their outputs need. FIRST:
// these are the first scores of the rows, so that their bases rise in any case. KEYS: the scores of
// so many keys, the first ones.
// Returns the scale for exponentiate_rows: exp2_scale, or 1 if this has scaled the scores already.
// What is rare is behind one branch, as each branch would drain the pipelines. In there a warp is
// on its own: it must not wait for a product, because all four warps of a warpgroup have to execute
// each wgmma.wait_group (PTX ISA, .aligned).
template <class C, bool FIRST = false, int KEYS = C::BLOCK_K, class Raised>
__device__ __forceinline__ float update_row_max(device::Scores<C>& s_rmem,
                                                device::RowState<C>& state, float exp2_scale,
                                                Raised raised) {
  using W = Weights<C>;
  float max[2];
  lane_maxima<C, KEYS>(s_rmem, max);
  // Without short cuts, so that there is no branch.
  const auto exceed = [&](float limit_0, float limit_1) {
    return static_cast<int>(max[0] * exp2_scale > limit_0) |
           static_cast<int>(max[1] * exp2_scale > limit_1);
  };
  float (&base)[2] = state.base[0];
  float (&sum)[2] = state.sum[0];
  float lag = 0.0f;
  if constexpr (W::RAISE_FRACTION == 0.0f)
    lag = state.large ? W::LARGE_BASE_LAG : W::P_LOG2 + W::BASE_LAG;
  const bool rare = FIRST || __any_sync(device::FULL_WARP, exceed(base[0] + lag, base[1] + lag) |
                                                               static_cast<int>(state.large));
  if (!rare) return exp2_scale;
  const bool raises = FIRST || __any_sync(device::FULL_WARP,
                                          W::RAISE_FRACTION == 0.0f
                                              ? exceed(base[0] + lag, base[1] + lag)
                                              : exceed(base[0] + device::allowed_rise<W>(sum[0]),
                                                       base[1] + device::allowed_rise<W>(sum[1])));
  if (raises) {
    float corrections[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_max = max[r];
      // mutants: maximum-of-four-lanes (tests/sim/tags.py)
      row_max = fmaxf(row_max, __shfl_xor_sync(device::FULL_WARP, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(device::FULL_WARP, row_max, 2));
      float new_base = __fmul_rn(row_max, exp2_scale);
      if (W::P_LOG2 != 0.0f && fabsf(new_base) <= W::LARGE_BASE) new_base -= W::P_LOG2;
      new_base = fmaxf(base[r], new_base);
      corrections[r] = ptx::ex2_approx_ftz(base[r] - new_base);
      base[r] = new_base;
      sum[r] *= corrections[r];
    }
    raised(corrections);
    const auto is_large = [](float x) {
      return fabsf(x) > W::LARGE_BASE - W::P_LOG2 && x != device::LOWEST;
    };
    state.large = __any_sync(device::FULL_WARP, is_large(base[0]) || is_large(base[1]));
  }
  if (!state.large) return exp2_scale;
  scale_scores<C, KEYS>(s_rmem, exp2_scale);
  return 1.0f;
}

template <class C>
__device__ __forceinline__ void rescale(device::Outputs<C>& o_rmem, const float (&corrections)[2]) {
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o_rmem[0][n][i] *= corrections[i / 2];
  }
}

// P = 2^(S * scale - base) of row r, in place of S, for the first KEYS keys.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void exponentiate_row(device::Scores<C>& s_rmem,
                                                 device::RowState<C>& state, int r, float scale) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& p = s_rmem[0][n][2 * r + i];
      p = ptx::ex2_approx_ftz(fmaf(p, scale, -state.base[0][r]));
      sums[i] += p;
    }
  }
  state.sum[0][r] += sums[0] + sums[1];
}
// exponentiate_row() for both rows of a lane.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void exponentiate_rows(device::Scores<C>& s_rmem,
                                                  device::RowState<C>& state, float scale) {
  exponentiate_row<C, KEYS>(s_rmem, state, 0, scale);
  exponentiate_row<C, KEYS>(s_rmem, state, 1, scale);
}

// Rounds P of the first KEYS keys to fragments of A. In 8 bits a register has the keys 2t and 2t +
// 1 (t = lane % 4) of two neighbouring groups of 8 keys: a product takes them for the keys 4t to 4t
// + 3 of 16, an order that transpose_v() and transpose_block() give to V as well.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void pack(const device::Scores<C>& s_rmem, Probabilities<C>& p_rmem) {
#pragma unroll
  for (int n = 0; n < KEYS / 8; n += C::PACK) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* s = &s_rmem[0][n][2 * r];
      if constexpr (C::FP8) {
        const float* next = &s_rmem[0][n + 1][2 * r];
        p_rmem[0][n / 4][n % 4 + r] =
            ptx::mov_b32_b16x2(ptx::cvt_rn_satfinite_x2_f32<C::DTYPE>(s[0], s[1]),
                               ptx::cvt_rn_satfinite_x2_f32<C::DTYPE>(next[0], next[1]));
      } else {
        p_rmem[0][n / 2][n % 2 * 2 + r] = ptx::cvt_rn_x2_f32<C::DTYPE>(s[0], s[1]);
      }
    }
  }
}

// exponentiate_rows() and pack() for 16 keys of 8 bits at a time, so that scores and P need few
// registers together.
template <class C>
__device__ __forceinline__ void exponentiate_and_pack(const device::Scores<C>& s_rmem,
                                                      Probabilities<C>& p_rmem,
                                                      device::RowState<C>& state, float scale) {
  float sums[2][2] = {};
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; n += 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint16_t pairs[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          p[i] =
              ptx::ex2_approx_ftz(fmaf(s_rmem[0][n + half][2 * r + i], scale, -state.base[0][r]));
          sums[r][i] += p[i];
        }
        pairs[half] = ptx::cvt_rn_satfinite_x2_f32<C::DTYPE>(p[0], p[1]);
      }
      p_rmem[0][n / 4][n % 4 + r] = ptx::mov_b32_b16x2(pairs[0], pairs[1]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) state.sum[0][r] += sums[r][0] + sums[r][1];
}

}  // namespace archflash::hopper
