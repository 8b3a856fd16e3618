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
      note_write(warp, located, lane, LDMATRIX_ROW_BYTES, data, Writing::ByMatrix);
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

// The values that {byte-id, thread-id} may have: byte ids are multiples of the scales in a
// register.
constexpr int SCALES_IN_REGISTER = 4, THREADS_OF_A = 2, THREADS_OF_B = 4;

// Block scales: a register and {byte-id, thread-id}, which all lanes must agree about.
ScaleOperand scale_operand(Warp& warp, const Ref* refs, const char* matrix, int scales,
                           int threads) {
  const auto uniform = [&](Ref ref, const char* name, int end, int step) {
    const auto* registers = warp.lanes<const uint32_t>(ref);
    const auto value_of = [&](int lane) { return static_cast<uint16_t>(registers[lane]); };
    const int value = value_of(0);
    for (int lane = 0; lane < LANES; ++lane) {
      const int other = value_of(lane);
      if (other == value && value < end && value % step == 0) continue;
      throw Fault{"block-scale",
                  std::string("the ") + name + " of matrix " + matrix + " is " +
                      std::to_string(other) + ": one of 0 to " + std::to_string(end - step) +
                      (step > 1 ? " in steps of " + std::to_string(step) : "") +
                      ", the same in all lanes",
                  lane};
    }
    return value;
  };
  return {warp.lanes<const uint8_t>(refs[0]),
          uniform(refs[1], "byte-id", SCALES_IN_REGISTER, scales),
          uniform(refs[2], "thread-id", threads, 1)};
}

void run_mma(Warp& warp, const Instruction& instruction, uint32_t) {
  const auto& extra = *static_cast<const MmaExtra*>(instruction.extra);
  MmaOperands operands;
  const Ref* next = instruction.operands;
  for (int i = 0; i < extra.registers.d; ++i) operands.d[i] = warp.lanes<uint8_t>(*next++);
  for (int i = 0; i < extra.registers.a; ++i) operands.a[i] = warp.lanes<uint8_t>(*next++);
  for (int i = 0; i < extra.registers.b; ++i) operands.b[i] = warp.lanes<uint8_t>(*next++);
  for (int i = 0; i < extra.registers.c; ++i) operands.c[i] = warp.lanes<uint8_t>(*next++);
  if (const int scales = extra.shape.scales; scales > 0) {
    operands.scale_a = scale_operand(warp, next, "A", scales, THREADS_OF_A);
    operands.scale_b = scale_operand(warp, next + 3, "B", scales, THREADS_OF_B);
  }
  extra.function(extra.shape, operands, *warp.cta().launch().tensor_core);
}

ElementType element_type(Builder& b, std::string_view name) {
  static const struct {
    const char* name;
    ElementType type;
  } ROWS[] = {
      {"f16", ElementType::F16},   {"bf16", ElementType::BF16},   {"tf32", ElementType::TF32},
      {"f32", ElementType::F32},   {"f64", ElementType::F64},     {"e4m3", ElementType::E4M3},
      {"e5m2", ElementType::E5M2}, {"s8", ElementType::S8},       {"u8", ElementType::U8},
      {"s4", ElementType::S4},     {"u4", ElementType::U4},       {"b1", ElementType::B1},
      {"s32", ElementType::S32},   {"e2m3", ElementType::E2M3},   {"e3m2", ElementType::E3M2},
      {"e2m1", ElementType::E2M1}, {"ue8m0", ElementType::UE8M0}, {"ue4m3", ElementType::UE4M3}};
  for (const auto& row : ROWS) {
    if (name == row.name) return row.type;
  }
  b.fail("unknown element type");
}

MmaShape shape_named(Builder& b, std::string_view size) {
  MmaShape shape{};
  if (std::sscanf(std::string(size).c_str(), "m%dn%dk%d", &shape.m, &shape.n, &shape.k) != 3)
    b.fail("bad shape");
  return shape;
}

// Takes the fragments of a product and looks its function up.
MmaExtra take_fragments(Builder& b, const MmaShape& shape) {
  MmaExtra extra{shape, find_mma(shape), {}};
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
  return extra;
}

void finish_mma(Builder& b, const MmaExtra& extra) {
  b.instruction.extra = b.keep(extra);
  b.instruction.converge = Converge::Whole;
  b.handler(&run_mma, Class::Matrix);
}

