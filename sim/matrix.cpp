#include "sim/matrix.h"

#include <immintrin.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "sim/numeric.h"

// Fragments (PTX ISA, "Matrix Fragments for mma"). With lane = 4 * g + t and E elements in a
// register, register j of A holds row g + 8 * (j % (m / 8)), columns 4 * E * (j / (m / 8)) + E * t
// and on; register j of B holds column g, rows 4 * E * j + E * t and on; 32-bit register i of C and
// D holds row g + 8 * (i / 2), column 2 * t + i % 2. So the 32 lanes of a register of A, read as
// memory, are a row-major 8 x 4E block; of B, the same of its transpose; of an .f16 C, a row-major
// 8 x 8 block. One rule for every shape but m8n8k4 with .f16.
namespace archflash::sim {
namespace {

constexpr int WARP = 32;
constexpr int MAX_M = 16;
constexpr int N = 8;
constexpr int MAX_K = 32;  // of the floating-point forms
constexpr int BLOCK_ROWS = 8;

#define ARCHFLASH_AVX2 __attribute__((target("avx2,fma,f16c")))
#define ARCHFLASH_INLINE inline __attribute__((always_inline))

bool machine_has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

std::atomic<bool> avx2_in_use = machine_has_avx2();

int element_bits(ElementType type) {
  switch (type) {
    case ElementType::F64:
      return 64;
    case ElementType::F32:
    case ElementType::TF32:
    case ElementType::S32:
      return 32;
    case ElementType::F16:
    case ElementType::BF16:
      return 16;
    case ElementType::S4:
    case ElementType::U4:
      return 4;
    case ElementType::B1:
      return 1;
    default:
      return 8;
  }
}

bool is_fp8(ElementType type) { return type == ElementType::E4M3 || type == ElementType::E5M2; }
bool is_int8(ElementType type) { return type == ElementType::S8 || type == ElementType::U8; }
bool is_int4(ElementType type) { return type == ElementType::S4 || type == ElementType::U4; }

// ---- Decoding ----------------------------------------------------------------------------------

struct ByteTable {
  float value[256];
};

ByteTable byte_table(float (*decode)(uint8_t)) {
  ByteTable table;
  for (int i = 0; i < 256; ++i) table.value[i] = decode(static_cast<uint8_t>(i));
  return table;
}

const ByteTable E4M3_VALUES = byte_table(f32_of_e4m3);
const ByteTable E5M2_VALUES = byte_table(f32_of_e5m2);

int nibble(const uint8_t* bytes, int index, bool is_signed) {
  const int value = bytes[index / 2] >> index % 2 * 4 & 0xF;
  return is_signed && value > 7 ? value - 16 : value;
}

// `count` elements in memory as Out. Instantiated for float and double, in baseline and AVX2 code.
template <class Out>
ARCHFLASH_INLINE void decode_elements(ElementType type, const void* source, int count, Out* out) {
  const auto* bytes = static_cast<const uint8_t*>(source);
  const auto* halves = static_cast<const uint16_t*>(source);
  const auto* words = static_cast<const uint32_t*>(source);
  switch (type) {
    case ElementType::F16:
      for (int i = 0; i < count; ++i) out[i] = f32_of_f16(halves[i]);
      break;
    case ElementType::BF16:
      for (int i = 0; i < count; ++i) out[i] = f32_of(uint32_t{halves[i]} << 16);
      break;
    case ElementType::TF32:
      for (int i = 0; i < count; ++i) out[i] = f32_of_tf32(words[i]);
      break;
    case ElementType::F32:
      for (int i = 0; i < count; ++i) out[i] = f32_of(words[i]);
      break;
    case ElementType::E4M3:
      for (int i = 0; i < count; ++i) out[i] = E4M3_VALUES.value[bytes[i]];
      break;
    case ElementType::E5M2:
      for (int i = 0; i < count; ++i) out[i] = E5M2_VALUES.value[bytes[i]];
      break;
    case ElementType::S8:
      for (int i = 0; i < count; ++i) out[i] = static_cast<Out>(static_cast<int8_t>(bytes[i]));
      break;
    case ElementType::U8:
      for (int i = 0; i < count; ++i) out[i] = bytes[i];
      break;
    case ElementType::S4:
    case ElementType::U4:
      for (int i = 0; i < count; ++i) {
        out[i] = static_cast<Out>(nibble(bytes, i, type == ElementType::S4));
      }
      break;
    default:
      break;
  }
}

ARCHFLASH_AVX2 void decode_f16_avx2(const uint16_t* source, int count, double* out) {
  for (int i = 0; i < count; i += 8) {
    const __m256 floats =
        _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
    _mm256_storeu_pd(out + i, _mm256_cvtps_pd(_mm256_castps256_ps128(floats)));
    _mm256_storeu_pd(out + i + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(floats, 1)));
  }
}

ARCHFLASH_AVX2 void decode_bf16_avx2(const uint16_t* source, int count, double* out) {
  for (int i = 0; i < count; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i));
    const __m256 floats = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
    _mm256_storeu_pd(out + i, _mm256_cvtps_pd(_mm256_castps256_ps128(floats)));
    _mm256_storeu_pd(out + i + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(floats, 1)));
  }
}

