#include "sim/numerics/numeric.h"

#include <immintrin.h>

#include <algorithm>
#include <limits>

#include "sim/numerics/mma.h"  // uses_avx2
#include "sim/numerics/numeric_tables.h"

namespace archflash::sim {
namespace {

constexpr uint32_t DEFAULT_CONTROL = 0x1F80;  // MXCSR: all exceptions masked, RN, no FTZ, no DAZ
constexpr uint64_t F64_SIGN = uint64_t{1} << 63;
constexpr double TWO_64 = 18446744073709551616.0;

// ---- One rounding routine for every floating-point format -------------------------------------

// A binary format: sign, exponent field, mantissa field. `largest` is the bits of the largest
// finite magnitude; what lies above it is `infinity`, or out of range where the format has none.
struct Format {
  int exponent_bits, mantissa_bits;
  uint64_t largest;
  uint64_t infinity;  // 0: none
  uint64_t nan;       // 0: none
  int bits() const { return 1 + exponent_bits + mantissa_bits; }
  int min_exponent() const { return 2 - (1 << (exponent_bits - 1)); }  // of a normal number
};
constexpr Format F16{5, 10, 0x7BFF, 0x7C00, F16_NAN};
constexpr Format BF16{8, 7, 0x7F7F, 0x7F80, BF16_NAN};
constexpr Format TF32{8, 10, 0x7F7FE000 >> 13, 0x7F800000 >> 13, 0x7FFFE000 >> 13};
constexpr Format F32{8, 23, 0x7F7FFFFF, 0x7F800000, F32_NAN};
constexpr Format F64{11, 52, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0x7FFFFFFFFFFFFFFF};
constexpr Format E4M3{4, 3, 0x7E, 0, 0x7F};
constexpr Format E5M2{5, 2, 0x7B, 0x7C, 0x7F};
constexpr Format E2M3{2, 3, 0x1F, 0, 0};
constexpr Format E3M2{3, 2, 0x1F, 0, 0};
constexpr Format E2M1{2, 1, 0x7, 0, 0};

// Whether the kept part of a magnitude grows by one unit. `discarded` is what is cut off, `half`
// its half-way point; `sticky`: a little more was cut off before.
bool rounds_up(Round round, bool negative, bool odd, uint64_t discarded, uint64_t half,
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

// (-1)^negative * significand * 2^exponent in the format's bits, rounded once.
uint64_t encode(const Format& format, bool negative, uint64_t significand, int exponent,
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

uint64_t encode(const Format& format, double value, Round round, bool satfinite = false) {
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

// Exact. A NaN becomes the canonical one.
double decode(const Format& format, uint64_t bits) {
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

// ---- Double precision as the wide format of f32 and below --------------------------------------

// `sum` is exact + rounding error, `error` what was lost. Rounded to odd instead: then a second
// rounding to at most 51 bits, in any direction, gives what one rounding of the exact value would.
double round_to_odd(double sum, double error) {
  if (error == 0 || !std::isfinite(sum)) return sum;
  uint64_t bits = bits_of(sum);
  if ((error > 0) != (sum > 0)) bits -= 1;  // rounded away from zero: one step back
  return f64_of(bits | 1);
}

double add_to_odd(double a, double b) {
  const double sum = a + b;
  const double b_part = sum - a;
  const double error = (a - (sum - b_part)) + (b - b_part);
  return round_to_odd(sum, std::isfinite(sum) ? error : 0.0);
}

// The sign of a zero sum: that of both operands, else negative only when rounding down.
double zero_sum(double a, double b, Round round) {
  if (std::signbit(a) == std::signbit(b)) return a;
  return round == Round::RM ? -0.0 : 0.0;
}

double add_odd(double a, double b, Round round) {
  const double sum = add_to_odd(a, b);
  return sum == 0 ? zero_sum(a, b, round) : sum;
}

float narrow(double value, FloatMode mode) {
  const auto bits = static_cast<uint32_t>(encode(F32, value, mode.round));
  return finish_f32(f32_of(bits), mode);
}

// Double precision in a given direction: the host's own instructions under its rounding control.
class Direction {
 public:
  explicit Direction(Round round) : saved_(_mm_getcsr()) {
    const uint32_t control = round == Round::RM   ? 0x2000
                             : round == Round::RP ? 0x4000
                             : round == Round::RZ ? 0x6000
                                                  : 0x0000;
    _mm_setcsr((saved_ & ~0x6000u) | control);
  }
  ~Direction() { _mm_setcsr(saved_); }

 private:
  uint32_t saved_;
};

// Keeps the compiler from moving an operation across a change of the rounding control.
inline void pin(double& value) { asm volatile("" : "+x"(value)::"memory"); }

constexpr uint64_t F64_QUIET = uint64_t{1} << 51;
constexpr uint64_t F64_INVALID = 0xFFF8000000000000;  // of an operation without a NaN operand

double quiet(double nan) { return f64_of(bits_of(nan) | F64_QUIET); }

// A NaN result in double precision is the first NaN operand in the order given, made quiet.
double with_nan_of(double result, double first, double second, double third) {
  if (!std::isnan(result)) return result;
  for (const double operand : {first, second, third}) {
    if (std::isnan(operand)) return quiet(operand);
  }
  return f64_of(F64_INVALID);
}

template <class Operation>
double directed(Round round, Operation operation, double a, double b, double c = 0) {
  const Direction direction(round);
  pin(a);
  pin(b);
  pin(c);
  double result = operation(a, b, c);
  pin(result);
  return with_nan_of(result, b, c, a);
}

// ---- min and max, of any type that converts exactly to double ----------------------------------

// The bits of min or max: a NaN loses against a number, unless .NaN; -0 is below +0.
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

// ---- f16 and bf16 ------------------------------------------------------------------------------

bool is_nan_f16(uint16_t bits) { return (bits & 0x7FFF) > F16.infinity; }
bool is_nan_bf16(uint16_t bits) { return (bits & 0x7FFF) > BF16.infinity; }
uint16_t flush_f16(uint16_t bits) { return (bits & 0x7C00) == 0 ? bits & 0x8000 : bits; }

uint16_t finish_f16(double value, FloatMode mode) {
  // What is too small before rounding is flushed, even if it would round to a normal number.
  if (mode.ftz && std::fabs(value) < 0x1p-14) value = std::copysign(0.0, value);
  const auto bits = static_cast<uint16_t>(encode(F16, value, mode.round));
  if (!mode.sat) return bits;
  if ((bits & 0x7FFF) > F16.infinity || (bits & 0x8000)) return 0;
  return std::min<uint16_t>(bits, 0x3C00);
}

uint16_t finish_bf16(double value) { return static_cast<uint16_t>(encode(BF16, value, Round::RN)); }

double value_f16(uint16_t bits, bool ftz) { return f32_of_f16(ftz ? flush_f16(bits) : bits); }

constexpr uint16_t OOB_NAN = 0x7FF7;  // .oob: this operand, of either sign, makes the result 0

uint16_t apply_relu(uint16_t bits, uint16_t infinity, Relu relu) {
  const bool clamps = relu == Relu::RELU || relu == Relu::OOB_RELU;
  return clamps && (bits & 0x8000) && (bits & 0x7FFF) <= infinity ? 0 : bits;
}

bool oob(Relu relu, uint16_t a, uint16_t b) {
  const bool checks = relu == Relu::OOB || relu == Relu::OOB_RELU;
  return checks && ((a & 0x7FFF) == OOB_NAN || (b & 0x7FFF) == OOB_NAN);
}

}  // namespace

FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(DEFAULT_CONTROL); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(saved_); }

// ---- Conversions -------------------------------------------------------------------------------

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

struct IntegerType {
  int bits;  // 0: not an integer type
  bool is_signed;
};

IntegerType integer_type(NumericType type) {
  switch (type) {
    case NumericType::U8:
      return {8, false};
    case NumericType::S8:
      return {8, true};
    case NumericType::U16:
      return {16, false};
    case NumericType::S16:
      return {16, true};
    case NumericType::U32:
      return {32, false};
    case NumericType::S32:
      return {32, true};
    case NumericType::U64:
      return {64, false};
    case NumericType::S64:
      return {64, true};
    default:
      return {0, false};
  }
}

const Format* float_format(NumericType type) {  // of a type that is one number
  switch (type) {
    case NumericType::F16:
      return &F16;
    case NumericType::BF16:
      return &BF16;
    case NumericType::F32:
      return &F32;
    case NumericType::F64:
      return &F64;
    default:
      return nullptr;
  }
}

const Format* element_format(NumericType type) {  // of a packed type's elements
  switch (type) {
    case NumericType::F16X2:
      return &F16;
    case NumericType::BF16X2:
      return &BF16;
    case NumericType::E4M3X2:
      return &E4M3;
    case NumericType::E5M2X2:
      return &E5M2;
    case NumericType::E2M3X2:
      return &E2M3;
    case NumericType::E3M2X2:
      return &E3M2;
    case NumericType::E2M1X2:
      return &E2M1;
    default:
      return nullptr;
  }
}

// Bits between the two elements of a packed type: 4-bit elements share a byte, 6-bit ones have one
// each.
int element_pitch(NumericType type) {
  switch (type) {
    case NumericType::F16X2:
    case NumericType::BF16X2:
      return 16;
    case NumericType::E2M1X2:
      return 4;
    default:
      return 8;
  }
}

uint64_t low_bits(uint64_t value, int count) {
  return count == 64 ? value : value & ((uint64_t{1} << count) - 1);
}

int64_t sign_extended(uint64_t value, int count) {
  return static_cast<int64_t>(value << (64 - count)) >> (64 - count);
}

// Sign and magnitude: every integer type fits.
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

// cvt.ftz.f32.f64 flushes what is below this, whatever the rounding: half a unit under 2^-126.
constexpr double FLUSHED_F64 = 0x1.fffffep-127 + 0x1p-151;

// A number in [0, 1] in its bits of format; NaN is +0.
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

// A NaN of .f64 keeps its sign and the top of its payload; one of .f32 is kept when widened.
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
constexpr uint64_t UE8M0_NAN = 0xFF;
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

// Forms with one number on both sides.
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

// ---- f32 ---------------------------------------------------------------------------------------

float add_f32_general(float a, float b, FloatMode mode) {
  if (mode.ftz) a = flush(a), b = flush(b);
  return narrow(add_odd(a, b, mode.round), mode);
}

float mul_f32_general(float a, float b, FloatMode mode) {
  if (mode.ftz) a = flush(a), b = flush(b);
  return narrow(double{a} * double{b}, mode);
}

float fma_f32_general(float a, float b, float c, FloatMode mode) {
  if (mode.ftz) a = flush(a), b = flush(b), c = flush(c);
  const double product = double{a} * double{b};
  if (mode.round == Round::RN) {  // a double halfway between floats needs the error's sign
    const double sum = product + c;
    const uint64_t below = bits_of(sum) & 0x1FFFFFFF;
    const bool tie_or_small = below == 0x10000000 || std::fabs(sum) < 0x1p-125;
    if (!tie_or_small) return finish_f32(static_cast<float>(sum), mode);
  }
  return narrow(add_odd(product, c, mode.round), mode);
}

float div_f32(float a, float b, FloatMode mode) {
  if (mode.ftz) a = flush(a), b = flush(b);
  if (mode.round == Round::RN) return finish_f32(a / b, mode);
  const double quotient = double{a} / double{b};
  if (!std::isfinite(quotient) || b == 0 || std::isinf(b)) return narrow(quotient, mode);
  const double remainder = std::fma(-quotient, double{b}, double{a});
  return narrow(round_to_odd(quotient, std::signbit(b) ? -remainder : remainder), mode);
}

float rcp_f32(float a, FloatMode mode) { return div_f32(1.0f, a, mode); }

float sqrt_f32(float a, FloatMode mode) {
  if (mode.ftz) a = flush(a);
  if (mode.round == Round::RN) return finish_f32(std::sqrt(a), mode);
  const double root = std::sqrt(double{a});
  if (!std::isfinite(root)) return narrow(root, mode);
  return narrow(round_to_odd(root, std::fma(-root, root, double{a})), mode);
}

namespace {

float extreme_f32(float a, float b, MinMaxMode mode, bool maximum) {
  if (mode.ftz) a = flush(a), b = flush(b);
  return f32_of(
      extreme<uint32_t>(bits_of(a), bits_of(b), a, b, 0x80000000u, F32_NAN, mode, maximum));
}

}  // namespace

float min_f32(float a, float b, MinMaxMode mode) { return extreme_f32(a, b, mode, false); }
float max_f32(float a, float b, MinMaxMode mode) { return extreme_f32(a, b, mode, true); }
float neg_f32(float a, bool ftz) {
  return f32_of(bits_of(canonical(ftz ? flush(a) : a)) ^ (is_nan(a) ? 0 : 0x80000000u));
}
float abs_f32(float a, bool ftz) {
  return canonical(f32_of(bits_of(ftz ? flush(a) : a) & 0x7FFFFFFFu));
}

namespace {

// ---- The function unit (MUFU) ----
//
// ex2, lg2, rcp and rsqrt are quadratic interpolation in fixed point. The squarer leaves out every
// partial product below some column, and the sum is cut off, not rounded. Tables and parameters
// were found from whole binades of an H200's results, all of which they give bit for bit.
struct Interpolation {
  const uint64_t* table;
  int x_bits;      // operand bits below the segment's number
  int square_cut;  // partial products of x * x below 2^square_cut do not exist
  bool falling;    // c1 is subtracted
  int c0_shift;    // the three terms are added in units of 2^-result_shift
  int c2_shift;
  int64_t bias;
  int result_shift;
};
constexpr Interpolation EX2{EX2_TABLE, 17, 19, false, 13, 0, 6114, 15};
constexpr Interpolation RCP{RCP_TABLE, 16, 17, true, 13, 0, 2023, 15};
constexpr Interpolation LG2{LG2_TABLE, 17, 19, false, 12, 1, 837, 2};
constexpr Interpolation RSQRT{RSQRT_TABLE, 17, 19, true, 14, 2, -1, 16};

// Bit j of x contributes its products with the lower bits, doubled, and with itself.
template <Interpolation F>
constexpr uint32_t own_square(int j) {
  return 2 * j >= F.square_cut ? 1u << (2 * j - F.square_cut) : 0;
}
template <Interpolation F>
constexpr int lower_shift(int j) {
  return F.square_cut - 1 - j;
}

// x * x without the partial products below 2^square_cut, in units of that.
template <Interpolation F>
uint32_t truncated_square(uint32_t x) {
  uint32_t square = 0;
  for (int j = F.square_cut / 2; j < F.x_bits; ++j) {
    const uint32_t products = ((x & ((1u << j) - 1)) >> lower_shift<F>(j)) + own_square<F>(j);
    if (x >> j & 1) square += products;
  }
  return square;
}

// The mantissa field of the function at a mantissa: it grows by one at each unit in the last place
// and may carry into the exponent.
template <Interpolation F>
uint32_t interpolate(uint32_t mantissa) {
  const uint64_t entry = F.table[mantissa >> F.x_bits];
  const uint32_t x = mantissa & ((1u << F.x_bits) - 1);
  const int64_t slope = static_cast<int64_t>(entry >> 10 & 0xFFFF) * x;
  const int64_t sum = static_cast<int64_t>(entry >> 26 << F.c0_shift) + F.bias +
                      (F.falling ? -slope : slope) +
                      (static_cast<int64_t>(entry & 0x3FF) * truncated_square<F>(x) << F.c2_shift);
  return static_cast<uint32_t>(sum >> F.result_shift);
}

constexpr uint32_t MANTISSA = 0x7FFFFF;
constexpr uint32_t INFINITY_BITS = 0x7F800000;

// The unit reads subnormals as zeros and gives zeros for them.
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

constexpr float TWO_24 = 0x1p24f;  // by which ptxas makes subnormal operands normal
constexpr float SMALLEST_NORMAL = 0x1p-126f;

// What follows has no table here: the function in double precision, rounded.
template <class Function>
float approximate(Function function, double a) {
  return canonical(static_cast<float>(function(a)));
}

float mufu_sqrt(float a) {
  return approximate([](double x) { return std::sqrt(x); }, flush(a));
}

// sin and cos multiply by 1 / (2 pi), cut off, and give the unit what is left of whole turns. The
// angle in radians, in double precision.
double turns(float a, bool ftz) {
  const float scaled = mul_f32(a, 0x1.45f306p-3f, {Round::RZ, ftz, false});
  const double rest = double{scaled} - std::nearbyint(double{scaled});
  return std::copysign(rest, rest == 0 ? double{a} : rest) * 6.283185307179586;
}

}  // namespace

// Without .ftz the instruction is the unit's, with operands scaled into its range.
float ex2_approx_f32(float a, bool ftz) {
  if (ftz || !(a < -126.0f)) return mufu_ex2(a);
  const float root = mufu_ex2(a * 0.5f);
  return root * root;
}
float lg2_approx_f32(float a, bool ftz) {
  if (ftz || !(std::fabs(a) < SMALLEST_NORMAL)) return mufu_lg2(a);
  return mufu_lg2(a * TWO_24) - 24.0f;
}
float rcp_approx_f32(float a, bool ftz) {
  if (ftz || is_nan(a)) return mufu_rcp(a);
  const float magnitude = std::fabs(a);
  const float scale = magnitude > 0x1p126f ? 0.25f : magnitude < SMALLEST_NORMAL ? TWO_24 : 1.0f;
  return scale * mufu_rcp(a * scale);
}
float rsqrt_approx_f32(float a, bool ftz) {
  if (ftz || !(std::fabs(a) < SMALLEST_NORMAL)) return mufu_rsqrt(a);
  return mufu_rsqrt(a * TWO_24) * 0x1p12f;
}
float sqrt_approx_f32(float a, bool ftz) {
  if (ftz || !(std::fabs(a) < SMALLEST_NORMAL)) return mufu_sqrt(a);
  return mufu_sqrt(a * TWO_24) * 0x1p-12f;
}
float sin_approx_f32(float a, bool ftz) {
  return approximate([](double x) { return std::sin(x); }, turns(a, ftz));
}
float cos_approx_f32(float a, bool ftz) {
  return approximate([](double x) { return std::cos(x); }, turns(a, ftz));
}
float tanh_approx_f32(float a) {
  if (std::fabs(a) < 0x1p-8f) return a;  // as an H200 has it
  return canonical(static_cast<float>(std::tanh(double{a})));
}
float div_approx_f32(float a, float b, bool ftz) {
  if (!ftz && std::fabs(b) < SMALLEST_NORMAL) a *= TWO_24, b *= TWO_24;
  return mul_f32(a, mufu_rcp(b), {Round::RN, ftz, false});
}
float div_full_f32(float a, float b, bool ftz) {
  const float magnitude = std::fabs(b);
  const FloatMode mode{Round::RN, ftz, false};
  if (magnitude > 0x1p126f) {
    a = mul_f32(a, 0.25f, mode);
    b = mul_f32(b, 0.25f, mode);
  } else if (!ftz && magnitude < SMALLEST_NORMAL) {
    a *= TWO_24, b *= TWO_24;
  }
  return mul_f32(a, mufu_rcp(b), mode);
}

// ---- f64 ---------------------------------------------------------------------------------------

double add_f64(double a, double b, Round round) {
  return directed(round, [](double x, double y, double) { return x + y; }, a, b);
}
double sub_f64(double a, double b, Round round) {
  return directed(round, [](double x, double y, double) { return x - y; }, a, b);
}
double mul_f64(double a, double b, Round round) {
  return directed(round, [](double x, double y, double) { return x * y; }, a, b);
}
double fma_f64(double a, double b, double c, Round round) {
  return directed(round, [](double x, double y, double z) { return std::fma(x, y, z); }, a, b, c);
}
double div_f64(double a, double b, Round round) {
  if (std::isnan(a)) return quiet(a);  // here a comes first
  return directed(round, [](double x, double y, double) { return x / y; }, a, b);
}
double rcp_f64(double a, Round round) { return div_f64(1.0, a, round); }
double sqrt_f64(double a, Round round) {
  return directed(round, [](double x, double, double) { return std::sqrt(x); }, a, 0);
}

namespace {

double extreme_f64(double a, double b, bool maximum) {
  if (std::isnan(a) && std::isnan(b)) return quiet(b);
  return f64_of(extreme<uint64_t>(bits_of(a), bits_of(b), a, b, F64_SIGN, F64.nan, {}, maximum));
}

// The function unit reads and gives upper halves of doubles only: 20 bits of mantissa, of which it
// makes as many of the result's as of a float's, and cuts off three.
constexpr uint32_t UPPER_MANTISSA = 0xFFFFF;
constexpr uint32_t UPPER_NAN = 0x7FFFFFFF;
constexpr uint32_t UPPER_INFINITY = 0x7FF00000;
constexpr int CUT_BITS = 23 - 20;

uint32_t upper_half(double value) { return static_cast<uint32_t>(bits_of(value) >> 32); }
double of_upper_half(uint32_t bits) { return f64_of(uint64_t{bits} << 32); }

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

// One step from the unit's estimate, as ptxas writes it.
double refined_rsqrt(double a) {
  const double y = mufu_rsq64h(a);
  const double error = std::fma(a, -(y * y), 1.0);
  return std::fma(std::fma(error, 0.375, 0.5), y * error, y);
}

}  // namespace

double min_f64(double a, double b) { return extreme_f64(a, b, false); }
double max_f64(double a, double b) { return extreme_f64(a, b, true); }
double neg_f64(double a) { return std::isnan(a) ? quiet(a) : f64_of(bits_of(a) ^ F64_SIGN); }
double abs_f64(double a) { return std::isnan(a) ? quiet(a) : f64_of(bits_of(a) & ~F64_SIGN); }
double rcp_approx_ftz_f64(double a) { return mufu_rcp64h(a); }
double rsqrt_approx_f64(double a, bool ftz) {
  if (ftz) return mufu_rsq64h(a);
  if (std::isnan(a)) return quiet(a);
  if (a == 0) return std::copysign(std::numeric_limits<double>::infinity(), a);
  if (a < 0) return f64_of(F64_INVALID);
  if (std::isinf(a)) return 0.0;
  return a < 0x1p-1022 ? refined_rsqrt(a * 0x1p54) * 0x1p27 : refined_rsqrt(a);
}

// ---- f16 and bf16 ------------------------------------------------------------------------------

uint16_t add_f16(uint16_t a, uint16_t b, FloatMode mode) {
  return finish_f16(value_f16(a, mode.ftz) + value_f16(b, mode.ftz), mode);
}
uint16_t sub_f16(uint16_t a, uint16_t b, FloatMode mode) {
  return finish_f16(value_f16(a, mode.ftz) - value_f16(b, mode.ftz), mode);
}
uint16_t mul_f16(uint16_t a, uint16_t b, FloatMode mode) {
  return finish_f16(value_f16(a, mode.ftz) * value_f16(b, mode.ftz), mode);
}
uint16_t fma_f16(uint16_t a, uint16_t b, uint16_t c, FloatMode mode, Relu relu) {
  if (oob(relu, a, b)) return 0;
  const double product = value_f16(a, mode.ftz) * value_f16(b, mode.ftz);
  const double sum = add_odd(product, value_f16(c, mode.ftz), Round::RN);
  return apply_relu(finish_f16(sum, mode), F16.infinity, relu);
}

namespace {

uint16_t extreme_f16(uint16_t a, uint16_t b, MinMaxMode mode, bool maximum) {
  if (mode.ftz) a = flush_f16(a), b = flush_f16(b);
  return extreme<uint16_t>(a, b, f32_of_f16(a), f32_of_f16(b), 0x8000, F16_NAN, mode, maximum);
}

uint16_t extreme_bf16(uint16_t a, uint16_t b, MinMaxMode mode, bool maximum) {
  return extreme<uint16_t>(a, b, f32_of_bf16(a), f32_of_bf16(b), 0x8000, BF16_NAN, mode, maximum);
}

}  // namespace

uint16_t min_f16(uint16_t a, uint16_t b, MinMaxMode mode) { return extreme_f16(a, b, mode, false); }
uint16_t max_f16(uint16_t a, uint16_t b, MinMaxMode mode) { return extreme_f16(a, b, mode, true); }
uint16_t neg_f16(uint16_t a, bool ftz) {
  return is_nan_f16(a) ? F16_NAN : (ftz ? flush_f16(a) : a) ^ 0x8000;
}
uint16_t abs_f16(uint16_t a, bool ftz) {
  return is_nan_f16(a) ? F16_NAN : (ftz ? flush_f16(a) : a) & 0x7FFF;
}
uint16_t ex2_approx_f16(uint16_t a) {
  const float power = mufu_ex2(f32_of_f16(a));
  if (power >= 65536.0f) return F16.infinity;
  return finish_f16(power, {Round::RZ, false, false});
}
uint16_t tanh_approx_f16(uint16_t a) {
  return finish_f16(tanh_approx_f32(f32_of_f16(a)), {Round::RZ, false, false});
}

uint16_t add_bf16(uint16_t a, uint16_t b) {
  return finish_bf16(add_odd(f32_of_bf16(a), f32_of_bf16(b), Round::RN));
}
uint16_t sub_bf16(uint16_t a, uint16_t b) { return add_bf16(a, b ^ 0x8000); }
uint16_t mul_bf16(uint16_t a, uint16_t b) {
  return finish_bf16(double{f32_of_bf16(a)} * double{f32_of_bf16(b)});
}
uint16_t fma_bf16(uint16_t a, uint16_t b, uint16_t c, Relu relu) {
  if (oob(relu, a, b)) return 0;
  const double product = double{f32_of_bf16(a)} * double{f32_of_bf16(b)};
  return apply_relu(finish_bf16(add_odd(product, f32_of_bf16(c), Round::RN)), BF16.infinity, relu);
}
uint16_t min_bf16(uint16_t a, uint16_t b, MinMaxMode mode) {
  return extreme_bf16(a, b, mode, false);
}
uint16_t max_bf16(uint16_t a, uint16_t b, MinMaxMode mode) {
  return extreme_bf16(a, b, mode, true);
}
uint16_t neg_bf16(uint16_t a) { return is_nan_bf16(a) ? BF16_NAN : a ^ 0x8000; }
uint16_t abs_bf16(uint16_t a) { return is_nan_bf16(a) ? BF16_NAN : a & 0x7FFF; }
uint16_t ex2_approx_ftz_bf16(uint16_t a) {
  return static_cast<uint16_t>(bits_of(mufu_ex2(f32_of_bf16(a))) >> 16);
}
uint16_t tanh_approx_bf16(uint16_t a) {
  const float result = tanh_approx_f32(f32_of_bf16(a));
  return static_cast<uint16_t>(bits_of(result) >> 16);
}

// ---- Integers ----------------------------------------------------------------------------------

uint64_t mul_hi_u64(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
int64_t mul_hi_s64(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<__int128>(a) * b >> 64);
}

uint32_t shf_l_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap) {
  const uint32_t amount = wrap ? c & 31 : std::min(c, 32u);
  return static_cast<uint32_t>((uint64_t{b} << 32 | a) << amount >> 32);
}
uint32_t shf_r_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap) {
  const uint32_t amount = wrap ? c & 31 : std::min(c, 32u);
  return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> amount);
}

namespace {

// The field of `width` bits of a at `position`: bits beyond the top are the sign of the field.
// The 32-bit forms take the low 8 bits of position and length; the 64-bit ones take all of them.
int field_operand(uint32_t operand, int bits) {
  return static_cast<int>(bits == 32 ? operand & 0xFF : std::min(operand, 255u));
}

uint64_t extract(uint64_t a, int bits, bool is_signed, uint32_t position, uint32_t length) {
  const int start = field_operand(position, bits);
  const int count = field_operand(length, bits);
  if (count == 0) return 0;
  const int last = std::min(start + count - 1, bits - 1);
  const bool sign = is_signed && (a >> last & 1);
  const uint64_t fill = sign ? ~uint64_t{0} : 0;
  if (start >= bits) return low_bits(fill, bits);
  uint64_t field = low_bits(a, bits) >> start;
  const int available = bits - start;
  const int taken = std::min(count, available);
  field = low_bits(field, taken);
  if (taken < 64) field |= fill << taken;
  return low_bits(field, bits);
}

uint64_t insert(uint64_t a, uint64_t b, int bits, uint32_t position, uint32_t length) {
  const int start = field_operand(position, bits);
  const int count = field_operand(length, bits);
  if (start >= bits || count == 0) return b;
  const uint64_t mask = low_bits(~uint64_t{0}, std::min(count, bits - start)) << start;
  return (b & ~mask) | (a << start & mask);
}

uint32_t find_highest(uint64_t a, bool shiftamt, int bits) {
  if (a == 0) return 0xFFFFFFFFu;
  const int position = 63 - std::countl_zero(a);
  return static_cast<uint32_t>(shiftamt ? bits - 1 - position : position);
}

}  // namespace

uint32_t bfe_u32(uint32_t a, uint32_t b, uint32_t c) {
  return static_cast<uint32_t>(extract(a, 32, false, b, c));
}
int32_t bfe_s32(int32_t a, uint32_t b, uint32_t c) {
  return static_cast<int32_t>(extract(static_cast<uint32_t>(a), 32, true, b, c));
}
uint64_t bfe_u64(uint64_t a, uint32_t b, uint32_t c) { return extract(a, 64, false, b, c); }
int64_t bfe_s64(int64_t a, uint32_t b, uint32_t c) {
  return static_cast<int64_t>(extract(static_cast<uint64_t>(a), 64, true, b, c));
}
uint32_t bfi_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return static_cast<uint32_t>(insert(a, b, 32, c, d));
}
uint64_t bfi_b64(uint64_t a, uint64_t b, uint32_t c, uint32_t d) { return insert(a, b, 64, c, d); }

