// Handlers for instructions that compute each lane's result from the lane's own operands. They turn
// a function of values into a handler for 32 lanes: one for any processor, and one for AVX2.
#pragma once

#include <bit>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "sim/load/program.h"
#include "sim/numerics/cpu.h"
#include "sim/run/warp.h"

#if defined(__x86_64__)
#define ARCHFLASH_SIM_AVX2 __attribute__((target("avx2,fma,f16c"), flatten))
#else
#define ARCHFLASH_SIM_AVX2 __attribute__((flatten))
#endif

namespace archflash::sim {

// A lane of a register has 64 bits for 64-bit types. Narrower types are zero-extended to 32 bits.
template <class T>
using Slot = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <class T>
inline T from_slot(Slot<T> bits) {
  if constexpr (std::is_floating_point_v<T>)
    return std::bit_cast<T>(bits);
  else
    return static_cast<T>(bits);
}
template <class T>
inline Slot<T> to_slot(T value) {
  if constexpr (std::is_floating_point_v<T>)
    return std::bit_cast<Slot<T>>(value);
  else
    return static_cast<Slot<T>>(static_cast<std::make_unsigned_t<T>>(value));
}

template <auto F, class D, class... S, size_t... I>
[[gnu::always_inline]] inline void apply_lanes(Warp& warp, const Instruction& instruction,
                                               uint32_t mask, D (*)(S...),
                                               std::index_sequence<I...>) {
  Slot<D>* d = warp.lanes<Slot<D>>(instruction.operands[0]);
  const std::tuple<const Slot<S>*...> s(warp.lanes<const Slot<S>>(instruction.operands[I + 1])...);
  if (mask == ALL_LANES) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; ++i) d[i] = to_slot<D>(F(from_slot<S>(std::get<I>(s)[i])...));
    return;
  }
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    d[i] = to_slot<D>(F(from_slot<S>(std::get<I>(s)[i])...));
  }
}

template <auto F, class D, class... S>
[[gnu::always_inline]] inline void apply_lanes(Warp& warp, const Instruction& instruction,
                                               uint32_t mask, D (*f)(S...)) {
  apply_lanes<F>(warp, instruction, mask, f, std::index_sequence_for<S...>());
}

template <auto F>
void lanes_baseline(Warp& warp, const Instruction& instruction, uint32_t mask) {
  apply_lanes<F>(warp, instruction, mask, +F);
}
template <auto F>
ARCHFLASH_SIM_AVX2 void lanes_avx2(Warp& warp, const Instruction& instruction, uint32_t mask) {
  apply_lanes<F>(warp, instruction, mask, +F);
}

// The handler that applies F, a captureless lambda of operands in PTX's order, to each lane.
// Operand 0 is the destination.
template <auto F>
Handler elementwise() {
  return uses_avx2() ? &lanes_avx2<F> : &lanes_baseline<F>;
}

}  // namespace archflash::sim
