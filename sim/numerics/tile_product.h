// Products of whole tiles, as wgmma adds them up on an H200.
#pragma once

#include "sim/numerics/element.h"

namespace archflash::sim {

struct TileShape {
  int m, n, k;
  ElementType type;     // of the elements of a and b; b may have the other type of FP8
  bool to_f16 = false;  // d holds .f16 values
};

// d (m, n) = a (m, k) * b (k, n) + d, or without d where `accumulate` is false. The elements are
// decoded F16, BF16, TF32, E4M3 or E5M2. Matrices are row-major; pitches are the distances of their
// rows in floats.
//
// Sums are those of mma.sync: 16 of k at a time (8 of TF32) are added to the sum so far, in their
// order. FP8 adds up as wgmma with f32 sums does on an H200: 32 of k at a time, in 13 bits of
// fraction. FP8 with .f16 sums is not measured.
void multiply_accumulate(const TileShape& shape, const float* a, int a_pitch, const float* b,
                         int b_pitch, float* d, int d_pitch, bool accumulate);

}  // namespace archflash::sim
