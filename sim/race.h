// The race detector of a CTA: vector clocks of its warps and of its asynchronous units.
//
// An agent is a warp or an asynchronous unit. Agent a's clock counts its synchronising steps; a
// vector V holds, for each agent, the last of its steps that is known to have happened before. Each
// granule of shared memory remembers its last writer and every warp's last read. An access races
// with an earlier one that is not before it in V. Lanes of a warp are told apart as well: between
// two of them only a warp-wide synchronisation orders.
//
// Two knowledge sets: `general` (happens before, in the generic proxy) and `async` (made visible to
// the asynchronous proxy by a proxy fence). Both travel along release and acquire. Accesses of
// units in the async proxy are checked against the second.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace archflash::sim {

using Clock = uint32_t;

// What an agent knows of every agent.
struct Knowledge {
  std::vector<Clock> general;
  std::vector<Clock> async;

  void join(const Knowledge& other);
  bool empty() const { return general.empty(); }
};

// Who makes an access, for the granules and for reports.
struct Accessor {
  int agent = 0;
  int lane = 0;
  uint32_t pc = 0;
};

struct Race {
  bool found = false;
  bool other_wrote = false;  // the earlier access was a write
  bool same_warp = false;    // between two lanes of one warp
  int other_agent = 0;
  int other_lane = 0;
  int64_t other_pc = -1;  // -1: unknown (an earlier read)
};

class RaceDetector {
 public:
  // Agents 0 .. warps-1 are warps, warps .. 2*warps-1 their cp.async units.
  RaceDetector(int warps, uint64_t shared_bytes, int granule_log2);

  int copy_agent(int warp) const { return warps_ + warp; }
  int warp_of(int agent) const { return agent < warps_ ? agent : agent - warps_; }

  // A warp's plain access to shared memory at `offset` from its start. On a conflict returns what
  // it conflicts with.
  Race read(const Accessor& who, uint32_t offset, uint32_t bytes);
  // Every lane of the warp takes part, so that what any of them does next comes after it.
  Race collective_read(const Accessor& who, uint32_t offset, uint32_t bytes);
  Race write(const Accessor& who, uint32_t offset, uint32_t bytes);
  Race strong_load(const Accessor& who, uint32_t offset, uint32_t bytes);
  // Accesses that conflict with plain ones only.
  Race atomic(const Accessor& who, uint32_t offset, uint32_t bytes);
  // An asynchronous copy, at its issue: it may land at any time from now on. `sequence` counts the
  // warp's copies from 1.
  Race copy(int warp, int lane, uint32_t pc, Clock sequence, uint32_t offset, uint32_t bytes);
  // Global memory, only between warps of this CTA.
  Race global_write(const Accessor& who, uint64_t address, uint32_t bytes);
  Race global_read(const Accessor& who, uint64_t address, uint32_t bytes);
  Race global_atomic(const Accessor& who, uint64_t address, uint32_t bytes);

  // The lanes of a warp have synchronised with each other.
  void warp_sync(int warp);
  // All of the warp's copies up to `sequence` have been waited for.
  void copies_done(int warp, Clock sequence);

  // Release and acquire: what a warp knows flows into and out of a synchronisation object.
  void release(int warp, Knowledge& into);
  void acquire(int warp, const Knowledge& from);
  // A fence: what was acquired by relaxed reads counts now, later relaxed writes release this.
  void fence(int warp);
  // A strong (volatile, relaxed or stronger) access to a synchronising variable.
  void strong_read(int warp, uint64_t address, bool acquires);
  void strong_write(int warp, uint64_t address, bool releases);
  // fence.proxy.async: what the warp knows becomes visible to the async proxy.
  void proxy_fence(int warp);

 private:
  struct Write {
    Clock clock = 0;
    uint16_t agent = 0;
    uint8_t lane = 0;
    uint8_t atomic = 0;
    uint32_t pc = 0;
  };
  // Reads: clock << 6 | lane (MANY_LANES: several).
  static constexpr uint32_t LANE_BITS = 6;
  static constexpr uint32_t MANY_LANES = 63;
  static constexpr uint32_t ALL_TOGETHER = 62;

  bool ordered_after_write(const Accessor& who, const Write& write) const;
  Race check_write(const Accessor& who, const Write& last) const;
  Race mark_read(const Accessor& who, uint32_t offset, uint32_t bytes, uint32_t lane);
  Race check_readers(const Accessor& who, const uint32_t* readers) const;

  int warps_, agents_;
  int shift_;
  std::vector<Knowledge> known_;
  // What all lanes of a warp know of its own copies: what was waited for before the last warp-wide
  // synchronisation.
  std::vector<Clock> copies_synced_;
  std::vector<Knowledge> fenced_;   // at the warp's last fence
  std::vector<Knowledge> pending_;  // acquired by relaxed reads, counts from the next fence on
  std::vector<Write> writes_;
  std::vector<uint32_t> reads_;  // [granule][warp]
  std::unordered_map<uint64_t, Knowledge> variables_;
  struct GlobalCell {
    Write write;
    bool written = false;
    std::vector<uint32_t> readers;
  };
  std::unordered_map<uint64_t, GlobalCell> global_;
};

}  // namespace archflash::sim
