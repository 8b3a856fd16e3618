// The online softmax of a row whose P is e4m3, and the descales of 8-bit inputs. The keys of a
// block are PARTS of SCALE_ROWS keys, which share their descales. Those of q and k multiply the
// exponent's scale. That of v multiplies the output, or, where each block of keys has its own,
// joins the exponent as a logarithm: P of a key is its share of the output, the largest of a row is
// in range whatever the descales are, and O has one unit for all keys.
#pragma once

#include <cstdint>

#include "blackwell_dc/params.h"
#include "blackwell_dc/row_softmax.cuh"
#include "common/attention_params.h"
#include "common/descales.h"
#include "common/math/attention_work.cuh"
#include "common/math/descales.cuh"
#include "common/math/fp8_softmax.cuh"
#include "common/problem.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/f32x2.cuh"
#include "common/ptx/lg2.cuh"
#include "common/ptx/mov.cuh"

namespace archflash::blackwell_dc {

template <class C>
constexpr int PARTS = C::BLOCK_K / SCALE_ROWS;
// A block's descale of v that can be a factor; smaller ones stand for zeros. What a zero block adds
// to the sum goes by the smallest: so it moves the base of no row that sees another block's share.
constexpr float SMALLEST_V = 8.271806126e-25f, SMALLEST_V_LOG2 = -80.0f;
__device__ __forceinline__ bool counts(float v_descale) {
  return fabsf(v_descale) >= SMALLEST_V || v_descale != v_descale;
}

// What outputs are counted in: v's descale, or 1 where its blocks have their own.
__device__ __forceinline__ float find_v_unit(const Descales& descales,
                                             const AttentionParams& params,
                                             const math::Work& work) {
  if (descales.v.gmem == nullptr || math::is_by_block(descales.v)) return 1.0f;
  const int batch = work.batch_head / params.heads_q;
  const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
  return *math::descale_of_head(descales.v, batch, kv_head);
}

// Of the keys of a block, part by part.
template <class C>
struct BlockDescales {
  float qk[PARTS<C>];          // of q, which a warp's rows share, times that of k
  float exp2_scale[PARTS<C>];  // of the scores, which are transformed first where that is asked for
  bool transform;
  float v[PARTS<C>];          // 1 where all keys have the same, 0 where the part stands for zeros
  float v_log2[PARTS<C>];     // of its size; SMALLEST_V_LOG2 where it is 0: P becomes 0 at the end
  float v_inverse[PARTS<C>];  // 2^-v_log2
  bool v_all_positive;
};

// A row of e4m3 inputs, block by block in the order of its functions.
// P = 2^(score * exp2_scale - base - lift + v_log2), where base is the rounded product of the score
// that last raised it: even where products are large, its difference from their base is as exact as
// their rounding. A raise leaves 2^P_LOG2 as the largest P.
template <class C>
struct RowSoftmaxE4m3 {
  using Weights = math::WeightsE4m3;
  static constexpr int KEYS = C::BLOCK_K / 4;
  static constexpr int QUARTERS = 4 / PARTS<C>;  // of a part

  float sum = 0.0f;  // of P without v's descales

  // warp_row: of the sequence.
  __device__ __forceinline__ RowSoftmaxE4m3(const Params& params, const math::Work& work,
                                            int warp_row)
      : attention_(params.attention),
        of_keys_(math::find_key_descales(params.descales, params.attention, work)),
        nk_(work.nk) {
    by_block_ = of_keys_.k_gmem != nullptr || of_keys_.v_gmem != nullptr;
    rows_qk_ = math::find_warp_descale(params.descales, params.attention, work, warp_row).qk;
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) {
      of_block_.qk[part] = rows_qk_;
      of_block_.v[part] = 1.0f;
      of_block_.v_log2[part] = 0.0f;
      of_block_.v_inverse[part] = 1.0f;
    }
    find_scales();
  }

