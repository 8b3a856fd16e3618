// atom and red.
#include "sim/numerics/atomic.h"

#include <bit>
#include <cstring>

#include "sim/instructions/memory_order.h"
#include "sim/instructions/operands.h"

namespace archflash::sim {
namespace {

// Operands: `count` destinations (atom only), the address, `count` sources; cas has twice as many
// sources.
void run_atomic(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const AtomicUpdate*>(instruction.extra);
  const int count = instruction.count;
  const bool returns = (instruction.flags & WIDE_REGISTER) != 0;
  const Ref* operands = instruction.operands + (returns ? count : 0);
  const uint32_t bytes = instruction.bytes, total = bytes * static_cast<uint32_t>(count);
  Located located;
  locate(warp, mask, address_of(instruction, returns ? count : 0), total, Access::Atomic, located);
  const auto value = [&](Ref ref, int lane) -> uint64_t {
    if (bytes == 8) return warp.lanes<const uint64_t>(ref)[lane];
    const uint32_t v = warp.lanes<const uint32_t>(ref)[lane];
    return bytes == 2 ? v & 0xFFFF : v;
  };
  RaceDetector* races = warp.cta().races();
  // Lanes act one after the other, also at one address.
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int lane = std::countr_zero(rest);
    if (races != nullptr) {
      const uint64_t key = variable_key(located, lane);
      const SyncScope scope = scope_of(instruction);
      races->strong_read(warp.agent(), key, instruction.flags & ACQUIRE, scope);
      races->strong_write(warp.agent(), key, instruction.flags & RELEASE, true, scope);
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
  const std::string_view type_name = b.slot(7);
  AtomicUpdate extra{};
  extra.operation = atomic_named(b.slot(3));
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

constexpr Form FORMS[] = {
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
};

}  // namespace

std::span<const Form> atomic_forms() { return FORMS; }

}  // namespace archflash::sim
