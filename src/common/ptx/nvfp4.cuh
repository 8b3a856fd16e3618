// Conversions to four bits and to block scales.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// cvt.rn.satfinite.e2m1x2.f32: PTX ISA, "Data Movement and Conversion Instructions: cvt" (sm_120f).
// Eight numbers as e2m1, rounded to nearest even, the first in the lowest bits. Values beyond 6
// become 6.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e2m1x8_f32(const float (&x)[8]) {
  uint32_t word;
  asm("{\n"
      ".reg .b8 b<4>;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}\n"
      : "=r"(word)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return word;
}

// rcp.approx.ftz.f32, off by at most 1 in the last bit.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace archflash::ptx
