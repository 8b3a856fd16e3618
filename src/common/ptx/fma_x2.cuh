// Arithmetic on two 16-bit numbers at a time, one instruction each.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace archflash::ptx {

// fma.rn.{f16x2,bf16x2} (sm_80 and up): PTX ISA, "Half Precision Floating Point Instructions: fma".
// a * b + c of both halves, rounded once to nearest even; subnormal numbers count.
template <DType DTYPE>
__device__ __forceinline__ uint32_t fma_rn_x2(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(DTYPE == DType::F16 || DTYPE == DType::BF16, "16-bit numbers only");
  uint32_t d;
  if constexpr (DTYPE == DType::F16) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}

}  // namespace archflash::ptx
