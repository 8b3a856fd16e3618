// Dense products in float, for tensor cores whose arithmetic no card has been asked about.
#pragma once

namespace archflash::sim {

constexpr int DENSE_ROWS = 64;

// d (n, rows) = b (n, k) * a (k, rows) + d, or without d; `rows` is a multiple of DENSE_ROWS. Rows
// of a and b are contiguous, those of d are `d_pitch` floats apart. Fused multiply-adds in the
// order of k: one rounding to nearest for each product.
void add_dense_product(const float* a, const float* b, float* d, int d_pitch, int n, int rows,
                       int k, bool accumulate);

}  // namespace archflash::sim
