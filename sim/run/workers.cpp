#include "sim/run/workers.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>

#include "sim/numerics/numeric.h"
#include "sim/run/cluster.h"

namespace archflash::sim {
namespace {

constexpr size_t MAX_LOGGED_WRITES = size_t{1} << 23;
constexpr std::chrono::milliseconds BETWEEN_QUESTIONS{50};  // asking whether to stop

Unstarted unstarted_of(const Kernel& kernel, const LaunchRequest& request, int64_t clusters) {
  Unstarted result;
  if (!kernel.takes_unstarted) return result;
  result.lists.resize(static_cast<size_t>(clusters));
  result.waits.resize(static_cast<size_t>(clusters));
  const Options& options = request.options;
  const int64_t fitting = std::max<int64_t>(options.resident_ctas / request.cluster.count(), 1);
  const auto most = static_cast<size_t>(options.resident_ctas == 0 ? clusters : fitting);
  constexpr uint64_t ONE_IN = 4;  // of the clusters start by themselves, where chance decides
  Random random(~options.seed);
  std::vector<int64_t> running = {0};
  for (int64_t index = 1; index < clusters && running.size() < most; ++index) {
    const bool starts =
        options.mode == Mode::Eager || (options.mode != Mode::Lazy && random.below(ONE_IN) == 0);
    if (starts) running.push_back(index);
  }
  size_t next = 1;  // of those that run
  for (int64_t index = 1; index < clusters; ++index) {
    if (next < running.size() && running[next] == index) {
      ++next;
      continue;
    }
    std::deque<int64_t>& list =
        result.lists[static_cast<size_t>(running[random.below(running.size())])];
    // With priorities they come in no particular order.
    if (options.mode == Mode::Priority && random.below(2) == 0)
      list.push_front(index);
    else
      list.push_back(index);
    result.waits[static_cast<size_t>(index)] = true;
  }
  return result;
}

// How many clusters run at a time on one thread. One after another, unless they tell each other
// things: then some run by turns, so that what one waits for may be far away. They start in the
// order of their indices, as on a card.
size_t clusters_at_a_time(const Kernel& kernel, const LaunchRequest& request) {
  constexpr size_t INTERLEAVED = 4;
  const Options& options = request.options;
  if (!kernel.orders_globally || kernel.takes_unstarted || options.mode == Mode::Lazy) return 1;
  const int64_t fitting = std::max<int64_t>(options.resident_ctas / request.cluster.count(), 1);
  return options.resident_ctas == 0 ? INTERLEAVED : std::min<size_t>(INTERLEAVED, fitting);
}

// The longest turn of a cluster, in instructions, and what tells the choice of the next one from
// other random choices of the same seed.
constexpr uint64_t INTERLEAVED_STRETCH = 20000, INTERLEAVING = 0x9E3779B97F4A7C15u;

int64_t thread_count(const LaunchContext& context, int64_t clusters) {
  if (context.kernel->orders_globally) return 1;
  const int64_t wanted = context.options.threads > 0
                             ? context.options.threads
                             : static_cast<int64_t>(std::thread::hardware_concurrency());
  return std::clamp<int64_t>(wanted, 1, std::min<int64_t>(clusters, 256));
}

}  // namespace

// The cluster of a CTA, both by their indices.
int64_t cluster_of(const LaunchRequest& request, int64_t cta) {
  const Dim3 &grid = request.grid, &size = request.cluster;
  const int64_t x = cta % grid.x / size.x, y = cta / grid.x % grid.y / size.y,
                z = cta / (grid.x * grid.y) / size.z;
  return x + grid.x / size.x * (y + grid.y / size.y * z);
}

// A cluster in execution.
struct Workers::Running {
  LaunchContext context;
  int64_t index;
  Cluster cluster;

  Running(const LaunchContext& launch, bool traced, int64_t index, Counts& counts,
          std::deque<int64_t> takes)
      : context(launch),
        index(index),
        cluster(with_trace(traced), index, counts, std::move(takes)) {}