// ---- Floating-point mma.sync, every shape but m8n8k4 --------------------------------------------

// A, B and C as plain matrices. B and C have their columns in the order of the accumulator's
// registers, even ones first: lane 4 * g + t of c[0] is column 2 * t.
struct Tiles {
  alignas(32) double a[MAX_M][MAX_K];
  alignas(32) double b[MAX_K][N];
  alignas(32) double c[MAX_M][N];
};

constexpr int stored_column(int column) { return column / 2 + column % 2 * (N / 2); }

template <bool AVX2>
ARCHFLASH_INLINE void decode_doubles(ElementType type, const void* source, int count, double* out) {
  if (AVX2 && type == ElementType::F16) {
    decode_f16_avx2(static_cast<const uint16_t*>(source), count, out);
  } else if (AVX2 && type == ElementType::BF16) {
    decode_bf16_avx2(static_cast<const uint16_t*>(source), count, out);
  } else {
    decode_elements(type, source, count, out);
  }
}

template <bool AVX2>
ARCHFLASH_INLINE void read_tiles(const MmaShape& shape, const MmaOperands& operands, Tiles& tiles) {
  const int width = 4 * 32 / element_bits(shape.a);  // columns of A in one register
  const int row_bytes = 16;
  for (int block = 0; block < shape.k / width; ++block) {
    for (int half = 0; half < shape.m / BLOCK_ROWS; ++half) {
      const auto* a =
          static_cast<const uint8_t*>(operands.a[block * (shape.m / BLOCK_ROWS) + half]);
      for (int row = 0; row < BLOCK_ROWS; ++row) {
        decode_doubles<AVX2>(shape.a, a + row * row_bytes, width,
                             &tiles.a[half * BLOCK_ROWS + row][block * width]);
      }
    }
    alignas(32) double transposed[N][16];
    const auto* b = static_cast<const uint8_t*>(operands.b[block]);
    for (int column = 0; column < N; ++column) {
      decode_doubles<AVX2>(shape.b, b + column * row_bytes, width,
                           transposed[stored_column(column)]);
    }
    for (int k = 0; k < width; ++k) {
      for (int column = 0; column < N; ++column) {
        tiles.b[block * width + k][column] = transposed[column][k];
      }
    }
  }
  for (int half = 0; half < shape.m / BLOCK_ROWS; ++half) {
    for (int row = 0; row < BLOCK_ROWS; ++row) {
      double* c = tiles.c[half * BLOCK_ROWS + row];
      if (shape.c == ElementType::F16) {
        const auto* packed_row = static_cast<const uint16_t*>(operands.c[half]) + row * N;
        for (int column = 0; column < N; ++column) {
          c[stored_column(column)] = f32_of_f16(packed_row[column]);
        }
      } else {
        const auto* even = static_cast<const float*>(operands.c[2 * half]) + row * (N / 2);
        const auto* odd = static_cast<const float*>(operands.c[2 * half + 1]) + row * (N / 2);
        for (int i = 0; i < N / 2; ++i) {
          c[i] = even[i];
          c[N / 2 + i] = odd[i];
        }
      }
    }
  }
}

// c += a * b. A product of two elements is exact in double, so that a fused multiply-add and a
// multiplication followed by an addition give the same bits.
void multiply_baseline(int m, int depth, Tiles& tiles) {
  for (int row = 0; row < m; ++row) {
    double* c = tiles.c[row];
    for (int k = 0; k < depth; ++k) {
      const double a = tiles.a[row][k];
      for (int column = 0; column < N; ++column) c[column] += a * tiles.b[k][column];
    }
  }
}

