// The mbarrier objects of a CTA: their phases, pending arrivals and bytes that are still expected.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "sim/run/cluster.h"

namespace archflash::sim {

constexpr uint32_t MBARRIER_BYTES = 8;  // the size of an object in shared memory

class MbarrierUnit {
 public:
  explicit MbarrierUnit(Cta& cta) : cta_(cta) {}

  bool any() const { return !objects_.empty(); }

  // Offsets are those in the CTA's shared memory. The lane of `warp` that acts may be in another
  // CTA.
  void init(Warp& warp, int lane, uint32_t offset, uint32_t count);
  void inval(Warp& warp, int lane, uint32_t offset);
  // A fence by `warp` after which its mbarrier.inits are visible in the whole cluster.
  void fence(const Warp& warp);

  struct Arrival {
    uint32_t count = 1;
    int64_t expect = 0;  // bytes that are added to the expected ones first
    bool drop = false;   // later phases expect so many arrivals less
    bool completes = true;
    bool releases = true;     // false: relaxed
    bool in_cluster = false;  // its scope; false: the CTA
  };
  struct Acquire {
    bool acquires = true;     // false: relaxed
    bool in_cluster = false;  // its scope
  };
  // Returns the state of the phase in which the arrival counted.
  uint64_t arrive(Warp& warp, int lane, uint32_t offset, const Arrival& arrival);
  void expect(Warp& warp, int lane, uint32_t offset, int64_t bytes);
  // mbarrier.complete_tx: software completes bytes.
  void complete(Warp& warp, int lane, uint32_t offset, int64_t bytes);

  // Whether the phase of this parity, or of this state, is complete. If it is, the warp comes to
  // know what happened before it.
  bool test_parity(Warp& warp, int lane, uint32_t offset, bool parity, Acquire acquire);
  bool test_state(Warp& warp, int lane, uint32_t offset, uint64_t state, Acquire acquire);
  static uint32_t pending_count(uint64_t state);
  static uint64_t phase_of(uint64_t state);

  // ---- For asynchronous operations ----
  // Says that an operation which `warp` starts will complete bytes here. Returns the agent of its
  // writes, or -1 without a race detector.
  int subscribe(Warp& warp, int lane, uint32_t offset);
  Clock serial(uint32_t offset) { return objects_[offset].serial; }
  // Says that `bytes` have landed. Returns the clock of the agent from which on they are known.
  Clock landed(AsyncOperation& by, uint32_t offset, int64_t bytes);
  // Adds a pending arrival to the phase (cp.async.mbarrier.arrive without .noinc).
  void increment(Warp& warp, int lane, uint32_t offset);
  // An operation arrives. The arrival releases what `agent` has done up to `clock`.
  void arrive_for(AsyncOperation& by, uint32_t offset, int agent, Clock clock);

  // Says that an operation which `warp` starts will arrive here.
  void expect_arrival(Warp& warp, int lane, uint32_t offset);
  // tcgen05.commit arrives. The arrival releases what `agent` has carried out up to `clock`, and
  // whatever came before that.
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
    Clock serial = 1;  // counts the phases of all objects that lay here, from 1
    bool fenced = false;
    int init_agent = 0;
    int64_t init_pc = 0;
    int unit = -1;  // the agent whose clock is the serial
    Clock landed = 0;
    uint32_t landed_pc = 0;
    uint64_t seen = 0;       // how many phases somebody has seen complete
    uint64_t committed = 0;  // how many phases there were when a tcgen05.commit arrived last
    uint32_t committed_pc = 0;
    // What arrivals hand on: to every wait, and those of other CTAs to waits with their scope.
    Knowledge arriving, arriving_far, complete, complete_far;
  };

  Object& find(const Warp& warp, int lane, uint32_t offset, const char* what);
  Object& find_for(Warp& warp, int lane, uint32_t offset, const char* what);
  void check_race(Warp& warp, int lane, uint32_t offset,
                  Race (RaceDetector::*access)(const Accessor&, uint32_t, uint32_t));
  void add_transactions(Object& object, int lane, uint32_t offset, int64_t bytes);
  void count_arrival(Object& object, int lane, uint32_t offset);
  // `cause`: the track of the trace that may have completed the phase.
  void complete_if_due(Object& object, uint32_t offset, int cause);
  void trace_waits(const Object& object, uint32_t offset, int cause);
  int track_of(const Warp& warp);
  bool observe(Warp& warp, Object& object, bool done, Acquire acquire);
  std::string name(uint32_t offset) const;
  std::string name(const Object& object, uint32_t offset) const;

  Cta& cta_;
  std::unordered_map<uint32_t, Object> objects_;
};

}  // namespace archflash::sim
