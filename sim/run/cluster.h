// The CTAs of a cluster in execution. One scheduler picks among all their warps and the work that
// units have under way beside the warps. Without clusters there is one CTA.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "sim/run/cta.h"
#include "sim/run/lifetimes.h"

namespace archflash::sim {

// Work that a warp has started and that goes on beside it, step by step, at times that the
// scheduler chooses.
class AsyncOperation {
 public:
  // Lane `lane` of `warp` starts it with its current instruction.
  AsyncOperation(Warp& warp, int lane) : warp_(warp), lane_(lane), pc_(warp.pc()) {}
  virtual ~AsyncOperation() = default;

  // Takes the next step; returns whether it was the last one.
  virtual bool step() = 0;

  Warp& warp() { return warp_; }
  int lane() const { return lane_; }
  uint32_t pc() const { return pc_; }

 private:
  Warp& warp_;
  int lane_;
  uint32_t pc_;
};

// The position of the first CTA of a cluster in the grid; the position and the index of any.
Dim3 first_cta(const LaunchContext& launch, int64_t cluster);
Dim3 cta_position(const LaunchContext& launch, int64_t cluster, int rank);
int64_t cta_index(const LaunchContext& launch, Dim3 position);

class Cluster {
 public:
  // `unstarted` are the clusters that do not start if this one asks for their work.
  Cluster(const LaunchContext& launch, int64_t index, Counts& counts,
          std::deque<int64_t> unstarted = {});
  ~Cluster();

  // Runs all warps for about so many instructions; returns whether it has run them to their end, or
  // to a fault.
  bool run(uint64_t instructions);

  const LaunchContext& launch() const { return launch_; }
  int size() const { return static_cast<int>(ctas_.size()); }
  Cta& cta(int rank) { return *ctas_[static_cast<size_t>(rank)]; }
  RaceDetector* races() { return races_.get(); }
  Lifetimes& lifetimes() { return *lifetimes_; }
  Random& random() { return random_; }
  uint64_t time() const { return time_; }

  // ---- Asynchronous work ----
  void start(std::shared_ptr<AsyncOperation> operation);
  // Carries an operation on to its end, out of turn.
  void finish(AsyncOperation& operation);
  void advance(AsyncOperation& operation);  // by one step
  // Says that something happened which a waiting lane may have waited for.
  void progress() { fruitless_ = 0; }

  // ---- The barrier of the cluster: arrival and waiting are two instructions ----
  void arrive(Warp& warp, uint32_t mask, bool releases);
  // Returns whether the phase in which these lanes arrived is complete.
  bool wait(Warp& warp, uint32_t mask);
  void lanes_exited();

  // ---- griddepcontrol ----
  void wait_for_launch_before(Warp& warp);
  void let_next_launch_start(const Warp& warp);
  bool has_waited_for_launch(const Warp& warp) const;

  // ---- clusterlaunchcontrol ----
  // Takes the work of a cluster that has not started; -1: the request fails, because all have or
  // for no reason that a kernel can know.
  int64_t take_unstarted();
  const std::deque<int64_t>& unstarted() const { return unstarted_; }

 private:
  Warp* pick(uint64_t& budget);
  bool land_one(uint64_t pick);
  bool step(AsyncOperation& operation);
  bool wake_resting();
  void run_traced(Warp& warp, uint64_t budget);
  void fault(const Fault& fault, Cta& cta, const Warp& warp, int64_t pc);
  void deadlock();
  void complete_if_full();

  const LaunchContext& launch_;
  Random random_;
  std::unique_ptr<GlobalOrder> own_order_;  // unless the launch has one
  std::unique_ptr<RaceDetector> races_;
  std::unique_ptr<Lifetimes> lifetimes_;
  std::vector<std::unique_ptr<Cta>> ctas_;
  std::vector<Warp*> warps_;
  std::vector<uint32_t> priorities_;
  size_t turn_ = 0;
  uint64_t time_ = 0;
  uint64_t landed_ = 0;  // when a copy landed last
  std::vector<std::shared_ptr<AsyncOperation>> pending_;
  AsyncOperation* stepping_ = nullptr;
  // How often only resting lanes could run since something happened.
  uint64_t fruitless_ = 0;

  // The lanes of a warp that have arrived in this phase, and those that have yet to wait for it.
  struct Arrivals {
    uint32_t arrived = 0, unwaited = 0;
  };
  std::vector<Arrivals> arrivals_;
  Knowledge arriving_, arrived_;
  int launch_before_ = -1;  // the agent that a launch is with which this one overlaps
  std::deque<int64_t> unstarted_;
};

}  // namespace archflash::sim
