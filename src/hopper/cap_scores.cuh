// The softcap of a warp's scores, so that the products' warpgroups wait as little as they can for
// it.
#pragma once

#include "common/math/online_softmax.cuh"

namespace archflash::hopper {

// Below it tanhf() is a polynomial, which is all that most scores need.
constexpr float SMALL_TANH = 0.6f;

// What tanhf(x) is for |x| < SMALL_TANH, bit for bit.
__device__ __forceinline__ float small_tanh(float x) {
  const float square = x * x;
  float p = fmaf(0.0157396831f, square, -0.0523039624f);
  p = fmaf(p, square, 0.133152977f);
  p = fmaf(p, square, -0.333327681f);
  return fmaf(p * square, x, x);
}

// Does what math::transform_scores() does. There the question whether there is a softcap stands
// around each score, a branch that keeps the tanh of one score from starting before that of the
// last one has ended. Here it stands around all of them, and where no score of the warp is large
// none needs an exponential and a division.
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
  float largest[4] = {};  // four maxima side by side
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
