// cp.async.bulk, its tensor and reducing forms, bulk groups, prefetches of tensors and tensor maps.
#include "sim/units/bulk.h"

#include <array>
#include <bit>
#include <string>

#include "sim/instructions/operands.h"
#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

constexpr uint32_t UNIT = 16;        // addresses and sizes of plain copies are multiples of it
constexpr uint32_t BOX_ALIGN = 128;  // the alignment of a box in shared memory

// What one bulk copy has besides its operands. An operand of -1 is absent.
struct BulkExtra {
  AddressOperand to, from, barrier;  // in a tensor copy, `from` or `to` is the tensor map
  int coordinates = -1, rank = 0;
  int bytes = -1, cta_mask = -1;
  bool other_barrier = false;  // the mbarrier may be in the other CTA of the pair
  bool updates = false;
  AtomicUpdate update{};
};

// Takes operands one after the other and counts them.
class Taker {
 public:
  explicit Taker(Builder& b) : b_(b) {}

  AddressOperand address(Space space) { return take_address(b_, next_++, space); }
  // Takes [map, {coordinates}].
  AddressOperand map(BulkExtra& extra) {
    b_.instruction.flags &= ~Builder::ADDRESS_64;
    const std::vector<Operand>& items = b_.address_items(Space::Generic).items;
    const AddressOperand result{next_++, b_.instruction.offset,
                                (b_.instruction.flags & Builder::ADDRESS_64) != 0, Space::Generic};
    b_.instruction.flags &= ~Builder::ADDRESS_64;
    if (items.size() != 2 || items[1].kind != Operand::Kind::Vector) {
      b_.fail("a tensor map with its coordinates is due: [map, {c0, ...}]");
    }
    const std::vector<Operand>& coordinates = items[1].items;
    if (static_cast<int>(coordinates.size()) != extra.rank)
      b_.fail("a wrong number of coordinates");
    extra.coordinates = next_;
    for (const Operand& coordinate : coordinates) {
      b_.add_source(coordinate, {'s', 32});
      ++next_;
    }
    return result;
  }
  int source(Type type) {
    b_.source(type);
    return next_++;
  }

 private:
  Builder& b_;
  int next_ = 0;
};

const BulkExtra& extra_of(const Instruction& instruction) {
  return *static_cast<const BulkExtra*>(instruction.extra);
}

uint64_t value_of(Warp& warp, const Instruction& instruction, const AddressOperand& address,
                  int lane) {
  return address.of(instruction).of_lane(warp, lane);
}

SharedPlace place_of(Warp& warp, const Instruction& instruction, const AddressOperand& address,
                     int lane, uint32_t bytes, uint32_t align) {
  return locate_object(warp, lane, address.of(instruction), bytes, align);
}

TensorMap map_of(Warp& warp, const Instruction& instruction, const AddressOperand& address,
                 int lane) {
  const uint64_t at = value_of(warp, instruction, address, lane);
  if (at % TENSOR_MAP_ALIGN != 0) {
    throw Fault{"misaligned", "the address of a tensor map is not a multiple of 64", lane, at};
  }
  TensorMap map;
  if (!decode(locate_generic(warp, lane, at, TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN), map)) {
    throw Fault{"tensor-map", "the address holds no tensor map", lane, at};
  }
  const int rank = extra_of(instruction).rank;
  if (map.rank != rank) {
    throw Fault{"tensor-map",
                "an instruction for " + std::to_string(rank) +
                    " dimensions with a tensor map that has " + std::to_string(map.rank),
                lane, at};
  }
  return map;
}

std::array<int32_t, MAX_TENSOR_RANK> coordinates_of(Warp& warp, const Instruction& instruction,
                                                    const TensorMap& map, int lane, bool stores) {
  const BulkExtra& extra = extra_of(instruction);
  std::array<int32_t, MAX_TENSOR_RANK> result{};
  for (int i = 0; i < extra.rank; ++i) {
    result[static_cast<size_t>(i)] =
        warp.lanes<const int32_t>(instruction.operands[extra.coordinates + i])[lane];
    if (stores && result[static_cast<size_t>(i)] < 0) {
      throw Fault{"tensor-coordinate",
                  "a store at coordinate " + std::to_string(result[static_cast<size_t>(i)]) +
                      " of dimension " + std::to_string(i) + ": an illegal instruction on a card",
                  lane};
    }
  }
  if (int64_t{result[0]} * map.element_bytes() % UNIT != 0) {
    throw Fault{"tensor-coordinate",
                "coordinate " + std::to_string(result[0]) + " of dimension 0 is " +
                    std::to_string(int64_t{result[0]} * map.element_bytes()) +
                    " bytes, no multiple of 16: an illegal instruction on a card",
                lane};
  }
  return result;
}

