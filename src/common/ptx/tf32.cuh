// Matrix products of one warp in TF32, with all operands in registers.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32: PTX ISA, "Warp Level Matrix Instructions:
// mma" (sm_80 and up). d += a b, where the 13 lowest bits of a and b are ignored. With g = lane/4
// and t = lane%4:
//   a[0], a[1]: rows g and g+8, column t;  a[2], a[3]: the same rows, column t+4
//   b0, b1:     column g, rows t and t+4
//   d[0..1]:    row g, columns 2t, 2t+1;   d[2..3]: row g+8, the same columns
// It is not volatile because it is a pure function of its operands.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                                 uint32_t b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace archflash::ptx