uint32_t bmsk_b32(uint32_t a, uint32_t b, bool wrap) {
  const uint32_t start = wrap ? a & 31 : std::min(a, 32u);
  const uint32_t count = wrap ? b & 31 : std::min(b, 32u);
  return static_cast<uint32_t>(((uint64_t{1} << count) - 1) << start);
}
uint32_t szext_u32(uint32_t a, uint32_t b, bool wrap) {
  const uint32_t count = wrap ? b & 31 : std::min(b, 32u);
  return static_cast<uint32_t>(low_bits(a, static_cast<int>(count)));
}
int32_t szext_s32(int32_t a, uint32_t b, bool wrap) {
  const uint32_t count = wrap ? b & 31 : std::min(b, 32u);
  if (count == 0) return 0;
  return static_cast<int32_t>(sign_extended(static_cast<uint32_t>(a), static_cast<int>(count)));
}

uint32_t fns_b32(uint32_t mask, uint32_t base, int32_t offset) {
  constexpr uint32_t NONE = 0xFFFFFFFFu;
  const int step = offset < 0 ? -1 : 1;
  int64_t wanted = offset < 0 ? -int64_t{offset} : offset;
  if (offset == INT32_MIN) return 0;  // which has no magnitude: what ptxas makes of it
  if (offset == 0) return base < 32 && (mask >> base & 1) ? base : NONE;
  for (int64_t position = base; position >= 0 && position < 32; position += step) {
    if ((mask >> position & 1) && --wanted == 0) return static_cast<uint32_t>(position);
  }
  return NONE;
}

