// The matrix product of one warp of unsigned with signed bytes.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32: PTX ISA, "Warp Level Matrix Instructions: mma"
// (sm_80 and up). Returns a b + c in d, exact while sums fit 32 bits. The fragments are those of
// mma_m16n8k32_s8 (mma_sync.cuh). With a c of its own a sum starts at a constant without a copy. It
// is not volatile because it is a pure function of its operands.
__device__ __forceinline__ void mma_m16n8k32_u8_s8(int32_t (&d)[4], const uint32_t (&a)[4],
                                                   uint32_t b0, uint32_t b1,
                                                   const int32_t (&c)[4]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%10, %11, %12, %13};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),
        "r"(c[2]), "r"(c[3]));
}

}  // namespace archflash::ptx
