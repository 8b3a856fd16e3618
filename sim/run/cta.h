// A CTA in execution: its warps, shared memory and barriers, and what was counted and found.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sim/load/program.h"
#include "sim/memory/memory.h"
#include "sim/memory/race.h"
#include "sim/numerics/tensor_core_models.h"
#include "sim/run/random.h"
#include "sim/run/report.h"
#include "sim/run/trace.h"
#include "sim/run/warp.h"

namespace archflash::sim {

enum class Mode : uint8_t {
  Lazy,      // asynchronous work lands when it is waited for; warps run until they block
  Eager,     // asynchronous work lands at once
  Random,    // a random warp runs for a random stretch; asynchronous work lands at random times
  Priority,  // random priorities that change at random points
  Shuffled,  // like Random; a tensor pipe's operations run in any order that the ISA allows
};

struct Options {
  Mode mode = Mode::Random;
  uint64_t seed = 0;
  bool race = true;
  bool trace = false;
  int threads = 0;            // 0: one for each core
  uint64_t stretch = 0;       // a warp's longest turn, in instructions; 0: what the mode says
  int64_t resident_ctas = 0;  // CTAs that run at a time; 0: any number
  uint64_t max_instructions = uint64_t{1} << 32;  // of one CTA
};

// What all CTAs of a launch share.
struct LaunchContext {
  const Module* module = nullptr;
  const Kernel* kernel = nullptr;
  const TensorCore* tensor_core = nullptr;  // of the device
  Dim3 grid, cluster, block;
  uint64_t dynamic_shared = 0;
  std::vector<uint8_t> parameters;
  GlobalMemory* memory = nullptr;
  bool starts_early = false, next_starts_early = false;  // as in the request
  bool overlaps = false;                                 // one of the two
  GlobalOrder* global_order = nullptr;                   // of clusters that tell each other things
  Options options;
  const std::atomic<bool>* given_up = nullptr;  // when it becomes true, every CTA stops soon

  // Throws Interrupted if the run is given up. Code that runs for long calls it now and then.
  void check_given_up() const {
    if (given_up->load(std::memory_order_relaxed)) [[unlikely]]
      throw Interrupted{};
  }
};

// The size of one CTA's shared memory, and the distance of the CTAs of a cluster in the race
// detector.
uint64_t shared_bytes_of(const LaunchContext& launch);
uint64_t race_stride(const LaunchContext& launch);

// What one instruction did in memory, summed over its executions.
struct MemoryCounts {
  uint64_t transactions = 0;  // 32-byte sectors of global memory
  uint64_t wavefronts = 0;    // of shared memory
  uint64_t local = 0;         // 32-byte sectors of local memory
  uint64_t ideal = 0;         // wavefronts that the bytes would take without bank conflicts

  MemoryCounts& operator+=(const MemoryCounts& other) {
    transactions += other.transactions;
    wavefronts += other.wavefronts;
    ideal += other.ideal;
    local += other.local;
    return *this;
  }
};

struct Counts {
  std::vector<uint64_t> executed;  // warp-instructions, by instruction
  std::vector<MemoryCounts> memory;
  uint64_t barrier_waits = 0;  // fragments that had to wait at a barrier
  uint64_t ctas = 0;

  explicit Counts(size_t instructions) : executed(instructions), memory(instructions) {}
  Counts& operator+=(const Counts& other);
};

// An access to global memory that a launch may write. They are kept to find CTAs that use the same
// bytes, where nothing can put CTAs in order.
struct GlobalAccess {
  uint64_t address;
  uint32_t bytes;
  uint32_t pc;
  uint16_t warp;
  uint8_t lane;
  bool writes;
};

class Cluster;
class MbarrierUnit;
class TensorUnit;

// The box that TMA wrote to a line of 128 bytes of shared memory.
struct TileLine {
  uint32_t start = 0;  // the offset of the box in shared memory
  uint32_t pitch = 0;  // the distance of its rows; 0: there is no box
  uint32_t rows = 0;
  uint32_t slab_rows = 0;  // along the box's second dimension: a third one may be slabs, or rows
  // Along its second and third dimension together, if there are five: the third one then is slabs
  // of the same rows, and the fourth one groups of rows.
  uint32_t group_rows = 0;
  uint32_t span = 0;  // the span of its swizzle; 0: no swizzle
};

class Cta {
 public:
  static constexpr int BARRIERS = 16;

  Cta(Cluster& cluster, int rank, Dim3 position, Counts& counts);
  ~Cta();

  Cluster& cluster() { return cluster_; }
  int rank() const { return rank_; }  // in the cluster
  const LaunchContext& launch() const { return launch_; }
  const Kernel& kernel() const { return *launch_.kernel; }
  const Options& options() const { return launch_.options; }
  Counts& counts() { return counts_; }
  int64_t index() const { return index_; }
  Dim3 position() const { return position_; }
  int warp_count() const { return static_cast<int>(warps_.size()); }
  Warp& warp(int i) { return *warps_[static_cast<size_t>(i)]; }
  bool exited() const;
  Findings& findings() { return findings_; }
  uint64_t time() const;
  Random& random();

