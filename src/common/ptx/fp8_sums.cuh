// What the target's FP8 mma.sync keeps of a sum.
#pragma once

namespace archflash::ptx {

// 8.9 keeps 13 bits of a sum of 8-bit products, whatever the type of the accumulator. 12.x keeps
// 25, and on other targets ptxas makes 16-bit products of them, with sums of 25 bits and fp32
// additions (docs/numerics.md).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool FP8_SUMS_KEEP_13_BITS = true;
#else
constexpr bool FP8_SUMS_KEEP_13_BITS = false;
#endif

}  // namespace archflash::ptx
