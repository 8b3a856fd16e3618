// How a tensor core adds up, on plain tiles; mma.cpp and mma_avx2.cpp bring fragments into them.
//
// An H200's mma.sync with .f16, .bf16 and .tf32: every product is exact; products and c are aligned
// to the largest exponent among them and cut off, toward zero, 2^-25 below it; their sum is exact;
// it is cut off to float, or rounded to nearest for .f16. The exponent of a product is the sum of
// its factors': neither products nor subnormals are normalized.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sim/numerics/bits.h"

namespace archflash::sim {

constexpr int TILE_ROWS = 16;
constexpr int TILE_COLUMNS = 8;
constexpr int TILE_K = 16;  // at most, in one addition
constexpr int FRACTION_BITS = 25;

// The exponents of a zero, which is never the largest one, and of infinity and NaN, which always
// is.
constexpr int ZERO_EXPONENT = -1000;
constexpr int SPECIAL_EXPONENT = 4000;
constexpr int F16_SMALLEST = -14;   // of a normal number, and of subnormals
constexpr int F32_SMALLEST = -126;  // of bf16 and tf32, too

struct TileA {
  alignas(32) float value[TILE_ROWS][TILE_K];
  alignas(32) int16_t exponent[TILE_ROWS][TILE_K];
};
struct TileB {
  alignas(32) float value[TILE_K][TILE_COLUMNS];
  alignas(32) int16_t exponent[TILE_K / 2][TILE_COLUMNS][2];  // pairs of k side by side
};
struct TileC {
  alignas(32) float value[TILE_ROWS][TILE_COLUMNS];
};

inline int16_t exponent_of(float value, int smallest) {
  if (value == 0) return ZERO_EXPONENT;
  const auto field = static_cast<int>(bits_of(value) >> 23 & 0xFF);
  return static_cast<int16_t>(field == 0xFF ? SPECIAL_EXPONENT : std::max(field - 127, smallest));
}

// c (16, 8) = a (16, depth) * b (depth, 8) + c, depth 4, 8 or 16. With to_f16 c comes as .f16
// values and leaves as floats that round to nearest to the right ones. NaN is canonical.
void add_products(const TileA& a, const TileB& b, TileC& c, int depth, bool to_f16);

}  // namespace archflash::sim