// Warns about a box that does not start where its swizzle's pattern does. TMA lays it out by the
// address bits all the same, and its readers must do so, too.
void check_pattern(Warp& warp, int lane, const TensorMap& map, SharedPlace at) {
  const uint32_t pattern = swizzle_pattern_bytes(map.swizzle);
  if (map.swizzle == MapSwizzle::None || at.address() % pattern == 0) return;
  warp.cta().report(Severity::Lint, warp, lane, "alignment",
                    "a box with a swizzle of " + std::to_string(swizzle_span(map.swizzle)) +
                        " bytes at shared offset " + std::to_string(at.offset) +
                        ", which is no multiple of " + std::to_string(pattern) +
                        " from the start of the window: the pattern does not start with the box",
                    at.address());
}

// The places where a load lands: one, or one in each CTA of the multicast's mask.
std::vector<BulkTarget> targets_of(Warp& warp, const Instruction& instruction, int lane,
                                   uint32_t align) {
  const BulkExtra& extra = extra_of(instruction);
  const SharedPlace data = place_of(warp, instruction, extra.to, lane, 1, align);
  const SharedPlace barrier =
      place_of(warp, instruction, extra.barrier, lane, MBARRIER_BYTES, MBARRIER_BYTES);
  const bool peer_signal = extra.other_barrier;
  const bool peer = peer_signal && (data.cta->rank() ^ barrier.cta->rank()) == 1;
  if (data.cta != barrier.cta && !peer) {
    throw Fault{"mbarrier", "the mbarrier of a bulk copy is in another CTA than its destination",
                lane, barrier.address()};
  }
  if (extra.cta_mask < 0) return {{data, barrier}};
  const uint32_t mask =
      warp.lanes<const uint32_t>(instruction.operands[extra.cta_mask])[lane] & 0xFFFF;
  Cluster& cluster = warp.cta().cluster();
  if (mask == 0 || mask >> cluster.size() != 0) {
    throw Fault{"multicast",
                "a multicast to the CTAs of mask " + std::to_string(mask) + " in a cluster of " +
                    std::to_string(cluster.size()),
                lane};
  }
  std::vector<BulkTarget> targets;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    Cta& cta = cluster.cta(std::countr_zero(rest));
    cluster.lifetimes().check_use(warp, lane, cta, "a multicast to",
                                  cta.shared_base() + data.offset);
    // With .cta_group::2 the signal goes to one CTA of each destination's pair: the one with an
    // even rank if the mbarrier's CTA has an even rank, else the other.
    const int signalled = peer_signal ? (cta.rank() & ~1) | (barrier.cta->rank() & 1) : cta.rank();
    if (signalled >= cluster.size()) {
      throw Fault{"multicast", "the pair of CTA " + std::to_string(cta.index()) + " has no other",
                  lane};
    }
    Cta& informed = cluster.cta(signalled);
    cluster.lifetimes().check_use(warp, lane, informed, "a multicast that signals",
                                  informed.shared_base() + barrier.offset);
    targets.push_back({{&cta, data.offset}, {&informed, barrier.offset}});
  }
  return targets;
}

void run_tensor_load(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const BulkExtra& extra = extra_of(instruction);
  for_each_lane(mask, [&](int lane) {
    const TensorMap map = map_of(warp, instruction, extra.from, lane);
    const auto coordinates = coordinates_of(warp, instruction, map, lane, false);
    std::vector<BulkTarget> targets = targets_of(warp, instruction, lane, BOX_ALIGN);
    check_pattern(warp, lane, map, targets.front().data);
    start_bulk_load(warp, lane, box_shape(map, coordinates.data(), false), std::move(targets));
  });
}

