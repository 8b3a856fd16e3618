// tcgen05 instructions: allocation, loads and stores of tensor memory, products, commits, fences.
#include "sim/units/tcgen05.h"

#include <bit>
#include <cstring>

#include "sim/instructions/operands.h"
#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

// A lane's address of tensor memory, which has 32 bits.
uint32_t tensor_address(Warp& warp, const Instruction& instruction, const AddressOperand& address,
                        int lane) {
  return static_cast<uint32_t>(address.of(instruction).of_lane(warp, lane));
}

// The value of all lanes; a fault if they disagree.
template <class F>
uint32_t uniform(uint32_t mask, const char* what, F value_of) {
  const uint32_t value = value_of(std::countr_zero(mask));
  for_each_lane(mask, [&](int lane) {
    if (value_of(lane) == value) return;
    throw Fault{"tcgen05", std::string("lanes disagree about ") + what, lane};
  });
  return value;
}

// The number of CTAs that .cta_group states. It must be the same in all of a kernel's instructions.
int take_group(Builder& b, size_t slot) {
  const int ctas = b.slot(slot) == "cta_group::2" ? 2 : 1;
  int& of_kernel = b.kernel().tcgen05_group;
  if (of_kernel != 0 && of_kernel != ctas) {
    b.fail("a kernel with cta_group::" + std::to_string(of_kernel) + " and " +
           std::string(b.slot(slot)) + ": all of its tcgen05 instructions must have the same");
  }
  of_kernel = ctas;
  b.kernel().uses_tcgen05 = true;
  return ctas;
}

// ---- Allocation ----

// Operands: the place for the address, columns.
struct AllocationExtra {
  AddressOperand to;
  int ctas;
};

void run_alloc(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const AllocationExtra*>(instruction.extra);
  constexpr uint32_t BYTES = 4;
  const uint32_t columns = uniform(mask, "the columns of tcgen05.alloc", [&](int lane) {
    return warp.lanes<const uint32_t>(instruction.operands[1])[lane];
  });
  const int lane = std::countr_zero(mask);
  const SharedPlace at = locate_object(warp, lane, extra.to.of(instruction), BYTES, BYTES);
  Cta& cta = warp.cta();
  const std::optional<int> first = cta.tensor()->allocate(warp, extra.ctas, columns);
  if (!first) {
    warp.block(Wait::TensorMemory, columns, true);
    return;
  }
  if (RaceDetector* races = cta.races()) {
    const Race race = races->write({warp.agent(), lane, warp.pc()}, at.race_offset(), BYTES);
    if (race.found) {
      cta.report_race(warp, lane, race, true, false,
                      "shared memory at offset " + std::to_string(at.offset), at.address());
    }
  }
  const auto address = static_cast<uint32_t>(*first);
  std::memcpy(at.bytes(), &address, BYTES);
  std::memset(at.state(), VALID, BYTES);
}
void build_alloc(Builder& b) {
  AllocationExtra extra;
  extra.ctas = take_group(b, 1);
  extra.to = take_address(b, 0, b.has("shared::cta") ? Space::Shared : Space::Generic);
  b.source({'b', 32});
  b.instruction.extra = b.keep(extra);
  b.instruction.control = Control::Barrier;
  b.instruction.converge = Converge::Whole;
  b.handler(&run_alloc, Class::Other);
}

// Operands: address, columns.
void run_dealloc(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto value = [&](int i, const char* what) {
    return uniform(mask, what, [&](int lane) {
      return warp.lanes<const uint32_t>(instruction.operands[i])[lane];
    });
  };
  const uint32_t address = value(0, "the address of tcgen05.dealloc");
  warp.cta().tensor()->release(warp, address, value(1, "the columns of tcgen05.dealloc"));
}
void build_dealloc(Builder& b) {
  take_group(b, 1);
  b.source({'b', 32});
  b.source({'b', 32});
  b.instruction.converge = Converge::Whole;
  b.handler(&run_dealloc, Class::Other);
}

void run_relinquish(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->give_up_permit();
}
void build_relinquish(Builder& b) {
  take_group(b, 1);
  b.instruction.converge = Converge::Whole;
  b.handler(&run_relinquish, Class::Other);
}

