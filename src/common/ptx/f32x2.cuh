// Arithmetic on two floats at a time, one instruction each.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// PTX ISA, "Floating Point Instructions: add, sub, mul, fma" with .f32x2 (sm_100 and up, sm_120):
// one instruction, in one issue slot, operates on both halves of a 64-bit register. They are not
// volatile because they are pure functions of their operands.
__device__ __forceinline__ float2 add_rn_f32x2(float2 a, float2 b) {
  float2 d;
  asm("{\n"
      ".reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "add.rn.ftz.f32x2 d, a, b;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}\n"
      : "=f"(d.x), "=f"(d.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  return d;
}

// add.rm rounds towards minus infinity.
__device__ __forceinline__ float2 add_rm_f32x2(float2 a, float2 b) {
  float2 d;
  asm("{\n"
      ".reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "add.rm.ftz.f32x2 d, a, b;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}\n"
      : "=f"(d.x), "=f"(d.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  return d;
}

__device__ __forceinline__ float2 sub_rn_f32x2(float2 a, float2 b) {
  float2 d;
  asm("{\n"
      ".reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "sub.rn.ftz.f32x2 d, a, b;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}\n"
      : "=f"(d.x), "=f"(d.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  return d;
}

__device__ __forceinline__ float2 mul_rn_f32x2(float2 a, float2 b) {
  float2 d;
  asm("{\n"
      ".reg .b64 a, b, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "mul.rn.f32x2 d, a, b;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}\n"
      : "=f"(d.x), "=f"(d.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  return d;
}

__device__ __forceinline__ float2 fma_rn_f32x2(float2 a, float2 b, float2 c) {
  float2 d;
  asm("{\n"
      ".reg .b64 a, b, c, d;\n"
      "mov.b64 a, {%2, %3};\n"
      "mov.b64 b, {%4, %5};\n"
      "mov.b64 c, {%6, %7};\n"
      "fma.rn.ftz.f32x2 d, a, b, c;\n"
      "mov.b64 {%0, %1}, d;\n"
      "}\n"
      : "=f"(d.x), "=f"(d.y)
      : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y), "f"(c.x), "f"(c.y));
  return d;
}

// max.NaN.f32 of three operands (sm_100 and up, sm_120). The result is NaN if any operand is.
__device__ __forceinline__ float max_nan_f32(float a, float b, float c) {
  float d;
  asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

}  // namespace archflash::ptx
