// Matrix instructions of one warp: mma.sync, and the lane maps of ldmatrix, stmatrix and movmatrix.
//
// A register of a warp is 32 lanes that follow one another: uint32_t[32] for a 32-bit register,
// uint64_t[32] for an .f64 one. A fragment is an array of pointers to such registers, in the order
// in which PTX lists them.
//
// How mma.sync adds up (PTX leaves order and precision open) is what an H200 does, to the last bit:
// - .f16, .bf16, .tf32: all of k in one addition, see tensor_core.h;
// - .e4m3, .e5m2: as .f16 in two additions from zero; then c is added (a card of capability 8.9 or
//   12.0 has an instruction for it, which may add up otherwise: not measured);
// - m8n8k4 with .f16: fused multiply-adds in float, in the order of k from zero; then c is added;
// - .f64: fused multiply-adds in the order of k, from c; a NaN is that of the operation;
// - .s32: exact modulo 2^32, or clamped (.satfinite).
#pragma once

#include <cstdint>

namespace archflash::sim {

enum class ElementType : uint8_t { F16, BF16, TF32, F32, F64, E4M3, E5M2, S8, U8, S4, U4, B1, S32 };

// One form of mma.sync.aligned.mMnNkK{.row|.col}{.row|.col}{.satfinite}.d.a.b.c{.xor|.and}{.popc}.
struct MmaShape {
  int m, n, k;
  ElementType d, a, b, c;
  bool a_column_major = false;  // .col for A: only m8n8k4 with .f16
  bool b_row_major = false;     // .row for B: likewise
  bool satfinite = false;       // .satfinite, for .s32
  bool b1_and = false;          // .and.popc instead of .xor.popc, for .b1
};

// Pointers to the registers of each fragment; d may name registers of the others.
struct MmaOperands {
  void* d[8];
  const void* a[8];
  const void* b[4];
  const void* c[8];
};

// How many registers each fragment has: 32-bit ones, 64-bit ones where the type is F64.
struct MmaRegisters {
  int d, a, b, c;
};

using MmaFunction = void (*)(const MmaShape& shape, const MmaOperands& operands);

// The function for a form of mma.sync, nullptr if PTX has no such form (or it is sparse or block
// scaled, which is not simulated). Resolve once, when the PTX is loaded.
MmaFunction find_mma(const MmaShape& shape);
MmaRegisters mma_registers(const MmaShape& shape);  // of a shape that find_mma knows

inline void mma_sync(const MmaShape& shape, const MmaOperands& operands) {
  find_mma(shape)(shape, operands);
}

// Whether AVX2 code is in use; set_avx2(false) makes this process use the baseline code, so that a
// test can compare the two. set_avx2(true) has no effect where the machine lacks it.
bool uses_avx2();
void set_avx2(bool enabled);

// ---- ldmatrix, stmatrix, movmatrix: .m8n8 of .b16 ----------------------------------------------
// Matrix i of .x1, .x2, .x4 is register i; its row r is the 16 bytes at the address that lane
// 8 * i + r gives.

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

// Eight rows as read from memory into one register of the warp, and back.
void ldmatrix_m8n8_b16(const uint16_t rows[8][8], bool trans, uint32_t* d);
void stmatrix_m8n8_b16(const uint32_t* source, bool trans, uint16_t rows[8][8]);
void movmatrix_m8n8_trans_b16(const uint32_t* a, uint32_t* d);  // d may be a

// ---- Dense products, for the instructions that read tiles ---------------------------------------

// `count` elements that follow one another in memory, as floats (S8, U8, S4, U4, too; not F64, B1,
// S32): exact. TF32 loses its low 13 bits as in the tensor core. 4-bit types: two in a byte, the
// lower half first.
void decode_row(ElementType type, const void* source, int count, float* out);

// d (m, n) = a (m, k) * b (k, n) + d of decoded elements of `type`: F16, BF16, TF32, E4M3 or E5M2.
struct TileShape {
  int m, n, k;
  ElementType type;     // of a; of b, too, but for FP8, where each may be either
  bool to_f16 = false;  // d holds .f16 values
};

// Row-major, row lengths in floats given (so that tiles of larger arrays can be used); without d
// where `accumulate` is false. Added up as mma.sync does it: 16 of k at a time (8 of TF32) with the
// sum so far, in their order. FP8 as an H200's wgmma with f32 sums does: 32 of k at a time, in 13
// bits of fraction; with .f16 sums it is not measured.
void multiply_accumulate(const TileShape& shape, const float* a, int a_pitch, const float* b,
                         int b_pitch, float* d, int d_pitch, bool accumulate);

}  // namespace archflash::sim
