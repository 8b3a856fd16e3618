#include "sim/numerics/tile_product.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "sim/numerics/convert.h"
#include "sim/numerics/tensor_core.h"

namespace archflash::sim {
namespace {

// The k of one addition.
int step_of(ElementType type) { return type == ElementType::TF32 ? 8 : TILE_K; }

int smallest_exponent(ElementType type) {
  return type == ElementType::BF16 || type == ElementType::TF32 ? F32_SMALLEST : F16_SMALLEST;
}

constexpr int FP8_DEPTH = 32;
constexpr int FP8_FRACTION_BITS = 13;

float cut_to_fp8_sum(double value) {
  int exponent;
  const double fraction = std::frexp(value, &exponent);
  const double bits = std::trunc(std::ldexp(fraction, FP8_FRACTION_BITS + 1));
  return static_cast<float>(std::ldexp(bits, exponent - FP8_FRACTION_BITS - 1));
}

// One addition of FP8 by wgmma on an H200: 32 products and c are aligned to the largest exponent
// among them and cut off, toward zero, 2^-13 below it; their sum is cut off to 13 bits of fraction.
// How an H200 treats subnormals here is not measured.
float sum_fp8(const float* a, const float* b, int b_pitch, int count, float c) {
  const auto product = [&](int k) { return double{a[k]} * double{b[int64_t{k} * b_pitch]}; };
  int largest = exponent_of(c, F32_SMALLEST);
  double plain = c;  // as IEEE 754 adds up: for what is not finite
  for (int k = 0; k < count; ++k) {
    const float x = a[k], y = b[int64_t{k} * b_pitch];
    largest = std::max(largest, exponent_of(x, F16_SMALLEST) + exponent_of(y, F16_SMALLEST));
    plain += product(k);
  }
  if (!std::isfinite(plain)) return canonical(static_cast<float>(plain));
  if (plain == 0 && largest < ZERO_EXPONENT / 2) return 0.0f;
  const double scale = std::ldexp(1.0, FP8_FRACTION_BITS - largest);
  double sum = std::trunc(c * scale);
  for (int k = 0; k < count; ++k) sum += std::trunc(product(k) * scale);
  return cut_to_fp8_sum(sum / scale);
}

void multiply_accumulate_fp8(const TileShape& shape, const float* a, int a_pitch, const float* b,
                             int b_pitch, float* d, int d_pitch, bool accumulate) {
  for (int row = 0; row < shape.m; ++row) {
    for (int column = 0; column < shape.n; ++column) {
      float& target = d[int64_t{row} * d_pitch + column];
      float sum = accumulate ? target : 0.0f;
      for (int k = 0; k < shape.k; k += FP8_DEPTH) {
        sum = sum_fp8(a + int64_t{row} * a_pitch + k, b + int64_t{k} * b_pitch + column, b_pitch,
                      std::min(FP8_DEPTH, shape.k - k), sum);
        if (shape.to_f16) sum = f32_of_f16(cvt_rn_f16_f32(sum));
      }
      target = sum;
    }
  }
}

}  // namespace

void multiply_accumulate(const TileShape& shape, const float* a, int a_pitch, const float* b,
                         int b_pitch, float* d, int d_pitch, bool accumulate) {
  if (is_fp8(shape.type)) {
    multiply_accumulate_fp8(shape, a, a_pitch, b, b_pitch, d, d_pitch, accumulate);
    return;
  }
  const int depth = step_of(shape.type), smallest = smallest_exponent(shape.type);
  const int steps = (shape.k + depth - 1) / depth;
  std::vector<TileB> columns(steps);
  std::vector<TileA> rows(static_cast<size_t>(steps) * ((shape.m + TILE_ROWS - 1) / TILE_ROWS));
  for (size_t i = 0; i < rows.size(); ++i) {
    const int first_row = static_cast<int>(i) / steps * TILE_ROWS;
    const int first_k = static_cast<int>(i) % steps * depth;
    for (int row = 0; row < TILE_ROWS; ++row) {
      for (int k = 0; k < depth; ++k) {
        const bool inside = first_row + row < shape.m && first_k + k < shape.k;
        const float value = inside ? a[int64_t{first_row + row} * a_pitch + first_k + k] : 0.0f;
        rows[i].value[row][k] = value;
        rows[i].exponent[row][k] = exponent_of(value, smallest);
      }
    }
  }
  for (int first_column = 0; first_column < shape.n; first_column += TILE_COLUMNS) {
    const int width = std::min(TILE_COLUMNS, shape.n - first_column);
    for (int k = 0; k < steps * depth; ++k) {
      TileB& tile = columns[k / depth];
      for (int column = 0; column < TILE_COLUMNS; ++column) {
        const bool inside = column < width && k < shape.k;
        const float value = inside ? b[int64_t{k} * b_pitch + first_column + column] : 0.0f;
        tile.value[k % depth][column] = value;
        tile.exponent[k % depth / 2][column][k % 2] = exponent_of(value, smallest);
      }
    }
    for (int first_row = 0; first_row < shape.m; first_row += TILE_ROWS) {
      const int height = std::min(TILE_ROWS, shape.m - first_row);
      float* target = d + int64_t{first_row} * d_pitch + first_column;
      TileC c{};
      for (int row = 0; accumulate && row < height; ++row) {
        std::copy_n(target + int64_t{row} * d_pitch, width, c.value[row]);
      }
      for (int step = 0; step < steps; ++step) {
        const TileA& tile = rows[static_cast<size_t>(first_row / TILE_ROWS) * steps + step];
        add_products(tile, columns[step], c, depth, shape.to_f16);
        if (!shape.to_f16) continue;
        for (auto& row : c.value) {
          for (float& value : row) value = f32_of_f16(cvt_rn_f16_f32(value));
        }
      }
      for (int row = 0; row < height; ++row) {
        std::copy_n(c.value[row], width, target + int64_t{row} * d_pitch);
      }
    }
  }
}

}  // namespace archflash::sim
