// What both backward kernels of simt do with one score and with one gradient.
#pragma once

#include "simt/tile.cuh"

namespace archflash::simt {

// Applies softcap to a score. Returns the derivative: that of c * tanh(x / c) is
// 1 - tanh(x / c)^2.
__device__ __forceinline__ float cap_score(float& s, float softcap) {
  const float tanh = tanhf(s);
  s = softcap * tanh;
  return fmaf(-tanh, tanh, 1.0f);
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
