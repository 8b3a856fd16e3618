#include "sim/numerics/block_scaled.h"

#include <algorithm>
#include <cmath>

#include "sim/numerics/formats.h"

namespace archflash::sim {
namespace {

constexpr uint8_t UE4M3_NAN = 0x7F;

constexpr int ue8m0_exponent(uint8_t scale) { return scale - 127; }

// A scale as significand * 2^exponent; the significand is less than 1 for a subnormal number.
struct Scale {
  bool nan;
  int exponent;
  double significand;
};

Scale scale_of(ElementType type, uint8_t bits) {
  if (type == ElementType::UE8M0) return {bits == UE8M0_NAN, ue8m0_exponent(bits), 1.0};
  bits &= 0x7F;
  const int exponent = std::max(bits >> E4M3.mantissa_bits, 1) - 1 + E4M3.min_exponent();
  return {bits == UE4M3_NAN, exponent, std::ldexp(decode(E4M3, bits), -exponent)};
}

// Scales with such exponents may be multiplied into the values: a float has every product.
constexpr int SAFE_EXPONENT = 48;

template <size_t COUNT>
bool all_safe(const uint8_t (&scales)[COUNT]) {
  return std::all_of(scales, scales + COUNT, [](uint8_t scale) {
    return std::abs(ue8m0_exponent(scale)) <= SAFE_EXPONENT;
  });
}

void scale_element(float& value, int16_t& exponent, uint8_t scale) {
  value *= f32_of(uint32_t{scale} << 23);
  exponent = static_cast<int16_t>(exponent + ue8m0_exponent(scale));
}

}  // namespace

void add_scaled_products(TileA& a, TileB& b, const uint8_t (&row_scales)[TILE_ROWS],
                         const uint8_t (&column_scales)[TILE_COLUMNS], TileC& c, int k,
                         const Additions& additions) {
  if (all_safe(row_scales) && all_safe(column_scales)) {
    for (int i = 0; i < k; ++i) {
      for (int row = 0; row < TILE_ROWS; ++row) {
        scale_element(a.value[row][i], a.exponent[row][i], row_scales[row]);
      }
      for (int column = 0; column < TILE_COLUMNS; ++column) {
        scale_element(b.value[i][column], b.exponent[i / 2][column][i % 2], column_scales[column]);
      }
    }
    add_products(a, b, c, k, additions);
    return;
  }
  for (int row = 0; row < TILE_ROWS; ++row) {
    for (int column = 0; column < TILE_COLUMNS; ++column) {
      float& value = c.value[row][column];
      if (row_scales[row] == UE8M0_NAN || column_scales[column] == UE8M0_NAN) {
        value = f32_of(F32_NAN);
        continue;
      }
      const int scale = ue8m0_exponent(row_scales[row]) + ue8m0_exponent(column_scales[column]);
      for (int first = 0; first < k; first += additions.depth) {
        value = sum_element(a, b, value, row, column, first, additions, scale);
      }
    }
  }
}

void add_four_bit_products(const FourBitTiles& tiles, ElementType type, int scales, TileC& c) {
  constexpr int GROUP = 16, GROUPS = FOUR_BIT_K / GROUP, FRACTION_BITS = 35;
  const auto sum_of = [&](int row, int column, float start) {
    double parts[GROUPS];
    int exponents[GROUPS];
    int largest = exponent_of(start, F32_SMALLEST);
    for (int group = 0; group < GROUPS; ++group) {
      const int at = group * scales / GROUPS;
      const Scale of_a = scale_of(type, tiles.a_scales[row][at]);
      const Scale of_b = scale_of(type, tiles.b_scales[column][at]);
      if (of_a.nan || of_b.nan) return f32_of(F32_NAN);
      float sum = 0.0f;  // exact: multiples of 1/4 below 2^10
      for (int k = group * GROUP; k < (group + 1) * GROUP; ++k) {
        sum += tiles.a[row][k] * tiles.b[column][k];
      }
      parts[group] = sum * of_a.significand * of_b.significand;
      exponents[group] = of_a.exponent + of_b.exponent;
      largest = std::max(largest, exponents[group]);
    }
    if (!std::isfinite(start)) return canonical(start);
    const auto in_units = [&](double value, int exponent) {
      return static_cast<int64_t>(std::ldexp(value, FRACTION_BITS + exponent - largest));
    };
    int64_t sum = in_units(start, 0);
    for (int group = 0; group < GROUPS; ++group) sum += in_units(parts[group], exponents[group]);
    return cut_to_float(std::ldexp(static_cast<double>(sum), largest - FRACTION_BITS),
                        FRACTION_BITS);
  };
  for (int row = 0; row < TILE_ROWS; ++row) {
    for (int column = 0; column < TILE_COLUMNS; ++column) {
      c.value[row][column] = sum_of(row, column, c.value[row][column]);
    }
  }
}

}  // namespace archflash::sim
