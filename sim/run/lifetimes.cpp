#include "sim/run/lifetimes.h"

#include <string>

#include "sim/run/cluster.h"

namespace archflash::sim {
namespace {

std::string name_of(const Cta& cta) { return " CTA " + std::to_string(cta.index()); }

}  // namespace

void Lifetimes::pass_barrier(const Warp& warp) {
  const RaceDetector* races = cluster_.races();
  passed_[static_cast<size_t>(warp.agent())] =
      races != nullptr ? races->known_clock(warp.agent(), warp.agent()) : 1;
}

bool Lifetimes::knows_start(const Warp& warp, const Cta& other) const {
  const RaceDetector* races = cluster_.races();
  const int first = other.rank() * other.warp_count();
  for (int w = first; races != nullptr && w < first + other.warp_count(); ++w) {
    if (races->known_clock(warp.agent(), w) > 0) return true;
  }
  for (size_t w = 0; w < passed_.size(); ++w) {
    if (passed_[w] == 0) continue;
    const int agent = static_cast<int>(w);
    if (races == nullptr || races->happened(warp.agent(), agent, passed_[w])) return true;
  }
  return false;
}

void Lifetimes::check_use(Warp& warp, int lane, const Cta& other, const char* what,
                          uint64_t address) {
  if (&other == &warp.cta()) return;
  if (other.exited()) {
    throw Fault{"exited-cta",
                what + name_of(other) +
                    ", which has exited: it must stay until the cluster is done with it",
                lane, address};
  }
  uint32_t& started = started_[static_cast<size_t>(warp.agent())];
  const uint32_t bit = 1u << other.rank();
  if ((started & bit) != 0) return;
  started |= bit;  // a missing barrier is reported once for each warp
  if (knows_start(warp, other)) return;
  warp.cta().report(Severity::Error, warp, lane, "unstarted-cta",
                    what + name_of(other) +
                        ", which may not have started yet: let all threads of the cluster arrive "
                        "and wait at barrier.cluster before it",
                    address);
}

void Lifetimes::note_use(Warp& warp, int lane, const Cta& other, const char* what, int agent,
                         Clock clock, uint64_t address) {
  uses_[{agent, other.rank()}] = {&warp, lane, warp.pc(), what, clock, address};
}

void Lifetimes::note_access(Warp& warp, int lane, const Cta& other, const char* what,
                            uint64_t address) {
  const RaceDetector* races = cluster_.races();
  if (races == nullptr || &other == &warp.cta()) return;
  note_use(warp, lane, other, what, warp.agent(), races->known_clock(warp.agent(), warp.agent()),
           address);
}

void Lifetimes::check_exits() {
  const RaceDetector* races = cluster_.races();
  if (races == nullptr) return;
  for (const auto& [who, use] : uses_) {
    const auto& [agent, rank] = who;
    Cta& other = cluster_.cta(rank);
    bool known = false;
    for (int w = 0; w < other.warp_count() && !known; ++w) {
      known = races->happened(other.warp(w).agent(), agent, use.clock);
    }
    if (known) continue;
    use.warp->cta().report_at(
        use.pc, Severity::Error, *use.warp, use.lane, "exited-cta",
        use.what + name_of(other) +
            ", which may have exited by then: its warps wait for nothing that comes after this "
            "use; let all threads of the cluster arrive and wait at barrier.cluster after it",
        use.address);
  }
}

}  // namespace archflash::sim
