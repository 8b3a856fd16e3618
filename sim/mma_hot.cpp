#include "sim/mma_hot.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "sim/numeric.h"

#define ARCHFLASH_HOT __attribute__((target("avx2,fma,f16c"), always_inline)) inline
#define ARCHFLASH_HOT_ENTRY __attribute__((target("avx2,fma,f16c"), flatten))

namespace archflash::sim {
namespace {

constexpr int ROWS = 16, COLUMNS = 8, GROUP = 4;  // GROUP: lanes that hold a row

// Columns are kept even ones first, as the accumulators' registers have them: lanes 4g .. 4g+3 of
// d[0] are columns 0, 2, 4, 6 of row g, those of d[1] columns 1, 3, 5, 7.
struct Tiles {
  alignas(32) double a[ROWS][16];
  alignas(32) double b[16][COLUMNS];
};

template <ElementType TYPE>
ARCHFLASH_HOT __m256 eight_floats(__m128i halves) {
  if constexpr (TYPE == ElementType::F16) return _mm256_cvtph_ps(halves);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

// The lower (or upper) halves of four 32-bit words.
template <ElementType TYPE, bool UPPER>
ARCHFLASH_HOT __m256d four_doubles(__m128i words) {
  __m128 floats;
  if constexpr (TYPE == ElementType::BF16) {
    floats = _mm_castsi128_ps(UPPER ? _mm_and_si128(words, _mm_set1_epi32(~0xFFFF))
                                    : _mm_slli_epi32(words, 16));
  } else {
    const __m128i halves =
        UPPER ? _mm_srli_epi32(words, 16) : _mm_and_si128(words, _mm_set1_epi32(0xFFFF));
    floats = _mm_cvtph_ps(_mm_packus_epi32(halves, halves));
  }
  return _mm256_cvtps_pd(floats);
}

// A register of B: lane 4g + t has rows 2t and 2t + 1 of column g. `first`: its first row.
template <ElementType TYPE>
ARCHFLASH_HOT void read_b(const void* source, int first, Tiles& tiles) {
  const auto* rows = static_cast<const __m128i*>(source);
  for (int odd = 0; odd < 2; ++odd) {
    const __m128i c0 = _mm_loadu_si128(rows + odd), c1 = _mm_loadu_si128(rows + odd + 2);
    const __m128i c2 = _mm_loadu_si128(rows + odd + 4), c3 = _mm_loadu_si128(rows + odd + 6);
    const __m128i low01 = _mm_unpacklo_epi32(c0, c1), low23 = _mm_unpacklo_epi32(c2, c3);
    const __m128i high01 = _mm_unpackhi_epi32(c0, c1), high23 = _mm_unpackhi_epi32(c2, c3);
    const __m128i pairs[GROUP] = {
        _mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23),
        _mm_unpacklo_epi64(high01, high23), _mm_unpackhi_epi64(high01, high23)};
    for (int t = 0; t < GROUP; ++t) {
      _mm256_store_pd(&tiles.b[first + 2 * t][odd * GROUP], four_doubles<TYPE, false>(pairs[t]));
      _mm256_store_pd(&tiles.b[first + 2 * t + 1][odd * GROUP], four_doubles<TYPE, true>(pairs[t]));
    }
  }
}

// A register of A: lanes 4g .. 4g + 3 are eight columns of row g.
template <ElementType TYPE>
ARCHFLASH_HOT void read_a(const void* source, int first_row, int first_column, Tiles& tiles) {
  const auto* rows = static_cast<const __m128i*>(source);
  for (int g = 0; g < 8; ++g) {
    const __m256 floats = eight_floats<TYPE>(_mm_loadu_si128(rows + g));
    double* to = &tiles.a[first_row + g][first_column];
    _mm256_store_pd(to, _mm256_cvtps_pd(_mm256_castps256_ps128(floats)));
    _mm256_store_pd(to + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(floats, 1)));
  }
}

ARCHFLASH_HOT void store_sums(void* d, int g, __m256d sums) {
  __m128 floats = _mm256_cvtpd_ps(sums);
  const __m128 nan = _mm_cmpunord_ps(floats, floats);
  floats = _mm_blendv_ps(floats, _mm_castsi128_ps(_mm_set1_epi32(0x7FFFFFFF)), nan);
  _mm_storeu_ps(static_cast<float*>(d) + g * GROUP, floats);
}

template <ElementType TYPE, int DEPTH>
ARCHFLASH_HOT_ENTRY void multiply(const MmaShape&, const MmaOperands& operands) {
  Tiles tiles;
  for (int block = 0; block < DEPTH / 8; ++block) {
    read_a<TYPE>(operands.a[2 * block], 0, 8 * block, tiles);
    read_a<TYPE>(operands.a[2 * block + 1], 8, 8 * block, tiles);
    read_b<TYPE>(operands.b[block], 8 * block, tiles);
  }
  // Four rows at once: eight independent sums hide the latency of a multiply-add.
  for (int row = 0; row < ROWS; row += 4) {
    const int half = row / 8, g = row % 8;
    const auto* even = static_cast<const float*>(operands.c[2 * half]) + g * GROUP;
    const auto* odd = static_cast<const float*>(operands.c[2 * half + 1]) + g * GROUP;
    __m256d e0 = _mm256_cvtps_pd(_mm_loadu_ps(even)), o0 = _mm256_cvtps_pd(_mm_loadu_ps(odd));
    __m256d e1 = _mm256_cvtps_pd(_mm_loadu_ps(even + 4)),
            o1 = _mm256_cvtps_pd(_mm_loadu_ps(odd + 4));
    __m256d e2 = _mm256_cvtps_pd(_mm_loadu_ps(even + 8)),
            o2 = _mm256_cvtps_pd(_mm_loadu_ps(odd + 8));
    __m256d e3 = _mm256_cvtps_pd(_mm_loadu_ps(even + 12)),
            o3 = _mm256_cvtps_pd(_mm_loadu_ps(odd + 12));
#pragma GCC unroll 16
    for (int k = 0; k < DEPTH; ++k) {
      const __m256d b_even = _mm256_load_pd(tiles.b[k]), b_odd = _mm256_load_pd(tiles.b[k] + 4);
      const __m256d a0 = _mm256_broadcast_sd(&tiles.a[row][k]);
      e0 = _mm256_fmadd_pd(a0, b_even, e0);
      o0 = _mm256_fmadd_pd(a0, b_odd, o0);
      const __m256d a1 = _mm256_broadcast_sd(&tiles.a[row + 1][k]);
      e1 = _mm256_fmadd_pd(a1, b_even, e1);
      o1 = _mm256_fmadd_pd(a1, b_odd, o1);
      const __m256d a2 = _mm256_broadcast_sd(&tiles.a[row + 2][k]);
      e2 = _mm256_fmadd_pd(a2, b_even, e2);
      o2 = _mm256_fmadd_pd(a2, b_odd, o2);
      const __m256d a3 = _mm256_broadcast_sd(&tiles.a[row + 3][k]);
      e3 = _mm256_fmadd_pd(a3, b_even, e3);
      o3 = _mm256_fmadd_pd(a3, b_odd, o3);
    }
    // d may name registers of c, whose rows have been read; those of a and b have been, too.
    store_sums(operands.d[2 * half], g, e0);
    store_sums(operands.d[2 * half + 1], g, o0);
    store_sums(operands.d[2 * half], g + 1, e1);
    store_sums(operands.d[2 * half + 1], g + 1, o1);
    store_sums(operands.d[2 * half], g + 2, e2);
    store_sums(operands.d[2 * half + 1], g + 2, o2);
    store_sums(operands.d[2 * half], g + 3, e3);
    store_sums(operands.d[2 * half + 1], g + 3, o3);
  }
}

}  // namespace

MmaFunction find_hot_mma(const MmaShape& shape) {
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

}  // namespace archflash::sim

#else

namespace archflash::sim {
MmaFunction find_hot_mma(const MmaShape&) { return nullptr; }
}  // namespace archflash::sim

#endif