uint32_t bfind_u32(uint32_t a, bool shiftamt) { return find_highest(a, shiftamt, 32); }
uint32_t bfind_s32(int32_t a, bool shiftamt) {
  return find_highest(static_cast<uint32_t>(a < 0 ? ~a : a), shiftamt, 32);
}
uint32_t bfind_u64(uint64_t a, bool shiftamt) { return find_highest(a, shiftamt, 64); }
uint32_t bfind_s64(int64_t a, bool shiftamt) {
  return find_highest(static_cast<uint64_t>(a < 0 ? ~a : a), shiftamt, 64);
}

uint32_t brev_b32(uint32_t a) {
  a = (a >> 1 & 0x55555555) | (a & 0x55555555) << 1;
  a = (a >> 2 & 0x33333333) | (a & 0x33333333) << 2;
  a = (a >> 4 & 0x0F0F0F0F) | (a & 0x0F0F0F0F) << 4;
  return __builtin_bswap32(a);
}
uint64_t brev_b64(uint64_t a) {
  return uint64_t{brev_b32(static_cast<uint32_t>(a))} << 32 | brev_b32(uint32_t(a >> 32));
}

uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t c, PrmtMode mode) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  const uint32_t control = c & 3;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    uint32_t selector = 0;  // byte of {b, a}; bit 3: its sign, eight times
    switch (mode) {
      case PrmtMode::NONE:
        selector = c >> 4 * i & 0xF;
        break;
      case PrmtMode::F4E:
        selector = (control + i) & 7;
        break;
      case PrmtMode::B4E:
        selector = (control - i) & 7;
        break;
      case PrmtMode::RC8:
        selector = control;
        break;
      case PrmtMode::ECL:
        selector = std::max(control, i);
        break;
      case PrmtMode::ECR:
        selector = std::min(control, i);
        break;
      case PrmtMode::RC16:
        selector = (control & 1) * 2 + (i & 1);
        break;
    }
    uint32_t byte = bytes >> 8 * (selector & 7) & 0xFF;
    if (selector & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << 8 * i;
  }
  return result;
}

