// Packs two 16-bit values into one register.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// mov.b32 of two 16-bit registers: PTX ISA, "Data Movement and Conversion Instructions: mov". The
// assembler folds it into the conversions that made the halves; a shift and an OR would cost one
// more instruction. It is not volatile because it is a pure function of its operands.
__device__ __forceinline__ uint32_t mov_b32_b16x2(uint16_t low, uint16_t high) {
  uint32_t x;
  asm("mov.b32 %0, {%1, %2};" : "=r"(x) : "h"(low), "h"(high));
  return x;
}

// Returns `address`, which the compiler then computes at this place and once. In front of several
// guarded stores it would compute the address again for each of them.
template <class T>
__device__ __forceinline__ T* computed_here(T* address) {
  asm volatile("" : "+l"(address));
  return address;
}

}  // namespace archflash::ptx
