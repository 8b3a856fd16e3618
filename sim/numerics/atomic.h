// What atom, red and reducing copies do to one element.
#pragma once

#include <cstdint>
#include <string_view>

#include "sim/numerics/numeric.h"

namespace archflash::sim {

enum class Atomic : uint8_t { Add, Min, Max, Inc, Dec, And, Or, Xor, Exch, Cas };

// The operation that PTX calls "add", "min" and so on.
Atomic atomic_named(std::string_view name);

struct AtomicUpdate {
  Atomic operation;
  NumericType type;
  bool ftz = false;
};

// The element's new value. cas replaces an `old` that equals `x` by `y`.
uint64_t apply_atomic(const AtomicUpdate& update, uint64_t old, uint64_t x, uint64_t y);

}  // namespace archflash::sim
