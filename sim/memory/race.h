// The race detector of a CTA: vector clocks of its warps and of its asynchronous units.
//
// An agent is a warp or an asynchronous unit. Agent a's clock counts its synchronising steps; a
// vector V holds, for each agent, the last of its steps that is known to have happened before. Each
// granule of shared memory remembers its last writer and every warp's last read. An access races
// with an earlier one that is not before it in V. Lanes of a warp are told apart as well: between
// two of them only a warp-wide synchronisation orders, and what some lanes release at an mbarrier
// does not cover what others have done since the last one.
//
// ldmatrix and stmatrix are weak accesses in the ISA's memory model: .sync lets the lanes wait for
// each other but orders no memory, as bar.warp.sync does. They read and write for several lanes, so
// that no lane's plain access is in order with them by itself. The same goes for shfl, vote, match,
// redux, elect and mma.sync, which touch no memory: they order nothing.
//
// Two knowledge sets: `general` (happens before, in the generic proxy) and `async` (made visible to
// the asynchronous proxy by a proxy fence). Both travel along release and acquire. Accesses of
// units in the async proxy are checked against the second.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

namespace archflash::sim {

using Clock = uint32_t;

// What an agent knows of every agent.
struct Knowledge {
  // What is known of a warp: up to `whole` what all its lanes did, from there up to its clock what
  // `lanes` did, who released it without the others.
  struct Part {
    Clock whole = 0;
    uint32_t lanes = 0;
  };
  std::vector<Clock> general;
  std::vector<Clock> async;
  std::vector<Part> parts;  // by warp

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
  bool proxy = false;      // ordered, but the earlier write was not made visible to the async proxy
  bool same_warp = false;  // between two lanes of one warp
  // The accesses would be in order if ldmatrix and stmatrix acted for the addressing lane only.
  bool by_matrix = false;
  int other_agent = 0;
  int other_lane = 0;
  int64_t other_pc = -1;  // -1: unknown (an earlier read)
};

// How an asynchronous write is ordered: after what is visible to the async proxy, as a thread's own
// write, or as an atomic one.
enum class AsyncWrite : uint8_t { Proxy, Generic, Update };

class RaceDetector {
 public:
  static constexpr Clock UNFINISHED = UINT32_MAX;  // of what a unit has under way

  // Agents 0 .. warps-1 are warps, warps .. 2*warps-1 their cp.async units, the next `warps` their
  // parts of wgmma or what they put into the tensor pipe of tcgen05; units that are added follow.
  // `matrix_reads`: whether what these read is watched.
  RaceDetector(int warps, uint64_t shared_bytes, int granule_log2, int global_granule_log2,
               bool matrix_reads);

  int copy_agent(int warp) const { return warps_ + warp; }
  int matrix_agent(int warp) const { return 2 * warps_ + warp; }
  // A unit that works in the async proxy, with a clock that counts what it has finished.
  int add_unit();
  bool is_warp(int agent) const { return agent < warps_; }
  bool is_copy(int agent) const { return agent >= warps_ && agent < 2 * warps_; }
  bool is_matrix(int agent) const { return agent >= 2 * warps_ && agent < 3 * warps_; }
  // The warp that an agent is or belongs to; -1: to none.
  int warp_of(int agent) const { return agent < 3 * warps_ ? agent % warps_ : -1; }

  // A warp's plain access to shared memory at `offset` from its start. On a conflict returns what
  // it conflicts with.
  Race read(const Accessor& who, uint32_t offset, uint32_t bytes);
  Race write(const Accessor& who, uint32_t offset, uint32_t bytes);
  // By ldmatrix and stmatrix: for several lanes, at an address that `who.lane` gives.
  Race matrix_load(const Accessor& who, uint32_t offset, uint32_t bytes);
  Race matrix_store(const Accessor& who, uint32_t offset, uint32_t bytes);
  // Accesses that conflict with plain ones only.
  Race strong_load(const Accessor& who, uint32_t offset, uint32_t bytes);
  Race atomic(const Accessor& who, uint32_t offset, uint32_t bytes);
  // An asynchronous copy, at its issue: it may land at any time from now on. `sequence` counts the
  // warp's copies from 1.
  Race copy(int warp, int lane, uint32_t pc, Clock sequence, uint32_t offset, uint32_t bytes);
  // Accesses in the async proxy that warp `who.agent` starts now and `unit` carries out. A write is
  // in flight until `landed`; reads are done when the unit's clock, as others know it, is `clock`.
  Race async_write(const Accessor& who, int unit, uint32_t offset, uint32_t bytes,
                   AsyncWrite kind = AsyncWrite::Proxy);
  void landed(int unit, Clock clock, uint32_t offset, uint32_t bytes);
  Race async_read(const Accessor& who, int unit, Clock clock, uint32_t offset, uint32_t bytes);
  // Likewise of the warp's matrix agent: whole units of 16 bytes.
  Race matrix_read(const Accessor& who, Clock clock, uint32_t offset, uint32_t bytes);
  // Likewise if it is known at a glance to be in order; else false, and nothing is noted.
  bool matrix_read_in_order(const Accessor& who, Clock clock, uint32_t offset, uint32_t bytes);
  // A write of global memory that `who` starts and `unit` carries out.
  Race global_async_write(const Accessor& who, int unit, Clock clock, uint64_t address,
                          uint32_t bytes);
  // Reads that were started with the clock UNFINISHED are done by `clock`.
  void reads_landed(int unit, Clock clock, uint32_t offset, uint32_t bytes);
  // A unit's clock: what it did up to there becomes known to whoever acquires `into`, or to a warp.
  void unit_release(int unit, Clock clock, Knowledge& into);
  void unit_done(int unit, Clock clock, int warp);
  // What a warp knows: of what it acquires, but nothing that it did itself.
  Knowledge known_of_others(int warp) const;
  Clock known_clock(int warp, int agent) const {
    return known_[static_cast<size_t>(warp)].general[static_cast<size_t>(agent)];
  }
  const std::vector<Clock>& known_clocks(int warp) const {
    return known_[static_cast<size_t>(warp)].general;
  }
  // Whether what an agent did up to `clock` happened before what the warp does now.
  bool happened(int warp, int agent, Clock clock) const {
    return known_clock(warp, agent) >= clock;
  }
  // Whether some warp knows what the unit did up to `clock`.
  bool known(int unit, Clock clock) const;

