// ld, st, atom, red, cp.async, prefetch and fences.
#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "sim/instructions/elementwise.h"
#include "sim/load/builder.h"
#include "sim/memory/access.h"
#include "sim/numerics/atomic.h"
#include "sim/numerics/numeric.h"
#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

// Flags of loads, stores and atomics.
constexpr uint32_t SIGNED_LOAD = 1, WIDE_REGISTER = 2, STRONG = 4, ACQUIRE = 8, RELEASE = 16;

Space space_named(std::string_view name) {
  return name == "shared::cluster"    ? Space::SharedCluster
         : name.starts_with("shared") ? Space::Shared
         : name == "global"           ? Space::Global
         : name == "local"            ? Space::Local
         : name.starts_with("param")  ? Space::Param
         : name == "const"            ? Space::Const
                                      : Space::Generic;
}

// Watches memory at the granularity of the smallest access.
void note_width(Builder& b, Space space, uint32_t bytes) {
  const int log2 = std::countr_zero(std::min(bytes, 4u));
  Kernel& kernel = b.kernel();
  if (space == Space::Shared || space == Space::Generic) {
    kernel.race_granule_log2 = std::min(kernel.race_granule_log2, log2);
  }
  if (space == Space::Global || space == Space::Generic) {
    kernel.global_granule_log2 = std::min(kernel.global_granule_log2, log2);
  }
}

uint32_t order_flags(const Builder& b) {
  return (b.has("volatile") || b.has("relaxed") ? STRONG : 0) |
         (b.has("acquire") ? STRONG | ACQUIRE : 0) | (b.has("release") ? STRONG | RELEASE : 0) |
         (b.has("acq_rel") ? STRONG | ACQUIRE | RELEASE : 0);
}

// Where a synchronising variable is, for the race detector: unique over the spaces.
uint64_t variable_key(const Located& located, int lane) {
  return located.space[lane] == Space::Shared ? SHARED_WINDOW + located.address[lane]
                                              : located.address[lane];
}

// ---- ld ----

template <class Memory, class Register>
void load_vector(Warp& warp, const Instruction& instruction, uint32_t mask,
                 const Located& located) {
  for (int k = 0; k < instruction.count; ++k) {
    Register* d = warp.lanes<Register>(instruction.operands[k]);
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      Memory value;
      std::memcpy(&value, located.where[lane] + k * static_cast<int>(sizeof(Memory)),
                  sizeof(Memory));
      if constexpr (std::is_class_v<Memory>)
        d[lane] = value;
      else
        d[lane] = static_cast<Register>(value);
    }
  }
}

struct Bits128 {
  uint64_t low, high;
};

void run_load(Warp& warp, const Instruction& instruction, uint32_t mask) {
  Located located;
  const Ref base = instruction.operands[instruction.count];
  const bool strong = (instruction.flags & STRONG) != 0;
  const uint32_t bytes = uint32_t{instruction.bytes} * instruction.count;
  locate(warp, instruction, mask, base, instruction.offset,
         (instruction.flags & Builder::ADDRESS_64) != 0, instruction.space, bytes,
         strong ? Access::StrongRead : Access::Read, located);
  if (strong) {
    if (RaceDetector* races = warp.cta().races()) {
      for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        races->strong_read(warp.agent(), variable_key(located, std::countr_zero(rest)),
                           (instruction.flags & ACQUIRE) != 0);
      }
    }
  }
  const bool wide = (instruction.flags & WIDE_REGISTER) != 0;
  const bool is_signed = (instruction.flags & SIGNED_LOAD) != 0;
  switch (instruction.bytes) {
    case 1:
      if (wide) {
        if (is_signed)
          load_vector<int8_t, uint64_t>(warp, instruction, mask, located);
        else
          load_vector<uint8_t, uint64_t>(warp, instruction, mask, located);
      } else {
        if (is_signed)
          load_vector<int8_t, uint32_t>(warp, instruction, mask, located);
        else
          load_vector<uint8_t, uint32_t>(warp, instruction, mask, located);
      }
      break;
    case 2:
      if (wide) {
        if (is_signed)
          load_vector<int16_t, uint64_t>(warp, instruction, mask, located);
        else
          load_vector<uint16_t, uint64_t>(warp, instruction, mask, located);
      } else {
        if (is_signed)
          load_vector<int16_t, uint32_t>(warp, instruction, mask, located);
        else
          load_vector<uint16_t, uint32_t>(warp, instruction, mask, located);
      }
      break;
    case 4:
      if (wide) {
        if (is_signed)
          load_vector<int32_t, uint64_t>(warp, instruction, mask, located);
        else
          load_vector<uint32_t, uint64_t>(warp, instruction, mask, located);
      } else {
        load_vector<uint32_t, uint32_t>(warp, instruction, mask, located);
      }
      break;
    case 8:
      load_vector<uint64_t, uint64_t>(warp, instruction, mask, located);
      break;
    case 16:
      load_vector<Bits128, Bits128>(warp, instruction, mask, located);
      break;
  }
}

