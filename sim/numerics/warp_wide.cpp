#include "sim/numerics/warp_wide.h"

#include "sim/numerics/approximate.h"
#include "sim/numerics/convert.h"
#include "sim/numerics/cpu.h"
#include "sim/numerics/float.h"
#include "sim/numerics/function_unit.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace archflash::sim {
namespace {

template <bool FTZ>
void fma_baseline(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  for (int i = 0; i < WARP; ++i) {
    d[i] =
        bits_of(fma_f32_general(f32_of(a[i]), f32_of(b[i]), f32_of(c[i]), {Round::RN, FTZ, false}));
  }
}

#if defined(__x86_64__)

// The AVX2 functions use fused multiply-add only where PTX does: a contraction elsewhere would
// change bits.
#define ARCHFLASH_AVX2 __attribute__((target("avx2,f16c")))
#define ARCHFLASH_AVX2_FMA __attribute__((target("avx2,fma")))

ARCHFLASH_AVX2 inline __m256i load_lanes(const uint32_t* source) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
}
ARCHFLASH_AVX2 inline void store_lanes(uint32_t* target, __m256i lanes) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), lanes);
}

ARCHFLASH_AVX2 inline __m256 canonical_lanes(__m256 value) {
  const __m256 nan = _mm256_castsi256_ps(_mm256_set1_epi32(static_cast<int>(F32_NAN)));
  return _mm256_blendv_ps(value, nan, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

ARCHFLASH_AVX2 inline __m256 flush_lanes(__m256 value) {
  const __m256i exponent = _mm256_set1_epi32(0x7F800000);
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i small =
      _mm256_cmpeq_epi32(_mm256_and_si256(bits, exponent), _mm256_setzero_si256());
  const __m256i sign = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MIN));
  return _mm256_castsi256_ps(_mm256_blendv_epi8(bits, sign, small));
}

template <bool FTZ>
ARCHFLASH_AVX2_FMA void fma_avx2(uint32_t* d, const uint32_t* a, const uint32_t* b,
                                 const uint32_t* c) {
  for (int i = 0; i < WARP; i += 8) {
    __m256 x = _mm256_castsi256_ps(load_lanes(a + i));
    __m256 y = _mm256_castsi256_ps(load_lanes(b + i));
    __m256 z = _mm256_castsi256_ps(load_lanes(c + i));
    if (FTZ) x = flush_lanes(x), y = flush_lanes(y), z = flush_lanes(z);
    __m256 result = _mm256_fmadd_ps(x, y, z);
    if (FTZ) result = flush_lanes(result);
    store_lanes(d + i, _mm256_castps_si256(canonical_lanes(result)));
  }
}

// interpolate<F> of four mantissas' segments, x and squares, each in 64 bits.
template <Interpolation F>
ARCHFLASH_AVX2 inline __m256i add_terms(__m128i segments, __m256i x, __m256i square) {
  const auto* table = reinterpret_cast<const long long*>(F.table);
  const __m256i entry = _mm256_i32gather_epi64(table, segments, 8);
  const __m256i c0 = _mm256_slli_epi64(_mm256_srli_epi64(entry, 26), F.c0_shift);
  const __m256i c1 = _mm256_and_si256(_mm256_srli_epi64(entry, 10), _mm256_set1_epi64x(0xFFFF));
  const __m256i c2 = _mm256_and_si256(entry, _mm256_set1_epi64x(0x3FF));
  const __m256i slope = _mm256_mul_epu32(c1, x);
  const __m256i start = _mm256_add_epi64(c0, _mm256_set1_epi64x(F.bias));
  const __m256i linear =
      F.falling ? _mm256_sub_epi64(start, slope) : _mm256_add_epi64(start, slope);
  const __m256i curve = _mm256_slli_epi64(_mm256_mul_epu32(c2, square), F.c2_shift);
  return _mm256_srli_epi64(_mm256_add_epi64(linear, curve), F.result_shift);
}

template <Interpolation F>
ARCHFLASH_AVX2 inline __m256i interpolate_lanes(__m256i mantissa) {
  const __m256i x = _mm256_and_si256(mantissa, _mm256_set1_epi32((1 << F.x_bits) - 1));
  __m256i square = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int j = F.square_cut / 2; j < F.x_bits; ++j) {
    const __m256i lower = _mm256_and_si256(x, _mm256_set1_epi32((1 << j) - 1));
    const __m256i products = _mm256_add_epi32(_mm256_srli_epi32(lower, lower_shift<F>(j)),
                                              _mm256_set1_epi32(int(own_square<F>(j))));
    const __m256i bit = _mm256_srai_epi32(_mm256_slli_epi32(x, 31 - j), 31);
    square = _mm256_add_epi32(square, _mm256_and_si256(products, bit));
  }
  const __m256i segments = _mm256_srli_epi32(mantissa, F.x_bits);
  const __m256i low = add_terms<F>(_mm256_castsi256_si128(segments),
                                   _mm256_cvtepu32_epi64(_mm256_castsi256_si128(x)),
                                   _mm256_cvtepu32_epi64(_mm256_castsi256_si128(square)));
  const __m256i high = add_terms<F>(_mm256_extracti128_si256(segments, 1),
                                    _mm256_cvtepu32_epi64(_mm256_extracti128_si256(x, 1)),
                                    _mm256_cvtepu32_epi64(_mm256_extracti128_si256(square, 1)));
  // The lower words of both, in order.
  const __m256 words = _mm256_shuffle_ps(_mm256_castsi256_ps(low), _mm256_castsi256_ps(high), 0x88);
  return _mm256_permute4x64_epi64(_mm256_castps_si256(words), 0xD8);
}