namespace {

int32_t field_of(uint32_t value, int position, int bits, bool is_signed) {
  const uint32_t field = value >> position & ((1u << bits) - 1);
  return static_cast<int32_t>(is_signed ? sign_extended(field, bits) : field);
}

}  // namespace

uint32_t dp4a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c) {
  for (int i = 0; i < 4; ++i) {
    c += static_cast<uint32_t>(field_of(a, 8 * i, 8, a_signed) * field_of(b, 8 * i, 8, b_signed));
  }
  return c;
}

uint32_t dp2a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c, bool upper) {
  for (int i = 0; i < 2; ++i) {
    const int byte = 8 * i + (upper ? 16 : 0);
    c += static_cast<uint32_t>(field_of(a, 16 * i, 16, a_signed) * field_of(b, byte, 8, b_signed));
  }
  return c;
}

// ---- Whole warps -------------------------------------------------------------------------------

namespace {

constexpr int WARP = 32;

// The AVX2 functions use fused multiply-add only where PTX does: a contraction elsewhere would
// change bits.
#define ARCHFLASH_AVX2 __attribute__((target("avx2,f16c")))
#define ARCHFLASH_AVX2_FMA __attribute__((target("avx2,fma")))

ARCHFLASH_AVX2 inline __m256i load_lanes(const uint32_t* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}
ARCHFLASH_AVX2 inline void store_lanes(uint32_t* target, __m256i lanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), lanes);
}