// A load of an address that is the same for all lanes and all launches of the kernel.
void run_load_param(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const std::vector<uint8_t>& parameters = warp.cta().launch().parameters;
  const auto at = static_cast<uint64_t>(
      static_cast<int64_t>(*warp.lanes<const uint64_t>(instruction.operands[instruction.count])) +
      instruction.offset);
  const uint32_t total = uint32_t{instruction.bytes} * instruction.count;
  if (mask != ALL_LANES || at + total > parameters.size() || at % total != 0 ||
      instruction.bytes < 4 || (instruction.flags & WIDE_REGISTER)) {
    run_load(warp, instruction, mask);
    return;
  }
  for (int k = 0; k < instruction.count; ++k) {
    const uint8_t* from = parameters.data() + at + static_cast<uint64_t>(k * instruction.bytes);
    if (instruction.bytes == 8) {
      uint64_t value;
      std::memcpy(&value, from, 8);
      std::fill_n(warp.lanes<uint64_t>(instruction.operands[k]), LANES, value);
    } else {
      uint32_t value;
      std::memcpy(&value, from, 4);
      std::fill_n(warp.lanes<uint32_t>(instruction.operands[k]), LANES, value);
    }
  }
}

void build_load(Builder& b, Space space, size_t vector_slot, size_t type_slot) {
  const Type t = b.type(type_slot);
  const std::string_view vector = b.slot(vector_slot);
  const int count = vector.empty() ? 1 : vector[1] - '0';
  const Operand& destination = b.peek();
  if ((destination.kind == Operand::Kind::Vector) != !vector.empty()) {
    b.fail("a vector is due exactly where .v2, .v4 or .v8 is");
  }
  if (count * t.bits > 256) b.fail("too wide a vector");
  // Registers may be wider than memory: all of them alike.
  int register_bits = t.bits;
  if (vector.empty()) {
    register_bits = b.destination_at_least(t);
  } else {
    if (static_cast<int>(destination.items.size()) != count) b.fail("a vector of another size");
    b.take();
    // All wider than 32 bits or none, as one function writes them all.
    std::vector<Ref> sinks;
    int wide = 0, narrow = 0;
    for (const Operand& item : destination.items) {
      if (item.kind == Operand::Kind::Sink) {
        sinks.push_back(b.add_scratch(t.bits));
        continue;
      }
      const int bits = b.register_bits(b.add_destination(item, t, true));
      ++(bits > 32 ? wide : narrow);
      register_bits = std::max(register_bits, bits);
    }
    if (wide > 0 && narrow > 0) b.fail("registers of different widths");
    if (wide > 0) {
      for (const Ref sink : sinks) b.widen(sink);
    }
  }
  b.instruction.count = static_cast<uint8_t>(count);
  b.instruction.bytes = static_cast<uint8_t>(t.bits / 8);
  const bool constant_address =
      b.peek().kind == Operand::Kind::Address && b.peek().items[0].kind == Operand::Kind::Name;
  b.address(space);
  b.cache_policy(b.has("L2::cache_hint"));
  note_width(b, space, static_cast<uint32_t>(count * t.bits / 8));
  b.instruction.flags |= (t.kind == 's' ? SIGNED_LOAD : 0) |
                         (register_bits == 64 && t.bits < 64 ? WIDE_REGISTER : 0) | order_flags(b);
  b.handler(space == Space::Param && constant_address ? &run_load_param : &run_load, Class::Load);
}

