// mma.sync: the matrix products of one warp.
//
// A register of a warp is 32 lanes that follow one another in memory: uint32_t[32] for a 32-bit
// register, uint64_t[32] for an .f64 one. A fragment is an array of pointers to such registers, in
// the order in which PTX lists them.
//
// PTX leaves the order and precision of sums open. Here they are those of a card:
// - .f16, .bf16, .tf32 and FP8 add up as tensor_core_models.h says.
// - Where a card has no FP8 mma.sync, .e4m3 and .e5m2 become .f16 and take two additions from zero;
//   then c is added. An H200 was recorded; ptxas does the same for 10.x.
// - m8n8k4 with .f16 does fused multiply-adds in float, in the order of k from zero; then c is
//   added. Every card does what was recorded on an H200.
// - With block scales, block_scaled.h says how.
// - .f64 does fused multiply-adds in the order of k, from c; a NaN is that of the operation.
// - .s32 is exact modulo 2^32, or clamped (.satfinite).
#pragma once

#include "sim/numerics/element.h"
#include "sim/numerics/tensor_core_models.h"

namespace archflash::sim {

// One form of mma.sync.aligned.mMnNkK{.row|.col}{.row|.col}{.satfinite}.d.a.b.c{.xor|.and}{.popc}.
struct MmaShape {
  int m, n, k;
  ElementType d, a, b, c;
  bool a_column_major = false;  // .col for A: only m8n8k4 with .f16
  bool b_row_major = false;     // .row for B: only m8n8k4 with .f16
  bool satfinite = false;       // .satfinite, for .s32
  bool b1_and = false;          // .and.popc instead of .xor.popc, for .b1
  // .block_scale: how many scales a row of A and a column of B have (.scale_vec), and their type.
  int scales = 0;  // 0: none
  ElementType scale = ElementType::UE8M0;
};

// A register with block scales, and where they lie in it: from byte `byte` on, in the lanes of each
// group of four that `thread` names. Of A those are a pair, for rows g and g + 8 of group g; of B
// it is one, for column g.
struct ScaleOperand {
  const void* words = nullptr;
  int byte = 0, thread = 0;
};

// Pointers to the registers of each fragment; d may name registers of the others.
struct MmaOperands {
  void* d[8];
  const void* a[8];
  const void* b[4];
  const void* c[8];
  ScaleOperand scale_a, scale_b;
};

// How many registers each fragment has. They have 64 bits where the type is F64, else 32.
struct MmaRegisters {
  int d, a, b, c;
};

using MmaFunction = void (*)(const MmaShape& shape, const MmaOperands& operands,
                             const TensorCore& core);

// The function for a form of mma.sync; nullptr if PTX has no such form, or if it is sparse, which
// is not simulated. It is looked up once, when the PTX is loaded.
MmaFunction find_mma(const MmaShape& shape);
MmaRegisters mma_registers(const MmaShape& shape);  // of a shape that find_mma knows

}  // namespace archflash::sim