// ---- Loads and stores ----

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

void run_wait_ld(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->wait_loads(warp);
}
void run_wait_st(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->wait_stores(warp);
}
void build_wait(Builder& b) {
  b.kernel().uses_tcgen05 = true;
  b.instruction.converge = Converge::Whole;
  b.handler(b.slot(0) == "wait::ld" ? &run_wait_ld : &run_wait_st, Class::Barrier);
}

void run_fence_before(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->fence_before(warp);
}
void run_fence_after(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->fence_after(warp);
}
void build_fence(Builder& b) {
  b.kernel().uses_tcgen05 = true;
  const bool before = b.slot(0) == "fence::before_thread_sync";
  b.handler(before ? &run_fence_before : &run_fence_after, Class::Fence);
}

// ---- Products ----

// Operands: d, a, b, descriptor, lanes that are not written, predicate.
struct MmaExtra {
  MmaRequest request;  // the parts that the instruction itself states
  AddressOperand d, a;
  int a_descriptor = -1, b_descriptor = 0, descriptor = 0, skip = -1, predicate = 0;
  bool negated = false;
};

void run_mma(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const MmaExtra*>(instruction.extra);
  const auto operand = [&](int i) { return instruction.operands[i]; };
  if (std::popcount(mask) > 1) {
    warp.cta().report(Severity::Error, warp, -1, "tcgen05",
                      "tcgen05.mma by " + std::to_string(std::popcount(mask)) +
                          " lanes: each of them starts a product of its own");
  }
  for_each_lane(mask, [&](int lane) {
    MmaRequest request = extra.request;
    request.d = tensor_address(warp, instruction, extra.d, lane);
    if (request.a_in_tmem)
      request.a_tmem = tensor_address(warp, instruction, extra.a, lane);
    else
      request.a = warp.lanes<const uint64_t>(operand(extra.a_descriptor))[lane];
    request.b = warp.lanes<const uint64_t>(operand(extra.b_descriptor))[lane];
    request.descriptor = warp.lanes<const uint32_t>(operand(extra.descriptor))[lane];
    for (int i = 0; extra.skip >= 0 && i < TMEM_QUARTERS * request.ctas; ++i) {
      request.skip[static_cast<size_t>(i)] =
          warp.lanes<const uint32_t>(operand(extra.skip + i))[lane];
    }
    const bool adds = (warp.predicate(operand(extra.predicate)) >> lane & 1) != 0;
    request.accumulate = adds != extra.negated;
    warp.cta().tensor()->multiply(warp, lane, request);
  });
}

// Slots: mma, group, kind, ashift, collector.
void build_mma(Builder& b) {
  MmaExtra extra;
  MmaRequest& request = extra.request;
  request.ctas = take_group(b, 1);
  request.kind = b.slot(2) == "kind::f16"    ? MmaKind::F16
                 : b.slot(2) == "kind::tf32" ? MmaKind::TF32
                                             : MmaKind::F8F6F4;
  int next = 0;
  extra.d = take_address(b, next++, Space::Shared);
  request.a_in_tmem = b.peek().kind == Operand::Kind::Address;
  if (request.a_in_tmem) {
    extra.a = take_address(b, next++, Space::Shared);
  } else {
    extra.a_descriptor = next++;
    b.source({'b', 64});
  }
  extra.b_descriptor = next++;
  b.source({'b', 64});
  extra.descriptor = next++;
  b.source({'b', 32});
  if (b.peek().kind == Operand::Kind::Vector) {
    extra.skip = next;
    const int words = b.vector_source({'b', 32});
    if (words != TMEM_QUARTERS * request.ctas) b.fail("a vector of another size");
    next += words;
  }
  extra.predicate = next;
  b.predicate_source();
  extra.negated = (b.instruction.flags & Builder::NEGATED) != 0;
  b.instruction.flags &= ~Builder::NEGATED;
  if (b.operands_left() > 0) {
    constexpr int64_t MOST = 15;
    const int64_t scale = b.immediate();
    if (scale < 0 || scale > MOST) b.fail("a scale must be from 0 to 15");
    if (request.kind == MmaKind::F8F6F4) b.fail("only kind::f16 and kind::tf32 scale D");
    request.scale = static_cast<int>(scale);
  }
  b.instruction.extra = b.keep(extra);
  b.handler(&run_mma, Class::Matrix);
}