ARCHFLASH_AVX2 inline __m256 canonical_lanes(__m256 value) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(F32_NAN)));
  return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

ARCHFLASH_AVX2 inline __m256 flush_lanes(__m256 value) {
  const __m256i exponent = _mm256_set1_epi32(0x7F800000);
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i small =
      _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), _mm256_setzero_si256());
  const __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MIN));
  return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, sign, small));
}

template <bool FTZ>
ARCHFLASH_AVX2_FMA void fma_avx2(uint32_t* d, const uint32_t* a, const uint32_t* b,
                                 const uint32_t* c) {
  for (int i = 0; i < WARP; i += 8) {
    __m256 x = _mm256_castsi256_ps(load_lanes(a + i));
    __m256 y = _mm256_castsi256_ps(load_lanes(b + i));
    __m256 z = _mm256_castsi256_ps(load_lanes(c + i));
    if (FTZ) x = flush_lanes(x), y = flush_lanes(y), z = flush_lanes(z);
    __m256 result = _mm256_fmadd_ps(x, y, z);
    if (FTZ) result = flush_lanes(result);
    store_lanes(d + i, _mm256_castps_si256(canonical_lanes(result)));
  }
}

template <bool FTZ>
void fma_baseline(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  for (int i = 0; i < WARP; ++i) {
    d[i] =
        bits_of(fma_f32_general(f32_of(a[i]), f32_of(b[i]), f32_of(c[i]), {Round::RN, FTZ, false}));
  }
}

