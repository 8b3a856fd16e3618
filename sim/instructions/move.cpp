// mov, and conversions of addresses between a space and generic: cvta, isspacep.
#include <bit>
#include <cstring>

#include "sim/instructions/elementwise.h"
#include "sim/instructions/lane_values.h"
#include "sim/load/builder.h"
#include "sim/memory/memory.h"
#include "sim/run/cta.h"

namespace archflash::sim {
namespace {

// ---- mov ----

template <class T>
void run_copy(Warp& warp, const Instruction& instruction, uint32_t mask) {
  T* d = warp.lanes<T>(instruction.operands[0]);
  const T* s = warp.lanes<const T>(instruction.operands[1]);
  if (mask == ALL_LANES) {
    std::memmove(d, s, sizeof(T) * LANES);
    return;
  }
  for (; mask != 0; mask &= mask - 1) d[std::countr_zero(mask)] = s[std::countr_zero(mask)];
}

struct Bits128 {
  uint64_t low, high;
};

void run_copy_predicate(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t& d = warp.predicate(instruction.operands[0]);
  const uint32_t s = warp.predicate(instruction.operands[1]);
  d = (d & ~mask) | ((instruction.flags & Builder::NEGATED ? ~s : s) & mask);
}

// Reads a clock. The simulator's only clock counts the warp-instructions that the CTA has executed.
void run_clock(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const uint64_t now = warp.cta().time() + warp.executed();
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    if (instruction.bytes == 8)
      warp.lanes<uint64_t>(instruction.operands[0])[i] = now;
    else
      warp.lanes<uint32_t>(instruction.operands[0])[i] =
          static_cast<uint32_t>(now >> instruction.offset);
  }
}

// mov.bN d, {a, b, ...} with `count` parts of `bytes` bytes each.
void run_pack(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const int count = instruction.count, bytes = instruction.bytes;
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    uint64_t parts[2] = {};
    for (int k = 0; k < count; ++k) {
      uint64_t part = read_lane(warp, instruction.operands[k + 1], i, bytes);
      if (bytes < 4) part &= (uint64_t{1} << 8 * bytes) - 1;
      parts[k * bytes / 8] |= part << (k * bytes % 8 * 8);
    }
    if (count * bytes == 16)
      warp.lanes<Bits128>(instruction.operands[0])[i] = {parts[0], parts[1]};
    else
      write_lane(warp, instruction.operands[0], i, count * bytes, parts[0]);
  }
}
// mov.b64 {a, b}, d.
void run_unpack_pair(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* low = warp.lanes<uint32_t>(instruction.operands[0]);
  uint32_t* high = warp.lanes<uint32_t>(instruction.operands[1]);
  const uint64_t* whole = warp.lanes<const uint64_t>(instruction.operands[2]);
  if (mask == ALL_LANES) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; ++i) {
      low[i] = static_cast<uint32_t>(whole[i]);
      high[i] = static_cast<uint32_t>(whole[i] >> 32);
    }
    return;
  }
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    low[i] = static_cast<uint32_t>(whole[i]);
    high[i] = static_cast<uint32_t>(whole[i] >> 32);
  }
}
void run_unpack(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const int count = instruction.count, bytes = instruction.bytes;
  const Ref source = instruction.operands[count];
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    uint64_t parts[2] = {};
    if (count * bytes == 16) {
      const Bits128 whole = warp.lanes<const Bits128>(source)[i];
      parts[0] = whole.low, parts[1] = whole.high;
    } else {
      parts[0] = read_lane(warp, source, i, count * bytes);
    }
    for (int k = 0; k < count; ++k) {
      write_lane(warp, instruction.operands[k], i, bytes,
                 parts[k * bytes / 8] >> (k * bytes % 8 * 8));
    }
  }
}

