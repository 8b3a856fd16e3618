// The register that says how the host's processor rounds: MXCSR on x86-64, FPCR on aarch64.
#pragma once

#include <cstdint>

#include "sim/numerics/bits.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif !defined(__aarch64__)
#error "the simulator knows the rounding control of x86-64 and aarch64 only"
#endif

namespace archflash::sim {

#if defined(__x86_64__)

constexpr uint32_t DEFAULT_FLOAT_CONTROL = 0x1F80;  // all exceptions masked, RN, no FTZ, no DAZ
constexpr uint32_t ROUND_DOWN = 1 << 13, ROUND_UP = 2 << 13, ROUND_TO_ZERO = 3 << 13;

inline uint32_t float_control() { return _mm_getcsr(); }
inline void set_float_control(uint32_t control) { _mm_setcsr(control); }

// Keeps the compiler from moving an operation on `value` across a change of the control.
inline void pin(double& value) { asm volatile("" : "+x"(value)::"memory"); }

#else

constexpr uint32_t DEFAULT_FLOAT_CONTROL = 0;  // no traps, RN, subnormals and NaN are kept
constexpr uint32_t ROUND_UP = 1 << 22, ROUND_DOWN = 2 << 22, ROUND_TO_ZERO = 3 << 22;

inline uint32_t float_control() {
  uint64_t control;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return static_cast<uint32_t>(control);
}
inline void set_float_control(uint32_t control) {
  asm volatile("msr fpcr, %0" ::"r"(uint64_t{control}) : "memory");
}

inline void pin(double& value) { asm volatile("" : "+w"(value)::"memory"); }

#endif

constexpr uint32_t with_direction(uint32_t control, Round round) {
  const uint32_t direction = round == Round::RM   ? ROUND_DOWN
                             : round == Round::RP ? ROUND_UP
                             : round == Round::RZ ? ROUND_TO_ZERO
                                                  : 0;
  return (control & ~ROUND_TO_ZERO) | direction;
}

}  // namespace archflash::sim
