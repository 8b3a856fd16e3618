#include "sim/numerics/cpu.h"

#include <immintrin.h>

#include <atomic>

namespace archflash::sim {
namespace {

constexpr uint32_t DEFAULT_CONTROL = 0x1F80;  // MXCSR: all exceptions masked, RN, no FTZ, no DAZ

bool machine_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

std::atomic<bool> avx2_in_use = machine_has_avx2();

}  // namespace

FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(DEFAULT_CONTROL); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(saved_); }

bool uses_avx2() { return avx2_in_use.load(std::memory_order_relaxed); }
void set_avx2(bool enabled) { avx2_in_use = enabled && machine_has_avx2(); }

}  // namespace archflash::sim