NumericType numeric_type(MapType type) {
  static constexpr NumericType TYPES[] = {
      NumericType::U32, NumericType::U32, NumericType::U32, NumericType::S32, NumericType::U64,
      NumericType::S64, NumericType::F16, NumericType::F32, NumericType::F64, NumericType::BF16};
  return TYPES[static_cast<int>(type)];
}

void run_tensor_store(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const BulkExtra& extra = extra_of(instruction);
  for_each_lane(mask, [&](int lane) {
    const TensorMap map = map_of(warp, instruction, extra.to, lane);
    const auto coordinates = coordinates_of(warp, instruction, map, lane, true);
    const SharedPlace source = place_of(warp, instruction, extra.from, lane, 1, BOX_ALIGN);
    check_pattern(warp, lane, map, source);
    std::optional<AtomicUpdate> update;
    if (extra.updates) {
      update = extra.update;
      update->type = numeric_type(map.type);
      const bool floating = map.type == MapType::F16 || map.type == MapType::BF16 ||
                            map.type == MapType::F32 || map.type == MapType::F64;
      const Atomic operation = update->operation;
      const bool ordered = operation == Atomic::Min || operation == Atomic::Max;
      const bool wide_float = map.type == MapType::F32 || map.type == MapType::F64;
      if (map.element_bytes() < 4 && !floating) {
        throw Fault{"tensor-map", "a reduction of elements of 8 or 16 bits", lane};
      }
      if (floating && operation != Atomic::Add && (!ordered || wide_float)) {
        throw Fault{"tensor-map", "no such reduction of floating-point elements", lane};
      }
    }
    start_bulk_store(warp, lane, box_shape(map, coordinates.data(), true), source, update);
  });
}

uint32_t size_of(Warp& warp, const Instruction& instruction, int lane) {
  const uint32_t bytes =
      warp.lanes<const uint32_t>(instruction.operands[extra_of(instruction).bytes])[lane];
  if (bytes == 0 || bytes % UNIT != 0) {
    throw Fault{"copy-size",
                "a bulk copy of " + std::to_string(bytes) + " bytes: a multiple of 16, not 0",
                lane};
  }
  return bytes;
}

uint64_t global_of(Warp& warp, const Instruction& instruction, const AddressOperand& address,
                   int lane) {
  const uint64_t at = value_of(warp, instruction, address, lane);
  if (at % UNIT != 0) {
    throw Fault{"misaligned", "the global address of a bulk copy is not a multiple of 16", lane,
                at};
  }
  return at;
}

void run_load(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const BulkExtra& extra = extra_of(instruction);
  for_each_lane(mask, [&](int lane) {
    const uint32_t bytes = size_of(warp, instruction, lane);
    const uint64_t from = global_of(warp, instruction, extra.from, lane);
    start_bulk_load(warp, lane, flat_shape(from, bytes), targets_of(warp, instruction, lane, UNIT));
  });
}

void run_exchange(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const BulkExtra& extra = extra_of(instruction);
  for_each_lane(mask, [&](int lane) {
    const uint32_t bytes = size_of(warp, instruction, lane);
    const SharedPlace from = place_of(warp, instruction, extra.from, lane, bytes, UNIT);
    start_bulk_exchange(warp, lane, from, bytes, targets_of(warp, instruction, lane, UNIT).front());
  });
}

void run_store(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const BulkExtra& extra = extra_of(instruction);
  for_each_lane(mask, [&](int lane) {
    const uint32_t bytes = size_of(warp, instruction, lane);
    BulkShape shape = flat_shape(global_of(warp, instruction, extra.to, lane), bytes);
    shape.element_bytes = instruction.bytes;
    const SharedPlace from = place_of(warp, instruction, extra.from, lane, bytes, UNIT);
    std::optional<AtomicUpdate> update;
    if (extra.updates) update = extra.update;
    start_bulk_store(warp, lane, std::move(shape), from, update);
  });
}

Space space_of(std::string_view name) {
  return name == "shared::cluster" ? Space::SharedCluster
         : name == "shared::cta"   ? Space::Shared
                                   : Space::Global;
}

void finish(Builder& b, BulkExtra extra, Handler run) {
  b.cache_policy(b.has("L2::cache_hint"));
  if (extra.updates) b.kernel().orders_globally = true;
  b.instruction.extra = b.keep(extra);
  b.handler(run, Class::AsyncCopy);
}