// Says why an instruction that the simulator knows does not load.
void build_refused(Builder& b) {
  const auto starts = [&](std::string_view prefix) {
    for (size_t i = 0; i < 4; ++i) {
      if (b.slot(i).starts_with(prefix)) return true;
    }
    return false;
  };
  b.fail(starts("kind::mx")   ? "block-scaled products of tcgen05 are not simulated"
         : starts("ws")       ? "tcgen05.mma.ws is not simulated"
         : starts("sp")       ? "sparse products of tcgen05 are not simulated"
         : starts("kind::i8") ? "integer products of tcgen05 are not simulated"
         : starts("red")      ? "tcgen05.ld.red is not simulated"
                              : "tcgen05.mma with .ashift is not simulated");
}

// ---- Copies and shifts ----

// Operands: address, descriptor.
struct CopyExtra {
  CopyRequest request;
  AddressOperand to;
};

void run_copy(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CopyExtra*>(instruction.extra);
  for_each_lane(mask, [&](int lane) {
    CopyRequest request = extra.request;
    request.to = tensor_address(warp, instruction, extra.to, lane);
    request.source = warp.lanes<const uint64_t>(instruction.operands[1])[lane];
    warp.cta().tensor()->copy(warp, lane, request);
  });
}
// Slots: cp, group, shape, warps, formats.
void build_copy(Builder& b) {
  CopyExtra extra;
  CopyRequest& request = extra.request;
  request.ctas = take_group(b, 1);
  const std::string_view shape = b.slot(2), warps = b.slot(3);
  if (b.has("b8x16")) b.fail("tcgen05.cp that unpacks 6 or 4 bits is not simulated");
  if (shape == "4x256b") b.fail("tcgen05.cp of 4 rows is not simulated");
  request.bytes = shape == "128x256b" ? 32 : 16;
  const bool two = warps == "warpx2::02_13" || warps == "warpx2::01_23";
  if ((shape == "64x128b") != two || (shape == "32x128b") != (warps == "warpx4")) {
    b.fail("no such shape of tcgen05.cp");
  }
  if (warps == "warpx2::02_13") request.first = {0, 32, 0, 32};
  if (warps == "warpx2::01_23") request.first = {0, 0, 32, 32};
  if (warps == "warpx4") request.first = {0, 0, 0, 0};
  request.rows = two ? 64 : warps == "warpx4" ? 32 : 128;
  extra.to = take_address(b, 0, Space::Shared);
  b.source({'b', 64});
  b.instruction.extra = b.keep(extra);
  b.handler(&run_copy, Class::AsyncCopy);
}

// Operands: address.
void run_shift(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CopyExtra*>(instruction.extra);
  for_each_lane(mask, [&](int lane) {
    warp.cta().tensor()->shift(warp, lane, extra.request.ctas,
                               tensor_address(warp, instruction, extra.to, lane));
  });
}
void build_shift(Builder& b) {
  CopyExtra extra;
  extra.request.ctas = take_group(b, 1);
  extra.to = take_address(b, 0, Space::Shared);
  b.instruction.extra = b.keep(extra);
  b.handler(&run_shift, Class::Other);
}

// ---- Commits ----

// Operands: mbarrier, mask of CTAs.
struct CommitExtra {
  AddressOperand barrier;
  bool multicast;
};

