#include "sim/numerics/convert.h"

#include <algorithm>
#include <cmath>

#include "sim/numerics/formats.h"
#include "sim/numerics/integer.h"

namespace archflash::sim {

float f32_of_f16(uint16_t bits) {
  const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
  const uint32_t magnitude = bits & 0x7FFFu;
  if (magnitude >= 0x7C00) return f32_of(magnitude > 0x7C00 ? F32_NAN : sign | 0x7F800000u);
  if (magnitude >= 0x0400) return f32_of(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return f32_of(sign | bits_of(subnormal));
}

float f32_of_e5m2(uint8_t bits) { return f32_of_f16(static_cast<uint16_t>(bits << 8)); }

float f32_of_e4m3(uint8_t bits) {
  const uint32_t sign = uint32_t{bits & 0x80u} << 24;
  const uint32_t magnitude = bits & 0x7Fu;
  if (magnitude == 0x7F) return f32_of(F32_NAN);
  if (magnitude >= 0x08) return f32_of(sign | ((magnitude << 20) + (120u << 23)));
  return f32_of(sign | bits_of(static_cast<float>(magnitude) * 0x1p-9f));
}

uint16_t cvt_rn_f16_f32(float value) {
  return static_cast<uint16_t>(encode(F16, double{value}, Round::RN));
}

uint16_t cvt_rn_bf16_f32(float value) {
  if (is_nan(value)) return BF16_NAN;
  const uint32_t bits = bits_of(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

namespace {

constexpr double TWO_64 = 18446744073709551616.0;

struct IntegerType {
  int bits;  // 0: not an integer type
  bool is_signed;
};

// What a type is made of: one integer, one number of a format, or two elements of a format with so
// many bits between them (4-bit elements share a byte, 6-bit ones have one each).
struct TypeRow {
  IntegerType integer = {};
  const Format* number = nullptr;
  const Format* element = nullptr;
  int pitch = 8;
};
constexpr TypeRow TYPES[] = {
    // in the order of NumericType
    {{8, false}},
    {{8, true}},
    {{16, false}},
    {{16, true}},
    {{32, false}},
    {{32, true}},
    {{64, false}},
    {{64, true}},
    {.number = &F16},
    {.number = &BF16},
    {},  // TF32
    {.number = &F32},
    {.number = &F64},
    {.element = &F16, .pitch = 16},
    {.element = &BF16, .pitch = 16},
    {.element = &E4M3},
    {.element = &E5M2},
    {.element = &E2M3},
    {.element = &E3M2},
    {.element = &E2M1, .pitch = 4},
    {},  // UE8M0X2
};
const TypeRow& row_of(NumericType type) { return TYPES[static_cast<int>(type)]; }
IntegerType integer_type(NumericType type) { return row_of(type).integer; }
const Format* float_format(NumericType type) { return row_of(type).number; }
const Format* element_format(NumericType type) { return row_of(type).element; }
int element_pitch(NumericType type) { return row_of(type).pitch; }

// An integer as sign and magnitude, which every integer type fits.
struct Integer {
  bool negative;
  uint64_t magnitude;
};

Integer read_integer(IntegerType type, uint64_t bits) {
  if (!type.is_signed) return {false, low_bits(bits, type.bits)};
  const int64_t value = sign_extended(bits, type.bits);
  return {value < 0, value < 0 ? -static_cast<uint64_t>(value) : static_cast<uint64_t>(value)};
}

uint64_t write_integer(IntegerType type, uint64_t bits) {
  return type.is_signed ? static_cast<uint64_t>(sign_extended(bits, type.bits))
                        : low_bits(bits, type.bits);
}

uint64_t clamp_integer(IntegerType type, Integer value) {
  const uint64_t all = low_bits(~uint64_t{0}, type.bits);
  const uint64_t largest = type.is_signed ? all >> 1 : all;
  if (!value.negative) return write_integer(type, std::min(value.magnitude, largest));
  if (!type.is_signed) return 0;
  return write_integer(type, -std::min(value.magnitude, largest + 1));
}

uint64_t cvt_integer_integer(const CvtSpec& spec, uint64_t a, uint64_t) {
  const IntegerType from = integer_type(spec.from);
  const IntegerType to = integer_type(spec.to);
  const Integer value = read_integer(from, a);
  if (spec.sat) return clamp_integer(to, value);
  return write_integer(to, value.negative ? -value.magnitude : value.magnitude);
}

double flushed(double value, NumericType type, bool ftz) {
  return ftz && type == NumericType::F32 ? double{flush(static_cast<float>(value))} : value;
}

// cvt.ftz.f32.f64 flushes values below this, whatever the rounding: half a unit under 2^-126.
constexpr double FLUSHED_F64 = 0x1.fffffep-127 + 0x1p-151;

// Clamps a number of a format to [0, 1]; NaN becomes +0.
uint64_t saturated(const Format& format, uint64_t bits) {
  const double value = decode(format, bits);
  if (!(value > 0)) return 0;
  return value < 1 ? bits : encode(format, 1.0, Round::RN);
}

uint64_t cvt_integer_float(const CvtSpec& spec, uint64_t a, uint64_t) {  // from integer
  const Integer value = read_integer(integer_type(spec.from), a);
  const Format& format = *float_format(spec.to);
  const uint64_t bits = encode(format, value.negative, value.magnitude, 0, spec.round, false);
  return spec.sat ? saturated(format, bits) : bits;
}

// The integral double that .rni, .rzi, .rmi or .rpi makes of a value.
double integral(double value, Round round) {
  switch (round) {
    case Round::RZI:
      return std::trunc(value);
    case Round::RMI:
      return std::floor(value);
    case Round::RPI:
      return std::ceil(value);
    default:
      return std::nearbyint(value);  // the environment's direction: to nearest even
  }
}

uint64_t cvt_float_integer(const CvtSpec& spec, uint64_t a, uint64_t) {  // to integer
  const IntegerType to = integer_type(spec.to);
  double value = decode(*float_format(spec.from), a);
  if (std::isnan(value)) {  // PTX ISA, cvt: 0, or the top bit alone where 64 bits are involved
    const bool wide = spec.from == NumericType::F64 || to.bits == 64;
    return wide ? write_integer(to, uint64_t{1} << (to.bits - 1)) : 0;
  }
  value = integral(flushed(value, spec.from, spec.ftz), spec.round);
  const double magnitude = std::fabs(value);
  const uint64_t clamped = magnitude < TWO_64 ? static_cast<uint64_t>(magnitude) : ~uint64_t{0};
  return clamp_integer(to, {value < 0, clamped});
}

// The NaN that a conversion from or to .f64 gives: it keeps the sign and the top of the payload.
uint64_t converted_nan(const Format& from, const Format& to, uint64_t bits) {
  const uint64_t sign = bits >> (from.bits() - 1) & 1;
  const uint64_t payload = low_bits(bits, from.mantissa_bits);
  const int dropped = from.mantissa_bits - to.mantissa_bits;
  const uint64_t kept = dropped >= 0 ? payload >> dropped : payload << -dropped;
  const uint64_t quiet = uint64_t{1} << (to.mantissa_bits - 1);
  return sign << (to.bits() - 1) | to.infinity | quiet | kept;
}

uint64_t cvt_float_float(const CvtSpec& spec, uint64_t a, uint64_t) {
  const Format& from = *float_format(spec.from);
  const Format& to = *float_format(spec.to);
  if (spec.round == Round::NONE && !spec.ftz && !spec.sat) {
    if (&from == &to && &to != &F16) return a;                                          // a move
    if (spec.from == NumericType::BF16 && spec.to == NumericType::F32) return a << 16;  // a shift
  }
  const bool into_f16 = spec.to == NumericType::F16;  // where .ftz does not touch the operand
  double value = into_f16 ? decode(from, a) : flushed(decode(from, a), spec.from, spec.ftz);
  if (std::isnan(value) && !spec.sat) {
    if (spec.from == NumericType::F64) return converted_nan(from, to, a);
    if (spec.to == NumericType::F64) return converted_nan(from, to, spec.ftz ? F32_NAN : a);
  }
  if (spec.from == NumericType::F64 && spec.ftz && std::fabs(value) < FLUSHED_F64) {
    value = std::copysign(0.0, value);
  }
  if (spec.round >= Round::RNI) value = integral(value, spec.round);
  uint64_t bits = encode(to, value, spec.round, spec.satfinite);
  if (spec.ftz && spec.to == NumericType::F32) bits = bits_of(flush(f32_of(uint32_t(bits))));
  if (spec.sat) bits = saturated(to, bits);
  return bits;
}

// One element of a conversion that has .relu or .satfinite.
uint64_t narrow_element(const Format& to, double value, const CvtSpec& spec) {
  if (spec.relu && value <= 0) value = 0.0;
  return encode(to, value, spec.round, spec.satfinite);
}

uint64_t cvt_f32_half(const CvtSpec& spec, uint64_t a, uint64_t) {  // .f16.f32, .bf16.f32 + relu
  const double value = flushed(double{f32_of(uint32_t(a))}, spec.from, spec.ftz);
  return narrow_element(*float_format(spec.to), value, spec);
}

uint64_t cvt_f32_tf32(const CvtSpec& spec, uint64_t a, uint64_t) {
  if (spec.round == Round::RNA && is_nan(f32_of(static_cast<uint32_t>(a)))) {
    // ptxas makes this form of integer instructions: a NaN is cut off, and clamped, as a number.
    return (a & 0xFFFFE000u) - (spec.satfinite ? 0x2000 : 0);
  }
  const double value = f32_of(static_cast<uint32_t>(a));
  return narrow_element(TF32, value, spec) << 13;
}

uint64_t cvt_f32_packed(const CvtSpec& spec, uint64_t a, uint64_t b) {
  const Format& to = *element_format(spec.to);
  const uint64_t upper = narrow_element(to, f32_of(static_cast<uint32_t>(a)), spec);
  const uint64_t lower = narrow_element(to, f32_of(static_cast<uint32_t>(b)), spec);
  return upper << element_pitch(spec.to) | lower;
}

uint64_t cvt_packed_packed(const CvtSpec& spec, uint64_t a, uint64_t) {
  const Format& from = *element_format(spec.from);
  const Format& to = *element_format(spec.to);
  const int pitch = element_pitch(spec.from);
  const uint64_t upper = narrow_element(to, decode(from, low_bits(a >> pitch, pitch)), spec);
  const uint64_t lower = narrow_element(to, decode(from, low_bits(a, pitch)), spec);
  return upper << element_pitch(spec.to) | lower;
}

// UE8M0: a power of two, 2^(bits - 127); 0xFF is NaN.
uint64_t encode_ue8m0(double value, const CvtSpec& spec) {
  if (std::isnan(value)) return UE8M0_NAN;
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return spec.satfinite ? 0xFE : UE8M0_NAN;
  if (magnitude == 0) return 0;
  int exponent;
  const double fraction = std::frexp(magnitude, &exponent);  // in [0.5, 1)
  exponent -= 1;
  if (spec.round == Round::RP && fraction > 0.5) exponent += 1;
  if (exponent > 127) return spec.satfinite ? 0xFE : UE8M0_NAN;
  return static_cast<uint64_t>(std::max(exponent, -127) + 127);
}

uint64_t cvt_ue8m0(const CvtSpec& spec, uint64_t a, uint64_t b) {
  if (spec.from == NumericType::F32) {
    return encode_ue8m0(f32_of(static_cast<uint32_t>(a)), spec) << 8 |
           encode_ue8m0(f32_of(static_cast<uint32_t>(b)), spec);
  }
  return encode_ue8m0(f32_of_bf16(static_cast<uint16_t>(a >> 16)), spec) << 8 |
         encode_ue8m0(f32_of_bf16(static_cast<uint16_t>(a)), spec);
}

uint64_t cvt_from_ue8m0(const CvtSpec&, uint64_t a, uint64_t) {
  const auto element = [](uint64_t bits) {
    bits &= 0xFF;
    const double value = bits == UE8M0_NAN ? f64_of(F64.nan) : std::ldexp(1.0, int(bits) - 127);
    return encode(BF16, value, Round::RN);
  };
  return element(a >> 8) << 16 | element(a);
}

bool is_nearest_or_zero(Round round) { return round == Round::RN || round == Round::RZ; }
bool is_float_round(Round round) { return round >= Round::RN && round <= Round::RP; }
bool is_integral_round(Round round) { return round >= Round::RNI; }

// Whether every value of one integer type is a value of another.
bool holds(IntegerType to, IntegerType from) {
  if (from.is_signed && !to.is_signed) return false;
  return to.bits - (to.is_signed && !from.is_signed) >= from.bits;
}

// The forms that convert one number to one number.
CvtFunction find_scalar_cvt(const CvtSpec& spec) {
  const bool to_integer = integer_type(spec.to).bits != 0;
  const bool from_integer = integer_type(spec.from).bits != 0;
  const bool plain = !spec.satfinite && !spec.relu;
  const bool has_f32 = spec.from == NumericType::F32 || spec.to == NumericType::F32;
  if (spec.ftz && !has_f32) return nullptr;
  if (to_integer && from_integer) {
    if (spec.sat && holds(integer_type(spec.to), integer_type(spec.from))) return nullptr;
    return plain && spec.round == Round::NONE ? cvt_integer_integer : nullptr;
  }
  const bool has_bf16 = spec.from == NumericType::BF16 || spec.to == NumericType::BF16;
  const bool has_byte = integer_type(spec.from).bits == 8 || integer_type(spec.to).bits == 8;
  if (has_bf16 && has_byte) return nullptr;
  if (to_integer) return plain && is_integral_round(spec.round) ? cvt_float_integer : nullptr;
  if (from_integer) return plain && is_float_round(spec.round) ? cvt_integer_float : nullptr;
  if (!plain) {
    const bool half = spec.to == NumericType::F16 || spec.to == NumericType::BF16;
    const bool legal = half && spec.from == NumericType::F32 && is_nearest_or_zero(spec.round) &&
                       !spec.ftz && !spec.sat;
    return legal ? cvt_f32_half : nullptr;
  }
  const Format& from = *float_format(spec.from);
  const Format& to = *float_format(spec.to);
  const bool narrows = to.bits() < from.bits() || (to.bits() == from.bits() && &to != &from);
  if (narrows) return is_float_round(spec.round) ? cvt_float_float : nullptr;
  if (&to == &from) {
    const bool legal = spec.round == Round::NONE || is_integral_round(spec.round);
    return legal ? cvt_float_float : nullptr;
  }
  return spec.round == Round::NONE ? cvt_float_float : nullptr;
}

bool is_small_float(NumericType type) {  // packed, of 8 bits or fewer
  return type >= NumericType::E4M3X2 && type <= NumericType::E2M1X2;
}

}  // namespace

bool cvt_has_two_sources(const CvtSpec& spec) {
  return spec.from == NumericType::F32 && spec.to >= NumericType::F16X2;
}

CvtFunction find_cvt(const CvtSpec& spec) {
  const bool to_scalar = integer_type(spec.to).bits != 0 || float_format(spec.to) != nullptr;
  const bool from_scalar = integer_type(spec.from).bits != 0 || float_format(spec.from) != nullptr;
  if (to_scalar && from_scalar) return find_scalar_cvt(spec);
  if (spec.ftz || spec.sat) return nullptr;
  const bool from_f32 = spec.from == NumericType::F32;
  switch (spec.to) {
    case NumericType::TF32:
      if (!from_f32) return nullptr;
      if (spec.round == Round::RNA) return spec.relu ? nullptr : cvt_f32_tf32;
      return is_nearest_or_zero(spec.round) ? cvt_f32_tf32 : nullptr;
    case NumericType::F16X2:
      if (is_small_float(spec.from)) {
        return spec.round == Round::RN && !spec.satfinite ? cvt_packed_packed : nullptr;
      }
      return from_f32 && is_nearest_or_zero(spec.round) ? cvt_f32_packed : nullptr;
    case NumericType::BF16X2:
      if (spec.from == NumericType::UE8M0X2) {
        const bool legal = spec.round == Round::RN && !spec.satfinite && !spec.relu;
        return legal ? cvt_from_ue8m0 : nullptr;
      }
      return from_f32 && is_nearest_or_zero(spec.round) ? cvt_f32_packed : nullptr;
    case NumericType::E4M3X2:
    case NumericType::E5M2X2:
      if (spec.round != Round::RN || !spec.satfinite) return nullptr;
      if (spec.from == NumericType::F16X2) return cvt_packed_packed;
      return from_f32 ? cvt_f32_packed : nullptr;
    case NumericType::E2M3X2:
    case NumericType::E3M2X2:
    case NumericType::E2M1X2:
      return from_f32 && spec.round == Round::RN && spec.satfinite ? cvt_f32_packed : nullptr;
    case NumericType::UE8M0X2: {
      const bool legal = (spec.round == Round::RZ || spec.round == Round::RP) && !spec.relu &&
                         (from_f32 || spec.from == NumericType::BF16X2);
      return legal ? cvt_ue8m0 : nullptr;
    }
    default:
      return nullptr;
  }
}

}  // namespace archflash::sim
