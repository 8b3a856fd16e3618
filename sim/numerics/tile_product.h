// Products of whole tiles, as wgmma and tcgen05.mma add them up.
#pragma once

#include "sim/numerics/element.h"
#include "sim/numerics/tensor_core_models.h"

namespace archflash::sim {

struct TileShape {
  int m, n, k;
  ElementType a, b;     // of the elements
  bool to_f16 = false;  // d holds .f16 values
};

// d (m, n) = a (m, k) * b (k, n) + d, or without d where `accumulate` is false. The elements are
// decoded F16, BF16, TF32, E4M3 or E5M2. Matrices are row-major; pitches are the distances of their
// rows in floats. Products are added to the sum so far in the order of k, as many at a time as
// `sums` says.
void multiply_accumulate(const TileShape& shape, const Sums& sums, const float* a, int a_pitch,
                         const float* b, int b_pitch, float* d, int d_pitch, bool accumulate);

}  // namespace archflash::sim
