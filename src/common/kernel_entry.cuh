// Entry points of kernels, under the names that plan.cpp asks for. __grid_constant__ keeps the
// parameters in constant memory, where TMA reads the tensor maps.
#pragma once

namespace archflash {

template <class Params>
Params params_of(void (*)(const Params&));  // the type of the parameters of a kernel's code

}  // namespace archflash

// A kernel whose code is the function after BOUNDS: (threads of a CTA, CTAs that must fit on an
// SM).
#define ARCHFLASH_ENTRY(NAME, BOUNDS, ...)                                          \
  extern "C" __global__ void __launch_bounds__ BOUNDS NAME(                         \
      const __grid_constant__ decltype(archflash::params_of(__VA_ARGS__)) params) { \
    __VA_ARGS__(params);                                                            \
  }

// A kernel whose code is a function template of a configuration, which says the bounds.
#define ARCHFLASH_KERNEL(NAME, FUNCTION, ...) \
  ARCHFLASH_ENTRY(NAME, (__VA_ARGS__::THREADS, __VA_ARGS__::CTAS_PER_SM), FUNCTION<__VA_ARGS__>)
