#include "sim/numerics/tensor_core.h"

#include <immintrin.h>

#include <cmath>
#include <cstring>

#include "sim/numerics/convert.h"
#include "sim/numerics/cpu.h"

namespace archflash::sim {
namespace {

// ---- Any operands, one element at a time --------------------------------------------------------

constexpr int NO_EXPONENT = -500;  // above every exponent of a product with zero

// A double in f32 or f16, cut off or rounded once.
uint64_t narrowed(NumericType to, Round round, double value) {
  const CvtSpec spec{to, NumericType::F64, round};
  return find_cvt(spec)(spec, bits_of(value), 0);
}

float cut_to_float(double value) {
  if (std::fabs(value) >= 0x1p128) return std::copysign(INFINITY, static_cast<float>(value));
  return f32_of(static_cast<uint32_t>(narrowed(NumericType::F32, Round::RZ, value)));
}

float rounded_to_f16(double value) {
  return f32_of_f16(static_cast<uint16_t>(narrowed(NumericType::F16, Round::RN, value)));
}

float sum_element(const TileA& a, const TileB& b, float c, int row, int column, int depth,
                  bool to_f16) {
  int largest = exponent_of(c, to_f16 ? F16_SMALLEST : F32_SMALLEST);
  for (int k = 0; k < depth; ++k) {
    largest = std::max(largest, a.exponent[row][k] + b.exponent[k / 2][column][k % 2]);
  }
  if (largest < NO_EXPONENT) return 0.0f;
  if (largest > SPECIAL_EXPONENT / 2 || !std::isfinite(c)) {  // infinities and NaN follow IEEE 754
    float sum = c;
    for (int k = 0; k < depth; ++k) {
      const float product = a.value[row][k] * b.value[k][column];
      if (!std::isfinite(a.value[row][k]) || !std::isfinite(b.value[k][column])) sum += product;
    }
    return canonical(sum);
  }
  // Sums are in units of the last place that counts. A double has every bit of a product.
  const double scale = std::ldexp(1.0, FRACTION_BITS - largest);
  auto sum = static_cast<int64_t>(double{c} * scale);
  for (int k = 0; k < depth; ++k) {
    sum += static_cast<int64_t>(double{a.value[row][k]} * double{b.value[k][column]} * scale);
  }
  const double result = std::ldexp(static_cast<double>(sum), largest - FRACTION_BITS);
  return to_f16 ? rounded_to_f16(result) : cut_to_float(result);
}

void add_slowly(const TileA& a, const TileB& b, TileC& c, int depth, bool to_f16) {
  for (int row = 0; row < TILE_ROWS; ++row) {
    for (int column = 0; column < TILE_COLUMNS; ++column) {
      float& value = c.value[row][column];
      value = sum_element(a, b, value, row, column, depth, to_f16);
    }
  }
}

// ---- Most operands, in 32-bit arithmetic, eight columns at a time -------------------------------

#define ARCHFLASH_AVX2 __attribute__((target("avx2,fma,f16c")))
#define ARCHFLASH_AVX2_INLINE __attribute__((target("avx2,fma,f16c"), always_inline)) inline

// A sum fits into 32 bits if its largest exponent is in this range, or if it is a sum of zeros.
constexpr int LOW_EXPONENT = -100;
constexpr int HIGH_EXPONENT = 100;
// Sixteen products stay below 2^31. With c they may overflow, and then look larger than this.
constexpr uint32_t LARGE_SUM = (1u << 31) - (1u << (FRACTION_BITS + 1)) - 1;

// The exponents of a row's products in each column, for a pair of k.
ARCHFLASH_AVX2_INLINE __m256i pair_exponents(const int16_t* a, const TileB& b, int pair) {
  int32_t a_pair;
  std::memcpy(&a_pair, a + 2 * pair, sizeof(a_pair));
  const auto* b_pair = reinterpret_cast<const __m256i*>(b.exponent[pair]);
  return _mm256_add_epi16(_mm256_set1_epi32(a_pair), _mm256_load_si256(b_pair));
}

// The largest exponent of a row's products in each column.
template <int DEPTH>
ARCHFLASH_AVX2_INLINE __m256i products_exponent(const int16_t* a, const TileB& b) {
  // Two chains of dependent operations have half the latency of one.
  __m256i even = pair_exponents(a, b, 0), odd = pair_exponents(a, b, 1);
#pragma GCC unroll 4
  for (int pair = 2; pair < DEPTH / 2; pair += 2) {
    even = _mm256_max_epi16(even, pair_exponents(a, b, pair));
    odd = _mm256_max_epi16(odd, pair_exponents(a, b, pair + 1));
  }
  const __m256i both = _mm256_max_epi16(even, odd);
  return _mm256_max_epi32(_mm256_srai_epi32(_mm256_slli_epi32(both, 16), 16),
                          _mm256_srai_epi32(both, 16));
}

ARCHFLASH_AVX2_INLINE __m256i exponents_of_c(__m256 c, int smallest) {
  const __m256i magnitude = _mm256_slli_epi32(_mm256_castps_si256(c), 1);
  const __m256i exponent =
      _mm256_max_epi32(_mm256_sub_epi32(_mm256_srli_epi32(magnitude, 24), _mm256_set1_epi32(127)),
                       _mm256_set1_epi32(smallest));
  const __m256i zero = _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256());
  return _mm256_add_epi32(exponent, _mm256_and_si256(zero, _mm256_set1_epi32(ZERO_EXPONENT)));
}

// sum * unit, cut off toward zero. For .f16, the last bit says whether something was cut off, so
// that rounding once more is right. `magnitude` is that of the sum.
template <bool TO_F16>
ARCHFLASH_AVX2_INLINE __m256 cut_to_floats(__m256i sum, __m256i magnitude, __m256 unit) {
  const __m256 nearest = _mm256_cvtepi32_ps(magnitude);
  const __m256i back = _mm256_cvttps_epi32(nearest);
  // Where rounding to nearest went up, this takes one step back.
  __m256i bits =
      _mm256_add_epi32(_mm256_castps_si256(nearest), _mm256_cmpgt_epi32(back, magnitude));
  if (TO_F16) {
    const __m256i exact = _mm256_cmpeq_epi32(back, magnitude);
    bits = _mm256_or_si256(bits, _mm256_andnot_si256(exact, _mm256_set1_epi32(1)));
  }
  const __m256i sign = _mm256_and_si256(sum, _mm256_set1_epi32(INT32_MIN));
  return _mm256_or_ps(_mm256_mul_ps(_mm256_castsi256_ps(bits), unit), _mm256_castsi256_ps(sign));
}

ARCHFLASH_AVX2_INLINE __m256i below(__m256i x, uint32_t limit) {  // x < limit, unsigned
  const __m256i last = _mm256_set1_epi32(static_cast<int32_t>(limit - 1));
  return _mm256_cmpeq_epi32(_mm256_min_epu32(x, last), x);
}

// Returns false, and leaves c as it was, where the operands do not allow it.
template <int DEPTH, bool TO_F16>
ARCHFLASH_AVX2 bool add_avx2(const TileA& a, const TileB& b, TileC& c) {
  TileC result;
  __m256i highest = _mm256_setzero_si256();
  __m256i lowest = _mm256_set1_epi32(-1);  // unsigned, as is the next
  __m256i largest_sum = _mm256_setzero_si256();
  for (int row = 0; row < TILE_ROWS; ++row) {
    // Without this the compiler reads all of b before the loop, and spills it.
    asm volatile("" ::: "memory");
    const __m256 old = _mm256_load_ps(c.value[row]);
    __m256i largest = _mm256_max_epi32(products_exponent<DEPTH>(a.exponent[row], b),
                                       exponents_of_c(old, TO_F16 ? F16_SMALLEST : F32_SMALLEST));
    highest = _mm256_max_epi32(highest, largest);
    // Zeros alone are below NO_EXPONENT, here the largest unsigned numbers.
    lowest = _mm256_min_epu32(lowest, _mm256_sub_epi32(largest, _mm256_set1_epi32(NO_EXPONENT)));
    largest = _mm256_slli_epi32(_mm256_max_epi32(largest, _mm256_set1_epi32(LOW_EXPONENT)), 23);
    const __m256 scale = _mm256_castsi256_ps(
        _mm256_sub_epi32(_mm256_set1_epi32((127 + FRACTION_BITS) << 23), largest));
    const __m256 unit = _mm256_castsi256_ps(
        _mm256_add_epi32(_mm256_set1_epi32((127 - FRACTION_BITS) << 23), largest));
    // A product and its scaling are exact, or the product is far too small to count.
    __m256i even = _mm256_cvttps_epi32(_mm256_mul_ps(old, scale));
    __m256i odd = _mm256_setzero_si256();
#pragma GCC unroll 16
    for (int k = 0; k < DEPTH; ++k) {
      const __m256 product =
          _mm256_mul_ps(_mm256_broadcast_ss(&a.value[row][k]), _mm256_load_ps(b.value[k]));
      __m256i& sum = k % 2 == 0 ? even : odd;
      sum = _mm256_add_epi32(sum, _mm256_cvttps_epi32(_mm256_mul_ps(product, scale)));
    }
    const __m256i sum = _mm256_add_epi32(even, odd);
    const __m256i magnitude = _mm256_abs_epi32(sum);
    largest_sum = _mm256_max_epu32(largest_sum, magnitude);
    _mm256_store_ps(result.value[row], cut_to_floats<TO_F16>(sum, magnitude, unit));
  }
  const __m256i fits = below(largest_sum, LARGE_SUM);
  const __m256i unfit =
      _mm256_or_si256(_mm256_cmpgt_epi32(highest, _mm256_set1_epi32(HIGH_EXPONENT)),
                      below(lowest, LOW_EXPONENT - NO_EXPONENT));
  if (_mm256_movemask_epi8(_mm256_andnot_si256(unfit, fits)) != -1) return false;
  c = result;
  return true;
}

bool add_fast(const TileA& a, const TileB& b, TileC& c, int depth, bool to_f16) {
  switch (depth) {
    case 4:
      return to_f16 ? add_avx2<4, true>(a, b, c) : add_avx2<4, false>(a, b, c);
    case 8:
      return to_f16 ? add_avx2<8, true>(a, b, c) : add_avx2<8, false>(a, b, c);
    default:
      return to_f16 ? add_avx2<16, true>(a, b, c) : add_avx2<16, false>(a, b, c);
  }
}

}  // namespace

void add_products(const TileA& a, const TileB& b, TileC& c, int depth, bool to_f16) {
  if (uses_avx2() && add_fast(a, b, c, depth, to_f16)) return;
  add_slowly(a, b, c, depth, to_f16);
}

}  // namespace archflash::sim
