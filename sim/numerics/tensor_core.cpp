#include "sim/numerics/tensor_core.h"

#include <cmath>
#include <cstring>

#include "sim/numerics/convert.h"
#include "sim/numerics/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace archflash::sim {
namespace {

// ---- Any operands, one element at a time --------------------------------------------------------

constexpr int NO_EXPONENT = -500;  // above every exponent of a product with zero

// A double in f32 or f16, cut off or rounded once.
uint64_t narrowed(NumericType to, Round round, double value) {
  const CvtSpec spec{to, NumericType::F64, round};
  return find_cvt(spec)(spec, bits_of(value), 0);
}

constexpr int FLOAT_FRACTION_BITS = 23;

// The bits that a sum of so many bits of fraction keeps of a float's.
constexpr uint32_t kept_bits(int fraction_bits) {
  return ~0u << std::max(FLOAT_FRACTION_BITS - fraction_bits, 0);
}

float rounded_to_f16(double value) {
  return f32_of_f16(static_cast<uint16_t>(narrowed(NumericType::F16, Round::RN, value)));
}

void add_slowly(const TileA& a, const TileB& b, TileC& c, int first, const Additions& additions) {
  for (int row = 0; row < TILE_ROWS; ++row) {
    for (int column = 0; column < TILE_COLUMNS; ++column) {
      float& value = c.value[row][column];
      value = sum_element(a, b, value, row, column, first, additions);
    }
  }
}

// ---- Most operands, in 32-bit arithmetic, eight columns at a time -------------------------------

using AddFunction = bool (*)(const TileA& a, const TileB& b, TileC& c, int first);

#if defined(__x86_64__)

#define ARCHFLASH_AVX2 __attribute__((target("avx2,fma,f16c")))
#define ARCHFLASH_AVX2_INLINE __attribute__((target("avx2,fma,f16c"), always_inline)) inline

// A sum fits into 32 bits if its largest exponent is in this range, or if it is a sum of zeros.
constexpr int LOW_EXPONENT = -100;
constexpr int HIGH_EXPONENT = 100;
// Each half of the products has a sum, which c may be in, too. Sixteen products stay below 2^31.
// With c they may overflow, and then look larger than this; two sums that are not larger add up.
constexpr uint32_t LARGE_SUM = (1u << 30) - (1u << 26);

// The exponents of a row's products in each column, for a pair of k.
ARCHFLASH_AVX2_INLINE __m256i pair_exponents(const int16_t* a, const TileB& b, int pair) {
  int32_t a_pair;
  std::memcpy(&a_pair, a + 2 * pair, sizeof(a_pair));
  const auto* b_pair = reinterpret_cast<const __m256i*>(b.exponent[pair]);
  return _mm256_add_epi16(_mm256_set1_epi32(a_pair), _mm256_load_si256(b_pair));
}

// The largest exponent of a row's products in each column.
template <int DEPTH>
ARCHFLASH_AVX2_INLINE __m256i products_exponent(const int16_t* a, const TileB& b, int first) {
  // Two chains of dependent operations have half the latency of one.
  __m256i even = pair_exponents(a, b, first / 2), odd = pair_exponents(a, b, first / 2 + 1);
#pragma GCC unroll 8
  for (int pair = first / 2 + 2; pair < (first + DEPTH) / 2; pair += 2) {
    even = _mm256_max_epi16(even, pair_exponents(a, b, pair));
    odd = _mm256_max_epi16(odd, pair_exponents(a, b, pair + 1));
  }
  const __m256i both = _mm256_max_epi16(even, odd);
  return _mm256_max_epi32(_mm256_srai_epi32(_mm256_slli_epi32(both, 16), 16),
                          _mm256_srai_epi32(both, 16));
}

// exponent_of for eight finite values, in 32 bits each; infinities and NaN have 128.
ARCHFLASH_AVX2_INLINE __m256i finite_exponents(__m256 values, int smallest) {
  const __m256i magnitude = _mm256_slli_epi32(_mm256_castps_si256(values), 1);
  const __m256i exponent =
      _mm256_max_epi32(_mm256_sub_epi32(_mm256_srli_epi32(magnitude, 24), _mm256_set1_epi32(127)),
                       _mm256_set1_epi32(smallest));
  const __m256i zero = _mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256());
  return _mm256_add_epi32(exponent, _mm256_and_si256(zero, _mm256_set1_epi32(ZERO_EXPONENT)));
}

// exponent_of for eight values, in 32 bits each.
ARCHFLASH_AVX2_INLINE __m256i exponents_of(__m256 values, int smallest) {
  constexpr int OF_SPECIAL = 128;
  const __m256i exponent = finite_exponents(values, smallest);
  const __m256i special = _mm256_cmpeq_epi32(exponent, _mm256_set1_epi32(OF_SPECIAL));
  return _mm256_blendv_epi8(exponent, _mm256_set1_epi32(SPECIAL_EXPONENT), special);
}