ARCHFLASH_AVX2 void multiply_avx2(int m, int depth, Tiles& tiles) {
  constexpr int ROWS = 4;  // x 2 vectors of 4 columns: enough independent sums to hide the latency
  for (int row = 0; row < m; row += ROWS) {
    __m256d sums[ROWS][2];
    for (int i = 0; i < ROWS; ++i) {
      sums[i][0] = _mm256_load_pd(tiles.c[row + i]);
      sums[i][1] = _mm256_load_pd(tiles.c[row + i] + 4);
    }
    for (int k = 0; k < depth; ++k) {
      const __m256d b_even = _mm256_load_pd(tiles.b[k]);
      const __m256d b_odd = _mm256_load_pd(tiles.b[k] + 4);
      for (int i = 0; i < ROWS; ++i) {
        const __m256d a = _mm256_broadcast_sd(&tiles.a[row + i][k]);
        sums[i][0] = _mm256_fmadd_pd(a, b_even, sums[i][0]);
        sums[i][1] = _mm256_fmadd_pd(a, b_odd, sums[i][1]);
      }
    }
    for (int i = 0; i < ROWS; ++i) {
      _mm256_store_pd(tiles.c[row + i], sums[i][0]);
      _mm256_store_pd(tiles.c[row + i] + 4, sums[i][1]);
    }
  }
}

// A double rounded to .f16 once (through float it would be rounded twice).
uint16_t f16_of_f64(double value) {
  static const CvtSpec SPEC{NumericType::F16, NumericType::F64, Round::RN};
  static const CvtFunction CONVERT = find_cvt(SPEC);
  return static_cast<uint16_t>(CONVERT(SPEC, bits_of(value), 0));
}

ARCHFLASH_INLINE void write_tile(const MmaShape& shape, const MmaOperands& operands,
                                 const Tiles& tiles) {
  for (int half = 0; half < shape.m / BLOCK_ROWS; ++half) {
    for (int row = 0; row < BLOCK_ROWS; ++row) {
      const double* d = tiles.c[half * BLOCK_ROWS + row];
      if (shape.d == ElementType::F16) {
        auto* packed_row = static_cast<uint16_t*>(operands.d[half]) + row * N;
        for (int column = 0; column < N; ++column) {
          packed_row[column] = f16_of_f64(d[stored_column(column)]);
        }
      } else {
        auto* even = static_cast<uint32_t*>(operands.d[2 * half]) + row * (N / 2);
        auto* odd = static_cast<uint32_t*>(operands.d[2 * half + 1]) + row * (N / 2);
        for (int i = 0; i < N / 2; ++i) {
          even[i] = bits_of(canonical(static_cast<float>(d[i])));
          odd[i] = bits_of(canonical(static_cast<float>(d[N / 2 + i])));
        }
      }
    }
  }
}

void mma_float_baseline(const MmaShape& shape, const MmaOperands& operands) {
  Tiles tiles;
  read_tiles<false>(shape, operands, tiles);
  multiply_baseline(shape.m, shape.k, tiles);
  write_tile(shape, operands, tiles);
}

ARCHFLASH_AVX2 void mma_float_avx2(const MmaShape& shape, const MmaOperands& operands) {
  Tiles tiles;
  read_tiles<true>(shape, operands, tiles);
  multiply_avx2(shape.m, shape.k, tiles);
  write_tile(shape, operands, tiles);
}

void mma_float(const MmaShape& shape, const MmaOperands& operands) {
  uses_avx2() ? mma_float_avx2(shape, operands) : mma_float_baseline(shape, operands);
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

void mma_quad_pairs(const MmaShape& shape, const MmaOperands& operands) {
  double a[4][8][4], b[4][4][8], c[4][8][8];
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
      double sum = c[q][out.row][out.column];
      for (int k = 0; k < 4; ++k) sum += a[q][out.row][k] * b[q][k][out.column];
      if (d_f16) {
        static_cast<uint16_t*>(operands.d[i / 2])[2 * lane + i % 2] = f16_of_f64(sum);
      } else {
        static_cast<uint32_t*>(operands.d[i])[lane] = bits_of(canonical(static_cast<float>(sum)));
      }
    }
  }
}

// ---- f64 ---------------------------------------------------------------------------------------

void mma_f64(const MmaShape& shape, const MmaOperands& operands) {
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
        sum = std::fma(a[row_lane + k % 4], b[column_lane + k % 4], sum);
      }
      result[i][lane] = std::isnan(sum) ? f64_of(0x7FFFFFFFFFFFFFFF) : sum;
    }
  }
  for (int i = 0; i < 2 * halves; ++i) std::memcpy(operands.d[i], result[i], sizeof(result[i]));
}

// ---- Integers ----------------------------------------------------------------------------------

// One row of 4 registers' worth of integers, 16 bytes, against another.
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

