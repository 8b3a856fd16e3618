// How a tensor core adds up, on plain tiles; mma.cpp, mma_avx2.cpp and tile_product.cpp bring
// operands into them, tensor_core_models.h has what differs from card to card.
//
// Every product is exact. In one addition, the products and c are aligned to the largest exponent
// among them and cut off, toward zero, 2^-25 (24, 13) below it; their sum is exact; it is cut off
// to float, or to as many bits of fraction if these are fewer than a float's, or rounded to nearest
// for .f16. The exponent of a product is the sum of its factors': neither products nor subnormals
// are normalized.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sim/numerics/bits.h"
#include "sim/numerics/element.h"
#include "sim/numerics/tensor_core_models.h"

namespace archflash::sim {

constexpr int TILE_ROWS = 16;
constexpr int TILE_COLUMNS = 8;
constexpr int TILE_K = 32;  // at most

// The exponents of a zero, which is never the largest one, and of infinity and NaN, which always
// is.
constexpr int ZERO_EXPONENT = -1000;
constexpr int SPECIAL_EXPONENT = 4000;
constexpr int F16_SMALLEST = -14;   // of a normal number, and of subnormals
constexpr int F32_SMALLEST = -126;  // of bf16 and tf32, too
constexpr int E4M3_SMALLEST = -6;
constexpr int E3M2_SMALLEST = -2;
constexpr int E2M3_SMALLEST = 0;  // of e2m1, too

constexpr int smallest_exponent(ElementType type) {
  switch (type) {
    case ElementType::F16:
    case ElementType::E5M2:
      return F16_SMALLEST;
    case ElementType::E4M3:
      return E4M3_SMALLEST;
    case ElementType::E3M2:
      return E3M2_SMALLEST;
    case ElementType::E2M3:
    case ElementType::E2M1_IN_BYTE:
      return E2M3_SMALLEST;
    default:
      return F32_SMALLEST;
  }
}

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

// Sets the exponents of the values of the first k columns of A, or rows of B; k is even.
void set_exponents(TileA& a, int k, int smallest);
void set_exponents(TileB& b, int k, int smallest);

struct Additions {
  int depth;  // products in one addition: 4, 8, 16 or 32
  int fraction_bits;
  bool to_f16;  // c holds .f16 values

  Additions(const Sums& sums, ElementType type, bool to_f16)
      : depth(sums.depth(type)), fraction_bits(sums.fraction_bits), to_f16(to_f16) {}
};

// c (16, 8) = a (16, k) * b (k, 8) + c, in one addition for each `depth` of k, or in one for all if
// k is smaller: 4, 8, 16 or 32. NaN is canonical.
void add_products(const TileA& a, const TileB& b, TileC& c, int k, const Additions& additions);

// One addition of one element of c: the products from `first` on, each times 2^scale.
float sum_element(const TileA& a, const TileB& b, float c, int row, int column, int first,
                  const Additions& additions, int scale = 0);

// The value in float, cut off toward zero to at most so many bits of fraction.
float cut_to_float(double value, int fraction_bits);

}  // namespace archflash::sim
