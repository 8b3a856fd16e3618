// How the tensor cores of each card add up: one table, by compute capability.
#pragma once

#include <span>

#include "sim/numerics/element.h"

namespace archflash::sim {

// One addition takes the products of so many bytes of a row of A together with the accumulator, and
// keeps so many bits below the largest exponent among them (tensor_core.h). A product with more K
// is several additions, one after the other.
struct Sums {
  int bytes = 0;  // 0: the card has no such instruction
  int fraction_bits = 0;

  int depth(ElementType type) const { return 8 * bytes / element_bits(type); }
};

// The cards of capabilities `first` to `last`, which are 10 * major + minor.
struct TensorCore {
  int first, last;
  Sums wide;       // .f16, .bf16 and .tf32, in mma.sync, wmma, wgmma and tcgen05.mma
  Sums fp8_mma;    // FP8 in mma.sync. Without the instruction ptxas makes products of .f16 of it
  Sums fp8_async;  // FP8 in wgmma and tcgen05.mma
  const char* source;
};

std::span<const TensorCore> tensor_cores();
const TensorCore& tensor_core_of(int capability);  // below the first row: that row

}  // namespace archflash::sim
