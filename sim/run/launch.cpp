#include "sim/run/launch.h"

#include <algorithm>
#include <optional>

#include "sim/numerics/numeric.h"
#include "sim/run/cluster.h"
#include "sim/run/workers.h"

namespace archflash::sim {
namespace {

constexpr int64_t MAX_BLOCK = 1024, MAX_BLOCK_Z = 64;
constexpr int64_t MAX_GRID_X = INT32_MAX, MAX_GRID_YZ = 65535;
constexpr int64_t MAX_CLUSTER = 8;  // every GPU with clusters allows so many CTAs

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

// Finds accesses of different CTAs to the same bytes, one of which is a write. CTAs of a cluster
// may be in order, which the race detector knows if it is on.
void check_overlaps(const Module& module, const LaunchRequest& request, const Kernel& kernel,
                    GlobalMemory& memory, const Workers::Logs& logs, Findings& findings) {
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

  Workers workers(context, request);
  workers.run();
  for (size_t i = 0; i < globals.size(); ++i) {
    memory.remove(GLOBAL_BASE + ((GLOBAL_SLOTS / 2 + i) << GLOBAL_SLOT_LOG2) + GLOBAL_RED_ZONE);
  }
  LaunchReport report = workers.report();
  if (report.complete && report.overlaps_checked)
    check_overlaps(module, request, kernel, memory, workers.logs(), report.findings);
  return report;
}

}  // namespace archflash::sim
