// The GPU's function unit (MUFU). It reads subnormals as zeros and gives zeros for them; ptxas
// scales operands into its range where an instruction asks for more.
#pragma once

#include <cstdint>

#include "sim/numerics/function_unit_tables.h"

namespace archflash::sim {

// The unit interpolates ex2, lg2, rcp and rsqrt quadratically in fixed point. Its squarer leaves
// out every partial product below some column, and it cuts the sum off instead of rounding it.
// Tables and parameters were found from whole binades of an H200's results, all of which they give
// bit for bit.
struct Interpolation {
  const uint64_t* table;
  int x_bits;      // operand bits below the segment's number
  int square_cut;  // partial products of x * x below 2^square_cut do not exist
  bool falling;    // c1 is subtracted
  int c0_shift;    // the three terms are added in units of 2^-result_shift
  int c2_shift;
  int64_t bias;
  int result_shift;
};
inline constexpr Interpolation EX2{EX2_TABLE, 17, 19, false, 13, 0, 6114, 15};
inline constexpr Interpolation RCP{RCP_TABLE, 16, 17, true, 13, 0, 2023, 15};
inline constexpr Interpolation LG2{LG2_TABLE, 17, 19, false, 12, 1, 837, 2};
inline constexpr Interpolation RSQRT{RSQRT_TABLE, 17, 19, true, 14, 2, -1, 16};

// Bit j of x contributes its products with the lower bits, doubled, and with itself.
template <Interpolation F>
constexpr uint32_t own_square(int j) {
  return 2 * j >= F.square_cut ? 1u << (2 * j - F.square_cut) : 0;
}
template <Interpolation F>
constexpr int lower_shift(int j) {
  return F.square_cut - 1 - j;
}

// x * x without the partial products below 2^square_cut, in units of that.
template <Interpolation F>
uint32_t truncated_square(uint32_t x) {
  uint32_t square = 0;
  for (int j = F.square_cut / 2; j < F.x_bits; ++j) {
    const uint32_t products = ((x & ((1u << j) - 1)) >> lower_shift<F>(j)) + own_square<F>(j);
    if (x >> j & 1) square += products;
  }
  return square;
}

// The mantissa field of the function's value at a mantissa. It counts units in the last place and
// may carry into the exponent.
template <Interpolation F>
uint32_t interpolate(uint32_t mantissa) {
  const uint64_t entry = F.table[mantissa >> F.x_bits];
  const uint32_t x = mantissa & ((1u << F.x_bits) - 1);
  const int64_t slope = static_cast<int64_t>(entry >> 10 & 0xFFFF) * x;
  const int64_t sum = static_cast<int64_t>(entry >> 26 << F.c0_shift) + F.bias +
                      (F.falling ? -slope : slope) +
                      (static_cast<int64_t>(entry & 0x3FF) * truncated_square<F>(x) << F.c2_shift);
  return static_cast<uint32_t>(sum >> F.result_shift);
}

inline constexpr uint32_t MANTISSA = 0x7FFFFF;
inline constexpr uint32_t INFINITY_BITS = 0x7F800000;

float mufu_ex2(float a);
float mufu_rcp(float a);
float mufu_rsqrt(float a);
float mufu_lg2(float a);
// These read and give the upper halves of doubles.
double mufu_rcp64h(double a);
double mufu_rsq64h(double a);

}  // namespace archflash::sim
