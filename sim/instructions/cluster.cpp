// The barrier of the cluster, addresses in other CTAs, and the CTA's pool of registers.
#include "sim/run/cluster.h"

#include <bit>

#include "sim/load/builder.h"

namespace archflash::sim {
namespace {

constexpr uint32_t RELAXED = 1, INCREASE = 1;
constexpr uint64_t IN_WINDOW = (uint64_t{1} << CLUSTER_RANK_SHIFT) - 1;

// ---- barrier.cluster ----

void run_arrive(Warp& warp, const Instruction& instruction, uint32_t mask) {
  warp.cta().cluster().arrive(warp, mask, (instruction.flags & RELAXED) == 0);
}
void run_wait(Warp& warp, const Instruction&, uint32_t mask) {
  if (!warp.cta().cluster().wait(warp, mask)) warp.block(Wait::ClusterBarrier, 0, true);
}
void build_barrier(Builder& b) {
  const bool waits = b.slot(1) == "wait";
  b.instruction.flags = b.has("relaxed") ? RELAXED : 0;
  b.instruction.control = Control::Barrier;
  b.instruction.converge = b.has("aligned") ? Converge::Aligned : Converge::No;
  b.handler(waits ? &run_wait : &run_arrive, Class::Barrier);
}

// ---- mapa, getctarank ----

// Operands: destination, address, rank.
template <class T>
void run_mapa(Warp& warp, const Instruction& instruction, uint32_t mask) {
  T* d = warp.lanes<T>(instruction.operands[0]);
  const T* addresses = warp.lanes<const T>(instruction.operands[1]);
  const uint32_t* ranks = warp.lanes<const uint32_t>(instruction.operands[2]);
  const auto size = static_cast<uint32_t>(warp.cta().cluster().size());
  for (; mask != 0; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    if (ranks[lane] >= size) {
      throw Fault{
          "cluster",
          "mapa to CTA " + std::to_string(ranks[lane]) + " of a cluster of " + std::to_string(size),
          lane};
    }
    const T window = instruction.space == Space::Generic ? static_cast<T>(SHARED_WINDOW) : T{0};
    const T in_space = addresses[lane] - window;
    if (instruction.space == Space::Generic && addresses[lane] - SHARED_WINDOW >= WINDOW_BYTES) {
      throw Fault{"cluster", "mapa of an address that is not in shared memory", lane,
                  static_cast<uint64_t>(addresses[lane])};
    }
    d[lane] = window + (static_cast<T>(ranks[lane]) << CLUSTER_RANK_SHIFT) +
              (in_space & static_cast<T>(IN_WINDOW));
  }
}
void build_mapa(Builder& b) {
  const Type t = b.type(1);
  b.instruction.space = b.slot(0).empty() ? Space::Generic : Space::SharedCluster;
  if (b.slot(0).empty() && t.bits != 64) b.fail("a generic address has 64 bits");
  b.destination(t);
  b.source(t);
  b.source({'u', 32});
  b.handler(t.bits == 64 ? &run_mapa<uint64_t> : &run_mapa<uint32_t>, Class::Move);
}

template <class T>
void run_rank(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const T* addresses = warp.lanes<const T>(instruction.operands[1]);
  const T window = instruction.space == Space::Generic ? static_cast<T>(SHARED_WINDOW) : T{0};
  for (; mask != 0; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    d[lane] = static_cast<uint32_t>((addresses[lane] - window) >> CLUSTER_RANK_SHIFT);
  }
}
void build_rank(Builder& b) {
  const Type t = b.type(1);
  b.instruction.space = b.slot(0).empty() ? Space::Generic : Space::SharedCluster;
  if (b.slot(0).empty() && t.bits != 64) b.fail("a generic address has 64 bits");
  b.destination({'u', 32});
  b.source(t);
  b.handler(t.bits == 64 ? &run_rank<uint64_t> : &run_rank<uint32_t>, Class::Move);
}

// ---- setmaxnreg, griddepcontrol ----

void run_registers(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto count = static_cast<int>(instruction.offset);
  if (warp.cta().set_registers(warp, count, (instruction.flags & INCREASE) != 0)) return;
  (void)mask;
  warp.block(Wait::Registers, static_cast<uint64_t>(count), true);
}
void build_registers(Builder& b) {
  constexpr int64_t LEAST = 24, MOST = 256, UNIT = 8;
  b.instruction.offset = b.immediate();
  if (b.instruction.offset < LEAST || b.instruction.offset > MOST ||
      b.instruction.offset % UNIT != 0) {
    b.fail("a number of registers must be a multiple of 8 from 24 to 256");
  }
  b.instruction.flags = b.slot(0) == "inc" ? INCREASE : 0;
  b.instruction.control = Control::Barrier;
  b.instruction.converge = Converge::Whole;
  b.handler(&run_registers, Class::Other);
}

void run_wait_for_launch(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().cluster().wait_for_launch_before(warp);
}
// When the next launch starts is not simulated: it may do so at any time from here on.
void run_launch_dependents(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().cluster().let_next_launch_start(warp);
}
void build_dependency(Builder& b) {
  b.handler(b.slot(0) == "wait" ? &run_wait_for_launch : &run_launch_dependents, Class::Other);
}

constexpr Form FORMS[] = {
    {"barrier", "cluster arrive ?release|relaxed ?aligned", build_barrier},
    {"barrier", "cluster wait ?acquire ?aligned", build_barrier},
    {"mapa", "?shared::cluster u32|u64", build_mapa},
    {"getctarank", "?shared::cluster u32|u64", build_rank},
    {"setmaxnreg", "inc|dec sync aligned u32", build_registers},
    {"griddepcontrol", "launch_dependents|wait", build_dependency},
};

}  // namespace

std::span<const Form> cluster_forms() { return FORMS; }

}  // namespace archflash::sim
