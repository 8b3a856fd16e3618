#include "sim/numerics/ldmatrix.h"

#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace archflash::sim {

void ldmatrix_m8n8_b16(const uint16_t rows[8][8], bool trans, uint32_t* d) {
  if (!trans) {
    // A lane's two elements follow one another: register and matrix are the same bytes.
    std::memcpy(d, rows, 8 * LDMATRIX_ROW_BYTES);
    return;
  }
#if defined(__SSE2__)
  // The register is the bytes of the transposed matrix.
  __m128i line[8], pairs[8], quads[8];
  for (int i = 0; i < 8; ++i) line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[i]));
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm_unpacklo_epi16(line[i], line[i + 1]);
    pairs[i + 1] = _mm_unpackhi_epi16(line[i], line[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    for (int half = 0; half < 2; ++half) {
      quads[i + 2 * half] = _mm_unpacklo_epi32(pairs[i + half], pairs[i + 2 + half]);
      quads[i + 2 * half + 1] = _mm_unpackhi_epi32(pairs[i + half], pairs[i + 2 + half]);
    }
  }
  auto* const out = reinterpret_cast<__m128i*>(d);
  for (int i = 0; i < 4; ++i) {
    _mm_storeu_si128(out + 2 * i, _mm_unpacklo_epi64(quads[i], quads[i + 4]));
    _mm_storeu_si128(out + 2 * i + 1, _mm_unpackhi_epi64(quads[i], quads[i + 4]));
  }
#else
  for (int lane = 0; lane < 32; ++lane) {
    const MatrixElement low = ldmatrix_element(lane, 0, true);
    const MatrixElement high = ldmatrix_element(lane, 1, true);
    d[lane] = uint32_t{rows[high.row][high.column]} << 16 | rows[low.row][low.column];
  }
#endif
}

void stmatrix_m8n8_b16(const uint32_t* source, bool trans, uint16_t rows[8][8]) {
  for (int lane = 0; lane < 32; ++lane) {
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

}  // namespace archflash::sim
