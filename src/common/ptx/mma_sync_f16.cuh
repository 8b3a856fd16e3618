// The matrix product of one warp whose sums are fp16, which GeForce GPUs compute twice as fast as
// that of mma_sync.cuh.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16: PTX ISA, "Warp Level Matrix Instructions: mma"
// (sm_80 and up). d += a b. The fragments a and b are those of mma_m16n8k16. With g = lane/4 and
// t = lane%4:
//   d[0]: row g, columns 2t (low half) and 2t+1;  d[1]: row g+8, the same columns
// It is not volatile because it is a pure function of its operands.
__device__ __forceinline__ void mma_m16n8k16_f16(uint32_t (&d)[2], const uint32_t (&a)[4],
                                                 uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, "
      "{%0, %1};"
      : "+r"(d[0]), "+r"(d[1])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace archflash::ptx
