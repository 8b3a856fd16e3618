// mbarrier instructions, cp.async.mbarrier.arrive and fence.mbarrier_init.
#include "sim/units/mbarrier.h"

#include <bit>
#include <memory>
#include <string>

#include "sim/instructions/operands.h"

namespace archflash::sim {
namespace {

constexpr uint32_t EXPECT = 1, DROP = 2, NO_COMPLETE = 4, RELAXED = 8, PARITY = 16, TRY = 32,
                   IN_CLUSTER = 64;

bool is_random(const Cta& cta) {
  return cta.options().mode != Mode::Lazy && cta.options().mode != Mode::Eager;
}

// Takes the address operand. It is a generic address where the statement names no space.
void mbarrier_address(Builder& b) {
  const Space space = b.has("shared::cluster")                  ? Space::SharedCluster
                      : b.has("shared") || b.has("shared::cta") ? Space::Shared
                                                                : Space::Generic;
  b.address(space);
}

SharedPlace place_of(Warp& warp, const Instruction& instruction, int operand, int lane) {
  return locate_object(warp, lane, address_of(instruction, operand), MBARRIER_BYTES,
                       MBARRIER_BYTES);
}

// Operands: address, count.
void run_init(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const uint32_t* counts = warp.lanes<const uint32_t>(instruction.operands[1]);
  for_each_lane(mask, [&](int lane) {
    const SharedPlace at = place_of(warp, instruction, 0, lane);
    at.cta->mbarriers().init(warp, lane, at.offset, counts[lane]);
  });
}
void build_init(Builder& b) {
  mbarrier_address(b);
  b.source({'u', 32});
  b.handler(&run_init, Class::Barrier);
}

void run_inval(Warp& warp, const Instruction& instruction, uint32_t mask) {
  for_each_lane(mask, [&](int lane) {
    const SharedPlace at = place_of(warp, instruction, 0, lane);
    at.cta->mbarriers().inval(warp, lane, at.offset);
  });
}
void build_inval(Builder& b) {
  mbarrier_address(b);
  b.handler(&run_inval, Class::Barrier);
}

// Operands: state, address, {count or bytes}.
void run_arrive(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const uint32_t flags = instruction.flags;
  uint64_t* states = warp.lanes<uint64_t>(instruction.operands[0]);
  const uint32_t* values =
      instruction.count > 0 ? warp.lanes<const uint32_t>(instruction.operands[2]) : nullptr;
  uint32_t before = 0;  // the object at which the lane before arrived, and its phase then
  uint64_t phase = 0;
  for_each_lane(mask, [&](int lane) {
    const SharedPlace at = place_of(warp, instruction, 1, lane);
    MbarrierUnit::Arrival arrival;
    if (flags & EXPECT)
      arrival.expect = values[lane];
    else if (values != nullptr)
      arrival.count = values[lane];
    arrival.drop = (flags & DROP) != 0;
    arrival.completes = (flags & NO_COMPLETE) == 0;
    arrival.releases = (flags & RELAXED) == 0;
    arrival.in_cluster = (flags & IN_CLUSTER) != 0;
    states[lane] = at.cta->mbarriers().arrive(warp, lane, at.offset, arrival);
    if (before == at.address() && phase != MbarrierUnit::phase_of(states[lane])) {
      warp.cta().report(Severity::Error, warp, lane, "mbarrier",
                        "lanes of one instruction arrive in different phases of " +
                            at.cta->mbarriers().describe(before) +
                            ": more arrivals than a phase waits for",
                        before);
    }
    before = at.address();
    phase = MbarrierUnit::phase_of(states[lane]);
  });
}
void build_arrive(Builder& b) {
  if (b.has("shared::cluster") && b.peek().kind != Operand::Kind::Sink) {
    b.fail("an arrival in another CTA returns no state: the destination must be _");
  }
  b.destination({'b', 64});
  mbarrier_address(b);
  const bool expects = b.has("expect_tx");
  if (expects || b.has("noComplete") || b.operands_left() > 0) {
    if (!b.has("noComplete")) b.require_target("90");
    b.source({'u', 32});
    b.instruction.count = 1;
  } else {
    b.instruction.count = 0;
  }
  b.instruction.flags |= (expects ? EXPECT : 0) | (b.slot(0) == "arrive_drop" ? DROP : 0) |
                         (b.has("noComplete") ? NO_COMPLETE : 0) |
                         (b.has("relaxed") ? RELAXED : 0) | (b.has("cluster") ? IN_CLUSTER : 0);
  b.handler(&run_arrive, Class::Barrier);
}

// Operands: address, bytes.
template <bool EXPECTS>
void run_transactions(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const uint32_t* bytes = warp.lanes<const uint32_t>(instruction.operands[1]);
  for_each_lane(mask, [&](int lane) {
    const SharedPlace at = place_of(warp, instruction, 0, lane);
    if (EXPECTS)
      at.cta->mbarriers().expect(warp, lane, at.offset, bytes[lane]);
    else
      at.cta->mbarriers().complete(warp, lane, at.offset, bytes[lane]);
  });
}
void build_transactions(Builder& b) {
  mbarrier_address(b);
  b.source({'u', 32});
  b.handler(b.slot(0) == "expect_tx" ? &run_transactions<true> : &run_transactions<false>,
            Class::Barrier);
}

// Operands: predicate, address, state or parity, {time limit}.
void run_wait(Warp& warp, const Instruction& instruction, uint32_t mask) {
  // try_wait may answer false for no reason: one in so many answers does.
  constexpr uint64_t SPURIOUS = 16;
  const MbarrierUnit::Acquire acquire{(instruction.flags & RELAXED) == 0,
                                      (instruction.flags & IN_CLUSTER) != 0};
  const bool tries = (instruction.flags & TRY) != 0;
  Cta& cta = warp.cta();
  uint32_t& predicate = warp.predicate(instruction.operands[0]);
  if (tries && is_random(cta) && cta.random().below(SPURIOUS) == 0) {
    for_each_lane(mask, [&](int lane) {  // wrong operands are reported all the same
      place_of(warp, instruction, 1, lane);
    });
    predicate &= ~mask;
    warp.block(Wait::Rest, 0);
    return;
  }
  uint32_t done = 0;
  uint32_t address = 0;
  bool one_object = true;
  for_each_lane(mask, [&](int lane) {
    const SharedPlace at = place_of(warp, instruction, 1, lane);
    MbarrierUnit& unit = at.cta->mbarriers();
    bool complete;
    if (instruction.flags & PARITY) {
      const uint32_t parity = warp.lanes<const uint32_t>(instruction.operands[2])[lane];
      if (parity > 1) {
        throw Fault{"mbarrier", "a wait for parity " + std::to_string(parity) + ": 0 or 1", lane,
                    at.address()};
      }
      complete = unit.test_parity(warp, lane, at.offset, parity != 0, acquire);
    } else {
      const uint64_t state = warp.lanes<const uint64_t>(instruction.operands[2])[lane];
      complete = unit.test_state(warp, lane, at.offset, state, acquire);
    }
    done |= uint32_t{complete} << lane;
    one_object = one_object && (address == 0 || address == at.address());
    address = at.address();
  });
  if (done != 0) {
    predicate = (predicate & ~mask) | done;
    return;
  }
  if (tries && one_object && mask == warp.fragment_mask()) {
    warp.block(Wait::Mbarrier, address, true);
    return;
  }
  predicate &= ~mask;
  warp.block(Wait::Rest, 0);
}
void build_wait(Builder& b) {
  const bool tries = b.slot(0) == "try_wait";
  b.predicate_destination();
  mbarrier_address(b);
  if (b.has("parity"))
    b.source({'u', 32});
  else
    b.source({'b', 64});
  if (tries && b.operands_left() > 0) b.source({'u', 32});
  b.instruction.flags |= (b.has("parity") ? PARITY : 0) | (tries ? TRY : 0) |
                         (b.has("relaxed") ? RELAXED : 0) | (b.has("cluster") ? IN_CLUSTER : 0);
  b.instruction.control = Control::Barrier;
  b.handler(&run_wait, Class::Barrier);
}

void run_pending_count(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint64_t* states = warp.lanes<const uint64_t>(instruction.operands[1]);
  for_each_lane(mask, [&](int lane) { d[lane] = MbarrierUnit::pending_count(states[lane]); });
}
void build_pending_count(Builder& b) {
  b.destination({'b', 32});
  b.source({'b', 64});
  b.handler(&run_pending_count, Class::Barrier);
}

// ---- cp.async.mbarrier.arrive: an arrival once this lane's earlier copies have landed ----

class CopyArrival : public AsyncOperation {
 public:
  CopyArrival(Warp& warp, int lane, SharedPlace at, uint32_t sequence)
      : AsyncOperation(warp, lane), at_(at), sequence_(sequence) {}
  bool step() override {
    warp().land_copies(1u << lane(), sequence_);
    RaceDetector* races = warp().cta().races();
    const int agent = races != nullptr ? races->copy_agent(warp().agent()) : -1;
    at_.cta->mbarriers().arrive_for(*this, at_.offset, agent, sequence_);
    return true;
  }

