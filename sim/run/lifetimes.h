// When the CTAs of a cluster start and exit, as far as their warps can know. One CTA may start
// later or exit earlier than another. A warp that uses what belongs to another CTA must know that
// this CTA has started, and that CTA must know of the use before it exits.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "sim/memory/race.h"

namespace archflash::sim {

class Cluster;
class Cta;
class Warp;

class Lifetimes {
 public:
  Lifetimes(Cluster& cluster, size_t warps) : cluster_(cluster), passed_(warps), started_(warps) {}

  // The warp has waited for a complete phase of the cluster's barrier: all CTAs have started.
  void pass_barrier(const Warp& warp);
  // A lane uses what belongs to another CTA; `what` is the subject of a sentence that goes on with
  // that CTA: "a multicast to". `address` is where in its shared memory; 0: nowhere. Throws Fault
  // if that CTA has exited. Reports an error if nothing tells the warp that it has started.
  void check_use(Warp& warp, int lane, const Cta& other, const char* what, uint64_t address = 0);
  // That CTA must know before it exits what `agent` does up to `clock`. Called for the uses that
  // nothing else looks after; a bulk copy or a commit is looked after by its mbarrier.
  void note_use(Warp& warp, int lane, const Cta& other, const char* what, int agent, Clock clock,
                uint64_t address = 0);
  // note_use() for an access that the warp makes itself, now.
  void note_access(Warp& warp, int lane, const Cta& other, const char* what, uint64_t address);

  // Reports the uses that may come after the exit of the CTA that is used. Called when all CTAs
  // have exited.
  void check_exits();

 private:
  bool knows_start(const Warp& warp, const Cta& other) const;

  struct Use {
    Warp* warp;
    int lane;
    uint32_t pc;
    const char* what;
    Clock clock;
    uint64_t address;
  };

  Cluster& cluster_;
  // By warp: its clock when it last passed the cluster's barrier (0: never), and the CTAs that it
  // knows to have started, a bit for each rank.
  std::vector<Clock> passed_;
  std::vector<uint32_t> started_;
  std::map<std::pair<int, int>, Use> uses_;  // the last one, by agent and by the rank that is used
};

}  // namespace archflash::sim
