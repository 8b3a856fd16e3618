// How the kernels on tensor cores multiply fp32 numbers. Each is the sum of two numbers of TF32,
// big + small, to a unit of its last bit, and three products of TF32 stand for one of fp32:
//   x y = big(x) big(y) + big(x) small(y) + small(x) big(y)      small(x) small(y) < 2^-22 x y
//
// The tensor cores cut off what does not fit the sum where fp32 arithmetic would round it, so long
// sums become too small. Sums of few products are therefore added in fp32: at most 64 of them.
// Products with a small factor have sums of their own, whose errors are 2^-11 of the others'.
#pragma once

#include <cstdint>

#include "common/ptx/tf32.cuh"

namespace archflash::simt::tensor {

// An fp32 number in two of TF32. mma.sync cuts off what `small` has beyond TF32. Without CHECKS
// what is not finite, or would be rounded to infinity, gives NaN.
template <bool CHECKS>
__device__ __forceinline__ void split(float x, uint32_t& big, uint32_t& small) {
  constexpr uint32_t HALF = 1u << 12, TF32_BITS = ~((1u << 13) - 1);
  constexpr float LARGEST = 3.4011621342146535e38f;  // of TF32
  big = (__float_as_uint(x) + HALF) & TF32_BITS;
  if (CHECKS && !(fabsf(x) <= LARGEST)) {
    const bool finite = fabsf(x) <= 3.402823466e38f;
    // With a small part of infinity and a big one of 1, products have the signs that they should.
    big = __float_as_uint(copysignf(finite ? LARGEST : 1.0f, x));
    small = __float_as_uint(finite ? x - copysignf(LARGEST, x) : x);
    return;
  }
  small = __float_as_uint(x - __uint_as_float(big));
}

// The products of three pairs of the parts of a and b: those of the big ones are added to `sum`,
// the others to `small_sum`.
struct Parts {
  uint32_t big[4], small[4];
};
__device__ __forceinline__ void multiply(float (&sum)[4], float (&small_sum)[4], const Parts& a,
                                         uint32_t b0_big, uint32_t b1_big, uint32_t b0_small,
                                         uint32_t b1_small) {
  ptx::mma_m16n8k8_tf32(small_sum, a.small, b0_big, b1_big);
  ptx::mma_m16n8k8_tf32(small_sum, a.big, b0_small, b1_small);
  ptx::mma_m16n8k8_tf32(sum, a.big, b0_big, b1_big);
}

}  // namespace archflash::simt::tensor
