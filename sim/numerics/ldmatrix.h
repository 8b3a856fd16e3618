// Which element of an 8 x 8 matrix lies in which lane: ldmatrix, stmatrix and movmatrix (.m8n8 of
// .b16).
//
// Matrix i of .x1, .x2, .x4 is register i; its row r is the 16 bytes at the address that lane
// 8 * i + r gives. A register of a warp is 32 lanes that follow one another in memory.
#pragma once

#include <cstdint>

namespace archflash::sim {

constexpr int LDMATRIX_ROWS = 8;
constexpr int LDMATRIX_ROW_BYTES = 16;

// Where the two 16-bit elements of a lane's register lie in the 8 x 8 matrix.
struct MatrixElement {
  uint8_t row, column;
};
constexpr MatrixElement ldmatrix_element(int lane, int half, bool trans) {
  const auto outer = static_cast<uint8_t>(lane / 4);
  const auto inner = static_cast<uint8_t>(lane % 4 * 2 + half);
  return trans ? MatrixElement{inner, outer} : MatrixElement{outer, inner};
}

// These bring eight rows, as they lie in memory, into one register of the warp, and back.
void ldmatrix_m8n8_b16(const uint16_t rows[8][8], bool trans, uint32_t* d);
void stmatrix_m8n8_b16(const uint32_t* source, bool trans, uint16_t rows[8][8]);
void movmatrix_m8n8_trans_b16(const uint32_t* a, uint32_t* d);  // d may be a

}  // namespace archflash::sim
