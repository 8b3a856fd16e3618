// One rounding routine for every floating-point format, and double precision as the wide format in
// which .f32 and narrower types are computed.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "sim/numerics/bits.h"
#include "sim/numerics/float.h"

namespace archflash::sim {

inline constexpr uint64_t F64_SIGN = uint64_t{1} << 63;
inline constexpr uint64_t F64_QUIET = uint64_t{1} << 51;
// The NaN of an invalid operation without a NaN operand.
inline constexpr uint64_t F64_INVALID = 0xFFF8000000000000;

inline double quiet(double nan) { return f64_of(bits_of(nan) | F64_QUIET); }

// A binary format: sign, exponent field, mantissa field. `largest` has the bits of the largest
// finite magnitude. Greater magnitudes become `infinity`, or `largest` where the format has no
// infinity.
struct Format {
  int exponent_bits, mantissa_bits;
  uint64_t largest;
  uint64_t infinity;  // 0: none
  uint64_t nan;       // 0: none
  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  int min_exponent() const { return 2 - (1 << (exponent_bits - 1)); }  // of a normal number
};
inline constexpr Format F16{5, 10, 0x7BFF, 0x7C00, F16_NAN};
inline constexpr Format BF16{8, 7, 0x7F7F, 0x7F80, BF16_NAN};
inline constexpr Format TF32{8, 10, 0x7F7FE000 >> 13, 0x7F800000 >> 13, 0x7FFFE000 >> 13};
inline constexpr Format F32{8, 23, 0x7F7FFFFF, 0x7F800000, F32_NAN};
inline constexpr Format F64{11, 52, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF};
inline constexpr Format E4M3{4, 3, 0x7E, 0, 0x7F};
inline constexpr Format E5M2{5, 2, 0x7B, 0x7C, 0x7F};
inline constexpr Format E2M3{2, 3, 0x1F, 0, 0};
inline constexpr Format E3M2{3, 2, 0x1F, 0, 0};
inline constexpr Format E2M1{2, 1, 0x7, 0, 0};
inline constexpr uint8_t UE8M0_NAN = 0xFF;  // UE8M0: a power of two without a sign

// Whether rounding adds one unit to the kept part of a magnitude. `discarded` is the part that is
// cut off, `half` its half-way point; `sticky` says that still smaller bits were cut off before.
inline bool rounds_up(Round round, bool negative, bool odd, uint64_t discarded, uint64_t half,
                      bool sticky) {
  const bool inexact = discarded != 0 || sticky;
  switch (round) {
    case Round::RZ:
    case Round::RZI:
      return false;
    case Round::RM:
    case Round::RMI:
      return negative && inexact;
    case Round::RP:
    case Round::RPI:
      return !negative && inexact;
    case Round::RNA:
      return discarded >= half;
    default:
      return discarded > half || (discarded == half && (sticky || odd));
  }
}

// The format's bits of (-1)^negative * significand * 2^exponent, rounded once.
inline uint64_t encode(const Format& format, bool negative, uint64_t significand, int exponent,
                       Round round, bool satfinite) {
  const uint64_t sign = uint64_t{negative} << (format.bits() - 1);
  if (significand == 0) return sign;
  const int top = 63 - std::countl_zero(significand) + exponent;
  const int unit = std::max(top, format.min_exponent()) - format.mantissa_bits;
  int shift = unit - exponent;  // bits of the significand below the format's last one
  bool sticky = false;
  if (shift > 63) {
    sticky = true;  // all of it is below a quarter of the last bit
    significand = 0;
    shift = 63;
  }
  uint64_t kept;
  if (shift <= 0) {
    kept = significand << -shift;
  } else {
    kept = significand >> shift;
    const uint64_t discarded = significand & ((uint64_t{1} << shift) - 1);
    kept += rounds_up(round, negative, kept & 1, discarded, uint64_t{1} << (shift - 1), sticky);
  }
  // The leading one of a normal number adds the last step of the exponent field.
  const auto steps =
      static_cast<uint64_t>(std::max(top, format.min_exponent()) - format.min_exponent());
  const uint64_t magnitude = kept + (steps << format.mantissa_bits);
  if (magnitude <= format.largest) return sign | magnitude;
  const bool away = round == Round::RZ || round == (negative ? Round::RP : Round::RM);
  if (satfinite || away || format.infinity == 0) return sign | format.largest;
  return sign | format.infinity;
}

inline uint64_t encode(const Format& format, double value, Round round, bool satfinite = false) {
  const uint64_t bits = bits_of(value);
  const bool negative = bits >> 63;
  const auto field = static_cast<int>(bits >> 52 & 0x7FF);
  const uint64_t fraction = bits & 0xFFFFFFFFFFFFF;
  if (field == 0x7FF) {
    if (fraction != 0) {  // formats without NaN take the largest value
      return format.nan != 0 ? format.nan : format.largest;
    }
    const uint64_t sign = uint64_t{negative} << (format.bits() - 1);
    return sign | (satfinite || format.infinity == 0 ? format.largest : format.infinity);
  }
  const uint64_t significand = field == 0 ? fraction : fraction | uint64_t{1} << 52;
  return encode(format, negative, significand, std::max(field, 1) - 1075, round, satfinite);
}

// Exact; a NaN becomes the canonical one.
inline double decode(const Format& format, uint64_t bits) {
  const bool negative = bits >> (format.bits() - 1) & 1;
  const uint64_t magnitude = bits & ((uint64_t{1} << (format.bits() - 1)) - 1);
  const double sign = negative ? -1.0 : 1.0;
  if (magnitude > format.largest && (format.infinity != 0 || format.nan != 0)) {
    if (magnitude == format.infinity) return sign * std::numeric_limits<double>::infinity();
    return f64_of(F64.nan);
  }
  const auto field = static_cast<int>(magnitude >> format.mantissa_bits);
  const uint64_t fraction = magnitude & ((uint64_t{1} << format.mantissa_bits) - 1);
  const uint64_t significand =
      field == 0 ? fraction : fraction | uint64_t{1} << format.mantissa_bits;
  const int exponent = format.min_exponent() + std::max(field, 1) - 1 - format.mantissa_bits;
  return sign * std::ldexp(static_cast<double>(significand), exponent);
}

// ---- Double precision as the wide format -------------------------------------------------------

// The exact value is sum + error, where `sum` was rounded to nearest. Returns it rounded to odd: a
// second rounding to at most 51 bits, in any direction, then gives the same as one rounding of the
// exact value.
inline double round_to_odd(double sum, double error) {
  if (error == 0 || !std::isfinite(sum)) return sum;
  uint64_t bits = bits_of(sum);
  if ((error > 0) != (sum > 0)) bits -= 1;  // rounded away from zero: one step back
  return f64_of(bits | 1);
}

inline double add_to_odd(double a, double b) {
  const double sum = a + b;
  const double b_part = sum - a;
  const double error = (a - (sum - b_part)) + (b - b_part);
  return round_to_odd(sum, std::isfinite(sum) ? error : 0.0);
}

// A sum that is zero has the sign of its operands; where these differ it is negative only when
// rounding down.
inline double zero_sum(double a, double b, Round round) {
  if (std::signbit(a) == std::signbit(b)) return a;
  return round == Round::RM ? -0.0 : 0.0;
}

inline double add_odd(double a, double b, Round round) {
  const double sum = add_to_odd(a, b);
  return sum == 0 ? zero_sum(a, b, round) : sum;
}

inline float narrow(double value, FloatMode mode) {
  const auto bits = static_cast<uint32_t>(encode(F32, value, mode.round));
  return finish_f32(f32_of(bits), mode);
}

// ---- min and max -------------------------------------------------------------------------------

// The bits of min or max, for any type that converts exactly to double. A number wins against a
// NaN, unless .NaN asks for the NaN; -0 is below +0.
template <class Bits>
Bits extreme(Bits a, Bits b, double value_a, double value_b, Bits sign, Bits nan, MinMaxMode mode,
             bool maximum) {
  Bits xor_sign = 0;
  if (mode.xorsign_abs) {
    xor_sign = (a ^ b) & sign;
    a &= static_cast<Bits>(~sign);
    b &= static_cast<Bits>(~sign);
    value_a = std::fabs(value_a);
    value_b = std::fabs(value_b);
  }
  const bool nan_a = std::isnan(value_a);
  const bool nan_b = std::isnan(value_b);
  if ((nan_a && nan_b) || (mode.nan && (nan_a || nan_b))) return nan;
  Bits result;
  if (nan_a || nan_b) {
    result = nan_a ? b : a;
  } else if (value_a == value_b) {  // equal numbers, or zeros of either sign
    result = maximum == ((a & sign) != 0) ? b : a;
  } else {
    result = maximum == (value_a > value_b) ? a : b;
  }
  return result | xor_sign;
}

}  // namespace archflash::sim
