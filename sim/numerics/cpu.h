// What the host's processor does for the simulator: its floating-point environment, and AVX2.
#pragma once

#include <cstdint>

namespace archflash::sim {

// Gives this thread the default floating-point environment (round to nearest, subnormals kept) for
// as long as the object lives. A thread that may have another one (torch.set_flush_denormal) needs
// it.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  uint32_t saved_;
};

// Whether AVX2 code is in use. set_avx2(false) makes this process use the baseline code, so that a
// test can compare the two. set_avx2(true) has no effect where the machine lacks AVX2.
bool uses_avx2();
void set_avx2(bool enabled);

// Returns `call` from a function where AVX2 code is in use. Elsewhere the code below it serves, and
// a processor without AVX2 code does not even see the call's name.
#if defined(__x86_64__)
#define ARCHFLASH_RETURN_IF_AVX2(call) \
  if (uses_avx2()) return call
#else
#define ARCHFLASH_RETURN_IF_AVX2(call) static_cast<void>(0)
#endif

}  // namespace archflash::sim