 private:
  SharedPlace at_;
  uint32_t sequence_;
};

void run_copy_arrive(Warp& warp, const Instruction& instruction, uint32_t mask) {
  for_each_lane(mask, [&](int lane) {
    const SharedPlace at = place_of(warp, instruction, 0, lane);
    if (instruction.count > 0) at.cta->mbarriers().increment(warp, lane, at.offset);
    warp.cta().cluster().start(std::make_shared<CopyArrival>(warp, lane, at, warp.copy_sequence()));
  });
}
void build_copy_arrive(Builder& b) {
  mbarrier_address(b);
  b.instruction.count = b.has("noinc") ? 0 : 1;
  b.handler(&run_copy_arrive, Class::Barrier);
}

void run_fence_init(Warp& warp, const Instruction&, uint32_t) {
  if (RaceDetector* races = warp.cta().races()) races->fence(warp.agent(), SyncScope::Cluster);
  warp.cta().mbarriers().fence(warp);
}
void build_fence_init(Builder& b) { b.handler(&run_fence_init, Class::Fence); }

constexpr Form FORMS[] = {
    {"mbarrier", "init ?$shared b64", build_init},
    {"mbarrier", "inval ?$shared b64", build_inval},
    {"mbarrier",
     "arrive|arrive_drop ?expect_tx ?release|relaxed ?cta|cluster "
     "?shared|shared::cta|shared::cluster b64",
     build_arrive},
    {"mbarrier", "arrive|arrive_drop noComplete ?release ?cta ?$shared b64", build_arrive},
    {"mbarrier",
     "expect_tx|complete_tx ?relaxed ?cta|cluster ?shared|shared::cta|shared::cluster b64",
     build_transactions},
    {"mbarrier", "test_wait|try_wait ?parity ?acquire|relaxed ?cta|cluster ?$shared b64",
     build_wait},
    {"mbarrier", "pending_count b64", build_pending_count},
    {"cp", "async mbarrier arrive ?noinc ?$shared b64", build_copy_arrive},
    {"fence", "mbarrier_init release cluster", build_fence_init},
};

}  // namespace

std::span<const Form> mbarrier_forms() { return FORMS; }

}  // namespace archflash::sim