 private:
  const LaunchContext& with_trace(bool traced) {
    context.options.trace = traced;
    return context;
  }
};

// What one thread works on.
struct Workers::Thread {
  Counts counts;
  Random random;
  std::vector<std::unique_ptr<Running>> running;
  std::deque<int64_t> left;  // by a cluster that did not ask for them: they start now
};

Workers::Workers(const LaunchContext& context, const LaunchRequest& request)
    : context_(context),
      request_(request),
      clusters_(request.grid.count() / request.cluster.count()),
      threads_(thread_count(context, clusters_)),
      at_a_time_(clusters_at_a_time(*context.kernel, request)),
      unstarted_(unstarted_of(*context.kernel, request, clusters_)),
      working_(threads_) {
  context_.given_up = &given_up_;
  report_.counts = Counts(context.kernel->code.size());
}

// Starts the next cluster. Returns whether there is one.
bool Workers::start_next(Thread& thread) {
  for (;;) {
    int64_t index;
    if (!thread.left.empty()) {
      index = thread.left.front();
      thread.left.pop_front();
    } else {
      index = next_++;
      if (index >= clusters_ || index > first_fatal_) return false;
      if (!unstarted_.waits.empty() && unstarted_.waits[static_cast<size_t>(index)]) continue;
    }
    const bool traced =
        std::any_of(request_.traced_ctas.begin(), request_.traced_ctas.end(),
                    [&](int64_t cta) { return cluster_of(request_, cta) == index; });
    std::deque<int64_t> takes;  // the clusters whose work this one may ask for
    if (!unstarted_.lists.empty()) takes = std::move(unstarted_.lists[static_cast<size_t>(index)]);
    thread.running.push_back(
        std::make_unique<Running>(context_, traced, index, thread.counts, std::move(takes)));
    return true;
  }
}

// No cluster behind this one is needed: the report ends there.
void Workers::stop_after(int64_t cluster) {
  for (int64_t known = first_fatal_; cluster < known;) {
    if (first_fatal_.compare_exchange_weak(known, cluster)) break;
  }
}

// Gathers what a cluster reports.
void Workers::finish(Thread& thread, Running& done) {
  Cluster& cluster = done.cluster;
  thread.left.insert(thread.left.end(), cluster.unstarted().begin(), cluster.unstarted().end());
  Findings findings;
  bool logged_any = false;
  for (int rank = 0; rank < cluster.size(); ++rank) {
    findings.merge(cluster.cta(rank).findings());
    logged_any = logged_any || !cluster.cta(rank).global_accesses().empty();
  }
  if (std::any_of(findings.list().begin(), findings.list().end(),
                  [](const Finding& f) { return f.fatal; })) {
    stop_after(done.index);
    if (at_a_time_ > 1) thread.running.clear();  // they may wait for it
  }
  const bool traced = done.context.options.trace;
  if (findings.list().empty() && !logged_any && !traced) return;
  const std::lock_guard lock(mutex_);
  if (!findings.list().empty()) found_by_cluster_.emplace(done.index, std::move(findings));
  for (int rank = 0; rank < cluster.size(); ++rank) {
    Cta& cta = cluster.cta(rank);
    if (traced) report_.traces.emplace(cta.index(), std::move(cta.trace()));
    if (!logged_any) continue;
    logged_ += cta.global_accesses().size();
    if (logged_ < MAX_LOGGED_WRITES)
      logs_.emplace_back(cta.index(), std::move(cta.global_accesses()));
    else
      report_.overlaps_checked = false;
  }
}

void Workers::run_clusters(Thread& thread) {
  auto& running = thread.running;
  for (;;) {
    while (running.size() < at_a_time_ && start_next(thread)) {
    }
    if (running.empty()) return;
    const size_t chosen = running.size() > 1 ? thread.random.below(running.size()) : 0;
    const uint64_t stretch =
        at_a_time_ > 1 ? 1 + thread.random.below(INTERLEAVED_STRETCH) : UINT64_MAX / 2;
    if (!running[chosen]->cluster.run(stretch)) continue;
    const std::unique_ptr<Running> done = std::move(running[chosen]);
    running.erase(running.begin() + static_cast<std::ptrdiff_t>(chosen));
    finish(thread, *done);
  }
}

void Workers::work() {
  const FloatEnvironment environment;
  Thread thread{
      Counts(context_.kernel->code.size()), Random(context_.options.seed ^ INTERLEAVING), {}, {}};
  try {
    run_clusters(thread);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    failure_ = std::current_exception();
    first_fatal_ = -1;
  }
  const std::lock_guard lock(mutex_);
  report_.counts += thread.counts;
  --working_;
  ended_.notify_one();
}

void Workers::run() {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < threads_; ++i) threads.emplace_back([this] { work(); });
  {
    std::unique_lock lock(mutex_);
    while (!ended_.wait_for(lock, BETWEEN_QUESTIONS, [&] { return working_ == 0; })) {
      if (!request_.wants_to_stop || given_up_) continue;
      lock.unlock();  // the answer may take long
      given_up_ = request_.wants_to_stop();
      lock.lock();
    }
  }
  for (std::thread& thread : threads) thread.join();
}

LaunchReport Workers::report() {
  if (given_up_) throw Interrupted{};
  if (failure_) std::rethrow_exception(failure_);
  report_.complete = first_fatal_ == INT64_MAX;
  for (const auto& [index, findings] : found_by_cluster_) {
    if (index <= first_fatal_) report_.findings.merge(findings);
  }
  // Chance decides how far the other CTAs came.
  if (!report_.complete) report_.counts = Counts(context_.kernel->code.size());
  return std::move(report_);
}

}  // namespace archflash::sim
