// cvt: conversions between all types of numbers.
#pragma once

#include <cstdint>

#include "sim/numerics/bits.h"

namespace archflash::sim {

// Exact widening. A NaN becomes the canonical NaN of the wider type.
float f32_of_f16(uint16_t bits);
inline float f32_of_bf16(uint16_t bits) { return canonical(f32_of(uint32_t{bits} << 16)); }
float f32_of_e4m3(uint8_t bits);
float f32_of_e5m2(uint8_t bits);
// A .tf32 operand as the tensor core reads it: the low 13 bits do not exist.
inline float f32_of_tf32(uint32_t bits) { return f32_of(bits & 0xFFFFE000u); }

// Narrowing to nearest even: the forms of cvt that kernels use most.
uint16_t cvt_rn_f16_f32(float value);
uint16_t cvt_rn_bf16_f32(float value);

// Operand types of cvt, as PTX spells them.
enum class NumericType : uint8_t {
  U8,
  S8,
  U16,
  S16,
  U32,
  S32,
  U64,
  S64,
  F16,
  BF16,
  TF32,
  F32,
  F64,
  F16X2,
  BF16X2,
  E4M3X2,
  E5M2X2,
  E2M3X2,
  E3M2X2,
  E2M1X2,
  UE8M0X2,
};

struct CvtSpec {
  NumericType to, from;
  Round round = Round::NONE;
  bool ftz = false;
  bool sat = false;
  bool satfinite = false;
  bool relu = false;
};

// Takes and gives raw bits. Bits above an operand's width are ignored. Bits above the result's
// width are zero; but a signed integer narrower than 64 bits is sign-extended to 64 bits, so that
// any wider destination register holds what PTX says. A packed destination made of two .f32 takes
// them in PTX's order: `a` becomes the upper half. Other forms ignore `b`.
using CvtFunction = uint64_t (*)(const CvtSpec& spec, uint64_t a, uint64_t b);

// The function for a form of cvt, nullptr if PTX has no such form.
CvtFunction find_cvt(const CvtSpec& spec);
// Whether the form packs two .f32.
bool cvt_has_two_sources(const CvtSpec& spec);

}  // namespace archflash::sim
