#include "sim/numerics/approximate.h"

#include <cmath>
#include <limits>

#include "sim/numerics/convert.h"
#include "sim/numerics/float.h"
#include "sim/numerics/formats.h"
#include "sim/numerics/function_unit.h"
#include "sim/numerics/half.h"

namespace archflash::sim {
namespace {

constexpr float TWO_24 = 0x1p24f;  // by which ptxas makes subnormal operands normal
constexpr float SMALLEST_NORMAL = 0x1p-126f;

// These functions have no table here: they are computed in double precision and rounded.
template <class Function>
float approximate(Function function, double a) {
  return canonical(static_cast<float>(function(a)));
}

float mufu_sqrt(float a) {
  return approximate([](double x) { return std::sqrt(x); }, flush(a));
}

// The angle, in radians and in double precision, whose sin or cos an H200 computes: it multiplies
// by 1 / (2 pi), cuts the product off and drops whole turns.
double reduced_angle(float a, bool ftz) {
  const float scaled = mul_f32(a, 0x1.45f306p-3f, {Round::RZ, ftz, false});
  const double rest = double{scaled} - std::nearbyint(double{scaled});
  return std::copysign(rest, rest == 0 ? double{a} : rest) * 6.283185307179586;
}

}  // namespace

// With .ftz an instruction is the unit's own. Without, its operands are scaled into the unit's
// range.
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
  return approximate([](double x) { return std::sin(x); }, reduced_angle(a, ftz));
}
float cos_approx_f32(float a, bool ftz) {
  return approximate([](double x) { return std::cos(x); }, reduced_angle(a, ftz));
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

namespace {

// Refines the unit's estimate by one step, as the code of ptxas does.
double refined_rsqrt(double a) {
  const double y = mufu_rsq64h(a);
  const double error = std::fma(a, -(y * y), 1.0);
  return std::fma(std::fma(error, 0.375, 0.5), y * error, y);
}

}  // namespace

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

uint16_t ex2_approx_f16(uint16_t a) {
  const float power = mufu_ex2(f32_of_f16(a));
  if (power >= 65536.0f) return F16.infinity;
  return finish_f16(power, {Round::RZ, false, false});
}
uint16_t tanh_approx_f16(uint16_t a) {
  return finish_f16(tanh_approx_f32(f32_of_f16(a)), {Round::RZ, false, false});
}

uint16_t ex2_approx_ftz_bf16(uint16_t a) {
  return static_cast<uint16_t>(bits_of(mufu_ex2(f32_of_bf16(a))) >> 16);
}
uint16_t tanh_approx_bf16(uint16_t a) {
  const float result = tanh_approx_f32(f32_of_bf16(a));
  return static_cast<uint16_t>(bits_of(result) >> 16);
}

}  // namespace archflash::sim
