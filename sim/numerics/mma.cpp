#include "sim/numerics/mma.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "sim/numerics/block_scaled.h"
#include "sim/numerics/numeric.h"
#include "sim/numerics/tensor_core.h"
#include "sim/numerics/warp_wide.h"

// Fragments (PTX ISA, "Matrix Fragments for mma"). With lane = 4 * g + t and E elements in a
// register, register j of A holds row g + 8 * (j % (m / 8)), columns 4 * E * (j / (m / 8)) + E * t
// and on; register j of B holds column g, rows 4 * E * j + E * t and on; 32-bit register i of C and
// D holds row g + 8 * (i / 2), column 2 * t + i % 2. Therefore the 32 lanes of a register of A,
// read as memory, are a row-major 8 x 4E block; those of B are such a block of its transpose; those
// of an .f16 C are a row-major 8 x 8 block. Every shape but m8n8k4 with .f16 follows this rule.
namespace archflash::sim {
namespace {

constexpr int MAX_M = 16;
constexpr int N = 8;
constexpr int MAX_K = 32;  // of the floating-point forms
constexpr int BLOCK_ROWS = 8;

// ---- Floating-point mma.sync, every shape but m8n8k4 --------------------------------------------

// A, B and C as plain matrices. B and C have their columns in the order of the accumulator's
// registers, even ones first: lane 4 * g + t of c[0] is column 2 * t.
struct Tiles {
  float a[MAX_M][MAX_K];
  float b[MAX_K][N];
  TileC c;
};

constexpr int stored_column(int column) { return column / 2 + column % 2 * (N / 2); }

void read_c(const MmaShape& shape, const MmaOperands& operands, TileC& c) {
  for (int row = 0; row < MAX_M; ++row) {
    const int half = row / BLOCK_ROWS, g = row % BLOCK_ROWS;
    for (int column = 0; column < N; ++column) {
      c.value[row][stored_column(column)] =
          shape.c == ElementType::F16
              ? f32_of_f16(static_cast<const uint16_t*>(operands.c[half])[g * N + column])
              : static_cast<const float*>(
                    operands.c[2 * half + column % 2])[g * (N / 2) + column / 2];
    }
  }
}

void read_tiles(const MmaShape& shape, const MmaOperands& operands, Tiles& tiles) {
  const int width = 4 * 32 / element_bits(shape.a);  // columns of A in one register
  const int row_bytes = 16;
  for (int block = 0; block < shape.k / width; ++block) {
    for (int half = 0; half < MAX_M / BLOCK_ROWS; ++half) {
      const auto* a = static_cast<const uint8_t*>(operands.a[block * (MAX_M / BLOCK_ROWS) + half]);
      for (int row = 0; row < BLOCK_ROWS; ++row) {
        decode_row(shape.a, a + row * row_bytes, width,
                   &tiles.a[half * BLOCK_ROWS + row][block * width]);
      }
    }
    const auto* b = static_cast<const uint8_t*>(operands.b[block]);
    for (int column = 0; column < N; ++column) {
      float rows[16];
      decode_row(shape.b, b + column * row_bytes, width, rows);
      for (int k = 0; k < width; ++k) tiles.b[block * width + k][stored_column(column)] = rows[k];
    }
  }
  read_c(shape, operands, tiles.c);
}

void write_tile(const MmaShape& shape, const MmaOperands& operands, const TileC& c) {
  for (int row = 0; row < MAX_M; ++row) {
    const int half = row / BLOCK_ROWS, g = row % BLOCK_ROWS;
    for (int column = 0; column < N; ++column) {
      const float value = c.value[row][stored_column(column)];
      if (shape.d == ElementType::F16) {
        static_cast<uint16_t*>(operands.d[half])[g * N + column] = cvt_rn_f16_f32(value);
      } else {
        static_cast<float*>(operands.d[2 * half + column % 2])[g * (N / 2) + column / 2] = value;
      }
    }
  }
}

// c += a * b for `count` values of k, which are k_of(0), k_of(1), ...
template <class Function>
void add_tiles(const Tiles& tiles, TileC& c, int count, int smallest_a, int smallest_b,
               const Additions& additions, Function k_of) {
  TileA a;
  TileB b;
  for (int i = 0; i < count; ++i) {
    const int k = k_of(i);
    for (int row = 0; row < MAX_M; ++row) {
      a.value[row][i] = tiles.a[row][k];
    }
    std::copy_n(tiles.b[k], N, b.value[i]);
  }
  set_exponents(a, count, smallest_a);
  set_exponents(b, count, smallest_b);
  add_products(a, b, c, count, additions);
}

void multiply(const MmaShape& shape, const MmaOperands& operands, const Sums& sums) {
  Tiles tiles;
  read_tiles(shape, operands, tiles);
  add_tiles(tiles, tiles.c, shape.k, smallest_exponent(shape.a), smallest_exponent(shape.b),
            {sums, shape.a, shape.d == ElementType::F16}, [](int i) { return i; });
  write_tile(shape, operands, tiles.c);
}

void mma_float(const MmaShape& shape, const MmaOperands& operands, const TensorCore& core) {
  multiply(shape, operands, core.wide);
}

// A card without such an instruction converts FP8 to .f16 and adds up, from zero, the first two of
// every four of k, then the other two. At last it adds c, in the type of d.
void multiply_as_f16(const MmaShape& shape, const MmaOperands& operands, const Sums& sums) {
  Tiles tiles;
  read_tiles(shape, operands, tiles);
  const bool to_f16 = shape.d == ElementType::F16;
  const auto rounded = [&](float& value) {
    value = to_f16 ? f32_of_f16(cvt_rn_f16_f32(value)) : canonical(value);
  };
  TileC products{};
  for (int half = 0; half < 2; ++half) {
    add_tiles(tiles, products, shape.k / 2, F16_SMALLEST, F16_SMALLEST,
              {sums, ElementType::F16, to_f16},
              [&](int i) { return i / 2 * 4 + half * 2 + i % 2; });
    for (auto& row : products.value) std::for_each(row, row + N, rounded);
  }
  for (int row = 0; row < MAX_M; ++row) {
    for (int column = 0; column < N; ++column) {
      products.value[row][column] += tiles.c.value[row][column];
      rounded(products.value[row][column]);
    }
  }
  write_tile(shape, operands, products);
}

void mma_fp8(const MmaShape& shape, const MmaOperands& operands, const TensorCore& core) {
  if (core.fp8_mma.bytes == 0) {
    multiply_as_f16(shape, operands, core.wide);
  } else {
    multiply(shape, operands, core.fp8_mma);
  }
}

// ---- Block scales ------------------------------------------------------------------------------

// The scales of row or column `index`, of a register of A or B.
const uint8_t* scales_of(const ScaleOperand& operand, int index, bool of_a) {
  const int lane = of_a ? index % BLOCK_ROWS * 4 + 2 * operand.thread + index / BLOCK_ROWS
                        : index * 4 + operand.thread;
  return static_cast<const uint8_t*>(operand.words) + 4 * lane + operand.byte;
}

void mma_scaled_bytes(const MmaShape& shape, const MmaOperands& operands, const TensorCore& core) {
  Tiles tiles;
  read_tiles(shape, operands, tiles);
  TileA a;
  TileB b;
  for (int row = 0; row < MAX_M; ++row) std::copy_n(tiles.a[row], shape.k, a.value[row]);
  for (int k = 0; k < shape.k; ++k) std::copy_n(tiles.b[k], N, b.value[k]);
  set_exponents(a, shape.k, smallest_exponent(shape.a));
  set_exponents(b, shape.k, smallest_exponent(shape.b));
  uint8_t row_scales[MAX_M], column_scales[N];
  for (int row = 0; row < MAX_M; ++row) row_scales[row] = *scales_of(operands.scale_a, row, true);
  for (int column = 0; column < N; ++column) {
    column_scales[stored_column(column)] = *scales_of(operands.scale_b, column, false);
  }
  add_scaled_products(a, b, row_scales, column_scales, tiles.c, shape.k,
                      {core.fp8_mma, shape.a, false});
  write_tile(shape, operands, tiles.c);
}

void mma_scaled_nibbles(const MmaShape& shape, const MmaOperands& operands, const TensorCore&) {
  constexpr int WIDTH = 32;  // columns of A in one register
  FourBitTiles tiles;
  const auto read = [&](const void* const* registers, int count, int first, int step, auto& rows,
                        auto row_of) {
    for (int i = first; i < count; i += step) {
      for (int g = 0; g < BLOCK_ROWS; ++g) {
        float* row = rows[row_of(g)] + i / step * WIDTH;
        decode_row(ElementType::E2M1, static_cast<const uint8_t*>(registers[i]) + g * 16, WIDTH,
                   row);
      }
    }
  };
  for (int half = 0; half < 2; ++half) {
    read(operands.a, 4, half, 2, tiles.a, [&](int g) { return half * BLOCK_ROWS + g; });
  }
  read(operands.b, 2, 0, 1, tiles.b, stored_column);
  for (int row = 0; row < MAX_M; ++row) {
    tiles.a_scales[row] = scales_of(operands.scale_a, row, true);
  }
  for (int column = 0; column < N; ++column) {
    tiles.b_scales[stored_column(column)] = scales_of(operands.scale_b, column, false);
  }
  TileC c;
  read_c(shape, operands, c);
  add_four_bit_products(tiles, shape.scale, shape.scales, c);
  write_tile(shape, operands, c);
}

// ---- m8n8k4 with .f16: four independent products, one for each pair of quads --------------------

// Lanes 4 * q .. 4 * q + 3 and those 16 above work on product q.
struct QuadPairElement {
  int row, column;
};

QuadPairElement quad_pair_a(int lane, int i, bool column_major) {
  const int offset = lane < 16 ? 0 : 4;
  return column_major ? QuadPairElement{i + offset, lane % 4}
                      : QuadPairElement{lane % 4 + offset, i};
}

QuadPairElement quad_pair_b(int lane, int i, bool row_major) {
  const int offset = lane < 16 ? 0 : 4;
  return row_major ? QuadPairElement{lane % 4, i + offset} : QuadPairElement{i, lane % 4 + offset};
}

QuadPairElement quad_pair_c(int lane, int i, bool is_f16) {
  const int offset = lane < 16 ? 0 : 4;
  if (is_f16) return {lane % 4 + offset, i};
  return {(lane & 1) + (i & 2) + offset, (i & 4) + (lane & 2) + (i & 1)};
}

uint16_t half_of(const void* const* registers, int lane, int i) {
  return static_cast<const uint16_t*>(registers[i / 2])[2 * lane + i % 2];
}

void mma_quad_pairs(const MmaShape& shape, const MmaOperands& operands, const TensorCore&) {
  float a[4][8][4], b[4][4][8], c[4][8][8];
  const bool c_f16 = shape.c == ElementType::F16;
  const bool d_f16 = shape.d == ElementType::F16;
  for (int lane = 0; lane < WARP; ++lane) {
    const int q = lane % 16 / 4;
    for (int i = 0; i < 4; ++i) {
      const QuadPairElement in_a = quad_pair_a(lane, i, shape.a_column_major);
      const QuadPairElement in_b = quad_pair_b(lane, i, shape.b_row_major);
      a[q][in_a.row][in_a.column] = f32_of_f16(half_of(operands.a, lane, i));
      b[q][in_b.row][in_b.column] = f32_of_f16(half_of(operands.b, lane, i));
    }
    for (int i = 0; i < 8; ++i) {
      const QuadPairElement in_c = quad_pair_c(lane, i, c_f16);
      c[q][in_c.row][in_c.column] = c_f16 ? f32_of_f16(half_of(operands.c, lane, i))
                                          : static_cast<const float*>(operands.c[i])[lane];
    }
  }
  for (int lane = 0; lane < WARP; ++lane) {
    const int q = lane % 16 / 4;
    for (int i = 0; i < 8; ++i) {
      const QuadPairElement out = quad_pair_c(lane, i, d_f16);
      // An H200 computes this with the instructions of its CUDA cores, in float.
      const float addend = c[q][out.row][out.column];
      float products[4];
      for (int k = 0; k < 4; ++k) {
        const bool starts = k == 0 || (d_f16 && k == 2);
        products[k] = fma_f32(a[q][out.row][k], b[q][k][out.column], starts ? 0 : products[k - 1]);
      }
      if (d_f16) {  // each pair of k has a sum of its own, which is added to c
        const float sum = add_f32(add_f32(addend, products[1]), products[3]);
        static_cast<uint16_t*>(operands.d[i / 2])[2 * lane + i % 2] = cvt_rn_f16_f32(sum);
      } else {
        static_cast<float*>(operands.d[i])[lane] = add_f32(products[3], addend);
      }
    }
  }
}

// ---- f64 ---------------------------------------------------------------------------------------

void mma_f64(const MmaShape& shape, const MmaOperands& operands, const TensorCore&) {
  double result[4][WARP];
  const int halves = shape.m / BLOCK_ROWS;
  for (int lane = 0; lane < WARP; ++lane) {
    for (int i = 0; i < 2 * halves; ++i) {
      double sum = static_cast<const double*>(operands.c[i])[lane];
      const int row_lane = lane & ~3;                      // of A: the lanes of this row
      const int column_lane = (lane % 4 * 2 + i % 2) * 4;  // of B: the lanes of this column
      for (int k = 0; k < shape.k; ++k) {
        const auto* a = static_cast<const double*>(operands.a[k / 4 * halves + i / 2]);
        const auto* b = static_cast<const double*>(operands.b[k / 4]);
        const double x = a[row_lane + k % 4], y = b[column_lane + k % 4];
        const double next = std::fma(x, y, sum);
        sum = std::isnan(next) ? fma_f64(x, y, sum) : next;  // fma_f64 knows which NaN it is
      }
      result[i][lane] = sum;
    }
  }
  for (int i = 0; i < 2 * halves; ++i) std::memcpy(operands.d[i], result[i], sizeof(result[i]));
}

// ---- Integers ----------------------------------------------------------------------------------

// The dot product of two rows of integers: 16 bytes, those of four lanes.
int64_t dot_16_bytes(ElementType a_type, const uint8_t* a, ElementType b_type, const uint8_t* b,
                     bool b1_and) {
  int64_t sum = 0;
  if (a_type == ElementType::B1) {
    for (int i = 0; i < 16; ++i) sum += std::popcount(uint8_t(b1_and ? a[i] & b[i] : a[i] ^ b[i]));
  } else if (is_int8(a_type)) {
    const bool a_signed = a_type == ElementType::S8;
    const bool b_signed = b_type == ElementType::S8;
    for (int i = 0; i < 16; ++i) {
      const int x = a_signed ? static_cast<int8_t>(a[i]) : a[i];
      const int y = b_signed ? static_cast<int8_t>(b[i]) : b[i];
      sum += x * y;
    }
  } else {
    for (int i = 0; i < 32; ++i) {
      sum += nibble(a, i, a_type == ElementType::S4) * nibble(b, i, b_type == ElementType::S4);
    }
  }
  return sum;
}

void mma_integer(const MmaShape& shape, const MmaOperands& operands, const TensorCore&) {
  uint32_t result[4][WARP];
  const int halves = shape.m / BLOCK_ROWS;
  const int blocks = shape.k * element_bits(shape.a) / 128;
  for (int lane = 0; lane < WARP; ++lane) {
    for (int i = 0; i < 2 * halves; ++i) {
      int64_t sum = static_cast<const int32_t*>(operands.c[i])[lane];
      for (int block = 0; block < blocks; ++block) {
        const auto* a = static_cast<const uint8_t*>(operands.a[block * halves + i / 2]);
        const auto* b = static_cast<const uint8_t*>(operands.b[block]);
        sum += dot_16_bytes(shape.a, a + lane / 4 * 16, shape.b, b + (lane % 4 * 2 + i % 2) * 16,
                            shape.b1_and);
      }
      result[i][lane] =
          static_cast<uint32_t>(shape.satfinite ? saturate_s32(sum) : static_cast<int32_t>(sum));
    }
  }
  for (int i = 0; i < 2 * halves; ++i) std::memcpy(operands.d[i], result[i], sizeof(result[i]));
}

// ---- Which forms there are (PTX ISA, mma) -------------------------------------------------------

bool is_k(const MmaShape& shape, int first, int second) {
  return shape.k == first || shape.k == second;
}

bool accumulates(const MmaShape& shape, ElementType type) {
  return shape.c == type && shape.d == type;
}

MmaFunction find_float_mma(const MmaShape& shape) {
  const bool f32 = accumulates(shape, ElementType::F32);
  const bool f16 = accumulates(shape, ElementType::F16);
  if (shape.a == ElementType::F16 && shape.b == ElementType::F16) {
    if (shape.m == 8 && shape.k == 4) {
      // .f16 and .f32 may be mixed, but not .f32 into .f16.
      const bool mixed = shape.d == ElementType::F32 && shape.c == ElementType::F16;
      return f32 || f16 || mixed ? mma_quad_pairs : nullptr;
    }
    return shape.m == 16 && is_k(shape, 8, 16) && (f32 || f16) ? mma_float : nullptr;
  }
  if (shape.m != 16) return nullptr;
  if (shape.a == ElementType::BF16 && shape.b == ElementType::BF16) {
    return is_k(shape, 8, 16) && f32 ? mma_float : nullptr;
  }
  if (shape.a == ElementType::TF32 && shape.b == ElementType::TF32) {
    return is_k(shape, 4, 8) && f32 ? mma_float : nullptr;
  }
  if (is_fp8(shape.a) && is_fp8(shape.b)) {
    return is_k(shape, 16, 32) && (f32 || f16) ? mma_fp8 : nullptr;
  }
  if (is_f8f6f4(shape.a) && is_f8f6f4(shape.b)) {
    return shape.k == 32 && (f32 || f16) ? mma_fp8 : nullptr;
  }
  return nullptr;
}

MmaFunction find_scaled_mma(const MmaShape& shape) {
  if (shape.m != 16 || !accumulates(shape, ElementType::F32)) return nullptr;
  const bool powers = shape.scale == ElementType::UE8M0;
  if (is_f8f6f4(shape.a) && is_f8f6f4(shape.b)) {
    return shape.k == 32 && shape.scales == 1 && powers ? mma_scaled_bytes : nullptr;
  }
  if (shape.a != ElementType::E2M1 || shape.b != ElementType::E2M1 || shape.k != 64) return nullptr;
  return shape.scales == (powers ? 2 : 4) ? mma_scaled_nibbles : nullptr;
}

MmaFunction find_integer_mma(const MmaShape& shape) {
  if (!accumulates(shape, ElementType::S32)) return nullptr;
  int block;  // the k of one register
  if (is_int8(shape.a) && is_int8(shape.b)) {
    block = 16;
  } else if (is_int4(shape.a) && is_int4(shape.b)) {
    block = 32;
  } else if (shape.a == ElementType::B1 && shape.b == ElementType::B1 && !shape.satfinite) {
    block = 128;
  } else {
    return nullptr;
  }
  const bool legal = shape.m == 16 ? is_k(shape, block, 2 * block) : shape.k == block;
  return legal ? mma_integer : nullptr;
}

}  // namespace

MmaFunction find_mma(const MmaShape& shape) {
  if (shape.n != N || (shape.m != 8 && shape.m != 16)) return nullptr;
  const bool quad_pairs = shape.m == 8 && shape.k == 4 && shape.a == ElementType::F16;
  if ((shape.a_column_major || shape.b_row_major) && !quad_pairs) return nullptr;
  if (shape.b1_and && shape.a != ElementType::B1) return nullptr;
  if (shape.scales > 0) return find_scaled_mma(shape);
  if (shape.c == ElementType::S32) return find_integer_mma(shape);
  if (shape.satfinite) return nullptr;
  if (shape.a == ElementType::F64) {
    const bool f64 = shape.b == ElementType::F64 && accumulates(shape, ElementType::F64);
    const bool legal = shape.k == 4 || (shape.m == 16 && is_k(shape, 8, 16));
    return f64 && legal ? mma_f64 : nullptr;
  }
  return find_float_mma(shape);
}

MmaRegisters mma_registers(const MmaShape& shape) {
  const auto accumulator = [&](ElementType type) {
    return shape.m * shape.n / WARP / (type == ElementType::F16 ? 2 : 1);
  };
  if (shape.m == 8 && shape.k == 4 && shape.a == ElementType::F16) {  // four products at once
    return {shape.d == ElementType::F16 ? 4 : 8, 2, 2, shape.c == ElementType::F16 ? 4 : 8};
  }
  const int register_bits = shape.a == ElementType::F64 ? 64 : 32;
  const int a_bits = shape.m * shape.k * element_bits(shape.a) / WARP;
  const int b_bits = shape.k * shape.n * element_bits(shape.b) / WARP;
  return {accumulator(shape.d), a_bits / register_bits, b_bits / register_bits,
          accumulator(shape.c)};
}

}  // namespace archflash::sim
