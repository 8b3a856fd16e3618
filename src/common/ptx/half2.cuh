// Arithmetic on two packed numbers of 16 bits.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace archflash::ptx {

// a * b + c for both numbers, rounded once. Denormals are kept.
template <DType DTYPE>
__device__ __forceinline__ uint32_t fma_x2(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(DTYPE == DType::F16 || DTYPE == DType::BF16);
  uint32_t result;
  if constexpr (DTYPE == DType::F16) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  }
  return result;
}

}  // namespace archflash::ptx
