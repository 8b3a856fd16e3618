// The online softmax of a row whose scores all lie in one thread: what all types share, and
// RowSoftmax16 for 16-bit inputs. row_softmax_e4m3.cuh has RowSoftmaxE4m3.
#pragma once

#include <cstdint>

#include "blackwell_dc/params.h"
#include "blackwell_dc/walk.cuh"
#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/f32x2.cuh"

namespace archflash::blackwell_dc {

constexpr float LOWEST = -3.402823466e38f;

// When the base of a row rises: by the rule of the kernels on mma.sync (Weights16). There a lane
// compares with the sum over its quarter of the keys; here a thread has the sum over all keys.
struct RowWeights : device::Weights16 {
  static constexpr float RAISE_FRACTION = device::Weights16::RAISE_FRACTION / 4;
};

// The scores of one row and one block, later their P, in quarters of the block's keys.
template <class C>
using Scores = float[4][C::BLOCK_K / 4];

// Applies softcap, or a scale that cannot be folded into the exponential because it is zero or
// negative. Both are rare.
template <int KEYS>
__device__ __forceinline__ void transform_scores(float (&s_rmem)[KEYS], const ScoreRule& rule) {
#pragma unroll
  for (int i = 0; i < KEYS; ++i) s_rmem[i] = rule.score(s_rmem[i]);
}

// A mask of the bits `first` to `last` of 32 bits. Both may be below 0 or above 31.
__device__ __forceinline__ uint32_t bits_between(int first, int last) {
  const uint32_t up_to_last = last < 0 ? 0 : 0xFFFFFFFFu >> (31 - min(last, 31));
  const uint32_t from_first = first > 31 ? 0 : 0xFFFFFFFFu << max(first, 0);
  return up_to_last & from_first;
}

// Sets the scores of keys that the row does not see to -inf. It is a select, so that a masked NaN
// does not matter. first, last: the first and the last key that the row sees, counted from the
// block's first key.
template <class C>
__device__ __forceinline__ void mask_scores(Scores<C>& s_rmem, int first, int last) {
  constexpr int KEYS = C::BLOCK_K / 4;
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    const uint32_t seen = bits_between(first - quarter * KEYS, last - quarter * KEYS);
#pragma unroll
    for (int i = 0; i < KEYS; ++i) {
      if ((seen >> i & 1) == 0) s_rmem[quarter][i] = device::MINUS_INFINITY;
    }
  }
}

// The maximum of each quarter's scores but the last one: four chains of instructions that do not
// wait for each other. A NaN score makes the maximum NaN; it then becomes the row's base.
template <class C>
__device__ __forceinline__ void find_maxima(const Scores<C>& s_rmem, float (&max)[4]) {
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    const auto& s = s_rmem[quarter];
    max[quarter] = ptx::max_nan_f32(s[0], s[1], s[2]);
#pragma unroll
    for (int i = 3; i + 1 < C::BLOCK_K / 4; i += 2)
      max[quarter] = ptx::max_nan_f32(max[quarter], s[i], s[i + 1]);
  }
}

// 2^x of two numbers without the MUFU: 2^floor(x) * p(x - floor(x)) with the polynomial
// p(f) = 1 + f (P1 + f (P2 + f (P3 + f P4))). In [0, 1) |p(f) / 2^f - 1| < 3e-6, so that the
// log-sum-exp keeps its accuracy too. The result is 0 for x <= -127; x is at most about
// RowWeights::BASE_LAG.
__device__ __forceinline__ float2 exp2_polynomial(float2 x) {
  constexpr float P1 = 0.69304514f, P2 = 0.24127856f, P3 = 0.052245375f, P4 = 0.013425155f;
  constexpr float ROUNDER = 12582912.0f;  // 2^23 + 2^22: a sum with it is rounded to an integer
  x = {fmaxf(x.x, -127.0f), fmaxf(x.y, -127.0f)};
  const float2 shifted = ptx::add_rm_f32x2(x, {ROUNDER, ROUNDER});
  const float2 whole = ptx::sub_rn_f32x2(shifted, {ROUNDER, ROUNDER});
  const float2 f = ptx::sub_rn_f32x2(x, whole);
  float2 p = ptx::fma_rn_f32x2(f, {P4, P4}, {P3, P3});
  p = ptx::fma_rn_f32x2(p, f, {P2, P2});
  p = ptx::fma_rn_f32x2(p, f, {P1, P1});
  p = ptx::fma_rn_f32x2(p, f, {1.0f, 1.0f});
  // The lowest bits of `shifted` are floor(x). The shift moves them to the exponent, where they are
  // added to p's, and drops ROUNDER's own bits.
  return {__uint_as_float(__float_as_uint(p.x) + (__float_as_uint(shifted.x) << 23)),
          __uint_as_float(__float_as_uint(p.y) + (__float_as_uint(shifted.y) << 23))};
}

// Whether a pair of a quarter's scores is one of the SWITCHES.polynomial_pairs of its 16 pairs that
// use the polynomial. They are spread evenly.
template <class C>
__device__ __forceinline__ constexpr bool by_polynomial(int quarter, int pair) {
  if (quarter == 3 && !C::SWITCHES.polynomial_in_last_quarter) return false;
  return pair * C::SWITCHES.polynomial_pairs % 16 < C::SWITCHES.polynomial_pairs;
}