void run_commit(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CommitExtra*>(instruction.extra);
  for_each_lane(mask, [&](int lane) {
    const SharedPlace at =
        locate_object(warp, lane, extra.barrier.of(instruction), MBARRIER_BYTES, MBARRIER_BYTES);
    std::vector<SharedPlace> places{at};
    if (extra.multicast) {
      const uint32_t ctas = warp.lanes<const uint32_t>(instruction.operands[1])[lane] & 0xFFFF;
      Cluster& cluster = warp.cta().cluster();
      if (ctas == 0 || ctas >> cluster.size() != 0) {
        throw Fault{"multicast",
                    "a multicast to the CTAs of mask " + std::to_string(ctas) +
                        " in a cluster of " + std::to_string(cluster.size()),
                    lane};
      }
      places.clear();
      for_each_lane(ctas, [&](int rank) {
        Cta& cta = cluster.cta(rank);
        cluster.lifetimes().check_use(warp, lane, cta, "tcgen05.commit to",
                                      cta.shared_base() + at.offset);
        places.push_back({&cta, at.offset});
      });
    }
    warp.cta().tensor()->commit(warp, lane, std::move(places));
  });
}
void build_commit(Builder& b) {
  CommitExtra extra;
  take_group(b, 1);
  extra.multicast = b.has("multicast::cluster");
  extra.barrier =
      take_address(b, 0, b.has("shared::cluster") ? Space::SharedCluster : Space::Generic);
  if (extra.multicast) b.source({'b', 16});
  b.instruction.extra = b.keep(extra);
  b.handler(&run_commit, Class::Barrier);
}

constexpr Form FORMS[] = {
    {"tcgen05", "alloc cta_group::1|cta_group::2 sync aligned ?shared::cta b32", build_alloc},
    {"tcgen05", "dealloc cta_group::1|cta_group::2 sync aligned b32", build_dealloc},
    {"tcgen05", "relinquish_alloc_permit cta_group::1|cta_group::2 sync aligned", build_relinquish},
    {"tcgen05",
     "ld sync aligned 32x32b|16x64b|16x128b|16x256b|16x32bx2 x1|x2|x4|x8|x16|x32|x64|x128 "
     "?pack::16b b32",
     build_transfer},
    {"tcgen05",
     "st sync aligned 32x32b|16x64b|16x128b|16x256b|16x32bx2 x1|x2|x4|x8|x16|x32|x64|x128 "
     "?unpack::16b b32",
     build_transfer},
    {"tcgen05", "wait::ld|wait::st sync aligned", build_wait},
    {"tcgen05", "fence::before_thread_sync|fence::after_thread_sync", build_fence},
    {"tcgen05", "mma cta_group::1|cta_group::2 kind::f16|kind::tf32|kind::f8f6f4 ?$collector",
     build_mma},
    {"tcgen05",
     "cp cta_group::1|cta_group::2 128x256b|4x256b|128x128b|64x128b|32x128b "
     "?warpx2::02_13|warpx2::01_23|warpx4 ?b8x16 ?b6x16_p32|b4x16_p64",
     build_copy},
    {"tcgen05", "shift cta_group::1|cta_group::2 down", build_shift},
    {"tcgen05",
     "commit cta_group::1|cta_group::2 mbarrier::arrive::one ?shared::cluster "
     "?multicast::cluster b64",
     build_commit},
};

// The simulator knows these instructions and refuses them when they are loaded.
constexpr Form REFUSED[] = {
    {"tcgen05",
     "mma cta_group::1|cta_group::2 kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4 block_scale "
     "?scale_vec::1X|scale_vec::2X|scale_vec::4X|block16|block32 ?$collector",
     build_refused},
    {"tcgen05", "mma cta_group::1|cta_group::2 kind::i8 ?ashift ?$collector", build_refused},
    {"tcgen05",
     "mma cta_group::1|cta_group::2 kind::f16|kind::tf32|kind::f8f6f4 ashift ?$collector",
     build_refused},
    {"tcgen05", "mma ws ?sp cta_group::1 kind::f16|kind::tf32|kind::f8f6f4|kind::i8 ?$collector_b",
     build_refused},
    {"tcgen05",
     "mma sp cta_group::1|cta_group::2 "
     "kind::f16|kind::tf32|kind::f8f6f4|kind::i8|kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4 "
     "?block_scale ?scale_vec::1X|scale_vec::2X|scale_vec::4X|block16|block32 ?ashift ?$collector",
     build_refused},
    {"tcgen05",
     "ld red sync aligned 32x32b|16x32bx2 x2|x4|x8|x16|x32|x64|x128 min|max ?abs ?NaN f32|u32|s32",
     build_refused},
};

}  // namespace

std::span<const Form> tcgen05_forms() { return FORMS; }
std::span<const Form> tcgen05_refused_forms() { return REFUSED; }

}  // namespace archflash::sim
