#include "sim/run/launch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "sim/numerics/numeric.h"
#include "sim/run/cluster.h"

namespace archflash::sim {
namespace {

constexpr int64_t MAX_BLOCK = 1024, MAX_BLOCK_Z = 64;
constexpr int64_t MAX_GRID_X = INT32_MAX, MAX_GRID_YZ = 65535;
constexpr int64_t MAX_CLUSTER = 8;  // every GPU with clusters allows so many CTAs
constexpr size_t MAX_LOGGED_WRITES = size_t{1} << 23;
constexpr std::chrono::milliseconds BETWEEN_QUESTIONS{50};  // asking whether to stop

std::string str(int64_t value) { return std::to_string(value); }

void check(const Kernel& kernel, const LaunchRequest& request) {
  const Dim3 &block = request.block, &grid = request.grid;
  if (block.x < 1 || block.y < 1 || block.z < 1 || block.x > MAX_BLOCK || block.y > MAX_BLOCK ||
      block.z > MAX_BLOCK_Z || block.count() > MAX_BLOCK) {
    throw LoadError("a block of " + str(block.x) + " x " + str(block.y) + " x " + str(block.z) +
                    " threads: at most 1024 in all and 64 along z, at least 1");
  }
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > MAX_GRID_X || grid.y > MAX_GRID_YZ ||
      grid.z > MAX_GRID_YZ) {
    throw LoadError("a grid of " + str(grid.x) + " x " + str(grid.y) + " x " + str(grid.z) +
                    ": at most 2147483647 x 65535 x 65535, at least 1");
  }
  const Dim3& cluster = request.cluster;
  if (cluster.x < 1 || cluster.y < 1 || cluster.z < 1 || cluster.count() > MAX_CLUSTER ||
      grid.x % cluster.x != 0 || grid.y % cluster.y != 0 || grid.z % cluster.z != 0) {
    throw LoadError("clusters of " + str(cluster.x) + " x " + str(cluster.y) + " x " +
                    str(cluster.z) + " CTAs in a grid of " + str(grid.x) + " x " + str(grid.y) +
                    " x " + str(grid.z) + ": at most " + str(MAX_CLUSTER) +
                    " CTAs, and each side divides the grid's");
  }
  if (kernel.max_threads > 0 && block.count() > kernel.max_threads) {
    throw LoadError("a block of " + str(block.count()) + " threads: " + kernel.name +
                    " states .maxntid " + str(kernel.max_threads));
  }
  const int* required = kernel.required_threads;
  if (required[0] > 0 &&
      (required[0] != block.x || required[1] != block.y || required[2] != block.z)) {
    throw LoadError("a block of " + str(block.x) + " x " + str(block.y) + " x " + str(block.z) +
                    ": " + kernel.name + " states .reqntid " + str(required[0]) + ", " +
                    str(required[1]) + ", " + str(required[2]));
  }
  // The simulator chooses where the dynamic part begins, so that only its size counts.
  const uint64_t shared =
      request.dynamic_shared +
      (kernel.uses_dynamic_shared ? kernel.static_variable_bytes : kernel.static_shared_bytes);
  if (shared > request.shared_limit) {
    throw LoadError("a CTA with " + str(static_cast<int64_t>(shared)) +
                    " bytes of shared memory: the device has " +
                    str(static_cast<int64_t>(request.shared_limit)));
  }
  if (request.parameters.size() != kernel.parameter_bytes) {
    throw LoadError(str(static_cast<int64_t>(request.parameters.size())) +
                    " parameter bytes: " + kernel.name + " takes " + str(kernel.parameter_bytes));
  }
}

void check_target(const Module& module, int capability) {
  const int least = module.capability();
  const char suffix = module.target.empty() ? '\0' : module.target.back();
  const bool runs = suffix == 'a'   ? capability == least
                    : suffix == 'f' ? capability >= least && capability / 10 == least / 10
                                    : capability >= least;
  if (runs) return;
  throw LoadError("PTX for " + module.target + " on a device of capability " +
                  str(capability / 10) + "." + str(capability % 10) +
                  ": a target is at most the device's capability, one with \"a\" is equal to it, "
                  "and one with \"f\" has its major version");
}

// The cluster of a CTA, both by their indices.
int64_t cluster_of(const LaunchRequest& request, int64_t cta) {
  const Dim3 &grid = request.grid, &size = request.cluster;
  const int64_t x = cta % grid.x / size.x, y = cta / grid.x % grid.y / size.y,
                z = cta / (grid.x * grid.y) / size.z;
  return x + grid.x / size.x * (y + grid.y / size.y * z);
}

// Finds accesses of different CTAs to the same bytes, one of which is a write. CTAs of a cluster
// may be in order, which the race detector knows if it is on.
void check_overlaps(const Module& module, const LaunchRequest& request, const Kernel& kernel,
                    GlobalMemory& memory,
                    const std::vector<std::pair<int64_t, std::vector<GlobalAccess>>>& logs,
                    Findings& findings) {
  const auto same = [&](int64_t a, int64_t b) {
    return a == b || (request.options.race && cluster_of(request, a) == cluster_of(request, b));
  };
  struct Piece {
    uint64_t begin, end;
    int64_t cta;
    const GlobalAccess* access;
  };
  std::vector<Piece> pieces;
  for (const auto& [cta, accesses] : logs) {
    for (const GlobalAccess& access : accesses) {
      pieces.push_back({access.address, access.address + access.bytes, cta, &access});
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) {
    if (a.begin != b.begin) return a.begin < b.begin;
    return a.cta != b.cta ? a.cta < b.cta : a.access->pc < b.access->pc;
  });
  const auto check = [&](const Piece& piece, const Piece* other) {
    if (other == nullptr || piece.begin >= other->end || same(piece.cta, other->cta)) return;
    const auto verb = [](const Piece& of) { return of.access->writes ? "writes" : "reads"; };
    const uint64_t bytes = std::min(piece.end, other->end) - piece.begin;
    Finding finding;
    finding.kind = "race";
    finding.message = std::string(verb(piece)) + " " + memory.describe(piece.begin, bytes) +
                      ", which CTA " + str(other->cta) + " " + verb(*other) + " too, at " +
                      describe_instruction(module, kernel, other->access->pc);
    finding.cta = piece.cta;
    finding.warp = piece.access->warp;
    finding.lane = piece.access->lane;
    finding.pc = piece.access->pc;
    finding.other_pc = other->access->pc;
    finding.address = piece.begin;
    findings.add(std::move(finding));
  };
  const Piece *written = nullptr, *read = nullptr;  // those that reach furthest
  for (const Piece& piece : pieces) {
    check(piece, written);
    if (piece.access->writes) check(piece, read);
    const Piece*& furthest = piece.access->writes ? written : read;
    if (furthest == nullptr || piece.end > furthest->end) furthest = &piece;
  }
}

// For each cluster, those that do not start if it asks for their work. A cluster in the list of
// another one starts only if that one does not ask for it. On a card the speed of the clusters
// decides; here the mode and the seed do, so that a run does not depend on the number of threads.
// Without clusterlaunchcontrol all start: both lists are empty.
struct Unstarted {
  std::vector<std::deque<int64_t>> lists;  // by cluster
  std::vector<bool> waits;                 // by cluster: it is in a list
};

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

// A cluster in execution.
struct Running {
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

}  // namespace

LaunchReport launch(const Module& module, const LaunchRequest& request, GlobalMemory& memory,
                    std::vector<std::vector<uint8_t>>& globals) {
  const auto found = module.kernels.find(request.kernel);
  if (found == module.kernels.end()) {
    std::string names;
    for (const auto& [name, kernel] : module.kernels) names += (names.empty() ? "" : ", ") + name;
    throw LoadError("no kernel is called " + request.kernel + ": the PTX has " +
                    (names.empty() ? "none" : names));
  }
  const Kernel& kernel = *found->second;
  check(kernel, request);
  const int capability = request.capability != 0 ? request.capability : module.capability();
  check_target(module, capability);
  for (size_t i = 0; i < globals.size(); ++i) {
    memory.add_at(GLOBAL_SLOTS / 2 + i, module.globals[i].name, globals[i].data(),
                  globals[i].size(), true, true);
  }
  LaunchContext context;
  context.module = &module;
  context.kernel = &kernel;
  context.tensor_core = &tensor_core_of(capability);
  context.grid = request.grid;
  context.cluster = request.cluster;
  context.block = request.block;
  context.dynamic_shared = request.dynamic_shared;
  context.parameters = request.parameters;
  context.memory = &memory;
  context.options = request.options;
  context.starts_early = request.starts_early;
  context.next_starts_early = request.next_starts_early;
  context.overlaps = request.starts_early || request.next_starts_early;
  memory.begin_launch(request.starts_early);
  for (Buffer& buffer : memory.buffers()) {
    constexpr uint64_t BYTES = 4;
    if (request.next_starts_early && buffer.writable)
      buffer.uses.resize((buffer.bytes + BYTES - 1) / BYTES);
  }

  std::optional<GlobalOrder> order;
  if (kernel.orders_globally)
    context.global_order = &order.emplace(kernel.global_granule_log2, true);

  const int64_t ctas = request.grid.count(), clusters = ctas / request.cluster.count();
  int64_t threads = request.options.threads > 0
                        ? request.options.threads
                        : static_cast<int64_t>(std::thread::hardware_concurrency());
  threads = std::clamp<int64_t>(threads, 1, std::min<int64_t>(clusters, 256));
  if (kernel.orders_globally) threads = 1;

  LaunchReport report;
  report.counts = Counts(kernel.code.size());
  std::atomic<int64_t> next{0}, first_fatal{INT64_MAX};
  std::atomic<size_t> logged{0};
  std::mutex mutex;
  std::map<int64_t, Findings> found_by_cluster;
  std::vector<std::pair<int64_t, std::vector<GlobalAccess>>> logs;
  std::exception_ptr failure;
  std::atomic<bool> given_up{false};
  context.given_up = &given_up;
  std::condition_variable ended;
  int64_t working = threads;

  Unstarted unstarted = unstarted_of(kernel, request, clusters);

  const size_t at_a_time = clusters_at_a_time(kernel, request);
  const auto work = [&] {
    const FloatEnvironment environment;
    Counts counts(kernel.code.size());
    std::deque<int64_t> left;  // by a cluster that did not ask for them: they start now
    std::vector<std::unique_ptr<Running>> running;
    Random random(request.options.seed ^ INTERLEAVING);
    // Starts the next cluster; returns whether there is one.
    const auto start = [&] {
      for (;;) {
        int64_t index = left.empty() ? next++ : left.front();
        if (!left.empty()) {
          left.pop_front();
        } else if (index >= clusters || index > first_fatal) {
          return false;
        } else if (!unstarted.waits.empty() && unstarted.waits[static_cast<size_t>(index)]) {
          continue;
        }
        bool traced = false;
        for (const int64_t cta : request.traced_ctas)
          traced = traced || cluster_of(request, cta) == index;
        std::deque<int64_t> takes;  // the clusters whose work this one may ask for
        if (!unstarted.lists.empty())
          takes = std::move(unstarted.lists[static_cast<size_t>(index)]);
        running.push_back(
            std::make_unique<Running>(context, traced, index, counts, std::move(takes)));
        return true;
      }
    };
    try {
      for (;;) {
        while (running.size() < at_a_time && start()) {
        }
        if (running.empty()) break;
        const size_t chosen = running.size() > 1 ? random.below(running.size()) : 0;
        const uint64_t stretch =
            at_a_time > 1 ? 1 + random.below(INTERLEAVED_STRETCH) : UINT64_MAX / 2;
        if (!running[chosen]->cluster.run(stretch)) continue;
        const std::unique_ptr<Running> done = std::move(running[chosen]);
        running.erase(running.begin() + static_cast<std::ptrdiff_t>(chosen));
        Cluster& cluster = done->cluster;
        const int64_t index = done->index;
        left.insert(left.end(), cluster.unstarted().begin(), cluster.unstarted().end());
        Findings findings;
        bool logged_any = false;
        for (int rank = 0; rank < cluster.size(); ++rank) {
          findings.merge(cluster.cta(rank).findings());
          logged_any = logged_any || !cluster.cta(rank).global_accesses().empty();
        }
        const bool fatal = std::any_of(findings.list().begin(), findings.list().end(),
                                       [](const Finding& f) { return f.fatal; });
        if (fatal) {
          for (int64_t known = first_fatal; index < known;) {
            if (first_fatal.compare_exchange_weak(known, index)) break;
          }
          if (at_a_time > 1) running.clear();  // they may wait for it
        }

        const bool traced = done->context.options.trace;
        if (findings.list().empty() && !logged_any && !traced) continue;
        const std::lock_guard lock(mutex);
        if (!findings.list().empty()) found_by_cluster.emplace(index, std::move(findings));
        for (int rank = 0; rank < cluster.size(); ++rank) {
          Cta& cta = cluster.cta(rank);
          if (traced) report.traces.emplace(cta.index(), std::move(cta.trace()));
          if (!logged_any) continue;
          logged += cta.global_accesses().size();
          if (logged < MAX_LOGGED_WRITES)
            logs.emplace_back(cta.index(), std::move(cta.global_accesses()));
          else
            report.overlaps_checked = false;
        }
      }
    } catch (...) {
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
      first_fatal = -1;
    }
    const std::lock_guard lock(mutex);
    report.counts += counts;
    --working;
    ended.notify_one();
  };
  // The launching thread does none of the work, so that it can be asked to stop.
  std::vector<std::thread> workers;
  for (int64_t i = 0; i < threads; ++i) workers.emplace_back(work);
  {
    std::unique_lock lock(mutex);
    while (!ended.wait_for(lock, BETWEEN_QUESTIONS, [&] { return working == 0; })) {
      if (!request.wants_to_stop || given_up) continue;
      lock.unlock();  // the answer may take long
      given_up = request.wants_to_stop();
      lock.lock();
    }
  }
  for (std::thread& worker : workers) worker.join();
  for (size_t i = 0; i < globals.size(); ++i) {
    memory.remove(GLOBAL_BASE + ((GLOBAL_SLOTS / 2 + i) << GLOBAL_SLOT_LOG2) + GLOBAL_RED_ZONE);
  }
  if (given_up) throw Interrupted{};
  if (failure) std::rethrow_exception(failure);

  report.complete = first_fatal == INT64_MAX;
  for (const auto& [index, findings] : found_by_cluster) {
    if (index <= first_fatal) report.findings.merge(findings);
  }
  if (report.complete) {
    if (report.overlaps_checked)
      check_overlaps(module, request, kernel, memory, logs, report.findings);
  } else {
    report.counts = Counts(kernel.code.size());  // chance decides how far the other CTAs came
  }
  return report;
}

}  // namespace archflash::sim
