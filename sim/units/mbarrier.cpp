#include "sim/units/mbarrier.h"

#include <algorithm>
#include <cstring>

namespace archflash::sim {
namespace {

constexpr uint32_t OBJECT_BYTES = 8;
constexpr uint32_t MAX_COUNT = (1u << 20) - 1;
constexpr int64_t MAX_TRANSACTIONS = (int64_t{1} << 20) - 1;
// The bytes of an object hold this value. It is opaque to programs, and nothing that they could
// mistake for a count.
constexpr int OBJECT_CONTENT = 0xB5;
// A state, as arrivals return it, holds the phase and the arrivals that were pending before.
constexpr int STATE_PHASE_SHIFT = 20;

}  // namespace

std::string MbarrierUnit::name(uint32_t offset) const {
  return "the mbarrier at shared offset " + std::to_string(offset);
}

std::string MbarrierUnit::name(const Object& object, uint32_t offset) const {
  return name(offset) + " (phase " + std::to_string(object.phase) + ", " +
         std::to_string(object.pending) + " of " + std::to_string(object.expected) +
         " arrivals pending, tx-count " + std::to_string(object.tx) + ")";
}

std::string MbarrierUnit::describe(uint32_t address) const {
  const uint32_t offset = address - cta_.shared_base();
  const auto found = objects_.find(offset);
  if (found == objects_.end()) return name(offset);
  std::string text = name(found->second, offset);
  const int64_t tx = found->second.tx;
  if (tx > 0) text += ": " + std::to_string(tx) + " bytes are expected and nothing will bring them";
  if (tx < 0) text += ": " + std::to_string(-tx) + " bytes have come that nothing expects";
  return text;
}

// Finds the object at an offset; a fault if there is none or it was overwritten.
MbarrierUnit::Object& MbarrierUnit::find(const Warp&, int lane, uint32_t offset, const char* what) {
  const auto found = objects_.find(offset);
  if (found == objects_.end() || !found->second.live) {
    throw Fault{"mbarrier",
                std::string(what) + " on shared offset " + std::to_string(offset) +
                    ", where no mbarrier has been initialised",
                lane, cta_.shared_base() + offset};
  }
  const uint8_t* state = cta_.shared_state() + offset;
  if (std::any_of(state, state + OBJECT_BYTES, [](uint8_t s) { return s != MBARRIER; })) {
    throw Fault{"mbarrier", std::string(what) + " on " + name(offset) + ", which was overwritten",
                lane, cta_.shared_base() + offset};
  }
  return found->second;
}

// Tells the race detector of an access to a whole object, and reports the race that it finds.
void MbarrierUnit::check_race(Warp& warp, int lane, uint32_t offset,
                              Race (RaceDetector::*access)(const Accessor&, uint32_t, uint32_t)) {
  RaceDetector* races = cta_.races();
  if (races == nullptr) return;
  const Accessor who{warp.agent(), lane, warp.pc()};
  const Race race = (races->*access)(who, cta_.race_base() + offset, OBJECT_BYTES);
  if (race.found) {
    warp.cta().report_race(warp, lane, race, true, false, name(offset),
                           cta_.shared_base() + offset);
  }
}

// find, for an operation of a warp: it must come after the object's initialisation.
MbarrierUnit::Object& MbarrierUnit::find_for(Warp& warp, int lane, uint32_t offset,
                                             const char* what) {
  Object& object = find(warp, lane, offset, what);
  check_race(warp, lane, offset, &RaceDetector::atomic);
  if (&warp.cta() != &cta_ && !object.fenced) {
    warp.cta().report(
        Severity::Error, warp, lane, "mbarrier-fence",
        "another CTA uses " + name(offset) + " whose mbarrier.init no fence.mbarrier_init followed",
        cta_.shared_base() + offset, object.init_pc);
    object.fenced = true;
  }
  return object;
}

void MbarrierUnit::init(Warp& warp, int lane, uint32_t offset, uint32_t count) {
  if (count == 0 || count > MAX_COUNT) {
    throw Fault{"mbarrier",
                "an mbarrier for " + std::to_string(count) + " arrivals: 1 to " +
                    std::to_string(MAX_COUNT) + " are possible",
                lane, cta_.shared_base() + offset};
  }
  Object& object = objects_[offset];
  if (object.live) {
    warp.cta().report(
        Severity::Error, warp, lane, "mbarrier",
        name(object, offset) + " is initialised again without mbarrier.inval: it counts on",
        cta_.shared_base() + offset, object.init_pc);
  }
  check_race(warp, lane, offset, &RaceDetector::write);
  object.live = true;
  object.expected = object.pending = count;
  object.tx = 0;
  object.phase = object.seen = object.committed = 0;
  ++object.serial;
  object.fenced = false;
  object.init_agent = warp.agent();
  object.init_pc = warp.pc();
  object.arriving = object.arriving_far = {};
  object.complete = object.complete_far = {};
  std::memset(cta_.shared() + offset, OBJECT_CONTENT, OBJECT_BYTES);
  std::memset(cta_.shared_state() + offset, MBARRIER, OBJECT_BYTES);
}

void MbarrierUnit::inval(Warp& warp, int lane, uint32_t offset) {
  Object& object = find(warp, lane, offset, "mbarrier.inval");
  check_race(warp, lane, offset, &RaceDetector::write);
  object.live = false;
  std::memset(cta_.shared_state() + offset, UNINITIALISED, OBJECT_BYTES);
}

void MbarrierUnit::fence(const Warp& warp) {
  for (auto& [offset, object] : objects_) {
    if (object.init_agent == warp.agent()) object.fenced = true;
  }
}

void MbarrierUnit::add_transactions(Object& object, int lane, uint32_t offset, int64_t bytes) {
  object.tx += bytes;
  if (object.tx > MAX_TRANSACTIONS || object.tx < -MAX_TRANSACTIONS) {
    throw Fault{"mbarrier",
                "the tx-count of " + name(object, offset) + " leaves its range of " +
                    std::to_string(MAX_TRANSACTIONS) + " bytes",
                lane, cta_.shared_base() + offset};
  }
}

int MbarrierUnit::track_of(const Warp& warp) {
  const bool own = warp.index() < cta_.warp_count() && &cta_.warp(warp.index()) == &warp;
  return own ? warp.index() : -1;
}

void MbarrierUnit::trace_waits(const Object& object, uint32_t offset, int cause) {
  for (int w = 0; w < cta_.warp_count(); ++w) {
    for (const Fragment& fragment : cta_.warp(w).fragments()) {
      if (fragment.state != Fragment::State::Blocked || fragment.wait != Wait::Mbarrier ||
          fragment.key != cta_.shared_base() + offset) {
        continue;
      }
      TraceEvent event;
      event.kind = TraceEvent::Kind::Wait;
      event.track = w;
      event.begin = fragment.since;
      event.end = cta_.time() + 1;
      event.pc = fragment.waiting_pc;
      event.cause = cause;
      event.label =
          "mbarrier " + std::to_string(offset) + ", phase " + std::to_string(object.phase);
      if (event.end > event.begin) cta_.trace().events.push_back(std::move(event));
    }
  }
}

void MbarrierUnit::complete_if_due(Object& object, uint32_t offset, int cause) {
  if (object.pending != 0 || object.tx != 0) return;
  if (cta_.traced()) trace_waits(object, offset, cause);
  ++object.phase;
  ++object.serial;
  object.pending = object.expected;
  object.complete.join(object.arriving);
  object.complete_far.join(object.arriving_far);
  object.arriving = object.arriving_far = {};
  const uint64_t key = cta_.shared_base() + offset;
  for (int w = 0; w < cta_.warp_count(); ++w) cta_.warp(w).wake(Wait::Mbarrier, key);
  cta_.cluster().progress();
}

uint64_t MbarrierUnit::arrive(Warp& warp, int lane, uint32_t offset, const Arrival& arrival) {
  Object& object = find_for(warp, lane, offset, "an arrival");
  if (arrival.count == 0 || arrival.count > MAX_COUNT) {
    throw Fault{"mbarrier",
                "an arrival that counts " + std::to_string(arrival.count) + ": 1 to " +
                    std::to_string(MAX_COUNT) + " are possible",
                lane, cta_.shared_base() + offset};
  }
  if (arrival.expect != 0) add_transactions(object, lane, offset, arrival.expect);
  if (arrival.count > object.pending) {
    throw Fault{"mbarrier",
                std::to_string(arrival.count) + " more arrivals at " + name(object, offset) +
                    " than its phase waits for",
                lane, cta_.shared_base() + offset};
  }
  if (!arrival.completes && arrival.count == object.pending && object.tx == 0) {
    throw Fault{"mbarrier",
                "an arrival with .noComplete completes the phase of " + name(object, offset), lane,
                cta_.shared_base() + offset};
  }
  if (RaceDetector* races = cta_.races()) {
    const bool far = &warp.cta() != &cta_;
    Knowledge& to = far ? object.arriving_far : object.arriving;
    if (arrival.releases) {
      // A relaxed arrival cannot be watched: it does not tell those who wait that it was made.
      cta_.cluster().lifetimes().note_access(warp, lane, cta_, "arrives at an mbarrier of",
                                             cta_.shared_base() + offset);
      if (far && !arrival.in_cluster) {
        races->release_fenced(warp.agent(), SyncScope::Cluster, to);
        races->release_executed(warp.agent(), 1u << lane, warp.live(), to);
      } else {
        races->release_lanes(warp.agent(), 1u << lane, warp.live(), to);
      }
    } else {
      races->release_fenced(warp.agent(), far ? SyncScope::Cluster : SyncScope::Cta, to);
    }
  }
  const uint64_t state = object.phase << STATE_PHASE_SHIFT | object.pending;
  if (arrival.drop) object.expected -= arrival.count;
  object.pending -= arrival.count;
  complete_if_due(object, offset, track_of(warp));
  return state;
}

void MbarrierUnit::expect(Warp& warp, int lane, uint32_t offset, int64_t bytes) {
  Object& object = find_for(warp, lane, offset, "mbarrier.expect_tx");
  add_transactions(object, lane, offset, bytes);
  complete_if_due(object, offset, track_of(warp));
}

void MbarrierUnit::complete(Warp& warp, int lane, uint32_t offset, int64_t bytes) {
  Object& object = find_for(warp, lane, offset, "mbarrier.complete_tx");
  add_transactions(object, lane, offset, -bytes);
  complete_if_due(object, offset, track_of(warp));
}

bool MbarrierUnit::observe(Warp& warp, Object& object, bool done, Acquire acquire) {
  if (done) object.seen = object.phase;
  RaceDetector* races = cta_.races();
  if (!done || races == nullptr) return done;
  if (!acquire.acquires) {
    races->acquire_relaxed(warp.agent(), SyncScope::Cta, object.complete);
    races->acquire_relaxed(warp.agent(), SyncScope::Cluster, object.complete_far);
    return done;
  }
  races->acquire(warp.agent(), object.complete);
  if (object.complete_far.empty()) return done;
  if (acquire.in_cluster) {
    races->acquire(warp.agent(), object.complete_far);
  } else {
    races->acquire_executed(warp.agent(), object.complete_far);
    races->acquire_relaxed(warp.agent(), SyncScope::Cluster, object.complete_far);
  }
  return done;
}

bool MbarrierUnit::test_parity(Warp& warp, int lane, uint32_t offset, bool parity,
                               Acquire acquire) {
  Object& object = find_for(warp, lane, offset, "a wait");
  return observe(warp, object, (object.phase & 1) != parity, acquire);
}

bool MbarrierUnit::test_state(Warp& warp, int lane, uint32_t offset, uint64_t state,
                              Acquire acquire) {
  Object& object = find_for(warp, lane, offset, "a wait");
  const uint64_t phase = phase_of(state);
  if (phase > object.phase || object.phase - phase > 1) {
    throw Fault{"mbarrier",
                "a wait with the state of phase " + std::to_string(phase) + " for " +
                    name(object, offset) +
                    ": only the current phase and the one before can be asked for",
                lane, cta_.shared_base() + offset};
  }
  return observe(warp, object, object.phase != phase, acquire);
}

uint32_t MbarrierUnit::pending_count(uint64_t state) {
  return static_cast<uint32_t>(state & ((1u << STATE_PHASE_SHIFT) - 1));
}

uint64_t MbarrierUnit::phase_of(uint64_t state) { return state >> STATE_PHASE_SHIFT; }

// ---- For asynchronous operations ----

int MbarrierUnit::subscribe(Warp& warp, int lane, uint32_t offset) {
  Object& object = find(warp, lane, offset, "a bulk copy");
  if (!object.fenced) {
    warp.cta().report(Severity::Lint, warp, lane, "mbarrier-fence",
                      "a bulk copy will complete on " + name(offset) +
                          ", whose mbarrier.init neither fence.mbarrier_init nor "
                          "fence.proxy.async followed",
                      cta_.shared_base() + offset, object.init_pc);
    object.fenced = true;
  }
  RaceDetector* races = cta_.races();
  if (races == nullptr) return -1;
  check_race(warp, lane, offset, &RaceDetector::strong_load);
  if (object.unit < 0) object.unit = races->add_unit();
  return object.unit;
}

Clock MbarrierUnit::landed(AsyncOperation& by, uint32_t offset, int64_t bytes) {
  Object& object = find(by.warp(), by.lane(), offset, "the completion of a bulk copy");
  const Clock clock = object.serial;
  if (RaceDetector* races = cta_.races()) {
    races->unit_release(object.unit, clock, object.arriving);
    object.landed = clock;
    object.landed_pc = by.pc();
  }
  add_transactions(object, by.lane(), offset, -bytes);
  complete_if_due(object, offset, cta_.traced() ? cta_.trace().track(BULK_TRACK) : -1);
  return clock;
}

void MbarrierUnit::increment(Warp& warp, int lane, uint32_t offset) {
  Object& object = find_for(warp, lane, offset, "cp.async.mbarrier.arrive");
  if (object.pending == MAX_COUNT) {
    throw Fault{"mbarrier", "too many pending arrivals at " + name(object, offset), lane,
                cta_.shared_base() + offset};
  }
  ++object.pending;
}

void MbarrierUnit::arrive_for(AsyncOperation& by, uint32_t offset, int agent, Clock clock) {
  Object& object = find(by.warp(), by.lane(), offset, "cp.async.mbarrier.arrive");
  count_arrival(object, by.lane(), offset);
  if (RaceDetector* races = cta_.races()) races->unit_release(agent, clock, object.arriving);
  complete_if_due(object, offset, track_of(by.warp()));
}

void MbarrierUnit::expect_arrival(Warp& warp, int lane, uint32_t offset) {
  find_for(warp, lane, offset, "tcgen05.commit");
}

void MbarrierUnit::commit_arrives(AsyncOperation& by, uint32_t offset, int agent, Clock clock,
                                  const Knowledge& before) {
  Object& object = find(by.warp(), by.lane(), offset, "tcgen05.commit");
  count_arrival(object, by.lane(), offset);
  object.committed = object.phase + 1;
  object.committed_pc = by.pc();
  if (RaceDetector* races = cta_.races()) {
    object.arriving.join(before);
    races->unit_release(agent, clock, object.arriving);
  }
  complete_if_due(object, offset, cta_.traced() ? cta_.trace().track(TENSOR_TRACK) : -1);
}

void MbarrierUnit::count_arrival(Object& object, int lane, uint32_t offset) {
  if (object.pending == 0) {
    throw Fault{"mbarrier",
                "more arrivals at " + name(object, offset) + " than its phase waits for", lane,
                cta_.shared_base() + offset};
  }
  --object.pending;
}

void MbarrierUnit::check_exit() {
  for (const auto& [offset, object] : objects_) {
    if (!object.live) continue;
    RaceDetector* races = cta_.races();
    Finding finding;
    finding.cta = cta_.index();
    finding.address = cta_.shared_base() + offset;
    if (races != nullptr && object.landed != 0 && !races->known(object.unit, object.landed)) {
      finding.kind = "pending-copy";
      finding.message = "bytes that a bulk copy brings are not waited for before the exit: " +
                        name(object, offset);
      finding.pc = object.landed_pc;
    } else if (object.committed > object.seen) {
      finding.severity = Severity::Lint;
      finding.kind = "pending-copy";
      finding.message = "the arrival of a tcgen05.commit is not waited for before the exit: " +
                        name(object, offset);
      finding.pc = object.committed_pc;
    } else if (object.pending != object.expected || object.tx != 0) {
      finding.severity = Severity::Lint;
      finding.kind = "mbarrier";
      finding.message = name(object, offset) + " is left in the middle of a phase at the exit";
      finding.pc = object.init_pc;
    } else {
      continue;
    }
    cta_.findings().add(std::move(finding));
  }
}

}  // namespace archflash::sim