void build_ld(Builder& b) { build_load(b, space_named(b.slot(2)), 8, 9); }
void build_ld_nc(Builder& b) { build_load(b, Space::Global, 6, 7); }
void build_ldu(Builder& b) { build_load(b, space_named(b.slot(0)), 1, 2); }

// ---- st ----

void run_store(Warp& warp, const Instruction& instruction, uint32_t mask) {
  Located located;
  const uint32_t bytes = uint32_t{instruction.bytes} * instruction.count;
  locate(warp, instruction, mask, instruction.operands[0], instruction.offset,
         (instruction.flags & Builder::ADDRESS_64) != 0, instruction.space, bytes, Access::Write,
         located);
  const bool wide = (instruction.flags & WIDE_REGISTER) != 0 || instruction.bytes == 8;
  const bool strong = (instruction.flags & STRONG) != 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    alignas(16) uint8_t data[32];
    for (int k = 0; k < instruction.count; ++k) {
      const Ref source = instruction.operands[1 + k];
      uint8_t* to = data + k * instruction.bytes;
      if (instruction.bytes == 16)
        std::memcpy(to, warp.lanes<const Bits128>(source) + lane, 16);
      else if (wide)
        std::memcpy(to, warp.lanes<const uint64_t>(source) + lane, instruction.bytes);
      else
        std::memcpy(to, warp.lanes<const uint32_t>(source) + lane, instruction.bytes);
    }
    if (strong) {
      if (RaceDetector* races = warp.cta().races()) {
        races->strong_write(warp.agent(), variable_key(located, lane),
                            (instruction.flags & RELEASE) != 0);
      }
      note_strong_write(warp, located, lane, bytes);
    } else {
      note_write(warp, located, lane, bytes, data);
    }
    std::memcpy(located.where[lane], data, bytes);
  }
}

void build_store(Builder& b, Space space, size_t vector_slot, size_t type_slot) {
  const Type t = b.type(type_slot);
  const std::string_view vector = b.slot(vector_slot);
  const int count = vector.empty() ? 1 : vector[1] - '0';
  if (space == Space::Param || space == Space::Const) b.fail("this space cannot be written");
  b.address(space);
  const Operand& source = b.peek();
  if ((source.kind == Operand::Kind::Vector) != !vector.empty()) {
    b.fail("a vector is due exactly where .v2, .v4 or .v8 is");
  }
  if (count * t.bits > 256) b.fail("too wide a vector");
  int register_bits = t.bits;
  if (vector.empty()) {
    register_bits = b.source_at_least(t);
  } else {
    if (static_cast<int>(source.items.size()) != count) b.fail("a vector of another size");
    b.take();
    int wide = 0;
    for (const Operand& item : source.items) {
      const Ref ref = b.add_source(item, t, true);
      const int bits = ref & CONSTANT ? t.bits : b.register_bits(ref);
      wide += bits > 32;
      register_bits = std::max(register_bits, bits);
    }
    if (wide != 0 && wide != count) b.fail("registers of different widths");
  }
  b.cache_policy(b.has("L2::cache_hint"));
  b.instruction.count = static_cast<uint8_t>(count);
  b.instruction.bytes = static_cast<uint8_t>(t.bits / 8);
  note_width(b, space, static_cast<uint32_t>(count * t.bits / 8));
  b.instruction.flags |= (register_bits == 64 && t.bits < 64 ? WIDE_REGISTER : 0) | order_flags(b);
  b.handler(&run_store, Class::Store);
}
void build_st(Builder& b) { build_store(b, space_named(b.slot(2)), 7, 8); }

// ---- atom and red ----

