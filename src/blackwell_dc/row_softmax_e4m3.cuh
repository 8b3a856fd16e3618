// The online softmax of a row of e4m3 inputs, whose P is e4m3 as well, and the descales of the
// inputs. A block of keys is PARTS parts of SCALE_ROWS keys; the keys of a part share descales.
//   - The descales of q and k multiply the exponent's scale.
//   - A descale of v that all keys share multiplies the output at the end.
//   - Descales of v that differ between parts join the exponent as logarithms. P of a key then is
//     its share of the output: the base follows the largest share, so that P is in range whatever
//     the descales are, and O has the same unit for all keys.
#pragma once

#include <cstdint>

#include "blackwell_dc/params.h"
#include "blackwell_dc/row_softmax.cuh"
#include "common/attention_params.h"
#include "common/descales.h"
#include "common/device/attention_work.cuh"
#include "common/device/descales.cuh"
#include "common/device/fp8_softmax.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/f32x2.cuh"
#include "common/ptx/lg2.cuh"
#include "common/ptx/mov.cuh"

namespace archflash::blackwell_dc {

template <class C>
constexpr int PARTS = C::BLOCK_K / SCALE_ROWS;
// The smallest size of a part's descale of v. A smaller one counts as 0, and the part's V as zeros.
// The keys of such a part still count in the row's sum. They use the smallest exponent, so that
// they do not raise the base of a row that has a share of output from another part.
constexpr float SMALLEST_V = 8.271806126e-25f, SMALLEST_V_LOG2 = -80.0f;
// NaN counts: it spoils the rows that see it.
__device__ __forceinline__ bool counts(float v_descale) {
  return fabsf(v_descale) >= SMALLEST_V || v_descale != v_descale;
}

// The unit of the outputs: the descale of v if all keys of a head share one, else 1.
__device__ __forceinline__ float find_v_unit(const Descales& descales,
                                             const AttentionParams& params,
                                             const device::Work& work) {
  if (descales.v.gmem == nullptr || device::is_by_block(descales.v)) return 1.0f;
  const int batch = work.batch_head / params.heads_q;
  const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
  return *device::descale_of_head(descales.v, batch, kv_head);
}

// The descales of a block of keys, part by part.
template <class C>
struct BlockDescales {
  float qk[PARTS<C>];          // the descale of q, which a warp's rows share, times that of k
  float exp2_scale[PARTS<C>];  // the exponent's scale for the (transformed) scores
  bool transform;              // the scores go through transform_scores() first
  float v[PARTS<C>];           // 1 if all keys share a descale of v, 0 if the part counts as zeros
  float v_log2[PARTS<C>];  // log2 |v|, or SMALLEST_V_LOG2 if v is 0: exponentiate() then clears P
  float v_inverse[PARTS<C>];  // 2^-v_log2
  bool v_all_positive;
};

// The softmax of a row of e4m3 inputs. For each block its functions are called in their order here.
//   P = 2^(score * exp2_scale - base - lift + v_log2)
// base is the rounded product score * exp2_scale of the score that last raised it, and lift is its
// v_log2 less P_LOG2, so that a raise leaves 2^P_LOG2 as the largest P. base and lift are not added
// up: the difference of a large product from its base is then as exact as the two products are.
template <class C>
struct RowSoftmaxE4m3 {
  using Weights = device::WeightsE4m3;
  static constexpr int KEYS = C::BLOCK_K / 4;
  static constexpr int QUARTERS = 4 / PARTS<C>;  // in a part

  float sum = 0.0f;  // of P without v's descales, over all keys so far

  // warp_row: the warp's first row, counted from the sequence's first.
  __device__ __forceinline__ RowSoftmaxE4m3(const Params& params, const device::Work& work,
                                            int warp_row)
      : attention_(params.attention),
        key_descales_(device::find_key_descales(params.descales, params.attention, work)),
        nk_(work.nk) {
    by_block_ = key_descales_.k_gmem != nullptr || key_descales_.v_gmem != nullptr;
    rows_qk_ = device::find_warp_descale(params.descales, params.attention, work, warp_row).qk;
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) {
      block_descales_.qk[part] = rows_qk_;
      block_descales_.v[part] = 1.0f;
      block_descales_.v_log2[part] = 0.0f;
      block_descales_.v_inverse[part] = 1.0f;
    }
    find_scales();
  }

