// Permutes the bytes of two registers.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// prmt.b32: PTX ISA, "Data Movement and Conversion Instructions: prmt". Each 4 bits of `selector`
// choose a byte of the result: the lowest three its number among the bytes of a, then those of b;
// the highest one asks for that byte's sign in all 8 bits, which __byte_perm cannot. It is not
// volatile because it is a pure function of its operands.
__device__ __forceinline__ uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t x;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(x) : "r"(a), "r"(b), "r"(selector));
  return x;
}

}  // namespace archflash::ptx
