// wmma: matrices of 16 x 16 that a warp loads, multiplies and stores as a whole, for .f16 with .f32
// sums. PTX leaves open which lane holds which element. Here a fragment of A or B has the registers
// of the m16n8k16 products of mma.sync, twice; sums have those of two such products.
#include <algorithm>
#include <cstring>
#include <string>

#include "sim/instructions/operands.h"
#include "sim/numerics/mma.h"

namespace archflash::sim {
namespace {

constexpr int EDGE = 16;      // rows and columns of every matrix
constexpr int REGISTERS = 8;  // of every fragment
constexpr int CHUNK_BYTES = 16;
constexpr uint32_t FRAGMENT_ALIGN = 32;  // of the first element

struct WmmaExtra {
  char matrix;           // 'a', 'b' or 'c' (also for d)
  bool by_column;        // the lines in memory are columns
  int address, scratch;  // operands; the stride follows the address or the registers
  int stride;
  int registers;  // the first operand of the fragment
  int bytes;      // of an element
};

struct Element {
  int row, column;
};

// The element of a fragment that a lane holds in a register; `half` is 1 for the upper 16 bits.
Element element_of(char matrix, int lane, int reg, int half) {
  const int g = lane / 4, t = lane % 4 * 2;
  if (matrix == 'a') return {g + reg % 2 * 8, t + reg / 2 % 2 * 8 + half};
  if (matrix == 'b') return {t + reg % 2 * 8 + half, g + reg / 2 % 2 * 8};
  return {g + reg / 2 % 2 * 8, t + reg % 2 + reg / 4 * 8};
}

// Every lane must name the same matrix.
void check_uniform(Warp& warp, const Instruction& instruction, const WmmaExtra& extra,
                   const Address& address) {
  const uint32_t* strides = warp.lanes<const uint32_t>(instruction.operands[extra.stride]);
  const uint64_t first = address.of_lane(warp, 0);
  for (int lane = 1; lane < LANES; ++lane) {
    if (address.of_lane(warp, lane) != first || strides[lane] != strides[0])
      throw Fault{"wmma", "lanes disagree about the address or the stride", lane};
  }
  if (first % FRAGMENT_ALIGN != 0)
    throw Fault{"misaligned", "the address of a fragment is not a multiple of 32", 0, first};
  if (strides[0] * extra.bytes % CHUNK_BYTES != 0)
    throw Fault{"misaligned", "the stride is not a multiple of 16 bytes", 0, first};
}

// Calls f(line, first byte in the line, located, lane) for each 16 bytes of the matrix. As ldmatrix
// does, each lane locates 16 bytes.
template <class F>
void for_each_chunk(Warp& warp, const Instruction& instruction, uint32_t mask, Access access, F f) {
  const auto& extra = *static_cast<const WmmaExtra*>(instruction.extra);
  const Address given = address_of(instruction, extra.address);
  check_uniform(warp, instruction, extra, given);
  const uint64_t stride =
      uint64_t{warp.lanes<const uint32_t>(instruction.operands[extra.stride])[0]} *
      static_cast<uint64_t>(extra.bytes);
  const uint64_t first = given.of_lane(warp, 0);
  const Ref scratch = instruction.operands[extra.scratch];
  const int line_bytes = EDGE * extra.bytes;
  for (int byte = 0; byte < line_bytes; byte += 2 * CHUNK_BYTES) {
    for (int lane = 0; lane < LANES; ++lane) {
      warp.lanes<uint64_t>(scratch)[lane] = first + static_cast<uint64_t>(lane % EDGE) * stride +
                                            static_cast<uint64_t>(byte + lane / EDGE * CHUNK_BYTES);
    }
    Located located;
    locate(warp, mask, {scratch, 0, true, given.space}, CHUNK_BYTES, access, located);
    for (int lane = 0; lane < LANES; ++lane)
      f(lane % EDGE, byte + lane / EDGE * CHUNK_BYTES, located, lane);
  }
}

// Where an element lies in the matrix as it is in memory, line by line.
int place_of(const WmmaExtra& extra, Element element) {
  const int line = extra.by_column ? element.column : element.row;
  const int within = extra.by_column ? element.row : element.column;
  return (line * EDGE + within) * extra.bytes;
}

void run_wmma_load(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const WmmaExtra*>(instruction.extra);
  uint8_t matrix[EDGE * EDGE * 4];
  for_each_chunk(warp, instruction, mask, Access::MatrixLoad,
                 [&](int line, int byte, const Located& located, int lane) {
                   std::memcpy(matrix + line * EDGE * extra.bytes + byte, located.where[lane],
                               CHUNK_BYTES);
                 });
  for (int reg = 0; reg < REGISTERS; ++reg) {
    auto* lanes = warp.lanes<uint8_t>(instruction.operands[extra.registers + reg]);
    for (int lane = 0; lane < LANES; ++lane) {
      for (int half = 0; half < 4 / extra.bytes; ++half) {
        std::memcpy(lanes + 4 * lane + extra.bytes * half,
                    matrix + place_of(extra, element_of(extra.matrix, lane, reg, half)),
                    static_cast<size_t>(extra.bytes));
      }
    }
  }
}

void run_wmma_store(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const WmmaExtra*>(instruction.extra);
  uint8_t matrix[EDGE * EDGE * 4];
  for (int reg = 0; reg < REGISTERS; ++reg) {
    const auto* lanes = warp.lanes<const uint8_t>(instruction.operands[extra.registers + reg]);
    for (int lane = 0; lane < LANES; ++lane)
      std::memcpy(matrix + place_of(extra, element_of('c', lane, reg, 0)), lanes + 4 * lane, 4);
  }
  for_each_chunk(warp, instruction, mask, Access::Write,
                 [&](int line, int byte, const Located& located, int lane) {
                   const uint8_t* data = matrix + line * EDGE * extra.bytes + byte;
                   note_write(warp, located, lane, CHUNK_BYTES, data, Writing::ByMatrix);
                   std::memcpy(located.where[lane], data, CHUNK_BYTES);
                 });
}

constexpr MmaShape HALF_PRODUCT = {
    16, 8, 16, ElementType::F32, ElementType::F16, ElementType::F16, ElementType::F32};

void run_wmma_mma(Warp& warp, const Instruction& instruction, uint32_t) {
  const MmaFunction multiply = *static_cast<const MmaFunction*>(instruction.extra);
  const auto fragment = [&](int number, int reg) {
    return warp.lanes<uint8_t>(instruction.operands[REGISTERS * number + reg]);
  };
  uint32_t sums[REGISTERS][LANES];  // d may name registers of the other fragments
  for (int half = 0; half < 2; ++half) {
    MmaOperands operands;
    for (int i = 0; i < 4; ++i) {
      operands.d[i] = sums[4 * half + i];
      operands.a[i] = fragment(1, i);
      operands.c[i] = fragment(3, 4 * half + i);
    }
    for (int i = 0; i < 2; ++i) operands.b[i] = fragment(2, 2 * half + i);
    multiply(HALF_PRODUCT, operands, *warp.cta().launch().tensor_core);
  }
  for (int reg = 0; reg < REGISTERS; ++reg)
    std::memcpy(fragment(0, reg), sums[reg], sizeof(sums[reg]));
}

Space wmma_space(const Builder& b) {
  if (b.has("global")) return Space::Global;
  return b.has("shared") || b.has("shared::cta") ? Space::Shared : Space::Generic;
}

void finish_access(Builder& b, WmmaExtra extra, Handler run) {
  extra.stride = REGISTERS + 1;
  b.source({'b', 32});
  extra.scratch = REGISTERS + 2;
  b.add_scratch(64);
  b.instruction.extra = b.keep(extra);
  b.instruction.converge = Converge::Whole;
  b.handler(run, Class::MatrixLoad);
}

void build_wmma_load(Builder& b) {
  WmmaExtra extra{};
  extra.matrix = b.has("a") ? 'a' : b.has("b") ? 'b' : 'c';
  extra.by_column = b.has("col");
  extra.bytes = extra.matrix == 'c' ? 4 : 2;
  extra.registers = 0;
  if (b.vector_destination({'b', 32}) != REGISTERS) b.fail("a fragment of another size");
  extra.address = REGISTERS;
  b.address(wmma_space(b));
  finish_access(b, extra, &run_wmma_load);
}

void build_wmma_store(Builder& b) {
  WmmaExtra extra{};
  extra.matrix = 'c';
  extra.by_column = b.has("col");
  extra.bytes = 4;
  extra.address = 0;
  b.address(wmma_space(b));
  extra.registers = 1;
  if (b.vector_source({'b', 32}) != REGISTERS) b.fail("a fragment of another size");
  finish_access(b, extra, &run_wmma_store);
}

void build_wmma_mma(Builder& b) {
  const bool fits =
      b.vector_destination({'b', 32}) == REGISTERS && b.vector_source({'b', 32}) == REGISTERS &&
      b.vector_source({'b', 32}) == REGISTERS && b.vector_source({'b', 32}) == REGISTERS;
  if (!fits) b.fail("a fragment of another size");
  b.instruction.extra = b.keep(find_mma(HALF_PRODUCT));
  b.instruction.converge = Converge::Whole;
  b.handler(&run_wmma_mma, Class::Matrix);
}

constexpr Form FORMS[] = {
    {"wmma", "load a|b sync aligned row|col m16n16k16 ?global|shared|shared::cta f16",
     build_wmma_load},
    {"wmma", "load c sync aligned row|col m16n16k16 ?global|shared|shared::cta f32",
     build_wmma_load},
    {"wmma", "store d sync aligned row|col m16n16k16 ?global|shared|shared::cta f32",
     build_wmma_store},
    {"wmma", "mma sync aligned row|col row|col m16n16k16 f32 f32", build_wmma_mma},
};

}  // namespace

std::span<const Form> wmma_forms() { return FORMS; }

}  // namespace archflash::sim