// Operands: `count` destinations (atom only), the address, `count` sources, for cas as many again.
void run_atomic(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const AtomicUpdate*>(instruction.extra);
  const int count = instruction.count;
  const bool returns = (instruction.flags & WIDE_REGISTER) != 0;
  const Ref* operands = instruction.operands + (returns ? count : 0);
  const uint32_t bytes = instruction.bytes, total = bytes * static_cast<uint32_t>(count);
  Located located;
  locate(warp, instruction, mask, operands[0], instruction.offset,
         (instruction.flags & Builder::ADDRESS_64) != 0, instruction.space, total, Access::Atomic,
         located);
  const auto value = [&](Ref ref, int lane) -> uint64_t {
    if (bytes == 8) return warp.lanes<const uint64_t>(ref)[lane];
    const uint32_t v = warp.lanes<const uint32_t>(ref)[lane];
    return bytes == 2 ? v & 0xFFFF : v;
  };
  RaceDetector* races = warp.cta().races();
  // All lanes at one address happen one after the other.
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (races != nullptr) {
      races->strong_read(warp.agent(), variable_key(located, lane), instruction.flags & ACQUIRE);
      races->strong_write(warp.agent(), variable_key(located, lane), instruction.flags & RELEASE);
    }
    for (int k = 0; k < count; ++k) {
      uint8_t* where = located.where[lane] + static_cast<uint32_t>(k) * bytes;
      uint64_t old = 0;
      std::memcpy(&old, where, bytes);
      const uint64_t x = value(operands[1 + k], lane);
      const uint64_t y = extra.operation == Atomic::Cas ? value(operands[1 + count + k], lane) : 0;
      const uint64_t result = apply_atomic(extra, old, x, y);
      std::memcpy(where, &result, bytes);
      if (returns) {
        if (bytes == 8)
          warp.lanes<uint64_t>(instruction.operands[k])[lane] = old;
        else
          warp.lanes<uint32_t>(instruction.operands[k])[lane] = static_cast<uint32_t>(old);
      }
    }
  }
}

void build_atomic(Builder& b, bool returns) {
  const Space space = space_named(b.slot(2));
  if (space == Space::Local || space == Space::Param || space == Space::Const) {
    b.fail("atomics are for global and shared memory");
  }
  const std::string_view name = b.slot(3), type_name = b.slot(7);
  static const struct {
    const char* name;
    Atomic operation;
  } OPERATIONS[] = {{"add", Atomic::Add}, {"min", Atomic::Min}, {"max", Atomic::Max},
                    {"inc", Atomic::Inc}, {"dec", Atomic::Dec}, {"and", Atomic::And},
                    {"or", Atomic::Or},   {"xor", Atomic::Xor}, {"exch", Atomic::Exch},
                    {"cas", Atomic::Cas}};
  AtomicUpdate extra{};
  for (const auto& row : OPERATIONS) {
    if (name == row.name) extra.operation = row.operation;
  }
  const bool bits = type_name.starts_with('b') && !type_name.starts_with("bf");
  const bool floating = type_name.starts_with('f') || type_name.starts_with("bf");
  const bool bitwise = extra.operation == Atomic::And || extra.operation == Atomic::Or ||
                       extra.operation == Atomic::Xor || extra.operation == Atomic::Exch ||
                       extra.operation == Atomic::Cas;
  const bool counts = extra.operation == Atomic::Inc || extra.operation == Atomic::Dec;
  const bool no_min = type_name == "f32" || type_name == "f64";
  if (bits != bitwise || (counts && type_name != "u32") ||
      (floating && no_min && extra.operation != Atomic::Add) || (floating && counts)) {
    b.fail("no such atomic operation on this type");
  }
  const bool half =
      type_name == "f16" || type_name == "bf16" || type_name == "f16x2" || type_name == "bf16x2";
  if (half != b.has("noftz")) {
    b.fail(half ? ".noftz is due" : ".noftz is for 16-bit floating point");
  }
  extra.type = type_name == "f32"      ? NumericType::F32
               : type_name == "f64"    ? NumericType::F64
               : type_name == "f16"    ? NumericType::F16
               : type_name == "bf16"   ? NumericType::BF16
               : type_name == "f16x2"  ? NumericType::F16X2
               : type_name == "bf16x2" ? NumericType::BF16X2
               : type_name == "s32"    ? NumericType::S32
               : type_name == "s64"    ? NumericType::S64
               : type_name == "u32"    ? NumericType::U32
                                       : NumericType::U64;
  const Type t = b.type(7);
  const Type operand{half ? 'b' : t.kind, t.bits};
  const std::string_view vector = b.slot(6);
  const int count = vector.empty() ? 1 : vector[1] - '0';
  if (count > 1 && (!floating || space == Space::Shared || space == Space::SharedCluster)) {
    b.fail("vectors are for floating point in global memory");
  }
  if (returns && b.vector_destination(operand) != count) b.fail("a vector of another size");
  b.address(space);
  if (b.vector_source(operand) != count) b.fail("a vector of another size");
  if (extra.operation == Atomic::Cas) b.source(operand);
  b.cache_policy(b.has("L2::cache_hint"));
  b.instruction.count = static_cast<uint8_t>(count);
  b.instruction.bytes = static_cast<uint8_t>(t.bits / 8);
  note_width(b, space, static_cast<uint32_t>(t.bits / 8));
  b.instruction.flags |= order_flags(b) | (returns ? WIDE_REGISTER : 0);
  b.instruction.extra = b.keep(extra);
  if (space != Space::Shared && space != Space::SharedCluster) b.kernel().orders_globally = true;
  b.handler(&run_atomic, Class::Atomic);
}
void build_atom(Builder& b) { build_atomic(b, true); }
void build_red(Builder& b) { build_atomic(b, false); }