  __device__ __forceinline__ void start_block(int block) {
    if (!by_block_) return;
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) {
      // A part beyond the last key has no descale: any will do.
      const int key = min(block + part * SCALE_ROWS, nk_ - 1);
      if (of_keys_.k_gmem != nullptr)
        of_block_.qk[part] = rows_qk_ * of_keys_.k_gmem[key / SCALE_ROWS * of_keys_.k_block];
      if (of_keys_.v_gmem == nullptr) continue;
      const float v = of_keys_.v(key);
      of_block_.v[part] = counts(v) ? v : 0.0f;
      of_block_.v_log2[part] = counts(v) ? ptx::lg2_approx_ftz(fabsf(v)) : SMALLEST_V_LOG2;
      of_block_.v_inverse[part] = ptx::ex2_approx_ftz(-of_block_.v_log2[part]);
    }
    find_scales();
  }

  __device__ __forceinline__ void transform(Scores<C>& s_rmem) {
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) exp2_scale_[part] = of_block_.exp2_scale[part];
    if (!of_block_.transform) return;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      transform_scores(s_rmem[quarter], attention_.tanh_scale * of_block_.qk[quarter / QUARTERS],
                       attention_.softcap);
    }
  }

  // Moves the base up where these scores ask for it. Returns the factor for what was summed up with
  // the base before. The warp's rows branch together.
  __device__ __forceinline__ float follow_maximum(const Scores<C>& s_rmem) {
    constexpr float LARGEST_LOG2 =
        Weights::P_LOG2 + (C::SWITCHES.lazy_rescale ? Weights::BASE_LAG : 0.0f);
    float of_quarter[4], scaled[PARTS<C>];  // maxima
    find_maxima<C>(s_rmem, of_quarter);
    bool stays = true;  // false for NaN
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) {
      const float* of_part = &of_quarter[part * QUARTERS];
      float max = of_part[0];
#pragma unroll
      for (int i = 0; i < QUARTERS; i += 2) {
        const int quarter = part * QUARTERS + i;
        max = ptx::max_nan_f32(max, s_rmem[quarter][KEYS - 1], s_rmem[quarter + 1][KEYS - 1]);
        max = ptx::max_nan_f32(max, of_part[i], of_part[i + 1]);
      }
      scaled[part] = __fmul_rn(max, exp2_scale_[part]);
      const float p_log2 = scaled[part] - base_ + (of_block_.v_log2[part] - lift_);
      stays &= p_log2 <= LARGEST_LOG2;
    }
    if (__all_sync(FULL_WARP, stays)) return 1.0f;
    // Of the part whose P is largest, or NaN. Differences: sums would round v's share away.
    float base = scaled[0], v_log2 = of_block_.v_log2[0];
    if constexpr (PARTS<C> == 2) {
      const float more = (scaled[1] - scaled[0]) + (of_block_.v_log2[1] - v_log2);
      if (more > 0.0f || isnan(scaled[1])) {
        base = scaled[1];
        v_log2 = of_block_.v_log2[1];
      }
    }
    // An infinite base would make an infinite score NaN in one way of computing 2^x and not in the
    // other: 0 * infinity is NaN in both.
    base = stays ? base_ : fmaf(base, 0.0f, base);
    const float lift = stays ? lift_ : v_log2 - Weights::P_LOG2;
    const float factor = stays ? 1.0f : ptx::ex2_approx_ftz((base_ - base) + (lift_ - lift));
    base_ = base;
    lift_ = lift;
    sum *= factor;
    large_ = __any_sync(FULL_WARP, fabsf(base) > Weights::LARGE_BASE && base != LOWEST);
    return factor;
  }

  // Beyond LARGE_BASE, products are rounded as base is before that is subtracted.
  __device__ __forceinline__ void round_large(Scores<C>& s_rmem) {
    if (!large_) return;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
#pragma unroll
      for (int i = 0; i < KEYS; ++i) {
        const float product = __fmul_rn(s_rmem[quarter][i], exp2_scale_[quarter / QUARTERS]);
        s_rmem[quarter][i] = product - base_;
      }
    }
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) exp2_scale_[part] = 1.0f;
  }

  // S -> P of a quarter, in place and in e4m3.
  __device__ __forceinline__ void weigh(float (&s_rmem)[KEYS], uint32_t (&p_rmem)[KEYS / 4],
                                        int quarter) const {
    const int part = quarter / QUARTERS;
    const float base = (large_ ? 0.0f : base_) - (of_block_.v_log2[part] - lift_);
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) {
      uint16_t pairs[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* s = &s_rmem[4 * i + 2 * half];
        const float2 p = weigh_pair<C>(s, 2 * i + half, base, exp2_scale_[part]);
        s[0] = p.x;
        s[1] = p.y;
        pairs[half] = ptx::cvt_rn_satfinite_x2_f32<DType::E4M3>(p.x, p.y);
      }
      p_rmem[i] = ptx::mov_b32_b16x2(pairs[0], pairs[1]);
    }
    if (!by_block_ || of_block_.v_all_positive) return;
    const float v = of_block_.v[part];
    constexpr uint32_t SIGNS = 0x80808080;
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i)
      p_rmem[i] = v > 0.0f ? p_rmem[i] : v == 0.0f ? 0 : p_rmem[i] ^ SIGNS;
  }

  __device__ __forceinline__ void add(const Scores<C>& p_rmem) {
    float2 sums[4];
    sum_quarters<C>(p_rmem, sums);
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) {
      float2 of_part = sums[part * QUARTERS];
#pragma unroll
      for (int i = 1; i < QUARTERS; ++i)
        of_part = ptx::add_rn_f32x2(of_part, sums[part * QUARTERS + i]);
      sum = fmaf(of_part.x + of_part.y, of_block_.v_inverse[part], sum);
    }
  }

  __device__ __forceinline__ float base() const { return base_ + lift_; }

 private:
  static_assert(PARTS<C> <= 2, "a part is whole pairs of quarters");

  __device__ __forceinline__ void find_scales() {
    of_block_.transform = attention_.transform_scores;
    of_block_.v_all_positive = true;
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) {
      of_block_.exp2_scale[part] = attention_.exp2_scale * of_block_.qk[part];
      // An exponent scale must be positive and normal, or -inf would meet 0.
      of_block_.transform |= !(of_block_.exp2_scale[part] >= math::SMALLEST_NORMAL);
      of_block_.v_all_positive &= of_block_.v[part] > 0.0f;
    }
    if (!of_block_.transform) return;
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) of_block_.exp2_scale[part] = math::LOG2_E;
  }

  const AttentionParams& attention_;
  math::KeyDescales of_keys_;
  int nk_;
  bool by_block_;               // keys have descales of their own
  float rows_qk_;               // of the warp's rows, and of the keys where all have the same
  BlockDescales<C> of_block_;   // of the block at hand
  float exp2_scale_[PARTS<C>];  // of its scores as they are now
  float base_ = LOWEST;         // finite: no inf - inf in a row that has seen no key
  float lift_ = 0.0f;
  bool large_ = false;  // some base of the warp is beyond LARGE_BASE
};

}  // namespace archflash::blackwell_dc
