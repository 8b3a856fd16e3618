// Arithmetic of .f32 and .f64 with exact rounding.
#pragma once

#include <cmath>
#include <cstdint>

#include "sim/numerics/bits.h"

namespace archflash::sim {

// ---- f32 --------------------------------------------------------------------------------------
// Each rounds once, in any direction. `mode` is a constant at most call sites: the general path is
// out of line, and without modifiers these are the host's own instructions.
float add_f32_general(float a, float b, FloatMode mode);
float mul_f32_general(float a, float b, FloatMode mode);
float fma_f32_general(float a, float b, float c, FloatMode mode);
float div_f32(float a, float b, FloatMode mode);  // div.{rn,rz,rm,rp}
float rcp_f32(float a, FloatMode mode);           // rcp.{rn,rz,rm,rp}
float sqrt_f32(float a, FloatMode mode);          // sqrt.{rn,rz,rm,rp}

inline float finish_f32(float value, FloatMode mode) {
  if (mode.ftz) value = flush(value);
  return mode.sat ? saturate(value) : canonical(value);
}

inline float add_f32(float a, float b, FloatMode mode = {}) {
  if (mode.round != Round::RN) return add_f32_general(a, b, mode);
  if (mode.ftz) a = flush(a), b = flush(b);
  return finish_f32(a + b, mode);
}
inline float sub_f32(float a, float b, FloatMode mode = {}) {
  return add_f32(a, f32_of(bits_of(b) ^ 0x80000000u), mode);
}
inline float mul_f32(float a, float b, FloatMode mode = {}) {
  if (mode.round != Round::RN) return mul_f32_general(a, b, mode);
  if (mode.ftz) a = flush(a), b = flush(b);
  return finish_f32(a * b, mode);
}
inline float fma_f32(float a, float b, float c, FloatMode mode = {}) {
#ifdef __FMA__
  if (mode.round == Round::RN && !mode.ftz && !mode.sat) return canonical(std::fma(a, b, c));
#endif
  return fma_f32_general(a, b, c, mode);
}

float min_f32(float a, float b, MinMaxMode mode = {});
float max_f32(float a, float b, MinMaxMode mode = {});
float neg_f32(float a, bool ftz = false);
float abs_f32(float a, bool ftz = false);

// ---- f64 --------------------------------------------------------------------------------------

double add_f64(double a, double b, Round round = Round::RN);
double sub_f64(double a, double b, Round round = Round::RN);
double mul_f64(double a, double b, Round round = Round::RN);
double fma_f64(double a, double b, double c, Round round = Round::RN);
double div_f64(double a, double b, Round round = Round::RN);
double rcp_f64(double a, Round round = Round::RN);
double sqrt_f64(double a, Round round = Round::RN);
double min_f64(double a, double b);
double max_f64(double a, double b);
double neg_f64(double a);  // a NaN keeps its sign, here and in abs
double abs_f64(double a);

}  // namespace archflash::sim