// ---- cp.async ----

struct CopyExtra {
  int64_t source_offset;
  bool destination_wide, source_wide;
  bool ignore;  // the last operand is a predicate: true reads nothing
};

void run_copy_async(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CopyExtra*>(instruction.extra);
  const uint32_t bytes = instruction.bytes;
  Cta& cta = warp.cta();
  Located to;
  locate(warp, instruction, mask, instruction.operands[0], instruction.offset,
         extra.destination_wide, Space::Shared, bytes, Access::Copy, to);
  PendingCopy copy;
  copy.lanes = copy.mask = copy.unwaited = mask;
  copy.sequence = warp.next_copy_sequence();
  copy.pc = warp.pc();
  copy.bytes = static_cast<uint8_t>(bytes);
  copy.issued = cta.time();
  // What is read: all, as many bytes as the operand says, or nothing.
  uint32_t whole = mask;
  if (extra.ignore) {
    uint32_t ignored = warp.predicate(instruction.operands[2]);
    if (instruction.flags & Builder::NEGATED) ignored = ~ignored;
    whole = mask & ~ignored;
  } else {
    const uint32_t* sizes = warp.lanes<const uint32_t>(instruction.operands[2]);
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      const int lane = std::countr_zero(rest);
      if (sizes[lane] > bytes) {
        throw Fault{"copy-size",
                    "cp.async reads " + std::to_string(sizes[lane]) + " of " +
                        std::to_string(bytes) + " bytes",
                    lane, to.address[lane]};
      }
      if (sizes[lane] == bytes) continue;
      whole &= ~(1u << lane);
      copy.read_bytes[lane] = static_cast<uint8_t>(sizes[lane]);
    }
  }
  Located from;
  if (whole != 0) {
    locate(warp, instruction, whole, instruction.operands[1], extra.source_offset,
           extra.source_wide, Space::Global, bytes, Access::Read, from);
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    copy.offset[lane] = static_cast<uint32_t>(to.address[lane] - cta.shared_base());
    if (whole >> lane & 1) {
      copy.source[lane] = from.where[lane];
      copy.read_bytes[lane] = static_cast<uint8_t>(bytes);
    } else {
      const uint32_t part = extra.ignore ? 0 : copy.read_bytes[lane];
      copy.read_bytes[lane] = static_cast<uint8_t>(part);
      copy.source[lane] = nullptr;
      if (part > 0) {
        // Only the bytes that are read must exist. The address is aligned for the whole copy.
        copy.source[lane] = locate_bytes(warp, lane, instruction.operands[1], extra.source_offset,
                                         extra.source_wide, bytes, part);
      }
    }
    std::memset(cta.shared_state() + copy.offset[lane], IN_FLIGHT, bytes);
    if (RaceDetector* races = cta.races()) {
      const Race race = races->copy(warp.agent(), lane, warp.pc(), copy.sequence,
                                    cta.race_base() + copy.offset[lane], bytes);
      if (race.found) {
        cta.report_race(warp, lane, race, true, false,
                        std::to_string(bytes) + " bytes of shared memory at offset " +
                            std::to_string(copy.offset[lane]) + " by an asynchronous copy",
                        to.address[lane]);
      }
    }
  }
  warp.copies().push_back(copy);
  if (cta.options().mode == Mode::Eager) warp.land_copy(warp.copies().size() - 1);
}

