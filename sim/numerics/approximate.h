// Approximate functions. The comment at each function is PTX's own bound, for all inputs unless it
// says otherwise. Special cases (zeros, infinities, NaN) are exact.
//
// ex2, lg2, rcp, rsqrt and the divisions give the bits of an H200. sqrt and tanh are correctly
// rounded; so are sin and cos, of the angle that an H200 makes of its operand.
// tests/sim/vectors/README.md says how far these are from an H200.
#pragma once

#include <cstdint>

namespace archflash::sim {

float ex2_approx_f32(float a, bool ftz);    // 2 ulp; ex2(-inf) = +0, ex2(+-0) = 1
float lg2_approx_f32(float a, bool ftz);    // 2^-22 absolute in (0.5, 2), relative elsewhere
float rcp_approx_f32(float a, bool ftz);    // 1 ulp
float rsqrt_approx_f32(float a, bool ftz);  // 2^-22.9 relative
float sqrt_approx_f32(float a, bool ftz);   // 2^-23 relative
float sin_approx_f32(float a, bool ftz);    // 2^-20.5 absolute in [-2 pi, 2 pi]; elsewhere none
float cos_approx_f32(float a, bool ftz);    // 2^-20.5 absolute in [-2 pi, 2 pi]; elsewhere none
float tanh_approx_f32(float a);             // 2^-11 relative
float div_approx_f32(float a, float b, bool ftz);  // 2 ulp for |b| in [2^-126, 2^126]
float div_full_f32(float a, float b, bool ftz);    // 2 ulp

double rcp_approx_ftz_f64(double a);          // 2^-20 relative; the result's low 32 bits are 0
double rsqrt_approx_f64(double a, bool ftz);  // 2^-20 relative; the result's low 32 bits are 0

uint16_t ex2_approx_f16(uint16_t a);       // 2^-9.9 relative; an H200's bits
uint16_t tanh_approx_f16(uint16_t a);      // 2^-10.987 absolute; subnormals are kept
uint16_t ex2_approx_ftz_bf16(uint16_t a);  // 2^-7 relative; an H200's bits
uint16_t tanh_approx_bf16(uint16_t a);     // 2^-8 relative

}  // namespace archflash::sim
