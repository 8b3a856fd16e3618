#include "sim/numerics/half.h"

#include <algorithm>
#include <cmath>

#include "sim/numerics/convert.h"
#include "sim/numerics/formats.h"

namespace archflash::sim {
namespace {

bool is_nan_f16(uint16_t bits) { return (bits & 0x7FFF) > F16.infinity; }
bool is_nan_bf16(uint16_t bits) { return (bits & 0x7FFF) > BF16.infinity; }
uint16_t flush_f16(uint16_t bits) { return (bits & 0x7C00) == 0 ? bits & 0x8000 : bits; }

uint16_t finish_bf16(double value) { return static_cast<uint16_t>(encode(BF16, value, Round::RN)); }

double value_f16(uint16_t bits, bool ftz) { return f32_of_f16(ftz ? flush_f16(bits) : bits); }

constexpr uint16_t OOB_NAN =
    0x7FF7;  // .oob: an operand with these bits, of either sign, makes the result 0

uint16_t apply_relu(uint16_t bits, uint16_t infinity, Relu relu) {
  const bool clamps = relu == Relu::RELU || relu == Relu::OOB_RELU;
  return clamps && (bits & 0x8000) && (bits & 0x7FFF) <= infinity ? 0 : bits;
}

bool oob(Relu relu, uint16_t a, uint16_t b) {
  const bool checks = relu == Relu::OOB || relu == Relu::OOB_RELU;
  return checks && ((a & 0x7FFF) == OOB_NAN || (b & 0x7FFF) == OOB_NAN);
}

}  // namespace

uint16_t finish_f16(double value, FloatMode mode) {
  // A value that is too small before rounding is flushed, even if it would round to a normal
  // number.
  if (mode.ftz && std::fabs(value) < 0x1p-14) value = std::copysign(0.0, value);
  const auto bits = static_cast<uint16_t>(encode(F16, value, mode.round));
  if (!mode.sat) return bits;
  if ((bits & 0x7FFF) > F16.infinity || (bits & 0x8000)) return 0;
  return std::min<uint16_t>(bits, 0x3C00);
}

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

}  // namespace archflash::sim
