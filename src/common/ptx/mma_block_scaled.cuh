// Matrix products of one warp with block scales: only targets of the family sm_120f have them.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace archflash::ptx {

// Where the scales of a product lie in the registers that bring them. Lane 4g + t, for t / 2 equal
// to `a_pair`, has those of row g (even t) or g + 8 (odd t) of A; for t equal to `b_lane` it has
// those of column g of B. The first scale is byte `byte`; the others follow.
struct ScalePlace {
  int a_byte = 0, a_pair = 0, b_byte = 0, b_lane = 0;
};

// mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32: PTX ISA, "Warp Level Matrix
// Instructions: mma" (sm_120f). d += (a b) times a power of two for each row of a and each column
// of b, which scale_a and scale_b hold as ue8m0 (127 is 1). The fragments are those of
// mma_m16n8k32, whose bits it gives where all scales are 1, in half the time on GeForce.
template <DType A, DType B, ScalePlace PLACE = ScalePlace{}>
__device__ __forceinline__ void mma_mxf8_m16n8k32(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1, uint32_t scale_a,
                                                  uint32_t scale_b) {
  static_assert(A == DType::E4M3 || A == DType::E5M2, "8-bit floating-point inputs only");
  static_assert(B == DType::E4M3 || B == DType::E5M2, "8-bit floating-point inputs only");
#define ARCHFLASH_MMA_MXF8(TYPES)                                                              \
  asm("mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32." TYPES  \
      ".f32.ue8m0 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%11, " \
      "%12}, %13, {%14, %15};"                                                                 \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a),            \
        "n"(PLACE.a_byte), "n"(PLACE.a_pair), "r"(scale_b), "n"(PLACE.b_byte), "n"(PLACE.b_lane))
  if constexpr (A == DType::E4M3 && B == DType::E4M3) {
    ARCHFLASH_MMA_MXF8("e4m3.e4m3");
  } else if constexpr (A == DType::E4M3) {
    ARCHFLASH_MMA_MXF8("e4m3.e5m2");
  } else {
    static_assert(B == DType::E5M2, "no kernel multiplies e5m2 by e4m3");
    ARCHFLASH_MMA_MXF8("e5m2.e5m2");
  }
#undef ARCHFLASH_MMA_MXF8
}

// mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64 (sm_120f): d += a b, of packed
// e2m1 with a scale of type ue4m3 for each 16 of k, four in a register. A register of a or b has
// eight elements, the lowest bits first:
//   a[0], a[1]: rows g and g+8, columns 8t to 8t+7;  a[2], a[3]: the same rows, columns 8t+32 on
//   b0, b1:     column g, rows 8t to 8t+7 and 8t+32 to 8t+39
template <ScalePlace PLACE = ScalePlace{}>
__device__ __forceinline__ void mma_nvf4_m16n8k64(float (&d)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1, uint32_t scale_a,
                                                  uint32_t scale_b) {
  static_assert(PLACE.a_byte == 0 && PLACE.b_byte == 0, "four scales fill a register");
  asm("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1"
      ".f32.ue4m3 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, %10, {%11, %12}, "
      "%13, {%14, %15};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(scale_a), "n"(0),
        "n"(PLACE.a_pair), "r"(scale_b), "n"(0), "n"(PLACE.b_lane));
}

}  // namespace archflash::ptx
