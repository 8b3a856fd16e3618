#include "sim/numerics/float.h"

#include <cmath>

#include "sim/numerics/float_control.h"
#include "sim/numerics/formats.h"

namespace archflash::sim {
namespace {

// The host's rounding control, set to a direction for as long as the object lives: double precision
// uses the host's own instructions.
class Direction {
 public:
  explicit Direction(Round round) : saved_(float_control()) {
    set_float_control(with_direction(saved_, round));
  }
  ~Direction() { set_float_control(saved_); }

 private:
  uint32_t saved_;
};

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

}  // namespace

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

}  // namespace

double min_f64(double a, double b) { return extreme_f64(a, b, false); }
double max_f64(double a, double b) { return extreme_f64(a, b, true); }
double neg_f64(double a) { return std::isnan(a) ? quiet(a) : f64_of(bits_of(a) ^ F64_SIGN); }
double abs_f64(double a) { return std::isnan(a) ? quiet(a) : f64_of(bits_of(a) & ~F64_SIGN); }

}  // namespace archflash::sim
