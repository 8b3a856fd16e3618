// Descales of 8-bit tensors, as kernels are told of them. Plain C++.
#pragma once

#include <cstdint>
#include <type_traits>

namespace archflash {

// What stored numbers stand for: themselves times a float, one for the tensor, each head, or each
// block of SCALE_ROWS rows. Strides in elements, 0 where the same one serves.
struct Descale {
  const float* gmem;  // null: 1
  int64_t batch, head, block;
};

struct Descales {
  Descale q, k, v;
  int64_t heads_per_q_descale;  // query heads that share a descale of q: 1 or heads_per_kv
};
static_assert(std::is_trivially_copyable_v<Descales>);

}  // namespace archflash