void build_mov(Builder& b) {
  const Type t = b.type(0);
  const bool unpacks = b.peek().kind == Operand::Kind::Vector;
  if (t.kind == 'p') {
    b.predicate_destination();
    b.predicate_source();
    b.handler(&run_copy_predicate, Class::Move);
    return;
  }
  if (unpacks) {
    const auto parts = static_cast<int>(b.peek().items.size());
    if ((parts != 2 && parts != 4) || t.kind != 'b' || t.bits / parts < 8) b.fail("bad vector");
    b.vector_destination({'b', t.bits / parts});
    b.source(t);
    b.instruction.count = static_cast<uint8_t>(parts);
    b.instruction.bytes = static_cast<uint8_t>(t.bits / parts / 8);
    b.handler(parts == 2 && t.bits == 64 ? &run_unpack_pair : &run_unpack, Class::Move);
    return;
  }
  b.destination(t);
  const Operand& source = b.peek();
  if (source.kind == Operand::Kind::Vector) {
    const auto parts = static_cast<int>(source.items.size());
    if ((parts != 2 && parts != 4) || t.kind != 'b' || t.bits / parts < 8) b.fail("bad vector");
    b.vector_source({'b', t.bits / parts});
    b.instruction.count = static_cast<uint8_t>(parts);
    b.instruction.bytes = static_cast<uint8_t>(t.bits / parts / 8);
    const bool pair = parts == 2 && t.bits == 64;
    b.handler(
        pair ? elementwise<[](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; }>()
             : &run_pack,
        Class::Move);
    return;
  }
  if (source.kind == Operand::Kind::Special &&
      (source.text == "%clock" || source.text == "%clock_hi" || source.text == "%clock64" ||
       source.text == "%globaltimer" || source.text == "%globaltimer_lo" ||
       source.text == "%globaltimer_hi")) {
    const bool wide = source.text == "%clock64" || source.text == "%globaltimer";
    if (t.bits != (wide ? 64 : 32)) b.fail("a clock of another width");
    b.instruction.bytes = wide ? 8 : 4;
    b.instruction.offset = source.text.ends_with("_hi") ? 32 : 0;
    b.take();
    b.handler(&run_clock, Class::Move);
    return;
  }
  b.source(t);
  b.handler(t.bits == 128  ? &run_copy<Bits128>
            : t.bits == 64 ? &run_copy<uint64_t>
                           : &run_copy<uint32_t>,
            Class::Move);
}

// ---- Addresses ----

uint64_t window_of(std::string_view space) {
  return space.starts_with("shared")  ? SHARED_WINDOW
         : space == "local"           ? LOCAL_WINDOW
         : space.starts_with("param") ? PARAM_WINDOW
         : space == "const"           ? CONST_WINDOW
                                      : 0;
}

void run_cvta(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint64_t* d = warp.lanes<uint64_t>(instruction.operands[0]);
  const uint64_t* s = warp.lanes<const uint64_t>(instruction.operands[1]);
  const auto addend = static_cast<uint64_t>(instruction.offset);
  for (; mask != 0; mask &= mask - 1) {
    d[std::countr_zero(mask)] = s[std::countr_zero(mask)] + addend;
  }
}
void build_cvta(Builder& b) {
  const bool to = b.has("to");
  b.destination({'u', 64});
  b.source({'u', 64});
  const uint64_t window = window_of(b.slot(1));
  b.instruction.offset = static_cast<int64_t>(to ? 0 - window : window);
  b.handler(&run_cvta, Class::Move);
}

void run_isspacep(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const uint64_t* s = warp.lanes<const uint64_t>(instruction.operands[1]);
  const auto window = static_cast<uint64_t>(instruction.offset);
  uint32_t result = 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int i = std::countr_zero(rest);
    const bool inside = window == 0 ? s[i] >= GLOBAL_BASE : s[i] - window < WINDOW_BYTES;
    result |= uint32_t{inside} << i;
  }
  uint32_t& p = warp.predicate(instruction.operands[0]);
  p = (p & ~mask) | result;
}
void build_isspacep(Builder& b) {
  b.predicate_destination();
  b.source({'u', 64});
  b.instruction.offset = static_cast<int64_t>(window_of(b.slot(0)));
  b.handler(&run_isspacep, Class::Move);
}

constexpr Form FORMS[] = {
    {"mov", "pred|b16|b32|b64|b128|u16|u32|u64|s16|s32|s64|f32|f64", build_mov},
    {"cvta", "?to global|shared|shared::cta|shared::cluster|local|const|param|param::entry u64",
     build_cvta},
    {"isspacep", "global|shared|shared::cta|shared::cluster|local|const|param|param::entry",
     build_isspacep},
};

}  // namespace

std::span<const Form> move_forms() { return FORMS; }

}  // namespace archflash::sim