void mma_integer(const MmaShape& shape, const MmaOperands& operands) {
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
      // .f16 and .f32 in any mixture but .f32 into .f16.
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
    return is_k(shape, 16, 32) && (f32 || f16) ? mma_float : nullptr;
  }
  return nullptr;
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

bool uses_avx2() { return avx2_in_use.load(std::memory_order_relaxed); }
void set_avx2(bool enabled) { avx2_in_use = enabled && machine_has_avx2(); }

// ---- ldmatrix, stmatrix, movmatrix --------------------------------------------------------------

void ldmatrix_m8n8_b16(const uint16_t rows[8][8], bool trans, uint32_t* d) {
  if (!trans) {  // a lane's two elements follow one another: register and matrix are the same bytes
    std::memcpy(d, rows, 8 * LDMATRIX_ROW_BYTES);
    return;
  }
  for (int lane = 0; lane < WARP; ++lane) {
    const MatrixElement low = ldmatrix_element(lane, 0, true);
    const MatrixElement high = ldmatrix_element(lane, 1, true);
    d[lane] = uint32_t{rows[high.row][high.column]} << 16 | rows[low.row][low.column];
  }
}

void stmatrix_m8n8_b16(const uint32_t* source, bool trans, uint16_t rows[8][8]) {
  for (int lane = 0; lane < WARP; ++lane) {
    const MatrixElement low = ldmatrix_element(lane, 0, trans);
    const MatrixElement high = ldmatrix_element(lane, 1, trans);
    rows[low.row][low.column] = static_cast<uint16_t>(source[lane]);
    rows[high.row][high.column] = static_cast<uint16_t>(source[lane] >> 16);
  }
}

void movmatrix_m8n8_trans_b16(const uint32_t* a, uint32_t* d) {
  uint16_t rows[8][8];
  stmatrix_m8n8_b16(a, false, rows);
  ldmatrix_m8n8_b16(rows, true, d);
}

// ---- Dense products -----------------------------------------------------------------------------

void decode_row(ElementType type, const void* source, int count, float* out) {
  decode_elements(type, source, count, out);
}

namespace {

constexpr int PANEL = 8;  // columns of d computed together

ARCHFLASH_INLINE void sum_row_baseline(int k, const float* a, const double* panel, double* sums) {
  for (int i = 0; i < k; ++i) {
    const double factor = a[i];
    for (int column = 0; column < PANEL; ++column)
      sums[column] += factor * panel[i * PANEL + column];
  }
}

ARCHFLASH_AVX2 void sum_row_avx2(int k, const float* a, const double* panel, double* sums) {
  __m256d left = _mm256_loadu_pd(sums);
  __m256d right = _mm256_loadu_pd(sums + 4);
  for (int i = 0; i < k; ++i) {
    const __m256d factor = _mm256_set1_pd(a[i]);
    left = _mm256_fmadd_pd(factor, _mm256_loadu_pd(panel + i * PANEL), left);
    right = _mm256_fmadd_pd(factor, _mm256_loadu_pd(panel + i * PANEL + 4), right);
  }
  _mm256_storeu_pd(sums, left);
  _mm256_storeu_pd(sums + 4, right);
}

}  // namespace

void multiply_accumulate(int m, int n, int k, const float* a, int a_pitch, const float* b,
                         int b_pitch, float* d, int d_pitch, bool accumulate) {
  const bool avx2 = uses_avx2();
  std::vector<double> panel(static_cast<size_t>(k) * PANEL);
  for (int first = 0; first < n; first += PANEL) {
    const int columns = n - first < PANEL ? n - first : PANEL;
    for (int i = 0; i < k; ++i) {
      for (int column = 0; column < PANEL; ++column) {
        panel[i * PANEL + column] =
            column < columns ? b[static_cast<int64_t>(i) * b_pitch + first + column] : 0.0f;
      }
    }
    for (int row = 0; row < m; ++row) {
      const float* a_row = a + static_cast<int64_t>(row) * a_pitch;
      float* d_row = d + static_cast<int64_t>(row) * d_pitch + first;
      double sums[PANEL] = {};
      for (int column = 0; accumulate && column < columns; ++column) sums[column] = d_row[column];
      if (avx2) {
        sum_row_avx2(k, a_row, panel.data(), sums);
      } else {
        sum_row_baseline(k, a_row, panel.data(), sums);
      }
      for (int column = 0; column < columns; ++column) {
        d_row[column] = canonical(static_cast<float>(sums[column]));
      }
    }
  }
}

}  // namespace archflash::sim
