// The race detector of a cluster: vector clocks of its warps and of its asynchronous units.
//
// An agent is a warp or an asynchronous unit. The clock of an agent counts its synchronising steps.
// An agent's vector V holds, for each agent, the last step that is known to have happened before.
// Each granule of shared memory remembers its last writer and the last read of every warp. An
// access races with an earlier one that is not before it in V. Lanes of a warp are told apart, too:
// only a warp-wide synchronisation orders two of them, and a release at an mbarrier by some lanes
// does not cover what the other lanes have done since the last such synchronisation.
//
// ldmatrix and stmatrix are weak accesses in the ISA's memory model: .sync lets the lanes wait for
// each other, but does not order memory as bar.warp.sync does. They read and write for several
// lanes, so that no lane's plain access is in order with them by itself. shfl, vote, match, redux,
// elect and mma.sync access no memory and order nothing.
//
// There are two sets of knowledge: `general` (happened before, in the generic proxy) and `async`
// (made visible to the async proxy by a proxy fence). Both travel along release and acquire.
// Accesses of units in the async proxy are checked against the second.
//
// A release and an acquire put two threads in order only if the scope of each includes the other
// thread. Where it does not, the acquirer still knows that the other thread has come so far
// (`executed`): that is enough for tensor memory, which has fences of its own, and for what units
// have done, but not for what threads have read and written.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "sim/memory/global_order.h"

namespace archflash::sim {

// What an agent knows about every agent.
struct Knowledge {
  // What is known about a warp: what all its lanes did up to `whole` and, from there up to the
  // clock in `general`, what `lanes` did, because those lanes released it without the others.
  struct Part {
    Clock whole = 0;
    uint32_t lanes = 0;
  };
  std::vector<Clock> general;
  std::vector<Clock> async;
  std::vector<Part> parts;  // by warp
  // What has happened, whether or not scopes make it visible; empty: nothing but `general`.
  std::vector<Clock> executed;
  // What the agents of other clusters have done, in the generic and in the async proxy.
  OtherClusters others, others_async;

  void join(const Knowledge& other);
  // Joins what travels along a release and an acquire whose scopes are too small: that it has
  // happened, and what units have done. The first `threads` agents are not units.
  void join_executed(const Knowledge& other, size_t threads);
  bool empty() const { return general.empty(); }
};

// Who makes an access.
struct Accessor {
  int agent = 0;
  int lane = 0;
  uint32_t pc = 0;
};

struct Race {
  bool found = false;
  bool other_wrote = false;  // the earlier access was a write
  bool proxy = false;        // in order, but no proxy fence lies between it and the async proxy
  bool same_warp = false;    // the two are lanes of one warp
  // The accesses would be in order if ldmatrix and stmatrix acted for the addressing lane only.
  bool by_matrix = false;
  bool by_scope = false;  // they would be if the scopes of releases and acquires were large enough
  // The accessor's is an atomic one that depends on a relaxed read of what the other released.
  bool by_dependency = false;
  int32_t other_cluster = -1;  // -1: the accessor's own
  int other_agent = 0;
  int other_lane = 0;
  int64_t other_pc = -1;  // -1: unknown (an earlier read)
};

// How an asynchronous write is ordered: it comes after what is visible to the async proxy, or it is
// ordered like a thread's own write, or like an atomic one.
enum class AsyncWrite : uint8_t { Proxy, Generic, Update };

class RaceDetector {
 public:
  static constexpr Clock UNFINISHED = UINT32_MAX;  // the clock of work that is under way

  // Agents 0 .. warps-1 are warps. Agents warps .. 2*warps-1 are their cp.async units. The next
  // `warps` are their matrix agents: a warp's part of wgmma, or what it puts into the tensor pipe.
  // Units that are added follow. `matrix_reads` says whether reads of matrix agents are watched.
  // The warps of each CTA follow one another. `global` is what `cluster` shares with others.
  RaceDetector(int warps, int warps_of_cta, uint64_t shared_bytes, int granule_log2,
               bool matrix_reads, int32_t cluster, GlobalOrder& global);

  int copy_agent(int warp) const { return warps_ + warp; }
  int matrix_agent(int warp) const { return 2 * warps_ + warp; }
  // Adds a unit that works in the async proxy. Its clock counts what it has finished.
  int add_unit();
  bool is_warp(int agent) const { return agent < warps_; }
  bool is_copy(int agent) const { return agent >= warps_ && agent < 2 * warps_; }
  bool is_matrix(int agent) const { return agent >= 2 * warps_ && agent < 3 * warps_; }
  // The warp that an agent is or belongs to; -1: it belongs to none.
  int warp_of(int agent) const { return agent < 3 * warps_ ? agent % warps_ : -1; }

