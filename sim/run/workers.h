// The threads of a launch: they run its clusters, and gather what those report.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "sim/run/launch.h"

namespace archflash::sim {

// The cluster of a CTA, both by their indices.
int64_t cluster_of(const LaunchRequest& request, int64_t cta);

// For each cluster, those that do not start if it asks for their work. A cluster in the list of
// another one starts only if that one does not ask for it. On a card the speed of the clusters
// decides; here the mode and the seed do, so that a run does not depend on the number of threads.
// Without clusterlaunchcontrol all start: both lists are empty.
struct Unstarted {
  std::vector<std::deque<int64_t>> lists;  // by cluster
  std::vector<bool> waits;                 // by cluster: it is in a list
};

class Workers {
 public:
  // What CTAs have accessed, by their indices.
  using Logs = std::vector<std::pair<int64_t, std::vector<GlobalAccess>>>;

  Workers(const LaunchContext& context, const LaunchRequest& request);

  // Runs all clusters. The calling thread does none of the work, so that it can be asked to stop.
  void run();
  // What the clusters found up to the first that stopped early. Throws Interrupted if the run was
  // given up, and what a thread has thrown.
  LaunchReport report();
  const Logs& logs() const { return logs_; }

 private:
  struct Running;
  struct Thread;

  void work();
  void run_clusters(Thread& thread);
  bool start_next(Thread& thread);
  void finish(Thread& thread, Running& done);
  void stop_after(int64_t cluster);

  LaunchContext context_;
  const LaunchRequest& request_;
  int64_t clusters_, threads_;
  size_t at_a_time_;
  Unstarted unstarted_;

  std::atomic<int64_t> next_{0}, first_fatal_{INT64_MAX};
  std::atomic<size_t> logged_{0};
  std::atomic<bool> given_up_{false};
  std::mutex mutex_;  // of what follows
  std::condition_variable ended_;
  int64_t working_;
  std::exception_ptr failure_;
  LaunchReport report_;
  std::map<int64_t, Findings> found_by_cluster_;
  Logs logs_;
};

}  // namespace archflash::sim
