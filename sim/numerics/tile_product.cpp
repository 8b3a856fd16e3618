#include "sim/numerics/tile_product.h"

#include <algorithm>
#include <vector>

#include "sim/numerics/tensor_core.h"

namespace archflash::sim {
namespace {

// Both fill the first `depth` of K; tiles hold zeros beyond the matrices.
void read_a(TileA& tile, const float* a, int pitch, int rows, int k, int depth, int smallest) {
  for (int row = 0; row < TILE_ROWS; ++row) {
    const int count = row < rows ? k : 0;
    std::copy_n(a + int64_t{row} * pitch, count, tile.value[row]);
    std::fill(tile.value[row] + count, tile.value[row] + depth, 0.0f);
  }
  set_exponents(tile, depth, smallest);
}

void read_b(TileB& tile, const float* b, int pitch, int k, int columns, int depth, int smallest) {
  for (int i = 0; i < depth; ++i) {
    const int count = i < k ? columns : 0;
    std::copy_n(b + int64_t{i} * pitch, count, tile.value[i]);
    std::fill(tile.value[i] + count, tile.value[i] + TILE_COLUMNS, 0.0f);
  }
  set_exponents(tile, depth, smallest);
}

}  // namespace

void multiply_accumulate(const TileShape& shape, const Sums& sums, const float* a, int a_pitch,
                         const float* b, int b_pitch, float* d, int d_pitch, bool accumulate) {
  const Additions additions(sums, shape.a, shape.to_f16);
  const int depth = additions.depth, steps = (shape.k + depth - 1) / depth;
  const int smallest_a = smallest_exponent(shape.a), smallest_b = smallest_exponent(shape.b);
  std::vector<TileA> rows(static_cast<size_t>(steps) * ((shape.m + TILE_ROWS - 1) / TILE_ROWS));
  std::vector<TileB> columns(steps);
  const auto k_of = [&](int step) { return std::min(depth, shape.k - step * depth); };
  for (size_t i = 0; i < rows.size(); ++i) {
    const int first_row = static_cast<int>(i) / steps * TILE_ROWS;
    const int step = static_cast<int>(i) % steps;
    read_a(rows[i], a + int64_t{first_row} * a_pitch + step * depth, a_pitch,
           std::min(TILE_ROWS, shape.m - first_row), k_of(step), depth, smallest_a);
  }
  for (int first_column = 0; first_column < shape.n; first_column += TILE_COLUMNS) {
    const int width = std::min(TILE_COLUMNS, shape.n - first_column);
    for (int step = 0; step < steps; ++step) {
      read_b(columns[step], b + int64_t{step} * depth * b_pitch + first_column, b_pitch, k_of(step),
             width, depth, smallest_b);
    }
    for (int first_row = 0; first_row < shape.m; first_row += TILE_ROWS) {
      const int height = std::min(TILE_ROWS, shape.m - first_row);
      float* target = d + int64_t{first_row} * d_pitch + first_column;
      TileC c{};
      for (int row = 0; accumulate && row < height; ++row) {
        std::copy_n(target + int64_t{row} * d_pitch, width, c.value[row]);
      }
      for (int step = 0; step < steps; ++step) {
        add_products(rows[static_cast<size_t>(first_row / TILE_ROWS) * steps + step], columns[step],
                     c, depth, additions);
      }
      for (int row = 0; row < height; ++row) {
        std::copy_n(c.value[row], width, target + int64_t{row} * d_pitch);
      }
    }
  }
}

}  // namespace archflash::sim
