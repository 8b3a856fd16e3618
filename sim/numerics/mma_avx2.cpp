#include "sim/numerics/mma_avx2.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "sim/numerics/cpu.h"
#include "sim/numerics/tensor_core.h"

#define ARCHFLASH_AVX2 __attribute__((target("avx2,fma,f16c"), always_inline)) inline
#define ARCHFLASH_AVX2_ENTRY __attribute__((target("avx2,fma,f16c")))

namespace archflash::sim {
namespace {

constexpr int GROUP = 4;  // lanes that hold a row

// A tile's columns are stored with the even ones first, as the accumulators' registers have them:
// lanes 4g .. 4g+3 of d[0] are columns 0, 2, 4, 6 of row g, those of d[1] are columns 1, 3, 5, 7.

// The exponents (tensor_core.h: exponent_of) of 16 numbers.
template <ElementType TYPE>
ARCHFLASH_AVX2 __m256i exponents(__m256i halves) {
  constexpr bool IS_F16 = TYPE == ElementType::F16;
  constexpr int MANTISSA_BITS = IS_F16 ? 10 : 7, FIELD_MAX = IS_F16 ? 31 : 255;
  constexpr int SMALLEST = IS_F16 ? F16_SMALLEST : F32_SMALLEST;
  const __m256i magnitude = _mm256_and_si256(halves, _mm256_set1_epi16(0x7FFF));
  const __m256i field =
      _mm256_max_epi16(_mm256_srli_epi16(magnitude, MANTISSA_BITS), _mm256_set1_epi16(1));
  const __m256i zero = _mm256_cmpeq_epi16(magnitude, _mm256_setzero_si256());
  const __m256i special = _mm256_cmpeq_epi16(field, _mm256_set1_epi16(FIELD_MAX));
  const __m256i offset = _mm256_or_si256(
      _mm256_and_si256(zero, _mm256_set1_epi16(ZERO_EXPONENT - SMALLEST)),
      _mm256_and_si256(special, _mm256_set1_epi16(SPECIAL_EXPONENT - (FIELD_MAX + SMALLEST - 1))));
  return _mm256_add_epi16(_mm256_add_epi16(field, _mm256_set1_epi16(SMALLEST - 1)), offset);
}

template <ElementType TYPE>
ARCHFLASH_AVX2 __m256 eight_floats(__m128i halves) {
  if constexpr (TYPE == ElementType::F16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// The lower (or upper) halves of eight 32-bit words.
template <ElementType TYPE, bool UPPER>
ARCHFLASH_AVX2 __m256 halves_of(__m256i words) {
  if constexpr (TYPE == ElementType::BF16) {
    return _mm256_castsi256_ps(UPPER ? _mm256_and_si256(words, _mm256_set1_epi32(~0xFFFF))
                                     : _mm256_slli_epi32(words, 16));
  } else {
    const __m256i halves =
        UPPER ? _mm256_srli_epi32(words, 16) : _mm256_and_si256(words, _mm256_set1_epi32(0xFFFF));
    return _mm256_cvtph_ps(
        _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
  }
}

// Row t of a 4 x 4 transpose, for t from 0 to 3.
struct Transposed {
  __m128i row[GROUP];
};
ARCHFLASH_AVX2 Transposed transpose(__m128i c0, __m128i c1, __m128i c2, __m128i c3) {
  const __m128i low01 = _mm_unpacklo_epi32(c0, c1), low23 = _mm_unpacklo_epi32(c2, c3);
  const __m128i high01 = _mm_unpackhi_epi32(c0, c1), high23 = _mm_unpackhi_epi32(c2, c3);
  return {{_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23),
           _mm_unpacklo_epi64(high01, high23), _mm_unpackhi_epi64(high01, high23)}};
}

// Reads a register of B: lane 4g + t has rows 2t and 2t + 1 of column g. `first` is its first row
// in the tile.
template <ElementType TYPE>
ARCHFLASH_AVX2 void read_b(const void* source, int first, TileB& b) {
  __m128i column[TILE_COLUMNS];
  for (int i = 0; i < TILE_COLUMNS; ++i) {
    column[i] = _mm_loadu_si128(static_cast<const __m128i*>(source) + i);
  }
  const Transposed even = transpose(column[0], column[2], column[4], column[6]);
  const Transposed odd = transpose(column[1], column[3], column[5], column[7]);
  for (int t = 0; t < GROUP; ++t) {
    const __m256i words = _mm256_set_m128i(odd.row[t], even.row[t]);
    const int k = first + 2 * t;
    _mm256_store_ps(b.value[k], halves_of<TYPE, false>(words));
    _mm256_store_ps(b.value[k + 1], halves_of<TYPE, true>(words));
    _mm256_store_si256(reinterpret_cast<__m256i*>(b.exponent[k / 2]), exponents<TYPE>(words));
  }
}

// Reads registers of A: lanes 4g .. 4g + 3 are eight columns of row g; `right` has the next eight
// columns, or is nullptr.
template <ElementType TYPE>
ARCHFLASH_AVX2 void read_a(const void* left, const void* right, int first_row, TileA& a) {
  for (int g = 0; g < 8; ++g) {
    const int row = first_row + g;
    const __m128i low = _mm_loadu_si128(static_cast<const __m128i*>(left) + g);
    _mm256_store_ps(a.value[row], eight_floats<TYPE>(low));
    __m256i halves = _mm256_castsi128_si256(low);
    if (right != nullptr) {
      const __m128i high = _mm_loadu_si128(static_cast<const __m128i*>(right) + g);
      _mm256_store_ps(a.value[row] + 8, eight_floats<TYPE>(high));
      halves = _mm256_inserti128_si256(halves, high, 1);
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(a.exponent[row]), exponents<TYPE>(halves));
  }
}

// d = a * b + c, of registers.
template <int DEPTH, class C>
ARCHFLASH_AVX2 void add_to_registers(const TileA& a, const TileB& b, C* const* c_registers,
                                     void* const* d_registers, const Additions& additions) {
  TileC c;
  for (int row = 0; row < TILE_ROWS; ++row) {
    const int half = row / 8, first = row % 8 * GROUP;
    const auto* even = static_cast<const float*>(c_registers[2 * half]) + first;
    const auto* odd = static_cast<const float*>(c_registers[2 * half + 1]) + first;
    _mm256_store_ps(c.value[row], _mm256_set_m128(_mm_loadu_ps(odd), _mm_loadu_ps(even)));
  }
  add_products(a, b, c, DEPTH, additions);
  for (int row = 0; row < TILE_ROWS; ++row) {
    const int half = row / 8, first = row % 8 * GROUP;
    _mm_storeu_ps(static_cast<float*>(d_registers[2 * half]) + first, _mm_load_ps(c.value[row]));
    _mm_storeu_ps(static_cast<float*>(d_registers[2 * half + 1]) + first,
                  _mm_load_ps(c.value[row] + GROUP));
  }
}

template <ElementType TYPE, int DEPTH>
ARCHFLASH_AVX2_ENTRY void multiply(const MmaShape&, const MmaOperands& operands,
                                   const TensorCore& core) {
  TileA a;
  TileB b;
  for (int half = 0; half < 2; ++half) {
    read_a<TYPE>(operands.a[half], DEPTH == 16 ? operands.a[half + 2] : nullptr, 8 * half, a);
  }
  for (int block = 0; block < DEPTH / 8; ++block) read_b<TYPE>(operands.b[block], 8 * block, b);
  add_to_registers<DEPTH>(a, b, operands.c, operands.d, {core.wide, TYPE, false});
}

template <ElementType TYPE>
ARCHFLASH_AVX2_ENTRY void multiply_wide(const WideOperands& operands, int count,
                                        const TensorCore& core) {
  const Additions additions(core.wide, TYPE, false);
  TileA a;
  TileB b;
  for (int half = 0; half < 2; ++half) {
    read_a<TYPE>(operands.a[half], operands.a[half + 2], 8 * half, a);
  }
  for (int i = 0; i < count; ++i) {
    for (int block = 0; block < 2; ++block) read_b<TYPE>(operands.b[i][block], 8 * block, b);
    add_to_registers<16>(a, b, operands.d + 4 * i, operands.d + 4 * i, additions);
  }
}

}  // namespace

MmaFunction find_avx2_mma(const MmaShape& shape) {
  const bool floats = shape.d == ElementType::F32 && shape.c == ElementType::F32;
  if (!uses_avx2() || !floats || shape.m != 16 || shape.n != 8 || shape.a != shape.b ||
      shape.a_column_major || shape.b_row_major || (shape.k != 8 && shape.k != 16)) {
    return nullptr;
  }
  if (shape.a == ElementType::F16) {
    return shape.k == 16 ? &multiply<ElementType::F16, 16> : &multiply<ElementType::F16, 8>;
  }
  if (shape.a == ElementType::BF16) {
    return shape.k == 16 ? &multiply<ElementType::BF16, 16> : &multiply<ElementType::BF16, 8>;
  }
  return nullptr;
}

WideMmaFunction find_wide_mma(const MmaShape& shape) {
  if (find_avx2_mma(shape) == nullptr || shape.k != 16) return nullptr;
  return shape.a == ElementType::F16 ? &multiply_wide<ElementType::F16>
                                     : &multiply_wide<ElementType::BF16>;
}

}  // namespace archflash::sim

#else

namespace archflash::sim {
MmaFunction find_avx2_mma(const MmaShape&) { return nullptr; }
WideMmaFunction find_wide_mma(const MmaShape&) { return nullptr; }
}  // namespace archflash::sim

#endif
