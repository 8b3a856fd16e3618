// Matrix products of one warp with all operands in registers.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/ptx/mma_block_scaled.cuh"

namespace archflash::ptx {

// mma.sync.aligned.m16n8k16.row.col.f32.{f16,bf16}.{f16,bf16}.f32: PTX ISA, "Warp Level Matrix
// Instructions: mma" (sm_80 and up). d += a b. With g = lane/4 and t = lane%4:
//   a[0], a[1]: rows g and g+8, columns 2t, 2t+1;  a[2], a[3]: the same rows, columns 2t+8, 2t+9
//   b0, b1:     column g, rows 2t, 2t+1 and 2t+8, 2t+9
//   d[0..1]:    row g, columns 2t, 2t+1;           d[2..3]: row g+8, the same columns
// It is not volatile because it is a pure function of its operands.
template <DType DTYPE>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  static_assert(DTYPE == DType::F16 || DTYPE == DType::BF16, "16-bit inputs only");
  if constexpr (DTYPE == DType::F16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// mma.sync.aligned.m16n8k32.row.col.f32.{e4m3,e5m2}.{e4m3,e5m2}.f32: PTX ISA, "Warp Level Matrix
// Instructions: mma" (sm_89 and up). d += a b. d is as for m16n8k16. A register of a or b has four
// bytes, lowest first:
//   a[0], a[1]: rows g and g+8, columns 4t to 4t+3
//   a[2], a[3]: rows g and g+8, columns 4t+16 to 4t+19
//   b0, b1:     column g, rows 4t to 4t+3 and 4t+16 to 4t+19
// Targets of the family sm_120f take the form with block scales, all of them 1.
template <DType A, DType B>
__device__ __forceinline__ void mma_m16n8k32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  static_assert(A == DType::E4M3 || A == DType::E5M2, "8-bit floating-point inputs only");
  static_assert(B == DType::E4M3 || B == DType::E5M2, "8-bit floating-point inputs only");
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ / 100 == 12
  constexpr uint32_t ONES = 0x7F7F7F7F;
  mma_mxf8_m16n8k32<A, B>(d, a, b0, b1, ONES, ONES);
#else
  if constexpr (A == DType::E4M3 && B == DType::E4M3) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else if constexpr (A == DType::E4M3) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(B == DType::E5M2, "no kernel multiplies e5m2 by e4m3");
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
#endif
}

// mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32: PTX ISA, "Warp Level Matrix Instructions: mma"
// (sm_80 and up). d += a b, exact while sums fit 32 bits. The fragments are those of the 8-bit
// floating-point product above.
__device__ __forceinline__ void mma_m16n8k32_s8(int32_t (&d)[4], const uint32_t (&a)[4],
                                                uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace archflash::ptx
