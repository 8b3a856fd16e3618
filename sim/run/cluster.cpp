#include "sim/run/cluster.h"

#include <algorithm>
#include <bit>

#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

constexpr uint64_t LAZY_BUDGET = uint64_t{1} << 20;
// A copy lands at the latest when its cluster has executed so many instructions since one has: a
// warp that waits in a loop for another cluster can always run, and that one may need the copy.
constexpr uint64_t LAZY_PATIENCE = uint64_t{1} << 22;
constexpr uint64_t EAGER_BUDGET = 256;
constexpr uint64_t RANDOM_BUDGET = 400;
constexpr uint64_t PRIORITY_BUDGET = 2000;
constexpr uint64_t SEED_STEP = 0xD1342543DE82EF95u;
// After so many rounds in which lanes wait in a loop and nothing else happens, it is a deadlock.
constexpr uint64_t MAX_FRUITLESS = 10000;

}  // namespace

Dim3 first_cta(const LaunchContext& launch, int64_t cluster) {
  const Dim3& size = launch.cluster;
  const int64_t across = launch.grid.x / size.x, down = launch.grid.y / size.y;
  return {cluster % across * size.x, cluster / across % down * size.y,
          cluster / (across * down) * size.z};
}

Dim3 cta_position(const LaunchContext& launch, int64_t cluster, int rank) {
  const Dim3 &size = launch.cluster, first = first_cta(launch, cluster);
  return {first.x + rank % size.x, first.y + rank / size.x % size.y,
          first.z + rank / (size.x * size.y)};
}

int64_t cta_index(const LaunchContext& launch, Dim3 position) {
  return position.x + launch.grid.x * (position.y + launch.grid.y * position.z);
}

Cluster::Cluster(const LaunchContext& launch, int64_t index, Counts& counts,
                 std::deque<int64_t> unstarted)
    : launch_(launch),
      random_(launch.options.seed + static_cast<uint64_t>(index) * SEED_STEP),
      unstarted_(std::move(unstarted)) {
  const auto warps = static_cast<int>((launch.block.count() + LANES - 1) / LANES);
  const auto ranks = static_cast<int>(launch.cluster.count());
  if (launch.options.race) {
    GlobalOrder* global = launch.global_order;
    if (global == nullptr) {
      own_order_ = std::make_unique<GlobalOrder>(launch.kernel->global_granule_log2, false);
      global = own_order_.get();
    }
    races_ = std::make_unique<RaceDetector>(
        warps * ranks, warps, race_stride(launch) * static_cast<uint64_t>(ranks),
        launch.kernel->race_granule_log2, launch.kernel->uses_wgmma || launch.kernel->uses_tcgen05,
        static_cast<int32_t>(index), *global);
    if (launch.starts_early) launch_before_ = races_->add_unit();
  }
  for (int rank = 0; rank < ranks; ++rank) {
    ctas_.push_back(std::make_unique<Cta>(*this, rank, cta_position(launch, index, rank), counts));
    for (int w = 0; w < warps; ++w) warps_.push_back(&ctas_.back()->warp(w));
  }
  counts.ctas += static_cast<uint64_t>(ranks);
  lifetimes_ = std::make_unique<Lifetimes>(*this, warps_.size());
  arrivals_.resize(warps_.size());
  for (size_t w = 0; w < warps_.size(); ++w) {
    priorities_.push_back(static_cast<uint32_t>(random_.next() >> 32));
  }
}

Cluster::~Cluster() = default;