// 2^(score * exp2_scale - base) of two neighbouring scores, pair number `pair` of a quarter.
template <class C>
__device__ __forceinline__ float2 exponentiate_pair(const float* scores, int quarter, int pair,
                                                    float base, float exp2_scale) {
  const float2 x =
      ptx::fma_rn_f32x2({scores[0], scores[1]}, {exp2_scale, exp2_scale}, {-base, -base});
  if (by_polynomial<C>(quarter, pair)) return exp2_polynomial(x);
  return {ptx::ex2_approx_ftz(x.x), ptx::ex2_approx_ftz(x.y)};
}

// The sums of P in each quarter: x over its even keys, y over its odd keys.
template <class C>
__device__ __forceinline__ void sum_quarters(const Scores<C>& p_rmem, float2 (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < C::BLOCK_K / 8; ++i) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const float2 pair = {p_rmem[quarter][2 * i], p_rmem[quarter][2 * i + 1]};
      sums[quarter] = i == 0 ? pair : ptx::add_rn_f32x2(sums[quarter], pair);
    }
  }
}

// The softmax of a row of 16-bit inputs. For each block its functions are called in their order
// here.
template <class C>
struct RowSoftmax16 {
  static constexpr int KEYS = C::BLOCK_K / 4;

  float sum = 0.0f;  // of P, over all keys so far

  __device__ __forceinline__ RowSoftmax16(const Params& params, const device::Work&, int)
      : attention_(params.attention) {}

  // Finds the scaled score above which this block raises the base.
  __device__ __forceinline__ void start_block(int) {
    limit_ = base_;
    if constexpr (C::SWITCHES.lazy_rescale) limit_ += device::allowed_rise<RowWeights>(sum);
  }

  __device__ __forceinline__ void transform(Scores<C>& s_rmem) {
    exp2_scale_ = attention_.exp2_scale;
    if (!attention_.transform_scores) return;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter)
      transform_scores(s_rmem[quarter], attention_.rule);
  }

  // Raises the base if these scores ask for it. Returns the factor for O and the sum so far, which
  // have the base before. The rows of a warp branch together: most blocks raise no base.
  __device__ __forceinline__ float follow_maximum(const Scores<C>& s_rmem) {
    float quarter_max[4];
    find_maxima<C>(s_rmem, quarter_max);
    const float first = ptx::max_nan_f32(quarter_max[0], s_rmem[0][KEYS - 1], s_rmem[1][KEYS - 1]);
    const float second = ptx::max_nan_f32(quarter_max[1], s_rmem[2][KEYS - 1], s_rmem[3][KEYS - 1]);
    const float max = ptx::max_nan_f32(ptx::max_nan_f32(first, second, quarter_max[2]),
                                       quarter_max[3], quarter_max[3]);
    const bool stays = fmaf(max, exp2_scale_, -limit_) <= 0.0f;  // false for NaN
    if (__all_sync(FULL_WARP, stays)) return 1.0f;
    const float scaled = max * exp2_scale_;
    // An infinite base becomes NaN here. Otherwise the MUFU and the polynomial would give different
    // results for an infinite score.
    const float base = stays ? base_ : fmaf(scaled, 0.0f, scaled);
    const float factor = stays ? 1.0f : ptx::ex2_approx_ftz(base_ - base);
    base_ = base;
    sum *= factor;
    large_ = __any_sync(FULL_WARP, fabsf(base) > RowWeights::LARGE_BASE && base != LOWEST);
    return factor;
  }

  // A base is a rounded product. Beyond LARGE_BASE scores are rounded in the same way before the
  // base is subtracted, so that the largest score of a row is exactly its base and has P = 1.
  __device__ __forceinline__ void round_large(Scores<C>& s_rmem) {
    if (!large_) return;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
      for (int i = 0; i < KEYS; ++i)
        s_rmem[quarter][i] = __fmul_rn(s_rmem[quarter][i], exp2_scale_);
    }
    exp2_scale_ = 1.0f;
  }

  // S -> P of a quarter: in fp32 in place, and in 16 bits in p_rmem.
  __device__ __forceinline__ void exponentiate(float (&s_rmem)[KEYS], uint32_t (&p_rmem)[KEYS / 2],
                                               int quarter) const {
#pragma unroll
    for (int pair = 0; pair < KEYS / 2; ++pair) {
      float* s = &s_rmem[2 * pair];
      const float2 p = exponentiate_pair<C>(s, quarter, pair, base_, exp2_scale_);
      s[0] = p.x;
      s[1] = p.y;
      p_rmem[pair] = ptx::cvt_rn_x2_f32<C::DTYPE>(p.x, p.y);
    }
  }

  __device__ __forceinline__ void add(const Scores<C>& p_rmem) {
    float2 sums[4];
    sum_quarters<C>(p_rmem, sums);
    const float2 both =
        ptx::add_rn_f32x2(ptx::add_rn_f32x2(sums[0], sums[1]), ptx::add_rn_f32x2(sums[2], sums[3]));
    sum += both.x + both.y;
  }

  __device__ __forceinline__ float base() const { return base_; }

 private:
  const AttentionParams& attention_;
  float base_ = LOWEST;      // scaled for 2^x; finite, so that a row without keys has no inf - inf
  float limit_ = LOWEST;     // scaled scores above it raise the base
  bool large_ = false;       // some base of the warp is beyond LARGE_BASE
  float exp2_scale_ = 1.0f;  // of the block at hand
};

}  // namespace archflash::blackwell_dc