void build_cp_async(Builder& b) {
  CopyExtra extra{};
  b.address(Space::Shared);
  const int64_t to_offset = b.instruction.offset;
  extra.destination_wide = (b.instruction.flags & Builder::ADDRESS_64) != 0;
  b.instruction.flags &= ~Builder::ADDRESS_64;
  b.address(Space::Global);
  extra.source_offset = b.instruction.offset;
  extra.source_wide = (b.instruction.flags & Builder::ADDRESS_64) != 0;
  b.instruction.offset = to_offset;
  const int64_t bytes = b.immediate();
  const bool fits = b.has("cg") ? bytes == 16 : bytes == 4 || bytes == 8 || bytes == 16;
  if (!fits) b.fail("cp.async copies 4, 8 or 16 bytes (.ca) or 16 (.cg)");
  const size_t rest = b.operands_left() - (b.has("L2::cache_hint") ? 1 : 0);
  if (rest > 1) b.fail("too many operands");
  if (rest == 0) {
    b.add_constant(static_cast<uint64_t>(bytes), 32);
  } else if (b.is_predicate(b.peek())) {
    b.predicate_source();
    extra.ignore = true;
  } else {
    b.source({'u', 32});
  }
  b.cache_policy(b.has("L2::cache_hint"));
  b.instruction.bytes = static_cast<uint8_t>(bytes);
  b.instruction.extra = b.keep(extra);
  b.handler(&run_copy_async, Class::AsyncCopy);
}

void run_commit(Warp& warp, const Instruction&, uint32_t mask) { warp.commit_copies(mask); }
void build_commit(Builder& b) { b.handler(&run_commit, Class::AsyncCopy); }

void run_wait_group(Warp& warp, const Instruction& instruction, uint32_t mask) {
  warp.wait_copies(mask, static_cast<uint32_t>(instruction.offset), false);
}
void build_wait_group(Builder& b) {
  b.instruction.offset = b.immediate();
  if (b.instruction.offset < 0) b.fail("a negative number of groups");
  b.handler(&run_wait_group, Class::AsyncCopy);
}
void run_wait_all(Warp& warp, const Instruction&, uint32_t mask) {
  warp.wait_copies(mask, 0, true);
}
void build_wait_all(Builder& b) { b.handler(&run_wait_all, Class::AsyncCopy); }

// ---- Fences and hints ----

void run_fence(Warp& warp, const Instruction&, uint32_t) {
  if (RaceDetector* races = warp.cta().races()) races->fence(warp.agent());
}
void build_fence(Builder& b) {
  if (b.has("gl") || b.has("sys") || b.has("gpu")) b.kernel().orders_globally = true;
  b.handler(&run_fence, Class::Fence);
}
void run_proxy_fence(Warp& warp, const Instruction&, uint32_t) {
  if (RaceDetector* races = warp.cta().races()) races->proxy_fence(warp.agent());
  warp.cta().mbarriers().fence(warp);
}
void build_proxy_fence(Builder& b) { b.handler(&run_proxy_fence, Class::Fence); }