  // ---- Shared and local memory ----
  // Addresses of shared memory have the CTA's rank from bit 24 on, as in a cluster's window.
  uint32_t shared_base() const { return shared_base_; }
  const uint8_t* constants() const { return constants_; }
  uint8_t* shared() { return shared_.data(); }
  uint8_t* shared_state() { return shared_state_.data(); }
  uint64_t shared_bytes() const { return shared_.size(); }
  uint8_t* local(int warp, int lane) {
    return &local_[(static_cast<size_t>(warp) * LANES + static_cast<size_t>(lane)) *
                   kernel().local_bytes];
  }
  uint8_t* local_state(int warp, int lane) {
    return &local_state_[(static_cast<size_t>(warp) * LANES + static_cast<size_t>(lane)) *
                         kernel().local_bytes];
  }
  RaceDetector* races() { return races_; }
  // The offset of this CTA's shared memory in the race detector.
  uint32_t race_base() const { return race_base_; }
  MbarrierUnit& mbarriers() { return *mbarriers_; }
  TensorUnit* tensor() { return tensor_.get(); }  // nullptr: the kernel has no tcgen05

  // ---- The boxes that TMA wrote, to check readers that have a layout of their own ----
  bool has_tiles() const { return !tiles_.empty(); }
  const TileLine* tile_of(uint32_t offset) const;  // nullptr: something else wrote there last
  void set_tile(uint32_t offset, uint32_t bytes, const TileLine& tile);

  // ---- Barriers ----
  enum class BarrierKind : uint8_t { Sync, Arrive, RedPopc, RedAnd, RedOr };
  // Lanes of a warp arrive. The barrier waits for `threads` threads; 0 means all of the CTA.
  void arrive(Warp& warp, int id, int64_t threads, uint32_t mask, BarrierKind kind, bool aligned,
              uint32_t predicate, Ref destination);
  void lanes_exited(Warp& warp);

  // ---- Registers (setmaxnreg). The pool has those that no warp holds ----
  // Returns false if an increase has to wait until others give registers back.
  bool set_registers(Warp& warp, int count, bool increase);

  // ---- clusterlaunchcontrol: whether the CTA has seen that a request failed ----
  bool was_refused() const { return was_refused_; }
  void note_refusal() { was_refused_ = true; }

  // ---- Reports ----
  void report(Severity severity, const Warp& warp, int lane, const char* kind, std::string message,
              uint64_t address = 0, int64_t other_pc = -1);
  // Reports something that an earlier instruction of the warp, at `pc`, has started.
  void report_at(uint32_t pc, Severity severity, const Warp& warp, int lane, const char* kind,
                 std::string message, uint64_t address = 0, int64_t other_pc = -1);
  void report_race(const Warp& warp, int lane, const Race& race, bool writes, bool benign,
                   const std::string& what, uint64_t address);

  bool traced() const { return options().trace; }
  Trace& trace() { return trace_; }
  std::vector<GlobalAccess>& global_accesses() { return global_accesses_; }
  void log_access(const Accessor& who, uint64_t address, uint32_t bytes, bool writes);

  void check_exit();
  std::string describe_waits();  // what each warp waits for, for the report of a deadlock
  void trace_endless_waits();

 private:
  struct Barrier {
    int64_t threads = 0;  // how many are expected; 0: all of the CTA
    int64_t arrived = 0;
    bool active = false;
    BarrierKind kind = BarrierKind::Sync;
    uint32_t popc = 0;
    bool all = true, any = false;
    Knowledge knowledge;
    struct Waiting {
      int warp;  // with a blocked fragment
      uint64_t since;
      uint32_t pc;
    };
    std::vector<Waiting> waiting;
    std::vector<uint32_t> arrived_lanes;  // by warp
    struct Result {
      int warp;
      uint32_t mask;
      Ref destination;
      BarrierKind kind;
    };
    std::vector<Result> results;
  };

  int64_t live_threads() const;
  // `cause` is the warp that arrived or ended.
  void complete_if_full(int id, int cause);
  void relocate_constants();
  int registers_at_launch() const;

  Cluster& cluster_;
  const LaunchContext& launch_;
  int rank_;
  int64_t index_;
  Dim3 position_;
  Counts& counts_;
  Findings findings_;
  uint32_t shared_base_;
  uint32_t race_base_ = 0;
  std::vector<uint8_t> shared_, shared_state_;
  std::vector<uint8_t> local_, local_state_;
  const uint8_t* constants_;
  std::vector<uint8_t> own_constants_;  // the kernel's, with this CTA's addresses of shared memory
  RaceDetector* races_;
  std::unique_ptr<MbarrierUnit> mbarriers_;
  std::unique_ptr<TensorUnit> tensor_;
  std::vector<TileLine> tiles_;  // by 128 bytes; empty: no box yet
  std::array<Barrier, BARRIERS> barriers_;
  std::vector<std::unique_ptr<Warp>> warps_;
  // How many registers a thread of each warp has; empty until a warp changes its number.
  std::vector<int> registers_;
  int free_registers_ = 0;
  bool was_refused_ = false;
  Trace trace_;
  std::vector<GlobalAccess> global_accesses_;
};

}  // namespace archflash::sim
