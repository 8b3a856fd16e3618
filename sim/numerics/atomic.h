// What atom, red and reducing bulk copies do to one element.
#pragma once

#include <cstdint>

#include "sim/numerics/numeric.h"

namespace archflash::sim {

enum class Atomic : uint8_t { Add, Min, Max, Inc, Dec, And, Or, Xor, Exch, Cas };

struct AtomicUpdate {
  Atomic operation;
  NumericType type;
  bool ftz = false;
};

// The element's new value; `y` is what cas puts in the place of an `old` that equals `x`.
uint64_t apply_atomic(const AtomicUpdate& update, uint64_t old, uint64_t x, uint64_t y);

}  // namespace archflash::sim
