// The mbarrier objects of a CTA: phases, pending arrivals and bytes that are still expected.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "sim/run/cluster.h"

namespace archflash::sim {

constexpr uint32_t MBARRIER_BYTES = 8;  // of an object in shared memory

class MbarrierUnit {
 public:
  explicit MbarrierUnit(Cta& cta) : cta_(cta) {}

  bool any() const { return !objects_.empty(); }

  // Offsets are into the CTA's shared memory. `warp`'s lane acts, and may be of another CTA.
  void init(Warp& warp, int lane, uint32_t offset, uint32_t count);
  void inval(Warp& warp, int lane, uint32_t offset);
  // A fence by `warp` after which its mbarrier.inits are visible in the whole cluster.
  void fence(const Warp& warp);

  struct Arrival {
    uint32_t count = 1;
    int64_t expect = 0;  // bytes that are added to the transactions first
    bool drop = false;   // later phases expect as many arrivals less
    bool completes = true;
    bool releases = true;  // else relaxed
  };
  // Returns the state of the phase in which the arrival counted.
  uint64_t arrive(Warp& warp, int lane, uint32_t offset, const Arrival& arrival);
  void expect(Warp& warp, int lane, uint32_t offset, int64_t bytes);
  // By software, as mbarrier.complete_tx.
  void complete(Warp& warp, int lane, uint32_t offset, int64_t bytes);

  // Whether the phase of this parity, or that of this state, is complete; if so, what happened
  // before it becomes known to the warp.
  bool test_parity(Warp& warp, int lane, uint32_t offset, bool parity, bool acquires);
  bool test_state(Warp& warp, int lane, uint32_t offset, uint64_t state, bool acquires);
  static uint32_t pending_count(uint64_t state);
  static uint64_t phase_of(uint64_t state);

  // ---- For asynchronous operations ----
  // An operation that `warp` starts will complete transactions here. Returns the agent of its
  // writes; -1 without a race detector.
  int subscribe(Warp& warp, int lane, uint32_t offset);
  // `bytes` have landed. Returns the clock of the agent from which on they are known.
  Clock serial(uint32_t offset) { return objects_[offset].serial; }
  Clock landed(AsyncOperation& by, uint32_t offset, int64_t bytes);
  // The phase counts one more pending arrival (cp.async.mbarrier.arrive without .noinc).
  void increment(Warp& warp, int lane, uint32_t offset);
  // An arrival by what an operation has carried out: `agent` up to `clock`.
  void arrive_for(AsyncOperation& by, uint32_t offset, int agent, Clock clock);

  // An operation that `warp` starts will arrive here.
  void expect_arrival(Warp& warp, int lane, uint32_t offset);
  // tcgen05.commit does: what `agent` carried out up to `clock` becomes known, and what came before
  // that.
  void commit_arrives(AsyncOperation& by, uint32_t offset, int agent, Clock clock,
                      const Knowledge& before);

  void check_exit();
  std::string describe(uint32_t address) const;

 private:
  struct Object {
    bool live = false;
    uint32_t expected = 0, pending = 0;
    int64_t tx = 0;
    uint64_t phase = 0;
    Clock serial = 1;  // phases of all objects that lay here, from 1
    bool fenced = false;
    int init_agent = 0;
    int64_t init_pc = 0;
    int unit = -1;  // the agent whose clock is the serial
    Clock landed = 0;
    uint32_t landed_pc = 0;
    uint64_t seen = 0;       // phases that somebody has seen complete
    uint64_t committed = 0;  // phases up to the last one in which a tcgen05.commit arrived
    uint32_t committed_pc = 0;
    Knowledge arriving, complete;
  };

  Object& find(const Warp& warp, int lane, uint32_t offset, const char* what);
  Object& find_for(Warp& warp, int lane, uint32_t offset, const char* what);
  void add_transactions(Object& object, int lane, uint32_t offset, int64_t bytes);
  void count_arrival(Object& object, int lane, uint32_t offset);
  // `cause`: the track of the trace that may have completed the phase.
  void complete_if_due(Object& object, uint32_t offset, int cause);
  void trace_waits(const Object& object, uint32_t offset, int cause);
  int track_of(const Warp& warp);
  bool observe(Warp& warp, Object& object, bool done, bool acquires);
  std::string name(uint32_t offset) const;
  std::string name(const Object& object, uint32_t offset) const;

  Cta& cta_;
  std::unordered_map<uint32_t, Object> objects_;
};

}  // namespace archflash::sim
