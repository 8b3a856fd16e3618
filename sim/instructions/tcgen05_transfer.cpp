// tcgen05.ld and .st, between registers and tensor memory, and tcgen05.wait.
#include <cstdlib>
#include <cstring>

#include "sim/instructions/tcgen05.h"

namespace archflash::sim {
namespace {

enum class Shape : uint8_t { S32x32, S16x64, S16x128, S16x256, S16x32x2 };

// Operands: a load has its registers and then the address, a store the address first.
struct TransferExtra {
  Shape shape = Shape::S32x32;
  int repeats = 1;
  int registers = 1;
  bool packed = false;  // a register holds 16 bits of each of two columns
  int64_t second = 0;   // 16x32bx2: the distance of its halves in columns
  AddressOperand address;
};

// The columns that a transfer spans; each half of 16x32bx2 spans as many.
int columns_of(const TransferExtra& extra) {
  static constexpr int COLUMNS[] = {1, 2, 4, 8, 1};
  return extra.repeats * COLUMNS[static_cast<int>(extra.shape)] * (extra.packed ? 2 : 1);
}

struct Cell {
  int lane, column;  // relative to the address, without packing
};

Cell cell_of(Shape shape, int lane, int reg) {
  switch (shape) {
    case Shape::S32x32:
      return {lane, reg};
    case Shape::S16x64:
      return {lane / 4 + 8 * (lane & 1), (lane >> 1 & 1) + 2 * reg};
    case Shape::S16x128:
      return {lane / 4 + 8 * (reg & 1), lane % 4 + 4 * (reg >> 1)};
    case Shape::S16x256:
      return {lane / 4 + 8 * (reg >> 1 & 1), 2 * (lane % 4) + (reg & 1) + 8 * (reg >> 2)};
    case Shape::S16x32x2:
      break;
  }
  return {lane % 16, reg};
}

// The first lane and column of a warp's transfer.
struct Window {
  int lane = 0, column = 0;
};

Window window_of(Warp& warp, const Instruction& instruction, const TransferExtra& extra,
                 uint32_t mask, const char* what) {
  const uint32_t address = uniform(mask, "an address of tensor memory", [&](int lane) {
    return tensor_address(warp, instruction, extra.address, lane);
  });
  const auto field = static_cast<int>(address >> LANE_SHIFT);
  const int quarter = warp.index() % TMEM_QUARTERS;
  const std::string own = "lanes " + std::to_string(LANES * quarter) + "-" +
                          std::to_string(LANES * quarter + LANES - 1);
  const int within = field % LANES;
  if (within != 0 && (extra.shape == Shape::S32x32 || within != LANES / 2)) {
    throw Fault{"tmem", std::string(what) + " of this shape at lane " + std::to_string(field), -1,
                address};
  }
  if (field / LANES != quarter) {
    // In DeepGEMM's kernels (epilogue/sm100_store_cd.cuh) all warps name lane 0, and rely on each
    // getting its own lanes.
    const bool tolerated = field / LANES == 0;
    const std::string message = std::string(what) + " at lane " + std::to_string(field) +
                                " by warp " + std::to_string(warp.index()) + ", whose window is " +
                                own;
    if (!tolerated) throw Fault{"tmem", message, -1, address};
    warp.cta().report(Severity::Lint, warp, -1, "tmem", message, address);
  }
  return {LANES * quarter + within, static_cast<int>(address & COLUMN_MASK)};
}

// Calls f for the one or two regions of cells that the transfer uses.
template <class F>
void for_each_region(const TransferExtra& extra, const Window& window, F f) {
  TmemRegion region{window.column, columns_of(extra)};
  uint32_t& lanes = region.lanes[static_cast<size_t>(window.lane / LANES)];
  lanes = extra.shape == Shape::S32x32 ? ALL_LANES : 0xFFFFu << window.lane % LANES;
  f(region);
  if (extra.shape != Shape::S16x32x2) return;
  region.first += static_cast<int>(extra.second);
  f(region);
}

// Calls f(lane, register, cell, cell of the upper half when packed).
template <class F>
void for_each_cell(Tmem& memory, const TransferExtra& extra, const Window& window, F f) {
  for (int reg = 0; reg < extra.registers; ++reg) {
    for (int lane = 0; lane < LANES; ++lane) {
      const Cell cell = cell_of(extra.shape, lane, reg);
      int column = window.column + cell.column * (extra.packed ? 2 : 1);
      if (extra.shape == Shape::S16x32x2 && lane >= LANES / 2) {
        column += static_cast<int>(extra.second);
      }
      uint32_t* const low = memory.column(column) + window.lane + cell.lane;
      f(lane, reg, low, low + TMEM_LANES);
    }
  }
}

bool is_plain(const TransferExtra& extra) { return extra.shape == Shape::S32x32 && !extra.packed; }

void run_ld(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const TransferExtra*>(instruction.extra);
  const Window window = window_of(warp, instruction, extra, mask, "tcgen05.ld");
  TensorUnit& tensor = *warp.cta().tensor();
  Tmem& memory = tensor.memory();
  const TmemUser user = tensor.next_load(warp, instruction.operands, extra.registers);
  for_each_region(extra, window,
                  [&](const TmemRegion& region) { memory.read(warp, user, region, "tcgen05.ld"); });
  if (is_plain(extra)) {
    for (int reg = 0; reg < extra.registers; ++reg) {
      std::memcpy(warp.lanes<uint32_t>(instruction.operands[reg]),
                  memory.column(window.column + reg) + window.lane, LANES * sizeof(uint32_t));
    }
    return;
  }
  for_each_cell(memory, extra, window,
                [&](int lane, int reg, const uint32_t* low, const uint32_t* high) {
                  uint32_t& value = warp.lanes<uint32_t>(instruction.operands[reg])[lane];
                  value = extra.packed ? (*low & 0xFFFF) | *high << 16 : *low;
                });
}

void run_st(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const TransferExtra*>(instruction.extra);
  const Window window = window_of(warp, instruction, extra, mask, "tcgen05.st");
  const Ref* const registers = instruction.operands + 1;
  TensorUnit& tensor = *warp.cta().tensor();
  Tmem& memory = tensor.memory();
  const TmemUser user = tensor.next_store(warp);
  for_each_region(extra, window, [&](const TmemRegion& region) {
    memory.write(warp, user, region, "tcgen05.st");
  });
  if (is_plain(extra)) {
    for (int reg = 0; reg < extra.registers; ++reg) {
      std::memcpy(memory.column(window.column + reg) + window.lane,
                  warp.lanes<const uint32_t>(registers[reg]), LANES * sizeof(uint32_t));
    }
    return;
  }
  for_each_cell(memory, extra, window, [&](int lane, int reg, uint32_t* low, uint32_t* high) {
    const uint32_t value = warp.lanes<const uint32_t>(registers[reg])[lane];
    if (!extra.packed) {
      *low = value;
      return;
    }
    *low = value & 0xFFFF;  // the ISA does not say what the upper halves become
    *high = value >> 16;
  });
}

void run_wait_ld(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->wait_loads(warp);
}
void run_wait_st(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->wait_stores(warp);
}

}  // namespace

// Slots: ld or st, sync, aligned, shape, repeats, packing, type.
void build_transfer(Builder& b) {
  TransferExtra extra;
  const bool loads = b.slot(0) == "ld";
  const std::string_view shape = b.slot(3);
  extra.shape = shape == "32x32b"    ? Shape::S32x32
                : shape == "16x64b"  ? Shape::S16x64
                : shape == "16x128b" ? Shape::S16x128
                : shape == "16x256b" ? Shape::S16x256
                                     : Shape::S16x32x2;
  extra.repeats = std::atoi(std::string(b.slot(4).substr(1)).c_str());
  extra.registers = extra.repeats * (extra.shape == Shape::S16x128   ? 2
                                     : extra.shape == Shape::S16x256 ? 4
                                                                     : 1);
  constexpr int MOST_REGISTERS = 128;
  if (extra.registers > MOST_REGISTERS) b.fail("more than 128 registers");
  extra.packed = b.has("pack::16b") || b.has("unpack::16b");
  const auto take_registers = [&] {
    const int count = loads ? b.vector_destination({'b', 32}) : b.vector_source({'b', 32});
    if (count != extra.registers) b.fail("a vector of another size");
  };
  const auto take_place = [&](int operand) {
    extra.address = take_address(b, operand, Space::Shared);
    if (extra.shape != Shape::S16x32x2) return;
    extra.second = b.immediate();
    if (extra.second <= -TMEM_COLUMNS || extra.second >= TMEM_COLUMNS) {
      b.fail("a second half outside tensor memory");
    }
  };
  if (loads) {
    take_registers();
    take_place(extra.registers);
  } else {
    take_place(0);
    take_registers();
  }
  b.kernel().uses_tcgen05 = true;
  b.instruction.extra = b.keep(extra);
  b.instruction.converge = Converge::Whole;
  b.instruction.pinned = loads;
  b.handler(loads ? &run_ld : &run_st, Class::MatrixLoad);
}

void build_wait(Builder& b) {
  b.kernel().uses_tcgen05 = true;
  b.instruction.converge = Converge::Whole;
  b.handler(b.slot(0) == "wait::ld" ? &run_wait_ld : &run_wait_st, Class::Barrier);
}

}  // namespace archflash::sim