// interpolate<F> of four mantissas' segments, x and squares, each in 64 bits.
template <Interpolation F>
ARCHFLASH_AVX2 inline __m256i add_terms(__m128i segments, __m256i x, __m256i square) {
  const auto* table = reinterpret_cast<const long long*>(F.table);
  const __m256i entry = _mm256_i32gather_epi64(table, segments, 8);
  const __m256i c0 = _mm256_slli_epi64(_mm256_srli_epi64(entry, 26), F.c0_shift);
  const __m256i c1 = _mm256_and_si256(_mm256_srli_epi64(entry, 10), _mm256_set1_epi64x(0xFFFF));
  const __m256i c2 = _mm256_and_si256(entry, _mm256_set1_epi64x(0x3FF));
  const __m256i slope = _mm256_mul_epu32(c1, x);
  const __m256i start = _mm256_add_epi64(c0, _mm256_set1_epi64x(F.bias));
  const __m256i linear =
      F.falling ? _mm256_sub_epi64(start, slope) : _mm256_add_epi64(start, slope);
  const __m256i curve = _mm256_slli_epi64(_mm256_mul_epu32(c2, square), F.c2_shift);
  return _mm256_srli_epi64(_mm256_add_epi64(linear, curve), F.result_shift);
}

template <Interpolation F>
ARCHFLASH_AVX2 inline __m256i interpolate_lanes(__m256i mantissa) {
  const __m256i x = _mm256_and_si256(mantissa, _mm256_set1_epi32((1 << F.x_bits) - 1));
  __m256i square = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int j = F.square_cut / 2; j < F.x_bits; ++j) {
    const __m256i lower = _mm256_and_si256(x, _mm256_set1_epi32((1 << j) - 1));
    const __m256i products = _mm256_add_epi32(_mm256_srli_epi32(lower, lower_shift<F>(j)),
                                              _mm256_set1_epi32(int(own_square<F>(j))));
    const __m256i bit = _mm256_srai_epi32(_mm256_slli_epi32(x, 31 - j), 31);
    square = _mm256_add_epi32(square, _mm256_and_si256(products, bit));
  }
  const __m256i segments = _mm256_srli_epi32(mantissa, F.x_bits);
  const __m256i low = add_terms<F>(_mm256_castsi256_si128(segments),
                                   _mm256_cvtepu32_epi64(_mm256_castsi256_si128(x)),
                                   _mm256_cvtepu32_epi64(_mm256_castsi256_si128(square)));
  const __m256i high = add_terms<F>(_mm256_extracti128_si256(segments, 1),
                                    _mm256_cvtepu32_epi64(_mm256_extracti128_si256(x, 1)),
                                    _mm256_cvtepu32_epi64(_mm256_extracti128_si256(square, 1)));
  // The lower words of both, in order.
  const __m256 words = _mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), 0x88);
  return _mm256_permute4x64_epi64(_mm256_castps_si256(words), 0xD8);
}

