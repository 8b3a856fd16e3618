// cp.async: copies of 4 to 16 bytes for each lane, from global to shared memory.
#include <bit>
#include <cstring>
#include <string>

#include "sim/instructions/operands.h"

namespace archflash::sim {
namespace {

struct CopyExtra {
  AddressOperand destination, source;
  bool ignore = false;  // the last operand is a predicate: a lane where it is true reads nothing
};

void run_copy_async(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CopyExtra*>(instruction.extra);
  const uint32_t bytes = instruction.bytes;
  Cta& cta = warp.cta();
  Located to;
  locate(warp, mask, extra.destination.of(instruction), bytes, Access::Copy, to);
  PendingCopy copy;
  copy.lanes = copy.mask = copy.unwaited = mask;
  copy.sequence = warp.next_copy_sequence();
  copy.pc = warp.pc();
  copy.bytes = static_cast<uint8_t>(bytes);
  copy.issued = cta.time();
  // A lane reads all bytes, as many as the operand says, or none.
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
    locate(warp, whole, extra.source.of(instruction), bytes, Access::Read, from);
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
        copy.source[lane] = locate_part(warp, lane, extra.source.of(instruction), bytes, part);
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
  CopyExtra extra;
  extra.destination = take_address(b, 0, Space::Shared);
  extra.source = take_address(b, 1, Space::Global);
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

constexpr Form FORMS[] = {
    {"cp", "async ca|cg shared|shared::cta global ?L2::cache_hint ?$prefetch", build_cp_async},
    {"cp", "async commit_group", build_commit},
    {"cp", "async wait_group", build_wait_group},
    {"cp", "async wait_all", build_wait_all},
};

}  // namespace

std::span<const Form> cp_async_forms() { return FORMS; }

}  // namespace archflash::sim
