// How a tensor core of 12.x adds up products with block scales. The ISA leaves it open; this is
// what MMA-Sim (tensor_core_models.cpp) states of such cards.
//
// - 8, 6 and 4 bits in bytes (.kind::mxf8f6f4): as without scales, with the scales' exponents added
//   to those of each product. With scales of 1 the bits are those of the plain product.
// - Packed e2m1 (.kind::mxf4, .kind::mxf4nvf4): 16 products are added up exactly and multiplied by
//   their scales' significands. The four results and c are aligned to the largest exponent among
//   the scales' and c's, cut off toward zero 2^-35 below it, and their sum is cut off to float.
//
// A scale that is NaN, 0xFF of ue8m0 or 0x7F of ue4m3, makes the result NaN. The top bit of ue4m3
// is ignored.
#pragma once

#include <cstdint>

#include "sim/numerics/element.h"
#include "sim/numerics/tensor_core.h"

namespace archflash::sim {

// add_products() with a scale of type ue8m0 for each row of A and each column of B.
void add_scaled_products(TileA& a, TileB& b, const uint8_t (&row_scales)[TILE_ROWS],
                         const uint8_t (&column_scales)[TILE_COLUMNS], TileC& c, int k,
                         const Additions& additions);

constexpr int FOUR_BIT_K = 64;

struct FourBitTiles {
  float a[TILE_ROWS][FOUR_BIT_K];
  float b[TILE_COLUMNS][FOUR_BIT_K];  // by columns
  const uint8_t* a_scales[TILE_ROWS];
  const uint8_t* b_scales[TILE_COLUMNS];
};

// c += a * b, where `scales` scales of type `type` share out each row and each column.
void add_four_bit_products(const FourBitTiles& tiles, ElementType type, int scales, TileC& c);

}  // namespace archflash::sim