ARCHFLASH_AVX2 void set_fast(TileA& a, int k, int smallest) {
  constexpr int WIDTH = 8, ORDER = 0xD8;
  for (int row = 0; row < TILE_ROWS; ++row) {
    for (int i = 0; i < k; i += WIDTH) {
      const __m256i exponent = exponents_of(_mm256_load_ps(a.value[row] + i), smallest);
      const __m256i packed =
          _mm256_permute4x64_epi64(_mm256_packs_epi32(exponent, exponent), ORDER);
      _mm_store_si128(reinterpret_cast<__m128i*>(a.exponent[row] + i),
                      _mm256_castsi256_si128(packed));
    }
  }
}

ARCHFLASH_AVX2 void set_fast(TileB& b, int k, int smallest) {
  for (int i = 0; i < k; i += 2) {
    const __m256i first = exponents_of(_mm256_load_ps(b.value[i]), smallest);
    const __m256i second = exponents_of(_mm256_load_ps(b.value[i + 1]), smallest);
    _mm256_store_si256(reinterpret_cast<__m256i*>(b.exponent[i / 2]),
                       _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xAA));
  }
}

// sum * unit, cut off toward zero, or rounded to nearest for .f16. `magnitude` is that of the sum.
template <int FRACTION_BITS, bool TO_F16>
ARCHFLASH_AVX2_INLINE __m256 cut_to_floats(__m256i sum, __m256i magnitude, __m256 unit) {
  const __m256 nearest = _mm256_cvtepi32_ps(magnitude);
  const __m256i back = _mm256_cvttps_epi32(nearest);
  // Where rounding to nearest went up, this takes one step back.
  __m256i bits =
      _mm256_add_epi32(_mm256_castps_si256(nearest), _mm256_cmpgt_epi32(back, magnitude));
  if (TO_F16) {  // the last bit says whether something was cut off, so that rounding again is right
    const __m256i exact = _mm256_cmpeq_epi32(back, magnitude);
    bits = _mm256_or_si256(bits, _mm256_andnot_si256(exact, _mm256_set1_epi32(1)));
  } else if (kept_bits(FRACTION_BITS) != ~0u) {
    bits =
        _mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int32_t>(kept_bits(FRACTION_BITS))));
  }
  const __m256i sign = _mm256_and_si256(sum, _mm256_set1_epi32(INT32_MIN));
  const __m256 value =
      _mm256_or_ps(_mm256_mul_ps(_mm256_castsi256_ps(bits), unit), _mm256_castsi256_ps(sign));
  if (!TO_F16) return value;
  return _mm256_cvtph_ps(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}

ARCHFLASH_AVX2_INLINE __m256i below(__m256i x, uint32_t limit) {  // x < limit, unsigned
  const __m256i last = _mm256_set1_epi32(static_cast<int32_t>(limit - 1));
  return _mm256_cmpeq_epi32(_mm256_min_epu32(x, last), x);
}

// One addition, of the products from `first` on. Returns false, and leaves c as it was, where the
// operands do not allow it.
template <int DEPTH, int FRACTION_BITS, bool TO_F16>
ARCHFLASH_AVX2 bool add_avx2(const TileA& a, const TileB& b, TileC& c, int first) {
  TileC result;
  __m256i highest = _mm256_setzero_si256();
  __m256i lowest = _mm256_set1_epi32(-1);  // unsigned, as is the next
  __m256i largest_sum = _mm256_setzero_si256();
  for (int row = 0; row < TILE_ROWS; ++row) {
    // Without this the compiler reads all of b before the loop, and spills it.
    asm volatile("" ::: "memory");
    const __m256 old = _mm256_load_ps(c.value[row]);
    __m256i largest = _mm256_max_epi32(products_exponent<DEPTH>(a.exponent[row], b, first),
                                       finite_exponents(old, TO_F16 ? F16_SMALLEST : F32_SMALLEST));
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
#pragma GCC unroll 32
    for (int k = 0; k < DEPTH; ++k) {
      const __m256 product = _mm256_mul_ps(_mm256_broadcast_ss(&a.value[row][first + k]),
                                           _mm256_load_ps(b.value[first + k]));
      __m256i& sum = k % 2 == 0 ? even : odd;
      sum = _mm256_add_epi32(sum, _mm256_cvttps_epi32(_mm256_mul_ps(product, scale)));
    }
    const __m256i sum = _mm256_add_epi32(even, odd);
    largest_sum = _mm256_max_epu32(largest_sum,
                                   _mm256_max_epu32(_mm256_abs_epi32(even), _mm256_abs_epi32(odd)));
    _mm256_store_ps(result.value[row],
                    cut_to_floats<FRACTION_BITS, TO_F16>(sum, _mm256_abs_epi32(sum), unit));
  }
  const __m256i fits = below(largest_sum, LARGE_SUM);
  const __m256i unfit =
      _mm256_or_si256(_mm256_cmpgt_epi32(highest, _mm256_set1_epi32(HIGH_EXPONENT)),
                      below(lowest, LOW_EXPONENT - NO_EXPONENT));
  if (_mm256_movemask_epi8(_mm256_andnot_si256(unfit, fits)) != -1) return false;
  c = result;
  return true;
}

