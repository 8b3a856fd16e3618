#include "sim/numerics/cpu.h"

#include <atomic>

#include "sim/numerics/float_control.h"

namespace archflash::sim {
namespace {

bool machine_has_avx2() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

std::atomic<bool> avx2_in_use = machine_has_avx2();

}  // namespace

FloatEnvironment::FloatEnvironment() : saved_(float_control()) {
  set_float_control(DEFAULT_FLOAT_CONTROL);
}
FloatEnvironment::~FloatEnvironment() { set_float_control(saved_); }

bool uses_avx2() { return avx2_in_use.load(std::memory_order_relaxed); }
void set_avx2(bool enabled) { avx2_in_use = enabled && machine_has_avx2(); }

}  // namespace archflash::sim
