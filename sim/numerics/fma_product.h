// Products of whole tiles by fused multiply-adds in float, for tcgen05: how a card with tcgen05
// adds up is not measured.
#pragma once

namespace archflash::sim {

constexpr int FMA_ROWS = 64;

// d (n, rows) = b (n, k) * a (k, rows) + d, or without d where `accumulate` is false. `rows` is a
// multiple of FMA_ROWS. The rows of a and b are contiguous, those of d are `d_pitch` floats apart.
// The multiply-adds follow the order of k, and each rounds once, to nearest.
void add_fma_product(const float* a, const float* b, float* d, int d_pitch, int n, int rows, int k,
                     bool accumulate);

}  // namespace archflash::sim
