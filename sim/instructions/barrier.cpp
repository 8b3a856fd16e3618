// Barriers of the CTA, and bar.warp.sync.
#include <algorithm>
#include <bit>
#include <string>

#include "sim/load/builder.h"
#include "sim/run/cta.h"

namespace archflash::sim {
namespace {

constexpr uint32_t HAS_COUNT = 1, ALIGNED = 2, KIND_SHIFT = 8;

// Operands: barrier, {threads}, {predicate}, {destination}.
void run_barrier(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto kind = static_cast<Cta::BarrierKind>(instruction.flags >> KIND_SHIFT & 7);
  const auto uniform = [&](Ref ref, const char* name) {
    const uint32_t* lanes = warp.lanes<const uint32_t>(ref);
    const uint32_t value = lanes[std::countr_zero(mask)];
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      if (lanes[std::countr_zero(rest)] != value) {
        throw Fault{"barrier", std::string("lanes disagree about the ") + name,
                    std::countr_zero(rest)};
      }
    }
    return static_cast<int64_t>(value);
  };
  int next = 0;
  const int64_t id = uniform(instruction.operands[next++], "barrier");
  int64_t threads = 0;
  if (instruction.flags & HAS_COUNT) {
    threads = uniform(instruction.operands[next++], "number of threads");
    if (threads == 0) throw Fault{"barrier", "a barrier for 0 threads", std::countr_zero(mask)};
  }
  uint32_t predicate = 0;
  Ref destination = NO_REF;
  if (kind != Cta::BarrierKind::Sync && kind != Cta::BarrierKind::Arrive) {
    predicate = warp.predicate(instruction.operands[next++]);
    if (instruction.flags & Builder::NEGATED) predicate = ~predicate;
    destination = instruction.operands[next];
  }
  warp.cta().arrive(warp, static_cast<int>(std::min<int64_t>(id, 1 << 20)), threads, mask, kind,
                    (instruction.flags & ALIGNED) != 0, predicate, destination);
}

void build_barrier(Builder& b, bool aligned) {
  Cta::BarrierKind kind = Cta::BarrierKind::Sync;
  if (b.has("arrive")) kind = Cta::BarrierKind::Arrive;
  if (b.has("red")) {
    kind = b.has("popc")  ? Cta::BarrierKind::RedPopc
           : b.has("and") ? Cta::BarrierKind::RedAnd
                          : Cta::BarrierKind::RedOr;
  }
  const bool reduces = b.has("red");
  const Operand* destination = reduces ? &b.take() : nullptr;
  b.source({'u', 32});
  const size_t others = b.operands_left() - (reduces ? 1 : 0);
  if (others == 1) {
    b.source({'u', 32});
    b.instruction.flags |= HAS_COUNT;
  } else if (others != 0 || kind == Cta::BarrierKind::Arrive) {
    b.fail("wrong number of operands");
  }
  if (reduces) {
    b.predicate_source();
    b.add_destination(*destination,
                      kind == Cta::BarrierKind::RedPopc ? Type{'u', 32} : Type{'p', 1});
  }
  b.instruction.flags |= static_cast<uint32_t>(kind) << KIND_SHIFT | (aligned ? ALIGNED : 0);
  b.instruction.control = Control::Barrier;
  b.instruction.converge = aligned ? Converge::Aligned : Converge::No;
  b.handler(&run_barrier, Class::Barrier);
}
void build_bar(Builder& b) { build_barrier(b, true); }
void build_barrier_maybe_aligned(Builder& b) { build_barrier(b, b.has("aligned")); }

void run_warp_sync(Warp& warp, const Instruction&, uint32_t) {
  if (RaceDetector* races = warp.cta().races()) races->warp_sync(warp.agent());
}
void build_warp_sync(Builder& b) {
  b.source({'b', 32});
  b.instruction.converge = Converge::Members;
  b.instruction.converge_operand = 0;
  b.handler(&run_warp_sync, Class::Barrier);
}

constexpr Form FORMS[] = {
    {"bar", "?cta sync", build_bar},
    {"bar", "?cta arrive", build_bar},
    {"bar", "?cta red popc u32", build_bar},
    {"bar", "?cta red and|or pred", build_bar},
    {"barrier", "?cta sync ?aligned", build_barrier_maybe_aligned},
    {"barrier", "?cta arrive ?aligned", build_barrier_maybe_aligned},
    {"barrier", "?cta red popc ?aligned u32", build_barrier_maybe_aligned},
    {"barrier", "?cta red and|or ?aligned pred", build_barrier_maybe_aligned},
    {"bar", "warp sync", build_warp_sync},
};

}  // namespace

std::span<const Form> barrier_forms() { return FORMS; }

}  // namespace archflash::sim