// mufu_ex2 of each lane.
ARCHFLASH_AVX2 void ex2_avx2(uint32_t* d, const uint32_t* a) {
  const __m256i zero = _mm256_setzero_si256();
  for (int i = 0; i < WARP; i += 8) {
    const __m256i bits = load_lanes(a + i);
    const __m256 x = _mm256_castsi256_ps(bits);
    const __m256 magnitude =
        _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)));
    const __m256i fixed = _mm256_cvttps_epi32(
        _mm256_mul_ps(_mm256_min_ps(magnitude, _mm256_set1_ps(255.0f)), _mm256_set1_ps(0x1p23f)));
    const __m256i fraction_mask = _mm256_set1_epi32(MANTISSA);
    const __m256i integral = _mm256_cmpeq_epi32(_mm256_and_si256(fixed, fraction_mask), zero);
    const __m256i sign = _mm256_srai_epi32(bits, 31);
    // ~fixed where negative, and one more, which makes it -fixed, where that is integral.
    const __m256i exponent_of =
        _mm256_sub_epi32(_mm256_xor_si256(fixed, sign), _mm256_and_si256(sign, integral));
    const __m256i exponent = _mm256_srai_epi32(exponent_of, 23);
    __m256i result =
        _mm256_add_epi32(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23),
                         interpolate_lanes<EX2>(_mm256_and_si256(exponent_of, fraction_mask)));
    const __m256i vanishes = _mm256_cmpgt_epi32(_mm256_set1_epi32(-126), exponent);
    const __m256i overflows = _mm256_cmpgt_epi32(exponent, _mm256_set1_epi32(127));
    result = _mm256_andnot_si256(vanishes, result);
    result = _mm256_blendv_epi8(result, _mm256_set1_epi32(INFINITY_BITS), overflows);
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    store_lanes(d + i, _mm256_blendv_epi8(result, _mm256_set1_epi32(F32_NAN), nan));
  }
}

ARCHFLASH_AVX2 void cvt_f16x2_avx2(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  for (int i = 0; i < WARP; i += 8) {
    const __m256 upper = canonical_lanes(_mm256_castsi256_ps(load_lanes(a + i)));
    const __m256 lower = canonical_lanes(_mm256_castsi256_ps(load_lanes(b + i)));
    const __m256i high = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(upper, _MM_FROUND_TO_NEAREST_INT));
    const __m256i low = _mm256_cvtepu16_epi32(_mm256_cvtps_ph(lower, _MM_FROUND_TO_NEAREST_INT));
    store_lanes(d + i, _mm256_or_si256(_mm256_slli_epi32(high, 16), low));
  }
}

// bf16 in the upper half of each lane; the lower half is to be cut off.
ARCHFLASH_AVX2 inline __m256i bf16_lanes(const uint32_t* source) {
  const __m256 value = canonical_lanes(_mm256_castsi256_ps(load_lanes(source)));
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  // The canonical NaN would round into the sign.
  const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  return _mm256_blendv_epi8(rounded, bits, _mm256_castps_si256(nan));
}

ARCHFLASH_AVX2 void cvt_bf16x2_avx2(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  for (int i = 0; i < WARP; i += 8) {
    const __m256i upper = bf16_lanes(a + i);
    const __m256i lower = _mm256_srli_epi32(bf16_lanes(b + i), 16);
    store_lanes(d + i, _mm256_blend_epi16(upper, lower, 0x55));
  }
}

#endif

}  // namespace

void ex2_approx_ftz_f32_warp(uint32_t* d, const uint32_t* a) {
  ARCHFLASH_RETURN_IF_AVX2(ex2_avx2(d, a));
  for (int i = 0; i < WARP; ++i) d[i] = bits_of(ex2_approx_f32(f32_of(a[i]), true));
}

void cvt_rn_f16x2_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  ARCHFLASH_RETURN_IF_AVX2(cvt_f16x2_avx2(d, a, b));
  for (int i = 0; i < WARP; ++i) {
    d[i] = uint32_t{cvt_rn_f16_f32(f32_of(a[i]))} << 16 | cvt_rn_f16_f32(f32_of(b[i]));
  }
}

void cvt_rn_bf16x2_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b) {
  ARCHFLASH_RETURN_IF_AVX2(cvt_bf16x2_avx2(d, a, b));
  for (int i = 0; i < WARP; ++i) {
    d[i] = uint32_t{cvt_rn_bf16_f32(f32_of(a[i]))} << 16 | cvt_rn_bf16_f32(f32_of(b[i]));
  }
}

void fma_rn_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  ARCHFLASH_RETURN_IF_AVX2(fma_avx2<false>(d, a, b, c));
  fma_baseline<false>(d, a, b, c);
}

void fma_rn_ftz_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c) {
  ARCHFLASH_RETURN_IF_AVX2(fma_avx2<true>(d, a, b, c));
  fma_baseline<true>(d, a, b, c);
}

}  // namespace archflash::sim
