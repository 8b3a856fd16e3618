// The softcap of a warp's scores.
#pragma once

#include "common/math/online_softmax.cuh"

namespace archflash::hopper {

// Below it tanhf() is a polynomial. Most scores that have a softcap are that small against it.
constexpr float SMALL_TANH = 0.6f;

// What tanhf(x) gives for |x| < SMALL_TANH, bit for bit but for the sign of 0.
__device__ __forceinline__ float small_tanh(float x) {
  const float square = x * x;
  float p = fmaf(0.0157396831f, square, -0.0523039624f);
  p = fmaf(p, square, 0.133152977f);
  p = fmaf(p, square, -0.333327681f);
  return fmaf(p * square, x, x);
}

// Does what math::transform_scores() does, with the same bits. There the question whether there is
// a softcap stands at each score, and such a branch lets the tanh of no score start before that of
// the last one has ended. Here it is asked once. Where no score of the warp is large, none needs
// the exponential and the division of tanhf().
template <class C>
__device__ __forceinline__ void cap_scores(math::Scores<C>& s_rmem, float tanh_scale,
                                           float softcap) {
  const auto change = [&](const auto& changed) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s_rmem[0][n][i] = changed(s_rmem[0][n][i] * tanh_scale);
    }
  };
  if (softcap == 0.0f) return change([](float x) { return x; });
  float largest[4] = {};  // four maxima are found side by side
#pragma unroll
  for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i] = fmaxf(largest[i], fabsf(s_rmem[0][n][i]));
  }
  const float all = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
  if (__any_sync(math::FULL_WARP, all * fabsf(tanh_scale) >= SMALL_TANH)) {
    change([&](float x) { return softcap * tanhf(x); });
  } else {
    change([&](float x) { return softcap * small_tanh(x); });
  }
}

}  // namespace archflash::hopper
