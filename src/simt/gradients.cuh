// What both backward kernels of simt do with one score and with one gradient.
#pragma once

#include "common/attention_params.h"
#include "common/math/backward_work.cuh"
#include "common/ptx/ex2.cuh"
#include "simt/tile.cuh"

namespace archflash::simt {

// Applies softcap to a score. Returns the derivative: that of c * tanh(x / c) is
// 1 - tanh(x / c)^2.
__device__ __forceinline__ float cap_score(float& s, float softcap) {
  const float tanh = tanhf(s);
  s = softcap * tanh;
  return fmaf(-tanh, tanh, 1.0f);
}

// P of a score. It is at most 1: the LSE of huge scores is rounded, which must not make P infinite.
// Not fminf, because a NaN stays one.
__device__ __forceinline__ float probability_of(float s, const AttentionParams& attention,
                                                const math::RowTerms& terms) {
  const float exponent = fmaf(s, attention.exp2_scale, -terms.lse_log2);
  return ptx::ex2_approx_ftz(exponent > 0.0f ? 0.0f : exponent);
}

// Writes x times `factor` to four columns of a gradient, or adds it.
__device__ __forceinline__ void store_gradient_4(float* target_gmem, const float (&x)[4],
                                                 float factor, bool accumulate) {
  float sum[4], old[4] = {};
  if (accumulate) load_4(old, target_gmem);
#pragma unroll
  for (int c = 0; c < 4; ++c) sum[c] = fmaf(x[c], factor, old[c]);
  store_4<DType::F32>(target_gmem, sum);
}

}  // namespace archflash::simt