// Slots: async, bulk, tensor, rank, destination, ...
void build_tensor_load(Builder& b) {
  BulkExtra extra;
  Taker taker(b);
  extra.rank = b.slot(3)[0] - '0';
  const Space space = space_of(b.slot(4));
  extra.to = taker.address(space);
  extra.from = taker.map(extra);
  extra.barrier = taker.address(space);
  extra.other_barrier = b.has("cta_group::2");
  if (b.has("multicast::cluster")) extra.cta_mask = taker.source({'u', 16});
  finish(b, extra, &run_tensor_load);
}

void build_tensor_store(Builder& b) {
  BulkExtra extra;
  Taker taker(b);
  extra.updates = b.slot(0) == "reduce";
  extra.rank = b.slot(extra.updates ? 4 : 3)[0] - '0';
  if (extra.updates) extra.update.operation = atomic_named(b.slot(7));
  extra.to = taker.map(extra);
  extra.from = taker.address(Space::Shared);
  finish(b, extra, &run_tensor_store);
}

// Slots: async, bulk, destination, source, ...
void build_load(Builder& b) {
  BulkExtra extra;
  Taker taker(b);
  const Space space = space_of(b.slot(2));
  extra.to = taker.address(space);
  extra.from = taker.address(Space::Global);
  extra.bytes = taker.source({'u', 32});
  extra.barrier = taker.address(space);
  if (b.has("multicast::cluster")) extra.cta_mask = taker.source({'u', 16});
  finish(b, extra, &run_load);
}

void build_exchange(Builder& b) {
  BulkExtra extra;
  Taker taker(b);
  extra.to = taker.address(Space::SharedCluster);
  extra.from = taker.address(Space::Shared);
  extra.bytes = taker.source({'u', 32});
  extra.barrier = taker.address(Space::SharedCluster);
  finish(b, extra, &run_exchange);
}

void build_store(Builder& b) {
  BulkExtra extra;
  Taker taker(b);
  extra.to = taker.address(Space::Global);
  extra.from = taker.address(Space::Shared);
  extra.bytes = taker.source({'u', 32});
  finish(b, extra, &run_store);
}

// Slots: reduce, async, bulk, destination, source, completion, hint, operation, noftz, type.
void build_reduce(Builder& b) {
  BulkExtra extra;
  Taker taker(b);
  static const struct {
    const char* name;
    NumericType type;
    uint8_t bytes;
  } TYPES[] = {{"f16", NumericType::F16, 2}, {"bf16", NumericType::BF16, 2},
               {"b32", NumericType::U32, 4}, {"u32", NumericType::U32, 4},
               {"s32", NumericType::S32, 4}, {"b64", NumericType::U64, 8},
               {"u64", NumericType::U64, 8}, {"s64", NumericType::S64, 8},
               {"f32", NumericType::F32, 4}, {"f64", NumericType::F64, 8}};
  extra.updates = true;
  extra.update.operation = atomic_named(b.slot(7));
  const std::string_view type = b.slot(9);
  for (const auto& row : TYPES) {
    if (type != row.name) continue;
    extra.update.type = row.type;
    b.instruction.bytes = row.bytes;
  }
  const bool bits = type == "b32" || type == "b64";
  const bool half = type == "f16" || type == "bf16";
  const Atomic operation = extra.update.operation;
  const bool bitwise =
      operation == Atomic::And || operation == Atomic::Or || operation == Atomic::Xor;
  const bool counts = operation == Atomic::Inc || operation == Atomic::Dec;
  if (bits != bitwise || (counts && type != "u32") ||
      ((type == "f32" || type == "f64") && operation != Atomic::Add) ||
      b.has("noftz") != (half && operation == Atomic::Add)) {
    b.fail("no such reduction");
  }
  extra.to = taker.address(Space::Global);
  extra.from = taker.address(Space::Shared);
  extra.bytes = taker.source({'u', 32});
  finish(b, extra, &run_store);
}

void run_commit(Warp& warp, const Instruction&, uint32_t mask) { warp.bulk().commit(mask); }
void build_commit(Builder& b) { b.handler(&run_commit, Class::AsyncCopy); }