  // A warp's plain access to shared memory at an offset. Returns the access with which it races, if
  // any.
  Race read(const Accessor& who, uint32_t offset, uint32_t bytes);
  Race write(const Accessor& who, uint32_t offset, uint32_t bytes);
  // An access by ldmatrix or stmatrix: for several lanes, at an address that `who.lane` gives.
  Race matrix_load(const Accessor& who, uint32_t offset, uint32_t bytes);
  Race matrix_store(const Accessor& who, uint32_t offset, uint32_t bytes);
  // Accesses that conflict with plain ones only.
  Race strong_load(const Accessor& who, uint32_t offset, uint32_t bytes);
  Race atomic(const Accessor& who, uint32_t offset, uint32_t bytes);
  // An asynchronous copy is issued, and may land at any time from now on. `sequence` counts the
  // warp's copies from 1.
  Race copy(int warp, int lane, uint32_t pc, Clock sequence, uint32_t offset, uint32_t bytes);
  // Accesses in the async proxy that warp `who.agent` starts now and `unit` carries out. A write is
  // in flight until `landed`; reads are done when the unit's clock, as others know it, is `clock`.
  Race async_write(const Accessor& who, int unit, uint32_t offset, uint32_t bytes,
                   AsyncWrite kind = AsyncWrite::Proxy);
  void landed(int unit, Clock clock, uint32_t offset, uint32_t bytes);
  Race async_read(const Accessor& who, int unit, Clock clock, uint32_t offset, uint32_t bytes);
  // A read by the warp's matrix agent, of whole units of 16 bytes.
  Race matrix_read(const Accessor& who, Clock clock, uint32_t offset, uint32_t bytes);
  // The fast path of matrix_read: notes the read and returns true only if a glance shows that it is
  // in order.
  bool matrix_read_in_order(const Accessor& who, Clock clock, uint32_t offset, uint32_t bytes);
  // A write to global memory that `who` starts and `unit` carries out.
  Race global_async_write(const Accessor& who, int unit, Clock clock, uint64_t address,
                          uint32_t bytes, bool updates);
  // Reads that were started with the clock UNFINISHED are done at `clock`.
  void reads_landed(int unit, Clock clock, uint32_t offset, uint32_t bytes);
  // What a unit did up to `clock` becomes known to whoever acquires `into`, or to a warp.
  void unit_release(int unit, Clock clock, Knowledge& into);
  void unit_done(int unit, Clock clock, int warp);
  // What a warp knows about others, without what it did itself.
  Knowledge known_of_others(int warp) const;
  Clock known_clock(int warp, int agent) const {
    const Knowledge& known = known_[static_cast<size_t>(warp)];
    const auto a = static_cast<size_t>(agent);
    return a < known.executed.size() ? std::max(known.general[a], known.executed[a])
                                     : known.general[a];
  }
  std::vector<Clock> known_clocks(int warp) const;
  // Whether what an agent did up to `clock` happened before what the warp does now.
  bool happened(int warp, int agent, Clock clock) const {
    return known_clock(warp, agent) >= clock;
  }
  // Whether some warp knows what the unit did up to `clock`.
  bool known(int unit, Clock clock) const;

  // Accesses of global memory.
  Race global_write(const Accessor& who, uint64_t address, uint32_t bytes);
  Race global_read(const Accessor& who, uint64_t address, uint32_t bytes);
  Race global_async_read(const Accessor& who, uint64_t address, uint32_t bytes);
  Race global_strong_read(const Accessor& who, uint64_t address, uint32_t bytes);
  Race global_atomic(const Accessor& who, uint64_t address, uint32_t bytes);

  // The lanes of a warp have synchronised with each other.
  void warp_sync(int warp);
  // All of the warp's copies up to `sequence` have been waited for.
  void copies_done(int warp, Clock sequence);

  // Release and acquire: what a warp knows flows into and out of a synchronisation object.
  void release(int warp, Knowledge& into);
  // A release by `lanes` of a warp, of which `live` have not exited.
  void release_lanes(int warp, uint32_t lanes, uint32_t live, Knowledge& into);
  void acquire(int warp, const Knowledge& from);
  // A release and an acquire whose scopes are too small; `lanes` and `live` as for release_lanes.
  void release_executed(int warp, uint32_t lanes, uint32_t live, Knowledge& into);
  void acquire_executed(int warp, const Knowledge& from);
  // A relaxed release to threads that are at most `scope` away hands on what was before the warp's
  // last fence of such a scope. What a relaxed acquire from such threads brings counts from the
  // warp's next fence of such a scope on.
  void release_fenced(int warp, SyncScope scope, Knowledge& into);
  void acquire_relaxed(int warp, SyncScope scope, const Knowledge& from);
  // A fence: what relaxed reads have acquired counts from now on, and later relaxed writes release
  // what the warp knows now.
  void fence(int warp, SyncScope scope);
  // A strong (volatile, relaxed or stronger) access to a synchronising variable. `updates` says
  // that the write is part of an atomic operation.
  void strong_read(int warp, uint64_t address, bool acquires, SyncScope scope);
  void strong_write(int warp, uint64_t address, bool releases, bool updates, SyncScope scope);
  // fence.proxy.async: everything that the warp knows becomes visible to the async proxy, with
  // `in_global` also that about global memory that other clusters use.
  void proxy_fence(int warp, bool in_global);