  // Global memory, only between warps of this CTA.
  Race global_write(const Accessor& who, uint64_t address, uint32_t bytes);
  Race global_read(const Accessor& who, uint64_t address, uint32_t bytes);
  Race global_strong_read(const Accessor& who, uint64_t address, uint32_t bytes);
  Race global_atomic(const Accessor& who, uint64_t address, uint32_t bytes);

  // The lanes of a warp have synchronised with each other.
  void warp_sync(int warp);
  // All of the warp's copies up to `sequence` have been waited for.
  void copies_done(int warp, Clock sequence);

  // Release and acquire: what a warp knows flows into and out of a synchronisation object.
  void release(int warp, Knowledge& into);
  // By `lanes` of a warp of which `live` have not exited.
  void release_lanes(int warp, uint32_t lanes, uint32_t live, Knowledge& into);
  void acquire(int warp, const Knowledge& from);
  // Relaxed ones: what was before the warp's last fence flows out; what flows in counts from its
  // next fence on.
  void release_fenced(int warp, Knowledge& into);
  void acquire_relaxed(int warp, const Knowledge& from);
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
    bool operator==(const Write& other) const { return std::memcmp(this, &other, 12) == 0; }
  };
  static_assert(sizeof(Write) == 12);  // no padding
  // Reads: clock << 7 | STRONG | lane (MANY_LANES: several; BY_MATRIX: ldmatrix and nothing else).
  static constexpr uint32_t LANE_BITS = 7;
  static constexpr uint32_t STRONG = 64;  // all of them: no conflict with strong writes
  static constexpr uint32_t MANY_LANES = 63;
  static constexpr uint32_t BY_MATRIX = 62;
  // In the lane of an accessor or of a write: ldmatrix or stmatrix, at an address of that lane.
  static constexpr int FOR_OTHERS = 32;

  // Whether what `lane` of another warp did at a clock is known; several lanes: MANY_LANES.
  static bool known_of(const Knowledge& knowledge, int warp, Clock clock, uint32_t lane);
  // Whether what another lane of the warp did is before what its lane does now.
  bool before_in_warp(int warp, Clock clock, uint32_t lane) const;
  bool ordered_after_write(const Accessor& who, const Write& write) const;
  bool ordered_for_every_lane(const Accessor& who, const Write& write);
  bool is_ordered_but_for_matrix(const Accessor& who, const Write& last) const;
  Race check_write(const Accessor& who, const Write& last) const;
  Race mark_read(const Accessor& who, uint32_t offset, uint32_t bytes, uint32_t lane);
  void note_matrix_read(const Accessor& who, Clock clock, uint32_t offset, uint32_t bytes);
  static void mark(uint32_t& reader, Clock now, uint32_t lane);
  // `strong`: the access is, too, and conflicts with plain reads only.
  Race check_readers(const Accessor& who, const uint32_t* readers, bool strong = false) const;
  Race global_mark_read(const Accessor& who, uint64_t address, uint32_t bytes, uint32_t lane);
  Race check_async(const Accessor& who, const Write& last);
  // Reads by units and by wgmma.
  Race check_async_reads(const Accessor& who, uint32_t offset, uint32_t bytes) const;

  int warps_, agents_;
  int shift_, global_shift_;
  std::vector<Knowledge> known_;
  std::vector<Clock> lanes_synced_;  // the warp's clock at its last synchronisation
  // What lanes of the warp have released and the warp has acquired: up to which clock, and who.
  struct Returned {
    Clock clock = 0;
    uint32_t lanes = 0;
  };
  std::vector<Returned> returned_;
  // What all lanes of a warp know of its own copies: what was waited for before the last warp-wide
  // synchronisation.
  std::vector<Clock> copies_synced_;
  std::vector<Knowledge> fenced_;   // at the warp's last fence
  std::vector<Knowledge> pending_;  // acquired by relaxed reads, counts from the next fence on
  std::vector<Write> writes_;
  std::vector<uint32_t> reads_;      // [granule][warp]
  std::vector<Clock> matrix_reads_;  // [16 bytes][warp], of its part of wgmma; empty: unwatched
  // Of each warp the last write that was found in order, whatever the lane; and the last one that
  // was for the async proxy. What a warp knows only grows, so they stay in order, and the next
  // granule often has the same.
  std::vector<Write> passed_, passed_async_;
  // Reads of units that are under way, or that not every warp knows to be over.
  struct UnitRead {
    int unit;
    Clock clock;
    uint32_t begin, end;
    int lane;
    uint32_t pc;
  };
  static constexpr size_t MIN_UNIT_READS = 256;
  std::vector<UnitRead> unit_reads_;
  size_t next_prune_ = MIN_UNIT_READS;  // so many are looked through for those that are over
  std::unordered_map<uint64_t, Knowledge> variables_;
  struct GlobalCell {
    Write write;
    bool written = false;
    std::vector<uint32_t> readers;
  };
  std::unordered_map<uint64_t, GlobalCell> global_;
};

}  // namespace archflash::sim
