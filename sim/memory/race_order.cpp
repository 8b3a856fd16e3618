// What warps learn of each other: synchronised lanes, releases and acquires, fences.
#include <algorithm>

#include "sim/memory/memory.h"
#include "sim/memory/race.h"

namespace archflash::sim {
namespace {

void join_clocks(std::vector<Clock>& into, const std::vector<Clock>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

}  // namespace

void Knowledge::join(const Knowledge& other) {
  others.join(other.others);
  others_async.join(other.others_async);
  if (other.empty()) return;
  if (empty()) {
    general = other.general;
    async = other.async;
    parts = other.parts;
    join_clocks(executed, other.executed);
    return;
  }
  if (general.size() < other.general.size()) {  // this was made before a unit was added
    general.resize(other.general.size());
    async.resize(other.async.size());
  }
  if (parts.size() < other.parts.size()) parts.resize(other.parts.size());
  for (size_t w = 0; w < other.parts.size(); ++w) {
    const Part& theirs = other.parts[w];
    Part& part = parts[w];
    if (part.whole >= other.general[w]) continue;
    if (theirs.whole >= general[w]) {
      part = theirs;
      continue;
    }
    part.whole = std::max(part.whole, theirs.whole);
    part.lanes |= theirs.lanes;
    if (part.lanes == ALL_LANES) part.whole = std::max(general[w], other.general[w]);
  }
  if (!executed.empty() || !other.executed.empty()) join_clocks(executed, other.executed);
  for (size_t i = 0; i < other.general.size(); ++i) {
    general[i] = std::max(general[i], other.general[i]);
    async[i] = std::max(async[i], other.async[i]);
  }
}

void Knowledge::join_executed(const Knowledge& other, size_t threads) {
  if (other.empty()) return;
  join_clocks(executed, other.general);
  join_clocks(executed, other.executed);
  if (general.size() < other.general.size()) {
    general.resize(other.general.size());
    async.resize(other.async.size());
  }
  if (parts.size() < other.parts.size()) parts.resize(other.parts.size());
  for (size_t i = threads; i < other.general.size(); ++i)
    general[i] = std::max(general[i], other.general[i]);
  join_clocks(async, other.async);
}

void RaceDetector::unit_release(int unit, Clock clock, Knowledge& into) {
  const auto u = static_cast<size_t>(unit);
  if (into.general.size() <= u) {
    into.general.resize(static_cast<size_t>(agents_));
    into.async.resize(static_cast<size_t>(agents_));
  }
  into.general[u] = std::max(into.general[u], clock);
  into.async[u] = into.general[u];
}

void RaceDetector::unit_done(int unit, Clock clock, int warp) {
  Knowledge& knowledge = known_[static_cast<size_t>(warp)];
  const auto u = static_cast<size_t>(unit);
  knowledge.general[u] = std::max(knowledge.general[u], clock);
  knowledge.async[u] = knowledge.general[u];
}

Knowledge RaceDetector::known_of_others(int warp) const {
  const auto w = static_cast<size_t>(warp);
  Knowledge knowledge = known_[w];
  knowledge.general[w] = knowledge.async[w] = 0;
  return knowledge;
}

std::vector<Clock> RaceDetector::known_clocks(int warp) const {
  std::vector<Clock> clocks = known_[static_cast<size_t>(warp)].general;
  join_clocks(clocks, known_[static_cast<size_t>(warp)].executed);
  return clocks;
}

bool RaceDetector::known(int unit, Clock clock) const {
  return std::any_of(known_.begin(), known_.end(), [&](const Knowledge& k) {
    return k.general[static_cast<size_t>(unit)] >= clock;
  });
}

void RaceDetector::warp_sync(int warp) {
  const auto w = static_cast<size_t>(warp);
  lanes_synced_[w] = ++known_[w].general[w];
  copies_synced_[w] = known_[w].general[static_cast<size_t>(copy_agent(warp))];
}

void RaceDetector::copies_done(int warp, Clock sequence) {
  Clock& known = known_[static_cast<size_t>(warp)].general[static_cast<size_t>(copy_agent(warp))];
  known = std::max(known, sequence);
}

void RaceDetector::release(int warp, Knowledge& into) {
  release_lanes(warp, ALL_LANES, ALL_LANES, into);
}

void RaceDetector::release_lanes(int warp, uint32_t lanes, uint32_t live, Knowledge& into) {
  const auto w = static_cast<size_t>(warp);
  Knowledge& knowledge = known_[w];
  const bool all = (live & ~lanes) == 0;
  knowledge.parts[w] = {all ? knowledge.general[w] : lanes_synced_[w] - 1, lanes | ~live};
  into.join(knowledge);
  if (all)
    warp_sync(warp);
  else
    ++knowledge.general[w];
}

void RaceDetector::acquire(int warp, const Knowledge& from) {
  const auto w = static_cast<size_t>(warp);
  known_[w].join(from);
  const auto copies = static_cast<size_t>(copy_agent(warp));
  if (from.empty()) return;
  copies_synced_[w] = std::max(copies_synced_[w], from.general[copies]);
  // Where the warp's own releases come back to it, its lanes are in order up to those.
  if (from.parts.size() <= w) return;
  const Knowledge::Part& part = from.parts[w];
  lanes_synced_[w] = std::max(lanes_synced_[w], part.whole + 1);
  Returned& returned = returned_[w];
  if (returned.clock < lanes_synced_[w]) returned.lanes = 0;
  if (from.general[w] > part.whole) {
    returned.lanes |= part.lanes;
    returned.clock = std::max(returned.clock, from.general[w]);
  }
}

void RaceDetector::release_executed(int warp, uint32_t lanes, uint32_t live, Knowledge& into) {
  Knowledge all;
  release_lanes(warp, lanes, live, all);
  into.join_executed(all, 2 * static_cast<size_t>(warps_));
}

void RaceDetector::acquire_executed(int warp, const Knowledge& from) {
  known_[static_cast<size_t>(warp)].join_executed(from, 2 * static_cast<size_t>(warps_));
}

void RaceDetector::release_fenced(int warp, SyncScope scope, Knowledge& into) {
  const auto& fenced = fenced_[static_cast<size_t>(warp)][static_cast<size_t>(scope)];
  if (fenced != nullptr) into.join(*fenced);
}

void RaceDetector::acquire_relaxed(int warp, SyncScope scope, const Knowledge& from) {
  pending_[static_cast<size_t>(warp)][static_cast<size_t>(scope)].join(from);
}

void RaceDetector::fence(int warp, SyncScope scope) {
  const auto w = static_cast<size_t>(warp);
  for (size_t s = 0; s <= static_cast<size_t>(scope); ++s) {
    known_[w].join(pending_[w][s]);
    pending_[w][s] = {};
  }
  known_[w].parts[w].whole = known_[w].general[w];
  const auto now = std::make_shared<const Knowledge>(known_[w]);
  for (size_t s = 0; s <= static_cast<size_t>(scope); ++s) fenced_[w][s] = now;
  ++known_[w].general[w];
}

GlobalOrder& RaceDetector::variables_of(uint64_t address) {
  return address >= GLOBAL_BASE ? global_ : shared_variables_;
}

SyncScope RaceDetector::distance(const GlobalOrder::Release& release, int warp) const {
  if (release.cluster != cluster_) return SyncScope::Gpu;
  return release.cta == warp / warps_of_cta_ ? SyncScope::Cta : SyncScope::Cluster;
}

void RaceDetector::strong_read(int warp, uint64_t address, bool acquires, SyncScope scope) {
  auto& variables = variables_of(address).variables;
  const auto found = variables.find(address);
  if (found == variables.end()) return;
  const auto w = static_cast<size_t>(warp);
  for (const GlobalOrder::Release& release : found->second) {
    const SyncScope needed = distance(release, warp);
    const bool reaches = scope >= needed && release.scope >= needed;
    Knowledge& into = acquires ? known_[w] : pending_[w][static_cast<size_t>(needed)];
    if (needed == SyncScope::Gpu) {
      if (!reaches) continue;
      into.others.join(release.cluster, release.knowledge->general);
      into.others.join(release.knowledge->others);
      into.others_async.join(release.knowledge->others_async);
      pending_[w].back().others.join(release.seen);
    } else if (reaches) {
      into.join(*release.knowledge);
    } else {
      acquire_executed(warp, *release.knowledge);
    }
  }
}

void RaceDetector::strong_write(int warp, uint64_t address, bool releases, bool updates,
                                SyncScope scope) {
  const auto w = static_cast<size_t>(warp);
  std::vector<GlobalOrder::Release>& variable = variables_of(address).variables[address];
  if (!updates) variable.clear();
  const auto add = [&](SyncScope reach, std::shared_ptr<const Knowledge> knowledge) {
    GlobalOrder::Release release{cluster_, warp / warps_of_cta_, reach, std::move(knowledge),
                                 pending_[w].back().others};
    for (GlobalOrder::Release& other : variable) {
      if (other.cluster != cluster_ || other.cta != release.cta || other.scope != reach) continue;
      other.seen.join(release.seen);
      if (other.knowledge == release.knowledge) return;
      auto both = std::make_shared<Knowledge>(*release.knowledge);
      both->join(*other.knowledge);
      other.knowledge = std::move(both);
      return;
    }
    variable.push_back(std::move(release));
  };
  if (releases) {
    auto knowledge = std::make_shared<Knowledge>();
    release(warp, *knowledge);
    add(scope, std::move(knowledge));
    return;
  }
  std::shared_ptr<const Knowledge> added;
  for (size_t s = static_cast<size_t>(scope) + 1; s-- > 0;) {
    if (fenced_[w][s] == nullptr || fenced_[w][s] == added) continue;
    added = fenced_[w][s];
    add(static_cast<SyncScope>(s), added);
  }
}

void RaceDetector::proxy_fence(int warp, bool in_global) {
  const auto w = static_cast<size_t>(warp);
  Knowledge& known = known_[w];
  join_clocks(known.async, known.general);
  join_clocks(known.async, known.executed);
  if (in_global) {
    known.others_async.join(known.others);
    if (global_.is_shared()) known.others_async.join(cluster_, known.general);
  }
  ++known.general[w];  // the fence does not cover later writes
}

}  // namespace archflash::sim
