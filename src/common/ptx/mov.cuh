// Two halves put together, one instruction.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// mov.b32 of two 16-bit registers: PTX ISA, "Data Movement and Conversion Instructions: mov". The
// assembler lets the conversions that made the halves do it; shifted and or-ed they would cost an
// instruction more. Not volatile: a pure function of its operands.
__device__ __forceinline__ uint32_t mov_b32_b16x2(uint16_t low, uint16_t high) {
  uint32_t x;
  asm("mov.b32 %0, {%1, %2};" : "=r"(x) : "h"(low), "h"(high));
  return x;
}

}  // namespace archflash::ptx
