#include "sim/run/cta.h"

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>

#include "sim/run/cluster.h"
#include "sim/units/mbarrier.h"
#include "sim/units/tcgen05.h"
#include "sim/units/wgmma.h"

namespace archflash::sim {
namespace {

constexpr uint32_t TILE_LINE_BYTES = 128;

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

}  // namespace

Counts& Counts::operator+=(const Counts& other) {
  for (size_t i = 0; i < executed.size(); ++i) executed[i] += other.executed[i];
  for (size_t i = 0; i < memory.size(); ++i) memory[i] += other.memory[i];
  barrier_waits += other.barrier_waits;
  ctas += other.ctas;
  return *this;
}

uint64_t shared_bytes_of(const LaunchContext& launch) {
  const Kernel& kernel = *launch.kernel;
  uint64_t shared = kernel.static_shared_bytes;
  if (kernel.uses_dynamic_shared || launch.dynamic_shared > 0) shared += launch.dynamic_shared;
  return shared;
}

uint64_t race_stride(const LaunchContext& launch) {
  constexpr uint64_t LARGEST_GRANULE = 16;
  return (shared_bytes_of(launch) + LARGEST_GRANULE - 1) / LARGEST_GRANULE * LARGEST_GRANULE;
}

Cta::Cta(Cluster& cluster, int rank, Dim3 position, Counts& counts)
    : cluster_(cluster),
      launch_(cluster.launch()),
      rank_(rank),
      index_(cta_index(launch_, position)),
      position_(position),
      counts_(counts),
      shared_base_((static_cast<uint32_t>(rank) << CLUSTER_RANK_SHIFT) + SHARED_START),
      constants_(launch_.kernel->constants.data()),
      races_(cluster.races()) {
  const int64_t threads = launch_.block.count();
  const auto warps = static_cast<int>((threads + LANES - 1) / LANES);
  const Kernel& kernel = *launch_.kernel;
  const uint64_t shared = shared_bytes_of(launch_);
  shared_.resize(shared);
  shared_state_.resize(shared);
  race_base_ = static_cast<uint32_t>(race_stride(launch_) * static_cast<uint64_t>(rank));
  local_.resize(static_cast<size_t>(warps) * LANES * kernel.local_bytes);
  local_state_.resize(local_.size());
  if (rank > 0) relocate_constants();
  mbarriers_ = std::make_unique<MbarrierUnit>(*this);
  for (int w = 0; w < warps; ++w) {
    const int64_t rest = threads - int64_t{w} * LANES;
    warps_.push_back(std::make_unique<Warp>(*this, w, rank * warps + w,
                                            rest >= LANES ? ALL_LANES : (1u << rest) - 1));
  }
  if (kernel.uses_tcgen05) tensor_ = std::make_unique<TensorUnit>(*this);
  for (Barrier& barrier : barriers_) barrier.arrived_lanes.assign(static_cast<size_t>(warps), 0);
  if (traced()) {
    for (int w = 0; w < warps; ++w) trace_.track("warp " + std::to_string(w));
  }
}

Cta::~Cta() = default;

// Moves addresses of shared variables into the window of the CTA's own rank.
void Cta::relocate_constants() {
  own_constants_ = launch_.kernel->constants;
  const uint64_t addend = uint64_t{shared_base_} - SHARED_START;
  for (const SharedConstant& place : launch_.kernel->shared_constants) {
    for (size_t lane = 0; lane < LANES; ++lane) {
      uint8_t* at = &own_constants_[place.offset + lane * place.bytes];
      uint64_t value = 0;
      std::memcpy(&value, at, place.bytes);
      value += addend;
      std::memcpy(at, &value, place.bytes);
    }
  }
  constants_ = own_constants_.data();
}

const TileLine* Cta::tile_of(uint32_t offset) const {
  const TileLine& tile = tiles_[offset / TILE_LINE_BYTES];
  return tile.pitch != 0 ? &tile : nullptr;
}

void Cta::set_tile(uint32_t offset, uint32_t bytes, const TileLine& tile) {
  if (tiles_.empty()) {
    if (tile.pitch == 0) return;
    tiles_.resize(shared_.size() / TILE_LINE_BYTES + 1);
  }
  for (uint32_t line = offset / TILE_LINE_BYTES; line <= (offset + bytes - 1) / TILE_LINE_BYTES;
       ++line) {
    tiles_[line] = tile;
  }
}

void Cta::log_access(const Accessor& who, uint64_t address, uint32_t bytes, bool writes) {
  if (launch_.global_order != nullptr || launch_.grid.count() == 1) return;
  if (!global_accesses_.empty()) {
    GlobalAccess& last = global_accesses_.back();
    if (last.address + last.bytes == address && last.pc == who.pc && last.writes == writes) {
      last.bytes += bytes;
      return;
    }
  }
  global_accesses_.push_back({address, bytes, who.pc,
                              static_cast<uint16_t>(who.agent % warp_count()),
                              static_cast<uint8_t>(who.lane), writes});
}

uint64_t Cta::time() const { return cluster_.time(); }
Random& Cta::random() { return cluster_.random(); }

bool Cta::exited() const {
  return std::all_of(warps_.begin(), warps_.end(), [](const auto& w) { return w->exited(); });
}

void Cta::trace_endless_waits() {
  for (int id = 0; id < BARRIERS; ++id) {
    for (const Barrier::Waiting& waiting : barriers_[static_cast<size_t>(id)].waiting) {
      TraceEvent event;
      event.kind = TraceEvent::Kind::Wait;
      event.track = waiting.warp;
      event.begin = waiting.since;
      event.end = time() + 1;
      event.pc = waiting.pc;
      event.label = "barrier " + std::to_string(id) + ", for ever";
      trace_.events.push_back(std::move(event));
    }
  }
}

// The most registers that ptxas may give a thread under this launch bound; it gives as many to a
// kernel that uses setmaxnreg.
int Cta::registers_at_launch() const {
  constexpr int64_t REGISTERS = 65536, UNIT = 8, MOST = 256;
  const Kernel& kernel = *launch_.kernel;
  if (kernel.max_registers > 0) return kernel.max_registers;
  int64_t threads = kernel.max_threads;
  if (threads == 0) {
    threads = int64_t{kernel.required_threads[0]} * kernel.required_threads[1] *
              kernel.required_threads[2];
  }
  if (threads == 0) threads = launch_.block.count();
  threads = (threads + LANES - 1) / LANES * LANES;
  return static_cast<int>(std::min(MOST, REGISTERS / (threads * kernel.min_ctas) / UNIT * UNIT));
}

bool Cta::set_registers(Warp& warp, int count, bool increase) {
  if (registers_.empty()) {
    registers_.assign(warps_.size(), registers_at_launch());
    const Kernel& kernel = *launch_.kernel;
    if (kernel.max_registers == 0 && kernel.max_threads == 0 && kernel.required_threads[0] == 0) {
      report(Severity::Lint, warp, -1, "registers",
             "setmaxnreg in a kernel without launch bounds: ptxas ignores it there");
    }
  }
  int& held = registers_[static_cast<size_t>(warp.index())];
  if (increase ? count < held : count > held) {
    throw Fault{"registers", "setmaxnreg." + std::string(increase ? "inc" : "dec") + " to " +
                                 std::to_string(count) + " of a warp that has " +
                                 std::to_string(held) + " registers a thread"};
  }
  if (count - held > free_registers_) return false;
  free_registers_ -= count - held;
  held = count;
  for (const auto& each : warps_) each->wake_all(Wait::Registers);
  cluster_.progress();
  return true;
}

void Cta::check_exit() {
  constexpr size_t GROUP = 4;
  for (size_t w = 0; w < registers_.size(); ++w) {
    if (registers_[w] == registers_[w / GROUP * GROUP]) continue;
    Finding finding;
    finding.kind = "registers";
    finding.message = "warp " + std::to_string(w) + " has " + std::to_string(registers_[w]) +
                      " registers a thread and warp " + std::to_string(w / GROUP * GROUP) + " " +
                      std::to_string(registers_[w / GROUP * GROUP]) +
                      ": all warps of a warpgroup must execute setmaxnreg alike";
    finding.cta = index_;
    findings_.add(std::move(finding));
    break;
  }
  for (int id = 0; id < BARRIERS; ++id) {
    const Barrier& barrier = barriers_[static_cast<size_t>(id)];
    if (!barrier.active) continue;
    Finding finding;
    finding.kind = "barrier";
    finding.message = "barrier " + std::to_string(id) + " still holds " +
                      std::to_string(barrier.arrived) + " of " + std::to_string(barrier.threads) +
                      " arrivals at the exit of the CTA";
    finding.cta = index_;
    findings_.add(std::move(finding));
  }
  mbarriers_->check_exit();
  if (tensor_) tensor_->check_exit();
  for (size_t w = 0; w < warps_.size(); ++w) {
    if (warps_[w]->matrix().history() == warps_[w / GROUP * GROUP]->matrix().history()) continue;
    Finding finding;
    finding.kind = "wgmma";
    finding.message =
        "warp " + std::to_string(w) + " executed other wgmma instructions than warp " +
        std::to_string(w / GROUP * GROUP) +
        ": all warps of a warpgroup must execute the same products, fences, commits and waits";
    finding.cta = index_;
    findings_.add(std::move(finding));
    break;
  }
}

std::string Cta::describe_waits() {
  std::string text;
  for (const auto& warp : warps_) {
    if (warp->exited()) continue;
    for (const Fragment& fragment : warp->fragments()) {
      text += "\n  ";
      if (cluster_.size() > 1) text += "CTA " + std::to_string(index_) + ", ";
      text += "warp " + std::to_string(warp->index()) + ", lanes " + hex(fragment.mask) + ", ";
      if (fragment.state != Fragment::State::Blocked) {
        text += describe_instruction(*launch_.module, kernel(), fragment.pc) +
                ": waits for lanes of its warp that are elsewhere";
        continue;
      }
      text += describe_instruction(*launch_.module, kernel(), fragment.waiting_pc) + ": ";
      switch (fragment.wait) {
        case Wait::Barrier: {
          const Barrier& barrier = barriers_[fragment.key];
          text += "waits at barrier " + std::to_string(fragment.key) + " with " +
                  std::to_string(barrier.arrived) + " of " +
                  std::to_string(barrier.threads ? barrier.threads : live_threads()) +
                  " threads arrived";
          break;
        }
        case Wait::ClusterBarrier:
          text += "waits at the barrier of the cluster";
          break;
        case Wait::Mbarrier:
          text += "waits for " + mbarriers_->describe(static_cast<uint32_t>(fragment.key));
          break;
        case Wait::TensorMemory:
          text += tensor_->describe_wait(fragment.key);
          break;
        case Wait::Registers:
          text += "setmaxnreg waits for " + std::to_string(fragment.key) +
                  " registers a thread, has " +
                  std::to_string(registers_[static_cast<size_t>(warp->index())]) + ", and " +
                  std::to_string(free_registers_) +
                  " are in the CTA's pool: the sum is more than the launch gave";
          break;
        case Wait::Rest:
          text += "waits in a loop";
          break;
      }
    }
  }
  return text;
}

// ---- Barriers ----

int64_t Cta::live_threads() const {
  int64_t threads = 0;
  for (const auto& warp : warps_) threads += std::popcount(warp->live());
  return threads;
}

void Cta::arrive(Warp& warp, int id, int64_t threads, uint32_t mask, BarrierKind kind, bool aligned,
                 uint32_t predicate, Ref destination) {
  const int lane = std::countr_zero(mask);
  if (id < 0 || id >= BARRIERS) {
    throw Fault{"barrier", "barrier " + std::to_string(id) + " does not exist: 0 to 15 do", lane};
  }
  if (threads < 0 || threads % LANES != 0) {
    throw Fault{
        "barrier",
        "a barrier for " + std::to_string(threads) + " threads: it must be a multiple of 32", lane};
  }
  if (threads == 0 && kind == BarrierKind::Arrive) {
    throw Fault{"barrier", "an arrival without waiting must say how many threads take part", lane};
  }
  const auto all = static_cast<int64_t>(warps_.size()) * LANES;
  if (threads > all) {
    throw Fault{"barrier",
                "barrier " + std::to_string(id) + " for " + std::to_string(threads) +
                    " threads in a CTA of " + std::to_string(all),
                lane};
  }
  Barrier& barrier = barriers_[static_cast<size_t>(id)];
  if (!barrier.active) {
    barrier.active = true;
    barrier.threads = threads;
    barrier.kind = kind;
  } else if (barrier.threads != threads) {
    throw Fault{"barrier",
                "barrier " + std::to_string(id) + " waits for " +
                    (barrier.threads ? std::to_string(barrier.threads) : "all") +
                    " threads, but this arrival says " +
                    (threads ? std::to_string(threads) : "all"),
                lane};
  }
  uint32_t& arrived_lanes = barrier.arrived_lanes[static_cast<size_t>(warp.index())];
  if (arrived_lanes & mask) {
    throw Fault{"barrier",
                "the warp arrives at barrier " + std::to_string(id) +
                    " again before it has completed: two uses of it overlap",
                lane};
  }
  arrived_lanes |= mask;
  // A barrier with a count takes a warp for 32 threads, however many lanes it has left.
  barrier.arrived += threads > 0 && aligned ? LANES : std::popcount(mask);
  const uint32_t votes = predicate & mask;
  barrier.popc += static_cast<uint32_t>(std::popcount(votes));
  barrier.all = barrier.all && votes == mask;
  barrier.any = barrier.any || votes != 0;
  if (races_) races_->release(warp.agent(), barrier.knowledge);
  if (kind != BarrierKind::Arrive) {
    barrier.waiting.push_back({warp.index(), time() + 1, warp.pc()});
    if (kind != BarrierKind::Sync)
      barrier.results.push_back({warp.index(), mask, destination, kind});
    warp.block(Wait::Barrier, static_cast<uint64_t>(id));
  }
  if (threads > 0 && barrier.arrived > threads) {
    throw Fault{"barrier",
                "more threads arrive at barrier " + std::to_string(id) + " than the " +
                    std::to_string(threads) + " it is for",
                lane};
  }
  complete_if_full(id, warp.index());
}

void Cta::complete_if_full(int id, int cause) {
  Barrier& barrier = barriers_[static_cast<size_t>(id)];
  if (!barrier.active) return;
  const int64_t expected = barrier.threads > 0 ? barrier.threads : live_threads();
  if (barrier.arrived < expected) return;
  for (const Barrier::Result& result : barrier.results) {
    Warp& warp = *warps_[static_cast<size_t>(result.warp)];
    if (result.kind == BarrierKind::RedPopc) {
      uint32_t* d = warp.lanes<uint32_t>(result.destination);
      for (uint32_t rest = result.mask; rest != 0; rest &= rest - 1) {
        d[std::countr_zero(rest)] = barrier.popc;
      }
    } else {
      const bool value = result.kind == BarrierKind::RedAnd ? barrier.all : barrier.any;
      uint32_t& p = warp.predicate(result.destination);
      p = value ? p | result.mask : p & ~result.mask;
    }
  }
  for (const Barrier::Waiting& waiting : barrier.waiting) {
    Warp& warp = *warps_[static_cast<size_t>(waiting.warp)];
    if (races_) races_->acquire(warp.agent(), barrier.knowledge);
    warp.wake(Wait::Barrier, static_cast<uint64_t>(id));
    ++counts_.barrier_waits;
    if (traced() && time() + 1 > waiting.since) {
      TraceEvent event;
      event.kind = TraceEvent::Kind::Wait;
      event.track = waiting.warp;
      event.begin = waiting.since;
      event.end = time() + 1;  // the instruction that ends the wait is under way
      event.pc = waiting.pc;
      event.cause = cause;
      event.label = "barrier " + std::to_string(id);
      trace_.events.push_back(std::move(event));
    }
  }
  cluster_.progress();
  const size_t warps = warps_.size();
  barrier = Barrier();
  barrier.arrived_lanes.assign(warps, 0);
}

void Cta::lanes_exited(Warp& warp) {
  for (int id = 0; id < BARRIERS; ++id) {
    if (barriers_[static_cast<size_t>(id)].threads == 0) complete_if_full(id, warp.index());
  }
  cluster_.lanes_exited();
}

// ---- Reports ----

void Cta::report(Severity severity, const Warp& warp, int lane, const char* kind,
                 std::string message, uint64_t address, int64_t other_pc) {
  report_at(warp.pc(), severity, warp, lane, kind, std::move(message), address, other_pc);
}

void Cta::report_at(uint32_t pc, Severity severity, const Warp& warp, int lane, const char* kind,
                    std::string message, uint64_t address, int64_t other_pc) {
  Finding finding;
  finding.severity = severity;
  finding.kind = kind;
  finding.message = std::move(message);
  finding.cta = index_;
  finding.warp = warp.index();
  finding.lane = lane;
  finding.pc = pc;
  finding.other_pc = other_pc;
  finding.address = address;
  findings_.add(std::move(finding));
}

void Cta::report_race(const Warp& warp, int lane, const Race& race, bool writes, bool benign,
                      const std::string& what, uint64_t address) {
  const bool far = race.other_cluster >= 0;
  const auto name = [&](int agent) {
    const int count = warp_count(), of = races_->warp_of(agent);
    if (far) {
      return "warp " + std::to_string(of % count) + " of CTA " +
             std::to_string(
                 cta_index(launch_, cta_position(launch_, race.other_cluster, of / count)));
    }
    if (agent == warp.agent()) return std::string("another lane of the same warp");
    if (of == warp.agent()) return std::string("this warp");
    std::string text = "warp " + std::to_string(of % count);
    if (of / count != rank_) text += " of CTA " + std::to_string(cluster_.cta(of / count).index());
    return text;
  };
  const int agent = race.other_agent;
  const char* const matrix = tensor_ ? "an operation of the tensor pipe for " : "a wgmma of ";
  const std::string other =
      races_->is_warp(agent)     ? name(agent)
      : races_->is_copy(agent)   ? "an asynchronous copy of " + name(agent)
      : races_->is_matrix(agent) ? matrix + name(agent)
      : far ? "a bulk copy by the cluster of CTA " +
                  std::to_string(cta_index(launch_, first_cta(launch_, race.other_cluster)))
            : "a bulk copy";
  const char* const by = race.other_wrote ? "a write by " : "a read by ";
  std::string message = std::string(writes ? "a write to " : "a read of ") + what;
  message += !race.proxy        ? " is not ordered after "
             : race.other_wrote ? " in the async proxy does not see "
                                : " in the async proxy may overtake ";
  message += by + other;
  if (race.other_lane >= 0) message += " (lane " + std::to_string(race.other_lane) + ")";
  if (race.other_pc >= 0) {
    message += " at " + describe_instruction(*launch_.module, kernel(),
                                             static_cast<uint32_t>(race.other_pc));
  }
  if (race.proxy) message += ": no fence.proxy.async lies between";
  if (benign) message += "; both write the same value";
  if (race.by_matrix && !race.proxy) {
    message +=
        ": ldmatrix and stmatrix access memory for several lanes and do not order them; "
        "bar.warp.sync does";
  }
  if (race.by_dependency) {
    message +=
        ": the atomic operation depends on a relaxed load of what was released, which orders it on "
        "a card, but an acquire or a fence does so by the memory model";
  }
  if (race.by_scope) {
    message +=
        ": the releases and acquires between the two have a smaller scope than .cluster, and the "
        "two are in different CTAs";
  }
  const bool unfenced_read = race.proxy && !race.other_wrote;
  const char* const kind = unfenced_read        ? "proxy-read"
                           : race.proxy         ? "proxy"
                           : race.by_dependency ? "relaxed-order"
                           : race.by_scope      ? "scope"
                           : !race.by_matrix    ? "race"
                           : race.same_warp     ? "lane-order"
                                                : "lane-release";
  const bool tolerated = benign || unfenced_read ||
                         ((race.by_matrix || race.by_scope || race.by_dependency) && !race.proxy);
  report(tolerated ? Severity::Lint : Severity::Error, warp, lane, kind, std::move(message),
         address, race.other_pc);
}

}  // namespace archflash::sim