 private:
  // A read is clock << 7 | STRONG | lane. MANY_LANES stands for several lanes, BY_MATRIX for
  // ldmatrix and nothing else.
  static constexpr uint32_t LANE_BITS = 7;
  static constexpr uint32_t STRONG = 64;  // all reads were strong: no race with strong writes
  static constexpr uint32_t MANY_LANES = 63;
  static constexpr uint32_t BY_MATRIX = 62;
  static constexpr uint32_t LANES_OF_WARP = 32;
  // A flag in the lane of an accessor or of a write: ldmatrix or stmatrix, at that lane's address.
  static constexpr int FOR_OTHERS = 32;
  static constexpr int UNIT_LOG2 = 4;  // wgmma reads at least 16 bytes

  // Whether it is known what `lane` of another warp did at a clock.
  static bool known_of(const Knowledge& knowledge, int warp, Clock clock, uint32_t lane);
  // Whether what a lane did at a clock comes before what another lane of the same warp does now.
  bool before_in_warp(int warp, Clock clock, uint32_t lane) const;
  bool ordered_after_write(const Accessor& who, const Write& write) const;
  bool ordered_for_every_lane(const Accessor& who, const Write& write);
  bool is_ordered_but_for_matrix(const Accessor& who, const Write& last) const;
  Race check_write(const Accessor& who, const Write& last) const;
  Race mark_read(const Accessor& who, uint32_t offset, uint32_t bytes, uint32_t lane);
  void note_matrix_read(const Accessor& who, Clock clock, uint32_t offset, uint32_t bytes);
  static void mark(uint32_t& reader, Clock now, uint32_t lane);
  // A strong access races with plain reads only.
  Race check_readers(const Accessor& who, uint32_t granule, bool strong = false) const;
  [[gnu::always_inline]] inline void check_reader(const Accessor& who, int warp, uint32_t read,
                                                  bool strong, Race& race) const;
  bool is_executed(const Accessor& who, int agent, Clock clock) const;
  Race global_mark_read(const Accessor& who, uint64_t address, uint32_t bytes, uint32_t lane,
                        bool async);
  // Checks an access against the writes and the reads of a cell. `async`: it is in the async proxy;
  // `strong`: it is an atomic one.
  Race check_global_write(const Accessor& who, const GlobalOrder::Place& last, bool async) const;
  Race check_global_readers(const Accessor& who, const GlobalOrder::Cell& cell, bool strong) const;
  // Whether a relaxed read without a fence has brought what was written.
  bool has_seen(int warp, const GlobalOrder::Place& last) const;
  Race write_global(const Accessor& who, const Write& write, uint64_t address, uint32_t bytes,
                    bool async);
  SyncScope distance(const GlobalOrder::Release& release, int warp) const;
  // The variables at an address: those of shared memory belong to the cluster.
  GlobalOrder& variables_of(uint64_t address);
  Race check_async(const Accessor& who, const Write& last);
  // Reads that come before a write in the async proxy, but without a proxy fence between the two.
  Race check_unfenced_readers(const Accessor& who, const uint32_t* readers) const;
  // Reads by units and by wgmma.
  Race check_async_reads(const Accessor& who, uint32_t offset, uint32_t bytes) const;

  int warps_, warps_of_cta_, agents_;
  int shift_;
  int32_t cluster_;
  GlobalOrder& global_;
  GlobalOrder shared_variables_;
  std::vector<Knowledge> known_;
  std::vector<Clock> lanes_synced_;  // the warp's clock at its last synchronisation
  // What lanes of the warp have released and the warp itself has acquired.
  struct Returned {
    Clock clock = 0;
    uint32_t lanes = 0;
  };
  std::vector<Returned> returned_;
  // The copies of a warp that all its lanes know to be over: those that were waited for before the
  // last warp-wide synchronisation.
  std::vector<Clock> copies_synced_;
  // By warp and scope: what it knew at its last fence of at least that scope; and what relaxed
  // reads have brought, which counts from the next such fence on.
  std::vector<std::array<std::shared_ptr<const Knowledge>, SYNC_SCOPES>> fenced_;
  std::vector<std::array<Knowledge, SYNC_SCOPES>> pending_;
  std::vector<Write> writes_;
  std::vector<uint32_t> reads_;      // [granule][warp]
  std::vector<uint32_t> readers_;    // [granule]: which of the first 32 warps have read it
  std::vector<Clock> matrix_reads_;  // [16 bytes][warp], of matrix agents; empty: not watched
  // For each warp, the last write that was found in order for every lane, and the last one that was
  // found in order for the async proxy. A warp's knowledge only grows, so that these stay in order,
  // and the next granule often has the same writer.
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
  size_t next_prune_ = MIN_UNIT_READS;  // with so many, those that are over are removed
};

}  // namespace archflash::sim