// The warp that runs next, and for how many instructions; nullptr if none can run.
Warp* Cluster::pick(uint64_t& budget) {
  const size_t count = warps_.size();
  const Mode mode = launch_.options.mode;
  const auto longest = [&](uint64_t of_mode) {
    return launch_.options.stretch > 0 ? launch_.options.stretch : of_mode;
  };
  if (mode == Mode::Lazy && time_ - landed_ > LAZY_PATIENCE) land_one(0);
  if (mode == Mode::Lazy || mode == Mode::Eager) {
    budget = longest(mode == Mode::Lazy ? LAZY_BUDGET : EAGER_BUDGET);
    for (size_t i = 0; i < count; ++i) {
      turn_ = (turn_ + 1) % count;
      if (warps_[turn_]->runnable()) return warps_[turn_];
    }
    return nullptr;
  }
  size_t runnable = 0;
  for (const Warp* warp : warps_) runnable += warp->runnable();
  if (runnable == 0) return nullptr;
  if (random_.below(2)) {
    Warp& lucky = *warps_[random_.below(count)];
    for (uint64_t n = random_.below(4); n > 0; --n) lucky.land_copy(random_.next());
    if (!pending_.empty()) land_one(random_.next());
    if (random_.below(4) == 0) wake_resting();
  }
  if (mode != Mode::Priority) {
    budget = 1 + random_.below(longest(RANDOM_BUDGET));
    size_t skip = random_.below(runnable);
    for (Warp* warp : warps_) {
      if (warp->runnable() && skip-- == 0) return warp;
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
  return best < count ? warps_[best] : nullptr;
}

bool Cluster::run(uint64_t instructions) {
  const uint64_t end = time_ + instructions;
  Warp* warp = nullptr;
  try {
    for (;;) {
      launch_.check_given_up();
      if (time_ >= end) return false;
      uint64_t budget = 0;
      warp = pick(budget);
      if (warp == nullptr) {
        if (land_one(launch_.options.mode == Mode::Shuffled ? random_.next() : 0)) continue;
        if (fruitless_++ < MAX_FRUITLESS && wake_resting()) continue;
        break;
      }
      if (launch_.options.trace) {
        run_traced(*warp, budget);
      } else {
        const uint64_t before = warp->executed();
        warp->run(budget);
        time_ += warp->executed() - before;
      }
      if (time_ > launch_.options.max_instructions) {
        throw Fault{"limit", "more than " + std::to_string(launch_.options.max_instructions) +
                                 " warp-instructions in one CTA: an endless loop?"};
      }
    }
    if (std::any_of(warps_.begin(), warps_.end(), [](const Warp* w) { return !w->exited(); })) {
      deadlock();
    } else {
      for (const auto& cta : ctas_) cta->check_exit();
      lifetimes_->check_exits();
    }
  } catch (const Fault& failure) {
    if (stepping_ != nullptr) {
      fault(failure, stepping_->warp().cta(), stepping_->warp(), stepping_->pc());
    } else {
      fault(failure, warp->cta(), *warp, warp->pc());
    }
  }
  return true;
}

// Runs a warp instruction by instruction, so that every event has its exact time.
void Cluster::run_traced(Warp& warp, uint64_t budget) {
  TraceEvent event;
  event.track = warp.index();
  const auto end_event = [&] {
    event.end = time_;
    if (event.end > event.begin) warp.cta().trace().events.push_back(event);
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

void Cluster::fault(const Fault& fault, Cta& cta, const Warp& warp, int64_t pc) {
  Finding finding;
  finding.kind = fault.kind;
  finding.message = fault.message;
  finding.cta = cta.index();
  finding.warp = warp.index();
  finding.lane = fault.lane;
  finding.pc = pc;
  finding.address = fault.address;
  finding.fatal = true;
  cta.findings().add(std::move(finding));
}

void Cluster::deadlock() {
  const auto stuck =
      std::find_if(warps_.begin(), warps_.end(), [](const Warp* w) { return !w->exited(); });
  Cta& cta = (*stuck)->cta();
  if (launch_.options.trace) {
    for (const auto& each : ctas_) each->trace_endless_waits();
  }
  Finding finding;
  finding.kind = "deadlock";
  finding.message = "no warp can go on:";
  for (const auto& each : ctas_) finding.message += each->describe_waits();
  finding.cta = cta.index();
  finding.warp = (*stuck)->index();
  finding.pc = (*stuck)->pc();
  finding.fatal = true;
  cta.findings().add(std::move(finding));
}

// ---- Asynchronous work ----

void Cluster::start(std::shared_ptr<AsyncOperation> operation) {
  if (launch_.options.mode == Mode::Eager) {
    while (!step(*operation)) {
    }
    return;
  }
  pending_.push_back(std::move(operation));
}

void Cluster::finish(AsyncOperation& operation) {
  const auto found = std::find_if(pending_.begin(), pending_.end(),
                                  [&](const auto& pending) { return pending.get() == &operation; });
  if (found == pending_.end()) return;
  const std::shared_ptr<AsyncOperation> kept = *found;
  pending_.erase(found);
  while (!step(*kept)) {
  }
}

void Cluster::advance(AsyncOperation& operation) {
  if (step(operation)) {
    std::erase_if(pending_, [&](const auto& pending) { return pending.get() == &operation; });
  }
}

bool Cluster::step(AsyncOperation& operation) {
  AsyncOperation* const outer = stepping_;
  stepping_ = &operation;
  const bool done = operation.step();
  stepping_ = outer;
  progress();
  return done;
}

bool Cluster::land_one(uint64_t pick) {
  landed_ = time_;
  if (pending_.empty()) return false;
  const std::shared_ptr<AsyncOperation> operation = pending_[pick % pending_.size()];
  if (step(*operation)) std::erase(pending_, operation);  // a step may have changed the list
  return true;
}

bool Cluster::wake_resting() {
  bool woken = false;
  for (Warp* warp : warps_) {
    if (!warp->waits_for(Wait::Rest)) continue;
    warp->wake(Wait::Rest, 0);
    woken = true;
  }
  return woken;
}

// ---- The barrier of the cluster ----

void Cluster::arrive(Warp& warp, uint32_t mask, bool releases) {
  Arrivals& arrivals = arrivals_[static_cast<size_t>(warp.agent())];
  const uint32_t again = mask & (arrivals.arrived | arrivals.unwaited);
  if (again != 0) {
    throw Fault{"barrier",
                "the thread arrives at the barrier of the cluster again without having waited for "
                "it",
                std::countr_zero(again)};
  }
  arrivals.arrived |= mask;
  arrivals.unwaited |= mask;
  if (races_) {
    if (releases)
      races_->release(warp.agent(), arriving_);
    else
      races_->release_fenced(warp.agent(), SyncScope::Cluster, arriving_);
  }
  complete_if_full();
}

bool Cluster::wait(Warp& warp, uint32_t mask) {
  Arrivals& arrivals = arrivals_[static_cast<size_t>(warp.agent())];
  const uint32_t missing = mask & ~arrivals.unwaited;
  if (missing != 0) {
    throw Fault{"barrier",
                "the thread waits at the barrier of the cluster without having arrived at it",
                std::countr_zero(missing)};
  }
  if (arrivals.arrived & mask) return false;
  arrivals.unwaited &= ~mask;
  if (races_) races_->acquire(warp.agent(), arrived_);
  lifetimes_->pass_barrier(warp);
  return true;
}

void Cluster::wait_for_launch_before(Warp& warp) {
  launch_.memory->note_wait();
  if (launch_before_ >= 0) races_->unit_done(launch_before_, 1, warp.agent());
}

void Cluster::let_next_launch_start(const Warp& warp) {
  if (!has_waited_for_launch(warp)) launch_.memory->note_early_start();
}

bool Cluster::has_waited_for_launch(const Warp& warp) const {
  return launch_before_ < 0 || races_->happened(warp.agent(), launch_before_, 1);
}

void Cluster::lanes_exited() { complete_if_full(); }

int64_t Cluster::take_unstarted() {
  constexpr uint64_t REFUSED = 16;  // one in so many requests, where chance decides
  const Mode mode = launch_.options.mode;
  if (unstarted_.empty()) return -1;
  if (mode != Mode::Lazy && mode != Mode::Eager && random_.below(REFUSED) == 0) return -1;
  const int64_t index = unstarted_.front();
  unstarted_.pop_front();
  return index;
}

void Cluster::complete_if_full() {
  bool any = false;
  for (size_t w = 0; w < warps_.size(); ++w) {
    if (warps_[w]->live() & ~arrivals_[w].arrived) return;
    any = any || arrivals_[w].arrived != 0;
  }
  if (!any) return;
  for (Arrivals& arrivals : arrivals_) arrivals.arrived = 0;
  arrived_.join(arriving_);
  arriving_ = {};
  for (Warp* warp : warps_) warp->wake(Wait::ClusterBarrier, 0);
  progress();
}

}  // namespace archflash::sim
