// Numbers of fp16 and bf16 as floats, which they equal. Of a text for bf16 the build makes that for
// fp16 by exchanging these instructions, which it knows by their comments (text_for_f16 in
// _build/build_kernel.py).
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace archflash::ptx {

// Half 0 or 1 of a register, the lower one first. cvt.f32.f16; and shl or and, because a bf16
// number is the upper half of its float.
template <DType DTYPE>
__device__ __forceinline__ float f32_of_half(uint32_t pair, int half) {
  static_assert(DTYPE == DType::F16 || DTYPE == DType::BF16, "16-bit inputs only");
  float x;
  if constexpr (DTYPE == DType::F16) {
    if (half == 0) {
      asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low;}"
          : "=f"(x)
          : "r"(pair));
    } else {
      asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, high;}"
          : "=f"(x)
          : "r"(pair));
    }
  } else {
    if (half == 0) {
      asm("shl.b32 %0, %1, 16;  // low bf16" : "=f"(x) : "r"(pair));
    } else {
      asm("and.b32 %0, %1, 0xFFFF0000;  // high bf16" : "=f"(x) : "r"(pair));
    }
  }
  return x;
}

}  // namespace archflash::ptx