template <int DEPTH, int FRACTION_BITS>
AddFunction add_of(bool to_f16) {
  return to_f16 ? add_avx2<DEPTH, FRACTION_BITS, true> : add_avx2<DEPTH, FRACTION_BITS, false>;
}

template <int FRACTION_BITS>
AddFunction add_of(int depth, bool to_f16) {
  return depth == 4    ? add_of<4, FRACTION_BITS>(to_f16)
         : depth == 8  ? add_of<8, FRACTION_BITS>(to_f16)
         : depth == 16 ? add_of<16, FRACTION_BITS>(to_f16)
                       : add_of<32, FRACTION_BITS>(to_f16);
}

AddFunction add_of(const Additions& additions) {
  switch (additions.fraction_bits) {
    case 13:
      return add_of<13>(additions.depth, additions.to_f16);
    case 24:
      return add_of<24>(additions.depth, additions.to_f16);
    case 25:
      return add_of<25>(additions.depth, additions.to_f16);
    default:
      return nullptr;
  }
}

#endif

// The function that adds with AVX2; nullptr where there is none.
AddFunction find_avx2([[maybe_unused]] const Additions& additions) {
  ARCHFLASH_RETURN_IF_AVX2(add_of(additions));
  return nullptr;
}

}  // namespace

float cut_to_float(double value, int fraction_bits) {
  if (std::fabs(value) >= 0x1p128) return std::copysign(INFINITY, static_cast<float>(value));
  return f32_of(static_cast<uint32_t>(narrowed(NumericType::F32, Round::RZ, value)) &
                kept_bits(fraction_bits));
}

float sum_element(const TileA& a, const TileB& b, float c, int row, int column, int first,
                  const Additions& additions, int scale) {
  int largest = exponent_of(c, additions.to_f16 ? F16_SMALLEST : F32_SMALLEST);
  for (int k = first; k < first + additions.depth; ++k) {
    largest = std::max(largest, a.exponent[row][k] + b.exponent[k / 2][column][k % 2] + scale);
  }
  if (largest < NO_EXPONENT) return 0.0f;
  if (largest > SPECIAL_EXPONENT / 2 || !std::isfinite(c)) {  // infinities and NaN follow IEEE 754
    float sum = c;
    for (int k = first; k < first + additions.depth; ++k) {
      const float product = a.value[row][k] * b.value[k][column];
      if (!std::isfinite(a.value[row][k]) || !std::isfinite(b.value[k][column])) sum += product;
    }
    return canonical(sum);
  }
  // Sums are in units of the last place that counts. A double has every bit of a product.
  const int fraction_bits = additions.fraction_bits;
  const double c_unit = std::ldexp(1.0, fraction_bits - largest);
  const double unit = std::ldexp(c_unit, scale);
  auto sum = static_cast<int64_t>(double{c} * c_unit);
  for (int k = first; k < first + additions.depth; ++k) {
    sum += static_cast<int64_t>(double{a.value[row][k]} * double{b.value[k][column]} * unit);
  }
  const double result = std::ldexp(static_cast<double>(sum), largest - fraction_bits);
  return additions.to_f16 ? rounded_to_f16(result) : cut_to_float(result, fraction_bits);
}

void set_exponents(TileA& a, int k, int smallest) {
  if (k % TILE_COLUMNS == 0) ARCHFLASH_RETURN_IF_AVX2(set_fast(a, k, smallest));
  for (int row = 0; row < TILE_ROWS; ++row) {
    for (int i = 0; i < k; ++i) a.exponent[row][i] = exponent_of(a.value[row][i], smallest);
  }
}

void set_exponents(TileB& b, int k, int smallest) {
  ARCHFLASH_RETURN_IF_AVX2(set_fast(b, k, smallest));
  for (int i = 0; i < k; ++i) {
    for (int column = 0; column < TILE_COLUMNS; ++column) {
      b.exponent[i / 2][column][i % 2] = exponent_of(b.value[i][column], smallest);
    }
  }
}

void add_products(const TileA& a, const TileB& b, TileC& c, int k, const Additions& additions) {
  Additions step = additions;
  step.depth = std::min(step.depth, k);
  const AddFunction add = find_avx2(step);
  for (int first = 0; first < k; first += step.depth) {
    if (add == nullptr || !add(a, b, c, first)) add_slowly(a, b, c, first, step);
  }
}

}  // namespace archflash::sim
