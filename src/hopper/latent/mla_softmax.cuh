// What the softmax of latent attention does otherwise than row_softmax.cuh.
#pragma once

#include "common/ptx/ex2.cuh"
#include "hopper/forward/row_softmax.cuh"

namespace archflash::hopper {

// A smaller rise raises the base only if the new largest weight is more than all those of a lane
// together, about a quarter of its row's. With a quarter of that, bases rise in each of the first
// twelve blocks, and each time both warpgroups wait for the outputs to be rescaled.
struct LatentWeights : device::Weights16 {
  static constexpr float RAISE_FRACTION = 1.0f;
};

// update_row_max() by LatentWeights.
template <class G, class Raised>
__device__ __forceinline__ float update_latent_row_max(device::Scores<G>& s_rmem,
                                                       device::RowState<G>& state, float exp2_scale,
                                                       Raised raised) {
  float max[2];
  lane_maxima<G, G::BLOCK_K>(s_rmem, max);
  // Without short cuts, so that there is no branch.
  const auto exceed = [&](float limit_0, float limit_1) {
    return static_cast<int>(max[0] * exp2_scale > limit_0) |
           static_cast<int>(max[1] * exp2_scale > limit_1);
  };
  float (&base)[2] = state.base[0];
  float (&sum)[2] = state.sum[0];
  const bool rare =
      __any_sync(device::FULL_WARP, exceed(base[0], base[1]) | static_cast<int>(state.large));
  if (!rare) return exp2_scale;
  if (__any_sync(device::FULL_WARP,
                 exceed(base[0] + device::allowed_rise<LatentWeights>(sum[0]),
                        base[1] + device::allowed_rise<LatentWeights>(sum[1])))) {
    float corrections[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_max = max[r];
      // mutants: maximum-of-four-lanes (tests/sim/tags.py)
      row_max = fmaxf(row_max, __shfl_xor_sync(device::FULL_WARP, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(device::FULL_WARP, row_max, 2));
      const float new_base = fmaxf(base[r], __fmul_rn(row_max, exp2_scale));
      corrections[r] = ptx::ex2_approx_ftz(base[r] - new_base);
      base[r] = new_base;
      sum[r] *= corrections[r];
    }
    raised(corrections);
    state.large = __any_sync(device::FULL_WARP, device::is_large<LatentWeights>(base[0]) ||
                                                    device::is_large<LatentWeights>(base[1]));
  }
  if (!state.large) return exp2_scale;
  scale_scores<G, G::BLOCK_K>(s_rmem, exp2_scale);
  return 1.0f;
}

}  // namespace archflash::hopper
