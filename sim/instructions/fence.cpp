// Fences, and hints about caches.
#include <bit>

#include "sim/instructions/memory_order.h"
#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

void run_fence(Warp& warp, const Instruction& instruction, uint32_t) {
  if (RaceDetector* races = warp.cta().races()) {
    races->fence(warp.agent(), scope_of(instruction));
  }
}
void build_fence(Builder& b) {
  if (b.has("gl") || b.has("sys") || b.has("gpu")) b.kernel().orders_globally = true;
  b.instruction.flags = order_flags(b);
  b.handler(&run_fence, Class::Fence);
}
// `offset` says whether the fence is for global memory, too.
void run_proxy_fence(Warp& warp, const Instruction& instruction, uint32_t) {
  if (RaceDetector* races = warp.cta().races())
    races->proxy_fence(warp.agent(), instruction.offset != 0);
  warp.cta().mbarriers().fence(warp);
}
void build_proxy_fence(Builder& b) {
  b.instruction.offset = b.slot(2).empty() || b.has("global");
  b.handler(&run_proxy_fence, Class::Fence);
}

void run_nothing(Warp&, const Instruction&, uint32_t) {}
// A hint about caches has its address checked and accesses nothing.
void build_prefetch(Builder& b) {
  b.address(space_named(b.slot(0)));
  b.handler(&run_nothing, Class::Other);
}
void build_discard(Builder& b) {
  b.address(space_named(b.slot(0)));
  if (b.immediate() != 128) b.fail("the size must be 128");
  b.handler(&run_nothing, Class::Other);
}
// createpolicy: nothing but cache hints uses a policy, so that any value will do.
void run_policy(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint64_t* d = warp.lanes<uint64_t>(instruction.operands[0]);
  for (; mask != 0; mask &= mask - 1) d[std::countr_zero(mask)] = 0;
}
void build_policy(Builder& b) {
  b.destination({'b', 64});
  if (b.operands_left() > 0) b.source({'f', 32});
  b.handler(&run_policy, Class::Other);
}

constexpr Form FORMS[] = {
    {"membar", "cta|gl|sys", build_fence},
    {"fence", "?sc|acq_rel|acquire|release $scope", build_fence},
    {"fence", "proxy async ?global|shared::cta|shared::cluster", build_proxy_fence},
    {"fence", "proxy alias", build_fence},
    {"prefetch", "?global|local L1|L2", build_prefetch},
    {"prefetch", "global L2::evict_last|L2::evict_normal", build_prefetch},
    {"prefetchu", "L1", build_prefetch},
    {"discard", "?global L2", build_discard},
    {"createpolicy",
     "fractional L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged "
     "?L2::evict_unchanged b64",
     build_policy},
};

}  // namespace

std::span<const Form> fence_forms() { return FORMS; }

}  // namespace archflash::sim
