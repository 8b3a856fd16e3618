#include "sim/cta.h"

#include <algorithm>
#include <bit>
#include <cstdio>

namespace archflash::sim {
namespace {

constexpr uint64_t LAZY_BUDGET = uint64_t{1} << 20;
constexpr uint64_t EAGER_BUDGET = 256;
constexpr uint64_t RANDOM_BUDGET = 400;
constexpr uint64_t PRIORITY_BUDGET = 2000;
constexpr uint64_t SEED_STEP = 0xD1342543DE82EF95u;

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

void Findings::add(Finding finding) {
  for (Finding& known : list_) {
    if (known.kind == finding.kind && known.pc == finding.pc &&
        known.other_pc == finding.other_pc && known.severity == finding.severity) {
      known.count += finding.count;
      return;
    }
  }
  if (list_.size() >= LIMIT) {
    dropped_ += finding.count;
    return;
  }
  list_.push_back(std::move(finding));
}

void Findings::merge(const Findings& other) {
  for (const Finding& finding : other.list_) add(finding);
  dropped_ += other.dropped_;
}

bool Findings::has_errors() const {
  return std::any_of(list_.begin(), list_.end(),
                     [](const Finding& f) { return f.severity == Severity::Error; });
}

Counts& Counts::operator+=(const Counts& other) {
  for (size_t i = 0; i < executed.size(); ++i) executed[i] += other.executed[i];
  for (size_t i = 0; i < memory.size(); ++i) memory[i] += other.memory[i];
  barrier_waits += other.barrier_waits;
  barrier_wait_slices += other.barrier_wait_slices;
  ctas += other.ctas;
  return *this;
}

Cta::Cta(const LaunchContext& launch, int64_t index, Counts& counts)
    : launch_(launch),
      index_(index),
      position_{index % launch.grid.x, index / launch.grid.x % launch.grid.y,
                index / (launch.grid.x * launch.grid.y)},
      counts_(counts),
      random_(launch.options.seed + static_cast<uint64_t>(index) * SEED_STEP) {
  const int64_t threads = launch.block.count();
  const auto warps = static_cast<int>((threads + LANES - 1) / LANES);
  const Kernel& kernel = *launch.kernel;
  uint64_t shared = kernel.static_shared_bytes;
  if (kernel.uses_dynamic_shared || launch.dynamic_shared > 0) shared += launch.dynamic_shared;
  shared_.resize(shared);
  shared_state_.resize(shared);
  local_.resize(static_cast<size_t>(warps) * LANES * kernel.local_bytes);
  local_state_.resize(local_.size());
  if (launch.options.race) {
    races_ = std::make_unique<RaceDetector>(warps, shared, kernel.race_granule_log2);
  }
  for (int w = 0; w < warps; ++w) {
    const int64_t rest = threads - int64_t{w} * LANES;
    warps_.push_back(
        std::make_unique<Warp>(*this, w, rest >= LANES ? ALL_LANES : (1u << rest) - 1));
  }
  for (Barrier& barrier : barriers_) barrier.arrived_lanes.assign(static_cast<size_t>(warps), 0);
  if (traced()) {
    for (int w = 0; w < warps; ++w) trace_.track("warp " + std::to_string(w));
  }
  for (int w = 0; w < warps; ++w) {
    priorities_.push_back(static_cast<uint32_t>(random_.next() >> 32));
  }
}

// The warp that runs next, and for how long; nullptr when none can.
Warp* Cta::pick(uint64_t& budget) {
  const size_t count = warps_.size();
  const Mode mode = options().mode;
  const auto longest = [&](uint64_t of_mode) {
    return options().stretch > 0 ? options().stretch : of_mode;
  };
  if (mode == Mode::Lazy || mode == Mode::Eager) {
    budget = longest(mode == Mode::Lazy ? LAZY_BUDGET : EAGER_BUDGET);
    for (size_t i = 0; i < count; ++i) {
      turn_ = (turn_ + 1) % count;
      if (warps_[turn_]->runnable()) return warps_[turn_].get();
    }
    return nullptr;
  }
  size_t runnable = 0;
  for (const auto& warp : warps_) runnable += warp->runnable();
  if (runnable == 0) return nullptr;
  if (random_.below(2)) {
    Warp& lucky = *warps_[random_.below(count)];
    for (uint64_t n = random_.below(4); n > 0; --n) lucky.land_copy(random_.next());
  }
  if (mode == Mode::Random) {
    budget = 1 + random_.below(longest(RANDOM_BUDGET));
    size_t skip = random_.below(runnable);
    for (const auto& warp : warps_) {
      if (warp->runnable() && skip-- == 0) return warp.get();
    }
  }
  budget = 1 + random_.below(longest(PRIORITY_BUDGET));
  if (random_.below(8) == 0) {
    priorities_[random_.below(count)] = static_cast<uint32_t>(random_.next() >> 32);
  }
  size_t best = count;
  for (size_t w = 0; w < count; ++w) {
    if (warps_[w]->runnable() && (best == count || priorities_[w] > priorities_[best])) best = w;
  }
  return warps_[best].get();
}

void Cta::run() {
  ++counts_.ctas;
  Warp* warp = nullptr;
  try {
    for (;;) {
      uint64_t budget = 0;
      warp = pick(budget);
      if (warp == nullptr) break;
      if (traced()) {
        run_traced(*warp, budget);
      } else {
        const uint64_t before = warp->executed();
        warp->run(budget);
        time_ += warp->executed() - before;
      }
      if (time_ > options().max_instructions) {
        throw Fault{"limit", "more than " + std::to_string(options().max_instructions) +
                                 " warp-instructions in one CTA: an endless loop?"};
      }
    }
    const bool alive =
        std::any_of(warps_.begin(), warps_.end(), [](const auto& w) { return !w->exited(); });
    if (alive) {
      if (traced()) trace_endless_waits();
      Finding finding;
      finding.kind = "deadlock";
      finding.message = deadlock_dump();
      finding.cta = index_;
      for (const auto& w : warps_) {
        if (w->exited()) continue;
        finding.warp = w->index();
        finding.pc = w->pc();
        break;
      }
      finding.fatal = true;
      findings_.add(std::move(finding));
    } else {
      check_exit();
    }
  } catch (const Fault& fault) {
    Finding finding;
    finding.kind = fault.kind;
    finding.message = fault.message;
    finding.cta = index_;
    finding.warp = warp->index();
    finding.lane = fault.lane;
    finding.pc = warp->pc();
    finding.address = fault.address;
    finding.fatal = true;
    findings_.add(std::move(finding));
  }
}

// One instruction at a time, so that every event has its exact time.
void Cta::run_traced(Warp& warp, uint64_t budget) {
  TraceEvent event;
  event.track = warp.index();
  const auto end_event = [&] {
    event.end = time_;
    if (event.end > event.begin) trace_.events.push_back(event);
  };
  event.begin = time_;
  for (uint64_t turn = 0; turn < budget && warp.runnable(); ++turn) {
    const uint64_t before = warp.executed();
    warp.run(1);
    if (warp.executed() == before) continue;
    const auto follows = event.pc + static_cast<uint32_t>(time_ - event.begin);
    if (time_ == event.begin || warp.pc() != follows) {
      end_event();
      event.begin = time_;
      event.pc = warp.pc();
    }
    ++time_;
  }
  end_event();
}

void Cta::trace_endless_waits() {
  for (int id = 0; id < BARRIERS; ++id) {
    for (const Barrier::Waiting& waiting : barriers_[static_cast<size_t>(id)].waiting) {
      TraceEvent event;
      event.kind = TraceEvent::Kind::Wait;
      event.track = waiting.warp;
      event.begin = waiting.since;
      event.end = time_ + 1;
      event.pc = waiting.pc;
      event.label = "barrier " + std::to_string(id) + ", for ever";
      trace_.events.push_back(std::move(event));
    }
  }
}

void Cta::check_exit() {
  for (int id = 0; id < BARRIERS; ++id) {
    const Barrier& barrier = barriers_[static_cast<size_t>(id)];
    if (!barrier.active) continue;
    Finding finding;
    finding.kind = "barrier";
    finding.message = "barrier " + std::to_string(id) + " still holds " +
                      std::to_string(barrier.arrived) + " of " + std::to_string(barrier.threads) +
                      " arrivals at the exit of the CTA";
    finding.cta = index_;
    findings_.add(std::move(finding));
  }
}

std::string Cta::deadlock_dump() {
  std::string text = "no warp can go on:";
  for (const auto& warp : warps_) {
    if (warp->exited()) continue;
    for (const Fragment& fragment : warp->fragments()) {
      text += "\n  warp " + std::to_string(warp->index()) + ", lanes " + hex(fragment.mask) + ", ";
      if (fragment.state == Fragment::State::Blocked) {
        const Barrier& barrier = barriers_[fragment.barrier];
        text += describe_instruction(*launch_.module, kernel(), fragment.pc - 1) +
                ": waits at barrier " + std::to_string(fragment.barrier) + " with " +
                std::to_string(barrier.arrived) + " of " +
                std::to_string(barrier.threads ? barrier.threads : live_threads()) +
                " threads arrived";
      } else {
        text += describe_instruction(*launch_.module, kernel(), fragment.pc) +
                ": waits for lanes of its warp that are elsewhere";
      }
    }
  }
  return text;
}

// ---- Barriers ----

int64_t Cta::live_threads() const {
  int64_t threads = 0;
  for (const auto& warp : warps_) threads += std::popcount(warp->live());
  return threads;
}

bool Cta::arrive(Warp& warp, int id, int64_t threads, uint32_t mask, BarrierKind kind, bool aligned,
                 uint32_t predicate, Ref destination) {
  const int lane = std::countr_zero(mask);
  if (id < 0 || id >= BARRIERS) {
    throw Fault{"barrier", "barrier " + std::to_string(id) + " does not exist: 0 to 15 do", lane};
  }
  if (threads < 0 || threads % LANES != 0) {
    throw Fault{
        "barrier",
        "a barrier for " + std::to_string(threads) + " threads: it must be a multiple of 32", lane};
  }
  if (threads == 0 && kind == BarrierKind::Arrive) {
    throw Fault{"barrier", "an arrival without waiting must say how many threads take part", lane};
  }
  const auto all = static_cast<int64_t>(warps_.size()) * LANES;
  if (threads > all) {
    throw Fault{"barrier",
                "barrier " + std::to_string(id) + " for " + std::to_string(threads) +
                    " threads in a CTA of " + std::to_string(all),
                lane};
  }
  Barrier& barrier = barriers_[static_cast<size_t>(id)];
  if (!barrier.active) {
    barrier.active = true;
    barrier.threads = threads;
    barrier.kind = kind;
  } else if (barrier.threads != threads) {
    throw Fault{"barrier",
                "barrier " + std::to_string(id) + " waits for " +
                    (barrier.threads ? std::to_string(barrier.threads) : "all") +
                    " threads, but this arrival says " +
                    (threads ? std::to_string(threads) : "all"),
                lane};
  }
  uint32_t& arrived_lanes = barrier.arrived_lanes[static_cast<size_t>(warp.index())];
  if (arrived_lanes & mask) {
    throw Fault{"barrier",
                "the warp arrives at barrier " + std::to_string(id) +
                    " again before it has completed: two uses of it overlap",
                lane};
  }
  arrived_lanes |= mask;
  // A barrier with a count takes a warp as 32 threads, whatever lanes it has left.
  barrier.arrived += threads > 0 && aligned ? LANES : std::popcount(mask);
  const uint32_t votes = predicate & mask;
  barrier.popc += static_cast<uint32_t>(std::popcount(votes));
  barrier.all = barrier.all && votes == mask;
  barrier.any = barrier.any || votes != 0;
  if (races_) races_->release(warp.index(), barrier.knowledge);
  if (kind != BarrierKind::Arrive) {
    barrier.waiting.push_back({warp.index(), time_ + 1, warp.pc()});
    if (kind != BarrierKind::Sync)
      barrier.results.push_back({warp.index(), mask, destination, kind});
    warp.block(id);
  }
  if (threads > 0 && barrier.arrived > threads) {
    throw Fault{"barrier",
                "more threads arrive at barrier " + std::to_string(id) + " than the " +
                    std::to_string(threads) + " it is for",
                lane};
  }
  complete_if_full(id, warp.index());
  return true;
}

void Cta::complete_if_full(int id, int cause) {
  Barrier& barrier = barriers_[static_cast<size_t>(id)];
  if (!barrier.active) return;
  const int64_t expected = barrier.threads > 0 ? barrier.threads : live_threads();
  if (barrier.arrived < expected) return;
  for (const Barrier::Result& result : barrier.results) {
    Warp& warp = *warps_[static_cast<size_t>(result.warp)];
    if (result.kind == BarrierKind::RedPopc) {
      uint32_t* d = warp.lanes<uint32_t>(result.destination);
      for (uint32_t rest = result.mask; rest != 0; rest &= rest - 1) {
        d[std::countr_zero(rest)] = barrier.popc;
      }
    } else {
      const bool value = result.kind == BarrierKind::RedAnd ? barrier.all : barrier.any;
      uint32_t& p = warp.predicate(result.destination);
      p = value ? p | result.mask : p & ~result.mask;
    }
  }
  for (const Barrier::Waiting& waiting : barrier.waiting) {
    if (races_) races_->acquire(waiting.warp, barrier.knowledge);
    warps_[static_cast<size_t>(waiting.warp)]->release_barrier(id);
    ++counts_.barrier_waits;
    if (traced() && time_ + 1 > waiting.since) {
      TraceEvent event;
      event.kind = TraceEvent::Kind::Wait;
      event.track = waiting.warp;
      event.begin = waiting.since;
      event.end = time_ + 1;  // the instruction that ends it is under way
      event.pc = waiting.pc;
      event.cause = cause;
      event.label = "barrier " + std::to_string(id);
      trace_.events.push_back(std::move(event));
    }
  }
  const size_t warps = warps_.size();
  barrier = Barrier();
  barrier.arrived_lanes.assign(warps, 0);
}

void Cta::lanes_exited(Warp& warp) {
  for (int id = 0; id < BARRIERS; ++id) {
    if (barriers_[static_cast<size_t>(id)].threads == 0) complete_if_full(id, warp.index());
  }
}

// ---- Reports ----

void Cta::report(Severity severity, const Warp& warp, int lane, const char* kind,
                 std::string message, uint64_t address, int64_t other_pc) {
  Finding finding;
  finding.severity = severity;
  finding.kind = kind;
  finding.message = std::move(message);
  finding.cta = index_;
  finding.warp = warp.index();
  finding.lane = lane;
  finding.pc = warp.pc();
  finding.other_pc = other_pc;
  finding.address = address;
  findings_.add(std::move(finding));
}

void Cta::report_race(const Warp& warp, int lane, const Race& race, bool writes, bool benign,
                      const std::string& what, uint64_t address) {
  std::string other = race.same_warp ? "another lane of the same warp"
                                     : "warp " + std::to_string(races_->warp_of(race.other_agent));
  if (race.other_agent >= warp_count()) {
    other = std::string("an asynchronous copy of ") + (race.same_warp ? "this warp" : other);
  }
  std::string message = std::string(writes ? "a write to " : "a read of ") + what +
                        " is not ordered after " +
                        (race.other_wrote ? "a write by " : "a read by ") + other;
  if (race.other_lane >= 0) message += " (lane " + std::to_string(race.other_lane) + ")";
  if (race.other_pc >= 0) {
    message += " at " + describe_instruction(*launch_.module, kernel(),
                                             static_cast<uint32_t>(race.other_pc));
  }
  if (benign) message += "; both write the same value";
  report(benign ? Severity::Lint : Severity::Error, warp, lane, "race", std::move(message), address,
         race.other_pc);
}

}  // namespace archflash::sim
