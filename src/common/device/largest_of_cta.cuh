// The maximum over the threads of a CTA.
#pragma once

namespace archflash::device {

// Returns the largest `value` of all THREADS threads of the CTA to every thread. NaN is ignored.
// All threads call it, once in a kernel: it contains one barrier and uses one shared array.
template <int THREADS>
__device__ __forceinline__ float largest_of_cta(float value) {
  __shared__ float of_warp[THREADS / 32];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, distance));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();  // every warp has written its maximum, before all threads read them
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) value = fmaxf(value, of_warp[warp]);
  return value;
}

}  // namespace archflash::device
