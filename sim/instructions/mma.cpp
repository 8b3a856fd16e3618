// ldmatrix, stmatrix, movmatrix and mma.sync.
#include "sim/numerics/mma.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <string>

#include "sim/instructions/operands.h"
#include "sim/numerics/ldmatrix.h"
#include "sim/numerics/mma_avx2.h"

namespace archflash::sim {
namespace {

constexpr uint32_t TRANS = 1;

// The lanes whose addresses a load or store of `count` matrices uses.
uint32_t address_lanes(int count) {
  return count == 4 ? ALL_LANES : (1u << LDMATRIX_ROWS * count) - 1;
}

void run_ldmatrix(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const int count = instruction.count;
  Located located;
  locate(warp, mask & address_lanes(count), address_of(instruction, count), LDMATRIX_ROW_BYTES,
         Access::MatrixLoad, located);
  for (int m = 0; m < count; ++m) {
    const uint8_t* const* where = located.where + LDMATRIX_ROWS * m;
    if (!(instruction.flags & TRANS)) {  // lanes 4r .. 4r + 3 hold row r as it lies in memory
      auto* d = warp.lanes<uint8_t>(instruction.operands[m]);
      for (int r = 0; r < LDMATRIX_ROWS; ++r) {
        std::memcpy(d + r * LDMATRIX_ROW_BYTES, where[r], LDMATRIX_ROW_BYTES);
      }
      continue;
    }
    uint16_t rows[LDMATRIX_ROWS][8];
    for (int r = 0; r < LDMATRIX_ROWS; ++r) std::memcpy(rows[r], where[r], LDMATRIX_ROW_BYTES);
    ldmatrix_m8n8_b16(rows, (instruction.flags & TRANS) != 0,
                      warp.lanes<uint32_t>(instruction.operands[m]));
  }
}

void run_stmatrix(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const int count = instruction.count;
  Located located;
  locate(warp, mask & address_lanes(count), address_of(instruction, 0), LDMATRIX_ROW_BYTES,
         Access::Write, located);
  for (int m = 0; m < count; ++m) {
    uint16_t rows[LDMATRIX_ROWS][8];
    stmatrix_m8n8_b16(warp.lanes<const uint32_t>(instruction.operands[1 + m]),
                      (instruction.flags & TRANS) != 0, rows);
    for (int r = 0; r < LDMATRIX_ROWS; ++r) {
      const int lane = LDMATRIX_ROWS * m + r;
      uint8_t data[LDMATRIX_ROW_BYTES];
      std::memcpy(data, rows[r], LDMATRIX_ROW_BYTES);
      note_write(warp, located, lane, LDMATRIX_ROW_BYTES, data, true);
      std::memcpy(located.where[lane], data, LDMATRIX_ROW_BYTES);
    }
  }
}

int matrix_count(const Builder& b) { return b.has("x4") ? 4 : b.has("x2") ? 2 : 1; }
Space matrix_space(const Builder& b) {
  return b.has("shared") || b.has("shared::cta") ? Space::Shared : Space::Generic;
}

void build_ldmatrix(Builder& b) {
  const int count = matrix_count(b);
  if (b.vector_destination({'b', 32}) != count) b.fail("a vector of another size");
  b.address(matrix_space(b));
  b.instruction.count = static_cast<uint8_t>(count);
  b.instruction.flags |= b.has("trans") ? TRANS : 0;
  b.instruction.converge = Converge::Whole;
  b.handler(&run_ldmatrix, Class::MatrixLoad);
}
void build_stmatrix(Builder& b) {
  const int count = matrix_count(b);
  b.address(matrix_space(b));
  if (b.vector_source({'b', 32}) != count) b.fail("a vector of another size");
  b.instruction.count = static_cast<uint8_t>(count);
  b.instruction.flags |= b.has("trans") ? TRANS : 0;
  b.instruction.converge = Converge::Whole;
  b.handler(&run_stmatrix, Class::MatrixLoad);
}

void run_movmatrix(Warp& warp, const Instruction& instruction, uint32_t) {
  movmatrix_m8n8_trans_b16(warp.lanes<const uint32_t>(instruction.operands[1]),
                           warp.lanes<uint32_t>(instruction.operands[0]));
}
void build_movmatrix(Builder& b) {
  b.destination({'b', 32});
  b.source({'b', 32});
  b.instruction.converge = Converge::Whole;
  b.handler(&run_movmatrix, Class::MatrixLoad);
}

// ---- mma.sync ----

struct MmaExtra {
  MmaShape shape;
  MmaFunction function;
  MmaRegisters registers;
};

void run_mma(Warp& warp, const Instruction& instruction, uint32_t) {
  const auto& extra = *static_cast<const MmaExtra*>(instruction.extra);
  MmaOperands operands;
  const Ref* next = instruction.operands;
  for (int i = 0; i < extra.registers.d; ++i) operands.d[i] = warp.lanes<uint8_t>(*next++);
  for (int i = 0; i < extra.registers.a; ++i) operands.a[i] = warp.lanes<uint8_t>(*next++);
  for (int i = 0; i < extra.registers.b; ++i) operands.b[i] = warp.lanes<uint8_t>(*next++);
  for (int i = 0; i < extra.registers.c; ++i) operands.c[i] = warp.lanes<uint8_t>(*next++);
  extra.function(extra.shape, operands, *warp.cta().launch().tensor_core);
}

ElementType element_type(Builder& b, std::string_view name) {
  static const struct {
    const char* name;
    ElementType type;
  } ROWS[] = {{"f16", ElementType::F16},   {"bf16", ElementType::BF16}, {"tf32", ElementType::TF32},
              {"f32", ElementType::F32},   {"f64", ElementType::F64},   {"e4m3", ElementType::E4M3},
              {"e5m2", ElementType::E5M2}, {"s8", ElementType::S8},     {"u8", ElementType::U8},
              {"s4", ElementType::S4},     {"u4", ElementType::U4},     {"b1", ElementType::B1},
              {"s32", ElementType::S32}};
  for (const auto& row : ROWS) {
    if (name == row.name) return row.type;
  }
  b.fail("unknown element type");
}

void build_mma(Builder& b) {
  MmaExtra extra;
  MmaShape& shape = extra.shape;
  const std::string size(b.slot(2));
  if (std::sscanf(size.c_str(), "m%dn%dk%d", &shape.m, &shape.n, &shape.k) != 3)
    b.fail("bad shape");
  shape.a_column_major = b.slot(3) == "col";
  shape.b_row_major = b.slot(4) == "row";
  shape.satfinite = b.has("satfinite");
  shape.d = element_type(b, b.slot(6));
  shape.a = element_type(b, b.slot(7));
  shape.b = element_type(b, b.slot(8));
  shape.c = element_type(b, b.slot(9));
  shape.b1_and = b.has("and");
  if (b.has("popc") != (shape.a == ElementType::B1)) b.fail(".popc is for .b1, which needs it");
  extra.function = find_mma(shape);
  if (extra.function == nullptr) b.fail("PTX has no such matrix product, or it is not simulated");
  if (const MmaFunction fast = find_avx2_mma(shape)) extra.function = fast;
  extra.registers = mma_registers(shape);
  const auto type = [](ElementType t) -> Type {
    return t == ElementType::F64 ? Type{'f', 64} : Type{'b', 32};
  };
  const bool fits = b.vector_destination(type(shape.d)) == extra.registers.d &&
                    b.vector_source(type(shape.a)) == extra.registers.a &&
                    b.vector_source(type(shape.b)) == extra.registers.b &&
                    b.vector_source(type(shape.c)) == extra.registers.c;
  if (!fits) b.fail("a fragment of another size");
  b.instruction.extra = b.keep(extra);
  b.instruction.converge = Converge::Whole;
  b.handler(&run_mma, Class::Matrix);
}

constexpr Form FORMS[] = {
    {"ldmatrix", "sync aligned m8n8 x1|x2|x4 ?trans ?shared|shared::cta b16", build_ldmatrix},
    {"stmatrix", "sync aligned m8n8 x1|x2|x4 ?trans ?shared|shared::cta b16", build_stmatrix},
    {"movmatrix", "sync aligned m8n8 trans b16", build_movmatrix},
    {"mma",
     "sync aligned m8n8k4|m16n8k4|m16n8k8|m16n8k16|m16n8k32|m16n8k64|m16n8k128|m16n8k256|m8n8k16|"
     "m8n8k32|m8n8k128 row|col row|col ?satfinite f16|f32|f64|s32 "
     "f16|bf16|tf32|f64|e4m3|e5m2|s8|u8|s4|u4|b1 f16|bf16|tf32|f64|e4m3|e5m2|s8|u8|s4|u4|b1 "
     "f16|f32|f64|s32 ?xor|and ?popc",
     build_mma},
};

}  // namespace

std::span<const Form> matrix_forms() { return FORMS; }

}  // namespace archflash::sim
