#include "sim/numerics/function_unit.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "sim/numerics/bits.h"

namespace archflash::sim {

float mufu_ex2(float a) {
  if (is_nan(a)) return f32_of(F32_NAN);
  // 23 bits after the point, the rest cut off; negative numbers as the complement to one, but for
  // integers. 255: far enough to overflow or vanish.
  const auto fixed = static_cast<int32_t>(std::min(std::fabs(a), 255.0f) * 0x1p23f);
  const bool integral = (fixed & MANTISSA) == 0;
  const int32_t exponent_of = !std::signbit(a) ? fixed : integral ? -fixed : ~fixed;
  const int32_t exponent = exponent_of >> 23;
  if (exponent > 127) return f32_of(INFINITY_BITS);
  if (exponent < -126) return 0.0f;
  return f32_of((static_cast<uint32_t>(exponent + 127) << 23) +
                interpolate<EX2>(exponent_of & MANTISSA));
}

float mufu_rcp(float a) {
  const uint32_t sign = bits_of(a) & 0x80000000u;
  const uint32_t magnitude = bits_of(a) ^ sign;
  if (magnitude > INFINITY_BITS) return f32_of(F32_NAN);
  if (magnitude < 0x00800000) return f32_of(sign | INFINITY_BITS);
  if (magnitude > 0x7E800000) return f32_of(sign);  // below 2^-126
  // 1 / m is in (1/2, 1]: its field counts from 1/2 on.
  const uint32_t result =
      ((253 - (magnitude >> 23)) << 23) + interpolate<RCP>(magnitude & MANTISSA);
  return f32_of(sign | result);
}

float mufu_rsqrt(float a) {
  const uint32_t bits = bits_of(a);
  if (is_nan(a)) return f32_of(F32_NAN);
  if ((bits & 0x7FFFFFFF) < 0x00800000) return f32_of((bits & 0x80000000u) | INFINITY_BITS);
  if (bits & 0x80000000u) return f32_of(F32_NAN);
  if (bits == INFINITY_BITS) return 0.0f;
  const int exponent = static_cast<int>(bits >> 23) - 127;
  const uint32_t odd = exponent & 1;
  const auto half = static_cast<uint32_t>(126 - (exponent >> 1)) << 23;
  if (!odd && (bits & MANTISSA) == 0) return f32_of(half + 0x00800000);  // exact by itself
  return f32_of(half + interpolate<RSQRT>(odd << 23 | (bits & MANTISSA)));
}

float mufu_lg2(float a) {
  const uint32_t bits = bits_of(a);
  if (is_nan(a)) return f32_of(F32_NAN);
  if ((bits & 0x7FFFFFFF) < 0x00800000) return f32_of(0x80000000u | INFINITY_BITS);
  if (bits & 0x80000000u) return f32_of(F32_NAN);
  if (bits == INFINITY_BITS) return a;
  if (a == 1.0f) return 0.0f;
  // The exponent and 36 bits after the point; negative numbers as the complement to one.
  constexpr int POINT = 36;
  const uint32_t mantissa = bits & MANTISSA;
  const uint64_t entry = LG2.table[mantissa >> LG2.x_bits];
  const uint32_t x = mantissa & ((1u << LG2.x_bits) - 1);
  const int64_t curve = static_cast<int64_t>(entry & 0x3FF) * truncated_square<LG2>(x);
  const int64_t sum = static_cast<int64_t>(entry >> 26 << LG2.c0_shift) + LG2.bias +
                      static_cast<int64_t>(entry >> 10 & 0xFFFF) * x - (curve << LG2.c2_shift);
  const int64_t fixed =
      (static_cast<int64_t>(bits >> 23) - 127) * (int64_t{1} << POINT) + (sum >> LG2.result_shift);
  auto magnitude = static_cast<uint64_t>(fixed < 0 ? ~fixed : fixed);
  const int excess = 64 - std::countl_zero(magnitude) - 24;  // bits that a float does not have
  if (excess > 0) magnitude = magnitude >> excess << excess;
  return std::copysign(static_cast<float>(magnitude) * 0x1p-36f, fixed < 0 ? -1.0f : 1.0f);
}

// ---- Upper halves of doubles ----

namespace {

// The upper half of a double has 20 bits of mantissa. The unit computes 23 bits, as for a float,
// and cuts off three.
constexpr uint32_t UPPER_MANTISSA = 0xFFFFF;
constexpr uint32_t UPPER_NAN = 0x7FFFFFFF;
constexpr uint32_t UPPER_INFINITY = 0x7FF00000;
constexpr int CUT_BITS = 23 - 20;

uint32_t upper_half(double value) { return static_cast<uint32_t>(bits_of(value) >> 32); }
double of_upper_half(uint32_t bits) { return f64_of(uint64_t{bits} << 32); }

}  // namespace

double mufu_rcp64h(double a) {
  const uint32_t sign = upper_half(a) & 0x80000000u;
  const uint32_t magnitude = upper_half(a) ^ sign;
  if (magnitude > UPPER_INFINITY) return of_upper_half(UPPER_NAN);
  if (magnitude < 0x00100000) return of_upper_half(sign | UPPER_INFINITY);
  if (magnitude > 0x7FD00000) return of_upper_half(sign);  // below 2^-1022
  const uint32_t mantissa = interpolate<RCP>((magnitude & UPPER_MANTISSA) << CUT_BITS) >> CUT_BITS;
  return of_upper_half(sign | (((2045 - (magnitude >> 20)) << 20) + mantissa));
}

double mufu_rsq64h(double a) {
  const uint32_t bits = upper_half(a);
  if ((bits & 0x7FFFFFFF) > UPPER_INFINITY) return of_upper_half(UPPER_NAN);
  if ((bits & 0x7FFFFFFF) < 0x00100000) {
    return of_upper_half((bits & 0x80000000u) | UPPER_INFINITY);
  }
  if (bits & 0x80000000u) return of_upper_half(UPPER_NAN);
  if (bits == UPPER_INFINITY) return 0.0;
  const int exponent = static_cast<int>(bits >> 20) - 1023;
  const uint32_t odd = exponent & 1;
  const auto half = static_cast<uint32_t>(1022 - (exponent >> 1)) << 20;
  if (!odd && (bits & UPPER_MANTISSA) == 0) return of_upper_half(half + 0x00100000);
  const uint32_t mantissa = odd << 23 | (bits & UPPER_MANTISSA) << CUT_BITS;
  return of_upper_half(half + (interpolate<RSQRT>(mantissa) >> CUT_BITS));
}

}  // namespace archflash::sim