  __device__ __forceinline__ void start_block(int block) {
    if (!by_block_) return;
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) {
      // A part beyond the last key has no descale. Its scores are masked, so that any will do.
      const int key = min(block + part * SCALE_ROWS, nk_ - 1);
      if (key_descales_.k_gmem != nullptr)
        block_descales_.qk[part] =
            rows_qk_ * key_descales_.k_gmem[key / SCALE_ROWS * key_descales_.k_block];
      if (key_descales_.v_gmem == nullptr) continue;
      const float v = key_descales_.v(key);
      block_descales_.v[part] = counts(v) ? v : 0.0f;
      block_descales_.v_log2[part] = counts(v) ? ptx::lg2_approx_ftz(fabsf(v)) : SMALLEST_V_LOG2;
      block_descales_.v_inverse[part] = ptx::ex2_approx_ftz(-block_descales_.v_log2[part]);
    }
    find_scales();
  }

  __device__ __forceinline__ void transform(Scores<C>& s_rmem) {
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part)
      exp2_scale_[part] = block_descales_.exp2_scale[part];
    if (!block_descales_.transform) return;
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      transform_scores(s_rmem[quarter],
                       attention_.rule.scaled(block_descales_.qk[quarter / QUARTERS]));
    }
  }

  // Raises the base if these scores ask for it. Returns the factor for O and the sum so far, which
  // have the base before. The rows of a warp branch together: most blocks raise no base.
  __device__ __forceinline__ float follow_maximum(const Scores<C>& s_rmem) {
    constexpr float LARGEST_LOG2 =
        Weights::P_LOG2 + (C::SWITCHES.lazy_rescale ? Weights::BASE_LAG : 0.0f);
    float quarter_max[4];
    float scaled[PARTS<C>];  // the maximum of each part, scaled for 2^x
    find_maxima<C>(s_rmem, quarter_max);
    bool stays = true;  // false for NaN
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) {
      float max = quarter_max[part * QUARTERS];
#pragma unroll
      for (int i = 0; i < QUARTERS; i += 2) {
        const int quarter = part * QUARTERS + i;
        max = ptx::max_nan_f32(max, s_rmem[quarter][KEYS - 1], s_rmem[quarter + 1][KEYS - 1]);
        max = ptx::max_nan_f32(max, quarter_max[quarter], quarter_max[quarter + 1]);
      }
      scaled[part] = __fmul_rn(max, exp2_scale_[part]);
      const float p_log2 = scaled[part] - base_ + (block_descales_.v_log2[part] - lift_);
      stays &= p_log2 <= LARGEST_LOG2;
    }
    if (__all_sync(FULL_WARP, stays)) return 1.0f;
    // The base comes from the part whose P is larger, or which has a NaN. Differences are compared,
    // because v_log2 would be lost to rounding in a sum with a large product.
    float base = scaled[0], v_log2 = block_descales_.v_log2[0];
    if constexpr (PARTS<C> == 2) {
      const float more = (scaled[1] - scaled[0]) + (block_descales_.v_log2[1] - v_log2);
      if (more > 0.0f || isnan(scaled[1])) {
        base = scaled[1];
        v_log2 = block_descales_.v_log2[1];
      }
    }
    // An infinite base becomes NaN here. Otherwise the MUFU and the polynomial would give different
    // results for an infinite score.
    base = stays ? base_ : fmaf(base, 0.0f, base);
    const float lift = stays ? lift_ : v_log2 - Weights::P_LOG2;
    const float factor = stays ? 1.0f : ptx::ex2_approx_ftz((base_ - base) + (lift_ - lift));
    base_ = base;
    lift_ = lift;
    sum *= factor;
    large_ = __any_sync(FULL_WARP, fabsf(base) > Weights::LARGE_BASE && base != LOWEST);
    return factor;
  }

  // Beyond LARGE_BASE products are rounded in the same way as a base, before the base is
  // subtracted.
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

  // S -> P of a quarter: in fp32 in place, and in e4m3 in p_rmem, where P has the sign of v's
  // descale and is 0 if that is 0.
  __device__ __forceinline__ void exponentiate(float (&s_rmem)[KEYS], uint32_t (&p_rmem)[KEYS / 4],
                                               int quarter) const {
    const int part = quarter / QUARTERS;
    const float base = (large_ ? 0.0f : base_) - (block_descales_.v_log2[part] - lift_);
#pragma unroll
    for (int i = 0; i < KEYS / 4; ++i) {
      uint16_t pairs[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* s = &s_rmem[4 * i + 2 * half];
        const float2 p = exponentiate_pair<C>(s, quarter, 2 * i + half, base, exp2_scale_[part]);
        s[0] = p.x;
        s[1] = p.y;
        pairs[half] = ptx::cvt_rn_satfinite_x2_f32<DType::E4M3>(p.x, p.y);
      }
      p_rmem[i] = ptx::mov_b32_b16x2(pairs[0], pairs[1]);
    }
    if (!by_block_ || block_descales_.v_all_positive) return;
    const float v = block_descales_.v[part];
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
      float2 part_sum = sums[part * QUARTERS];
#pragma unroll
      for (int i = 1; i < QUARTERS; ++i)
        part_sum = ptx::add_rn_f32x2(part_sum, sums[part * QUARTERS + i]);
      sum = fmaf(part_sum.x + part_sum.y, block_descales_.v_inverse[part], sum);
    }
  }

  __device__ __forceinline__ float base() const { return base_ + lift_; }

 private:
  static_assert(PARTS<C> <= 2, "a part is whole pairs of quarters");

  // Finds what follows from the descales of a block.
  __device__ __forceinline__ void find_scales() {
    block_descales_.transform = attention_.transform_scores;
    block_descales_.v_all_positive = true;
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) {
      block_descales_.exp2_scale[part] = attention_.exp2_scale * block_descales_.qk[part];
      // A scale that is not positive and normal goes to the scores instead: times 0, a masked score
      // of -inf would be NaN.
      block_descales_.transform |= !(block_descales_.exp2_scale[part] >= device::SMALLEST_NORMAL);
      block_descales_.v_all_positive &= block_descales_.v[part] > 0.0f;
    }
    if (!block_descales_.transform) return;
#pragma unroll
    for (int part = 0; part < PARTS<C>; ++part) block_descales_.exp2_scale[part] = device::LOG2_E;
  }

  const AttentionParams& attention_;
  device::KeyDescales key_descales_;
  int nk_;
  bool by_block_;  // k or v has descales that differ from part to part
  float rows_qk_;  // the descale of q of the warp's rows, times that of k if all keys share one
  BlockDescales<C> block_descales_;  // of the block at hand
  float exp2_scale_[PARTS<C>];       // the exponent's scale for its scores as they are now
  float base_ = LOWEST;  // scaled for 2^x; finite, so that a row without keys has no inf - inf
  float lift_ = 0.0f;
  bool large_ = false;  // some base of the warp is beyond LARGE_BASE
};

}  // namespace archflash::blackwell_dc
