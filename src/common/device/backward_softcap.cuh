// Softcap in a backward pass: the scores, and the factor of their gradients.
#pragma once

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/lg2.cuh"

namespace archflash::device {

// A score becomes softcap * tanh(score / softcap). The error of tanh is relative to its result, as
// that of 1 - 2 / (1 + e^2x) is not near 0; the series ends with an error of 2^-24 at its limit.
__device__ __forceinline__ float cap_score(float score, const AttentionParams& params) {
  constexpr float SERIES_LIMIT = 0.1f;
  const float x = score * params.rule.tanh_scale;
  const float square = x * x;
  const float series = fmaf(x * square, fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f), x);
  const float power = ptx::ex2_approx_ftz(x * (2.0f * LOG2_E));
  const float far = 1.0f - __fdividef(2.0f, 1.0f + power);
  return params.rule.softcap * (square < SERIES_LIMIT * SERIES_LIMIT ? series : far);
}

// The derivative of softcap * tanh(x / softcap) by x: 1 - tanh(x / softcap)^2. The tanh comes from
// P = 2^(score - LSE), because the score is no longer there. Where P is 0, tanh is anything.
__device__ __forceinline__ float softcap_derivative(float p, float lse, float uncap) {
  constexpr float LEAST_EXPONENT = -126.0f;
  const float exponent = fmaxf(ptx::lg2_approx_ftz(p), LEAST_EXPONENT);
  const float tanh = (exponent + lse) * uncap;
  return fmaxf(fmaf(-tanh, tanh, 1.0f), 0.0f);
}

}  // namespace archflash::device