// mufu_ex2 of each lane.
ARCHFLASH_AVX2 void ex2_avx2(uint32_t* d, const uint32_t* a) {
  const __m256i zero = _mm256_setzero_si256();
  for (int i = 0; i < WARP; i += 8) {
    const __m256i bits = load_lanes(a + i);
    const __m256 x = _mm256_castsi256_ps(bits);
    const __m256 magnitude =
        _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)));
    const __m256i fixed = _mm256_cvttps_epi32(
        _mm256_mul_ps(_mm256_min_ps(magnitude, _mm256_set1_ps(255.0f)), _mm256_set1_ps(0x1p23f)));
    const __m256i fraction_mask = _mm256_set1_epi32(MANTISSA);
    const __m256i integral = _mm256_cmpeq_epi32(_mm256_and_si256(fixed, fraction_mask), zero);
    const __m256i sign = _mm256_srai_epi32(bits, 31);
    // ~fixed where negative, and one more, which makes it -fixed, where that is integral.
    const __m256i exponent_of =
        _mm256_sub_epi32(_mm256_xor_si256(fixed, sign), _mm256_and_si256(sign, integral));
    const __m256i exponent = _mm256_srai_epi32(exponent_of, 23);
    __m256i result =
        _mm256_add_epi32(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23),
                         interpolate_lanes<EX2>(_mm256_and_si256(exponent_of, fraction_mask)));
    const __m256i vanishes = _mm256_cmpgt_epi32(_mm256_set1_epi32(-126), exponent);
    const __m256i overflows = _mm256_cmpgt_epi32(exponent, _mm256_set1_epi32(127));
    result = _mm256_andnot_si256(vanishes, result);
    result = _mm256_blendv_epi8(result, _mm256_set1_epi32(INFINITY_BITS), overflows);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    store_lanes(d + i, _mm256_blendv_epi8(result, _mm256_set1_epi32(F32_NAN), nan));
  }
}

