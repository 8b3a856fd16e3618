#include "sim/numerics/fma_product.h"

#include <immintrin.h>

#include <cmath>
#include <cstddef>

#include "sim/numerics/cpu.h"

namespace archflash::sim {
namespace {

void add_slowly(const float* a, size_t a_pitch, const float* b, float* d, int k, bool accumulate) {
  for (int row = 0; row < FMA_ROWS; ++row) {
    float sum = accumulate ? d[row] : 0.0f;
    for (int i = 0; i < k; ++i)
      sum = std::fma(b[i], a[static_cast<size_t>(i) * a_pitch + row], sum);
    d[row] = sum;
  }
}

// Each of eight registers holds eight rows.
__attribute__((target("avx2,fma"))) void add_avx2(const float* a, size_t a_pitch, const float* b,
                                                  float* d, int k, bool accumulate) {
  constexpr int WIDTH = 8, COUNT = FMA_ROWS / WIDTH;
  __m256 sums[COUNT];
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; ++i) {
    sums[i] = accumulate ? _mm256_loadu_ps(d + i * WIDTH) : _mm256_setzero_ps();
  }
  for (int at = 0; at < k; ++at) {
    const __m256 factor = _mm256_broadcast_ss(b + at);
    const float* const row = a + static_cast<size_t>(at) * a_pitch;
#pragma GCC unroll 8
    for (int i = 0; i < COUNT; ++i) {
      sums[i] = _mm256_fmadd_ps(factor, _mm256_loadu_ps(row + i * WIDTH), sums[i]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < COUNT; ++i) _mm256_storeu_ps(d + i * WIDTH, sums[i]);
}

}  // namespace

void add_fma_product(const float* a, const float* b, float* d, int d_pitch, int n, int rows, int k,
                     bool accumulate) {
  const auto add = uses_avx2() ? add_avx2 : add_slowly;
  const auto a_pitch = static_cast<size_t>(rows);
  for (int column = 0; column < n; ++column) {
    for (int first = 0; first < rows; first += FMA_ROWS) {
      add(a + first, a_pitch, b + ptrdiff_t{column} * k, d + ptrdiff_t{column} * d_pitch + first, k,
          accumulate);
    }
  }
}

}  // namespace archflash::sim