void run_nothing(Warp&, const Instruction&, uint32_t) {}
// A hint about caches: the address is evaluated, nothing is accessed.
void build_prefetch(Builder& b) {
  b.address(space_named(b.slot(0)));
  b.handler(&run_nothing, Class::Other);
}
void build_discard(Builder& b) {
  b.address(space_named(b.slot(0)));
  if (b.immediate() != 128) b.fail("the size must be 128");
  b.handler(&run_nothing, Class::Other);
}
// createpolicy: the policy is only ever handed to cache hints.
void run_policy(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint64_t* d = warp.lanes<uint64_t>(instruction.operands[0]);
  for (; mask != 0; mask &= mask - 1) d[std::countr_zero(mask)] = 0;
}
void build_policy(Builder& b) {
  b.destination({'b', 64});
  if (b.operands_left() > 0) b.source({'f', 32});
  b.handler(&run_policy, Class::Other);
}

constexpr Form FORMS[] = {
    // 0 weak/order, 1 scope, 2 space, 3 cop, 4 L1, 5 L2 evict, 6 hint, 7 prefetch, 8 vec, 9 type
    {"ld",
     "?weak|volatile|relaxed|acquire ?$scope "
     "?global|shared|shared::cta|shared::cluster|local|param|param::entry|const ?$cop ?$evict "
     "?$evict2 "
     "?L2::cache_hint ?$prefetch ?$vec $mem",
     build_ld},
    // 0 global, 1 cop, 2 nc, 3 L1, 4 hint, 5 prefetch, 6 vec, 7 type
    {"ld", "global ?ca|cg|cs nc ?$evict ?L2::cache_hint ?$prefetch ?$vec $mem", build_ld_nc},
    {"ldu", "?global ?$vec $mem", build_ldu},
    // 0 order, 1 scope, 2 space, 3 cop, 4 L1, 5 L2, 6 hint, 7 vec, 8 type
    {"st",
     "?weak|volatile|relaxed|release ?$scope ?global|shared|shared::cta|shared::cluster|local "
     "?$cop ?$evict "
     "?$evict2 ?L2::cache_hint ?$vec $mem",
     build_st},
    // 0 order, 1 scope, 2 space, 3 operation, 4 noftz, 5 hint, 6 vec, 7 type
    {"atom",
     "?relaxed|acquire|release|acq_rel ?$scope ?global|shared|shared::cta|shared::cluster "
     "add|min|max|inc|dec|and|or|xor|exch|cas ?noftz ?L2::cache_hint ?$vec "
     "b32|b64|u32|u64|s32|s64|f32|f64|f16|bf16|f16x2|bf16x2",
     build_atom},
    {"red",
     "?relaxed|release ?$scope ?global|shared|shared::cta|shared::cluster "
     "add|min|max|inc|dec|and|or|xor ?noftz ?L2::cache_hint ?$vec "
     "b32|b64|u32|u64|s32|s64|f32|f64|f16|bf16|f16x2|bf16x2",
     build_red},
    {"cp", "async ca|cg shared|shared::cta global ?L2::cache_hint ?$prefetch", build_cp_async},
    {"cp", "async commit_group", build_commit},
    {"cp", "async wait_group", build_wait_group},
    {"cp", "async wait_all", build_wait_all},
    {"membar", "cta|gl|sys", build_fence},
    {"fence", "?sc|acq_rel|acquire|release $scope", build_fence},
    {"fence", "proxy async ?global|shared::cta|shared::cluster", build_proxy_fence},
    {"fence", "proxy alias", build_fence},
    {"prefetch", "?global|local L1|L2", build_prefetch},
    {"prefetch", "global L2::evict_last|L2::evict_normal", build_prefetch},
    {"prefetchu", "L1", build_prefetch},
    {"discard", "?global L2", build_discard},
    {"createpolicy",
     "fractional L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged "
     "?L2::evict_unchanged b64",
     build_policy},
};

}  // namespace

std::span<const Form> memory_forms() { return FORMS; }

}  // namespace archflash::sim