ARCHFLASH_AVX2 void cvt_f16x2_avx2(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  for (int i = 0; i < WARP; i += 8) {
    const __m256 upper = canonical_lanes(_mm256_castsi256_ps(load_lanes(a + i)));
    const __m256 lower = canonical_lanes(_mm256_castsi256_ps(load_lanes(b + i)));
    const __m256i high = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(upper, _MM_FROUND_TO_NEAREST_INT));
    const __m256i low = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(lower, _MM_FROUND_TO_NEAREST_INT));
    store_lanes(d + i, _mm256_or_si256(_mm256_slli_epi32(high, 16), low));
  }
}

// bf16 in the upper half of each lane; the lower half is to be cut off.
ARCHFLASH_AVX2 inline __m256i bf16_lanes(const uint32_t* source) {
  const __m256 value = canonical_lanes(_mm256_castsi256_ps(load_lanes(source)));
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  // The canonical NaN would round into the sign.
  const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, bits, _mm256_castps_si256(nan));
}

ARCHFLASH_AVX2 void cvt_bf16x2_avx2(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  for (int i = 0; i < WARP; i += 8) {
    const __m256i upper = bf16_lanes(a + i);
    const __m256i lower = _mm256_srli_epi32(bf16_lanes(b + i), 16);
    store_lanes(d + i, _mm256_blend_epi16(upper, lower, 0x55));
  }
}

}  // namespace

void ex2_approx_ftz_f32_warp(uint32_t* d, const uint32_t* a) {
  if (uses_avx2()) return ex2_avx2(d, a);
  for (int i = 0; i < WARP; ++i) d[i] = bits_of(ex2_approx_f32(f32_of(a[i]), true));
}

void cvt_rn_f16x2_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  if (uses_avx2()) return cvt_f16x2_avx2(d, a, b);
  for (int i = 0; i < WARP; ++i) {
    d[i] = uint32_t{cvt_rn_f16_f32(f32_of(a[i]))} << 16 | cvt_rn_f16_f32(f32_of(b[i]));
  }
}

void cvt_rn_bf16x2_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  if (uses_avx2()) return cvt_bf16x2_avx2(d, a, b);
  for (int i = 0; i < WARP; ++i) {
    d[i] = uint32_t{cvt_rn_bf16_f32(f32_of(a[i]))} << 16 | cvt_rn_bf16_f32(f32_of(b[i]));
  }
}

void fma_rn_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  uses_avx2() ? fma_avx2<false>(d, a, b, c) : fma_baseline<false>(d, a, b, c);
}

void fma_rn_ftz_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  uses_avx2() ? fma_avx2<true>(d, a, b, c) : fma_baseline<true>(d, a, b, c);
}

}  // namespace archflash::sim