void run_wait_group(Warp& warp, const Instruction& instruction, uint32_t mask) {
  warp.bulk().wait(mask, static_cast<uint32_t>(instruction.offset), instruction.flags != 0);
}
void build_wait_group(Builder& b) {
  b.instruction.offset = b.immediate();
  if (b.instruction.offset < 0) b.fail("a negative number of groups");
  b.instruction.flags = b.has("read") ? 1 : 0;
  b.handler(&run_wait_group, Class::AsyncCopy);
}

// ---- Prefetches: their operands are checked, and nothing moves ----

void run_prefetch(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const BulkExtra& extra = extra_of(instruction);
  for_each_lane(mask, [&](int lane) {
    size_of(warp, instruction, lane);
    global_of(warp, instruction, extra.from, lane);
  });
}
void build_prefetch(Builder& b) {
  BulkExtra extra;
  Taker taker(b);
  extra.from = taker.address(Space::Global);
  extra.bytes = taker.source({'u', 32});
  finish(b, extra, &run_prefetch);
}

void run_prefetch_tensor(Warp& warp, const Instruction& instruction, uint32_t mask) {
  for_each_lane(mask, [&](int lane) {
    const TensorMap map = map_of(warp, instruction, extra_of(instruction).from, lane);
    coordinates_of(warp, instruction, map, lane, false);
  });
}
void build_prefetch_tensor(Builder& b) {
  BulkExtra extra;
  Taker taker(b);
  extra.rank = b.slot(4)[0] - '0';
  extra.from = taker.map(extra);
  finish(b, extra, &run_prefetch_tensor);
}

void run_prefetch_map(Warp& warp, const Instruction& instruction, uint32_t mask) {
  for_each_lane(mask, [&](int lane) {
    const uint64_t at = value_of(warp, instruction, extra_of(instruction).from, lane);
    TensorMap map;
    if (at % TENSOR_MAP_ALIGN != 0 ||
        !decode(locate_generic(warp, lane, at, TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN), map)) {
      throw Fault{"tensor-map", "the address holds no tensor map", lane, at};
    }
  });
}
void build_prefetch_map(Builder& b) {
  BulkExtra extra;
  Taker taker(b);
  extra.from = taker.address(b.has("param")   ? Space::Param
                             : b.has("const") ? Space::Const
                                              : Space::Generic);
  if (extra.from.space != Space::Generic) b.fail("only generic addresses are simulated");
  finish(b, extra, &run_prefetch_map);
}

constexpr Form FORMS[] = {
    // LLVM writes the group last.
    {"cp",
     "async bulk tensor 1d|2d|3d|4d|5d shared::cta|shared::cluster global ?tile "
     "mbarrier::complete_tx::bytes ?multicast::cluster ?cta_group::1|cta_group::2 ?L2::cache_hint "
     "?cta_group::1|cta_group::2",
     build_tensor_load},
    {"cp", "async bulk tensor 1d|2d|3d|4d|5d global shared::cta ?tile bulk_group ?L2::cache_hint",
     build_tensor_store},
    {"cp",
     "reduce async bulk tensor 1d|2d|3d|4d|5d global shared::cta add|min|max|inc|dec|and|or|xor "
     "?tile bulk_group ?L2::cache_hint",
     build_tensor_store},
    {"cp",
     "async bulk shared::cta|shared::cluster global mbarrier::complete_tx::bytes "
     "?multicast::cluster ?L2::cache_hint",
     build_load},
    {"cp", "async bulk shared::cluster shared::cta mbarrier::complete_tx::bytes", build_exchange},
    {"cp", "async bulk global shared::cta bulk_group ?L2::cache_hint", build_store},
    {"cp",
     "reduce async bulk global shared::cta bulk_group ?L2::cache_hint "
     "add|min|max|inc|dec|and|or|xor ?noftz f16|bf16|b32|u32|s32|b64|u64|s64|f32|f64",
     build_reduce},
    {"cp", "async bulk commit_group", build_commit},
    {"cp", "async bulk wait_group ?read", build_wait_group},
    {"cp", "async bulk prefetch L2 global ?L2::cache_hint", build_prefetch},
    {"cp", "async bulk prefetch tensor 1d|2d|3d|4d|5d L2 global ?tile ?L2::cache_hint",
     build_prefetch_tensor},
    {"prefetch", "?param|const tensormap", build_prefetch_map},
};

}  // namespace

std::span<const Form> bulk_forms() { return FORMS; }

}  // namespace archflash::sim
