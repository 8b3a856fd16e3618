// Rows that several warps of a CTA share: KEY_GROUPS warps have the same rows, and each takes
// STEP_KEYS keys of every block. With few CTAs a row's keys so take half of the time.
#pragma once

#include "common/device/online_softmax.cuh"
#include "common/ptx/ex2.cuh"

namespace archflash::device {

// The first row of a warp, counted from the CTA's first one.
template <class C>
__device__ __forceinline__ int warp_first_row(unsigned thread) {
  return thread / 32 % (C::BLOCK_Q / C::WARP_ROWS) * C::WARP_ROWS;
}

// The group of a thread's warp.
template <class C>
__device__ __forceinline__ int key_group(unsigned thread) {
  return thread / (2 * C::BLOCK_Q / C::M_TILES);
}

// Threads of a group, and bytes through which two groups merge.
template <class C>
constexpr int GROUP_THREADS = 32 * C::BLOCK_Q / C::WARP_ROWS;
template <class C>
constexpr int MERGE_BYTES = GROUP_THREADS<C> * C::M_TILES * (C::HEAD_DIM_V / 8 + 1) * 16;

// Merges the outputs of two groups into those of group 0. `scratch` has MERGE_BYTES of shared
// memory. sync() is a barrier of the warps that share rows.
template <class C, class Flag, class Sync>
__device__ __forceinline__ void merge_key_groups(Outputs<C>& o_rmem, RowState<C, Flag>& state,
                                                 unsigned char* scratch, const Sync& sync) {
  constexpr int TILES = C::HEAD_DIM_V / 8, THREADS = GROUP_THREADS<C>;
  float4* place = reinterpret_cast<float4*>(scratch) + threadIdx.x % THREADS;
  const bool gives = threadIdx.x >= THREADS;
  if (gives) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const float (&o)[4] = o_rmem[m][n];
        place[(m * (TILES + 1) + n) * THREADS] = make_float4(o[0], o[1], o[2], o[3]);
      }
      place[(m * (TILES + 1) + TILES) * THREADS] =
          make_float4(state.base[m][0], state.base[m][1], state.sum[m][0], state.sum[m][1]);
    }
  }
  sync();
  if (gives) return;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
    const float4 end = place[(m * (TILES + 1) + TILES) * THREADS];
    const float bases[2] = {end.x, end.y}, sums[2] = {end.z, end.w};
    float keep[2], add[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base = fmaxf(state.base[m][r], bases[r]);
      keep[r] = ptx::ex2_approx_ftz(state.base[m][r] - base);
      add[r] = ptx::ex2_approx_ftz(bases[r] - base);
      state.base[m][r] = base;
      state.sum[m][r] = state.sum[m][r] * keep[r] + sums[r] * add[r];
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const float4 other = place[(m * (TILES + 1) + n) * THREADS];
      float (&o)[4] = o_rmem[m][n];
      o[0] = o[0] * keep[0] + other.x * add[0];
      o[1] = o[1] * keep[0] + other.y * add[0];
      o[2] = o[2] * keep[1] + other.z * add[1];
      o[3] = o[3] * keep[1] + other.w * add[1];
    }
  }
}

}  // namespace archflash::device