void build_mma(Builder& b) {
  MmaShape shape = shape_named(b, b.slot(2));
  shape.a_column_major = b.slot(3) == "col";
  shape.b_row_major = b.slot(4) == "row";
  shape.satfinite = b.has("satfinite");
  shape.d = element_type(b, b.slot(6));
  shape.a = element_type(b, b.slot(7));
  shape.b = element_type(b, b.slot(8));
  shape.c = element_type(b, b.slot(9));
  shape.b1_and = b.has("and");
  if (b.has("popc") != (shape.a == ElementType::B1)) b.fail(".popc is for .b1, which needs it");
  finish_mma(b, take_fragments(b, shape));
}

// The types of the forms with .kind, whose modifiers may come in two orders. In .m16n8k32 an
// element of e2m1 has a byte.
void read_kind_types(Builder& b, MmaShape& shape, size_t first) {
  const auto multiplied = [&](size_t slot) {
    const ElementType type = element_type(b, b.slot(slot));
    return type == ElementType::E2M1 && shape.k == 32 ? ElementType::E2M1_IN_BYTE : type;
  };
  shape.d = element_type(b, b.slot(first));
  shape.a = multiplied(first + 1);
  shape.b = multiplied(first + 2);
  shape.c = element_type(b, b.slot(first + 3));
}

void build_kind_mma(Builder& b) {
  MmaShape shape = shape_named(b, "m16n8k32");
  read_kind_types(b, shape, 6);
  finish_mma(b, take_fragments(b, shape));
}

// One of {byte-id, thread-id}; a number must be one that the instruction takes.
void take_selector(Builder& b, const Operand& operand, int end, int step) {
  const bool number = operand.kind == Operand::Kind::Integer;
  if (number && (operand.value < 0 || operand.value >= end || operand.value % step != 0)) {
    b.fail("a byte-id or thread-id of " + std::to_string(operand.value));
  }
  b.add_source(operand, {'b', 16});
}

void take_scales(Builder& b, int scales, int threads) {
  if (b.vector_source({'b', 32}) != 1) b.fail("block scales are in one register");
  const Operand& selectors = b.take();
  if (selectors.kind != Operand::Kind::Vector || selectors.items.size() != 2) {
    b.fail("block scales need {byte-id, thread-id}");
  }
  take_selector(b, selectors.items[0], SCALES_IN_REGISTER, scales);
  take_selector(b, selectors.items[1], threads, 1);
}

void build_block_scaled_mma(Builder& b) {
  MmaShape shape = shape_named(b, b.has("m16n8k64") ? "m16n8k64" : "m16n8k32");
  read_kind_types(b, shape, 8);
  shape.scale = element_type(b, b.slot(12));
  const bool bytes = b.has("kind::mxf8f6f4"), wide = b.has("kind::mxf4nvf4");
  shape.scales = b.has("scale_vec::4X")            ? 4
                 : b.has("scale_vec::2X")          ? 2
                 : b.has("scale_vec::1X") || bytes ? 1
                 : wide                            ? 0 /* it must be said */
                                                   : 2;
  if (shape.scales == 0) b.fail(".kind::mxf4nvf4 needs .scale_vec");
  const bool known = bytes == (shape.k == 32) && (wide || shape.scales < 4);
  if (!known) b.fail("PTX has no such matrix product");
  const MmaExtra extra = take_fragments(b, shape);
  take_scales(b, shape.scales, THREADS_OF_A);
  take_scales(b, shape.scales, THREADS_OF_B);
  finish_mma(b, extra);
}

#define F8F6F4 "e4m3|e5m2|e3m2|e2m3|e2m1 e4m3|e5m2|e3m2|e2m3|e2m1"
#define BLOCK_SCALED_KIND                                 \
  "kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4 block_scale " \
  "?scale_vec::1X|scale_vec::2X|scale_vec::4X"

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
    {"mma", "sync aligned kind::f8f6f4 m16n8k32 row col f16|f32 " F8F6F4 " f16|f32",
     build_kind_mma},
    {"mma", "sync aligned m16n8k32 row col kind::f8f6f4 f16|f32 " F8F6F4 " f16|f32",
     build_kind_mma},
    {"mma",
     "sync aligned " BLOCK_SCALED_KIND " m16n8k32|m16n8k64 row col f32 " F8F6F4 " f32 ue8m0|ue4m3",
     build_block_scaled_mma},
    {"mma",
     "sync aligned m16n8k32|m16n8k64 row col " BLOCK_SCALED_KIND " f32 " F8F6F4 " f32 ue8m0|ue4m3",
     build_block_scaled_mma},
};

}  // namespace

std::span<const Form> matrix_forms() { return FORMS; }

}  // namespace archflash::sim
