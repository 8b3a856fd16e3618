// Rows that see lowest scores only: those below LOWEST_SCORE, which count as LOWEST_SCORE
// (device/masks.cuh). Each of the n keys of such a row weighs 1 / n, but beside so large a number
// fp32 has no room for log(n). So forward kernels with masks as data lower the LSE of the row by
// some steps of fp32 for each key, and backward kernels read n from it. No other row has an LSE
// below LOWEST_SCORE.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/masks.cuh"
#include "common/ptx/ex2.cuh"

namespace archflash::device {

// Two steps for a key, because the product of the LSE and log2(e) is rounded.
constexpr uint32_t STEPS_OF_KEY = 2;
// More keys count as so many, so that this product is finite.
constexpr float MOST_LOWEST_KEYS = 1 << 17;

// Whether a row sees lowest scores only. max_log2: its largest score as a logarithm to base 2.
__device__ __forceinline__ bool sees_lowest(float max_log2, float sink) {
  return max_log2 == LOWEST_LOG2 && sink < LOWEST_SCORE;
}

// The LSE of a row that sees so many keys, all with lowest scores.
__device__ __forceinline__ float lse_of_lowest(float keys) {
  const auto counted = static_cast<uint32_t>(fminf(keys, MOST_LOWEST_KEYS));
  return __uint_as_float(__float_as_uint(LOWEST_SCORE) + STEPS_OF_KEY * counted);
}

// finish_row() of a row whose keys have such a base, the largest score as a logarithm to base 2,
// and such a sum of weights. HAS_LOWEST: whether rows may see lowest scores only.
template <bool HAS_LOWEST = true>
__device__ __forceinline__ RowEnd finish_row_to_base_2(float base, float sum, float sink) {
  RowEnd end = finish_row(sum == 0.0f ? MINUS_INFINITY : base * LN_2, sum, sink);
  if (HAS_LOWEST && sum != 0.0f && sees_lowest(base, sink)) end.lse = lse_of_lowest(sum);
  return end;
}

// The most that a key of a row may weigh: 1, or 1 / n. lse_log2: the LSE as a logarithm to base 2.
__device__ __forceinline__ float most_weight(float lse_log2) {
  constexpr float FIRST = LOWEST_SCORE * LOG2_E, STEP = 0x1p104f * LOG2_E * STEPS_OF_KEY;
  // Not contracted: an FMA of two constants would take a register of main loops.
  const float keys = rintf(__fmul_rn(__fsub_rn(FIRST, lse_log2), 1.0f / STEP));
  return __fdividef(1.0f, fmaxf(keys, 1.0f));
}

// device::probability() of a key that weighs so much at most.
__device__ __forceinline__ float probability_up_to(float most, float exponent) {
  const float p = ptx::ex2_approx_ftz(exponent > 0.0f ? 0.0f : exponent);
  return p > most ? most : p;  // a NaN stays one
}

}  // namespace archflash::device
