// ld and st.
#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "sim/instructions/memory_order.h"
#include "sim/instructions/operands.h"

namespace archflash::sim {
namespace {

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
  const bool strong = (instruction.flags & STRONG) != 0;
  const uint32_t bytes = uint32_t{instruction.bytes} * instruction.count;
  locate(warp, mask, address_of(instruction, instruction.count), bytes,
         strong ? Access::StrongRead : Access::Read, located);
  if (strong) {
    if (RaceDetector* races = warp.cta().races()) {
      for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
        races->strong_read(warp.agent(), variable_key(located, std::countr_zero(rest)),
                           (instruction.flags & ACQUIRE) != 0, scope_of(instruction));
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

// Whether CTAs may tell each other things by such a load or store.
void note_order(Builder& b, Space space) {
  if ((space == Space::Global || space == Space::Generic) && (b.has("gpu") || b.has("sys")))
    b.kernel().orders_globally = true;
}

void build_load(Builder& b, Space space, size_t vector_slot, size_t type_slot) {
  const Type t = b.type(type_slot);
  const std::string_view vector = b.slot(vector_slot);
  const int count = vector.empty() ? 1 : vector[1] - '0';
  const Operand& destination = b.peek();
  const bool listed = destination.kind == Operand::Kind::Vector;  // ptxas takes {a} as a, too
  if (!listed && count > 1) b.fail("a vector is due where .v2, .v4 or .v8 is");
  if (count * t.bits > 256) b.fail("too wide a vector");
  int register_bits = t.bits;
  if (!listed) {
    register_bits = b.destination_at_least(t);
  } else {
    if (static_cast<int>(destination.items.size()) != count) b.fail("a vector of another size");
    b.take();
    // One function writes all registers, so that all or none are wider than 32 bits.
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
  note_order(b, space);
  b.handler(space == Space::Param && constant_address ? &run_load_param : &run_load, Class::Load);
}

void build_ld(Builder& b) { build_load(b, space_named(b.slot(2)), 8, 9); }
void build_ld_nc(Builder& b) { build_load(b, Space::Global, 6, 7); }
void build_ldu(Builder& b) { build_load(b, space_named(b.slot(0)), 1, 2); }

// ---- st ----

void run_store(Warp& warp, const Instruction& instruction, uint32_t mask) {
  Located located;
  const uint32_t bytes = uint32_t{instruction.bytes} * instruction.count;
  locate(warp, mask, address_of(instruction, 0), bytes, Access::Write, located);
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
    if (RaceDetector* races = strong ? warp.cta().races() : nullptr) {
      races->strong_write(warp.agent(), variable_key(located, lane),
                          (instruction.flags & RELEASE) != 0, false, scope_of(instruction));
    }
    note_write(warp, located, lane, bytes, data, strong ? Writing::Strong : Writing::Plain);
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
  const bool listed = source.kind == Operand::Kind::Vector;
  if (!listed && count > 1) b.fail("a vector is due where .v2, .v4 or .v8 is");
  if (count * t.bits > 256) b.fail("too wide a vector");
  int register_bits = t.bits;
  if (!listed) {
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
  note_order(b, space);
  b.handler(&run_store, Class::Store);
}
void build_st(Builder& b) { build_store(b, space_named(b.slot(2)), 7, 8); }

constexpr Form FORMS[] = {
    // 0 weak/order, 1 scope, 2 space, 3 cop, 4 L1, 5 L2 evict, 6 hint, 7 prefetch, 8 vec, 9 type
    {"ld",
     "?weak|volatile|relaxed|acquire ?$scope "
     "?global|shared|shared::cta|shared::cluster|local|param|param::entry|const ?$cop ?$evict "
     "?$evict2 ?L2::cache_hint ?$prefetch ?$vec $mem",
     build_ld},
    // 0 global, 1 cop, 2 nc, 3 L1, 4 hint, 5 prefetch, 6 vec, 7 type
    {"ld", "global ?ca|cg|cs nc ?$evict ?L2::cache_hint ?$prefetch ?$vec $mem", build_ld_nc},
    {"ldu", "?global ?$vec $mem", build_ldu},
    // 0 order, 1 scope, 2 space, 3 cop, 4 L1, 5 L2, 6 hint, 7 vec, 8 type
    {"st",
     "?weak|volatile|relaxed|release ?$scope ?global|shared|shared::cta|shared::cluster|local "
     "?$cop ?$evict ?$evict2 ?L2::cache_hint ?$vec $mem",
     build_st},
};

}  // namespace

std::span<const Form> load_store_forms() { return FORMS; }

}  // namespace archflash::sim
