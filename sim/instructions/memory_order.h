// What loads, stores and atomics share: their flags, the spaces they name, and how they order
// memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string_view>

#include "sim/load/builder.h"
#include "sim/memory/access.h"

namespace archflash::sim {

// Flags of loads, stores and atomics.
constexpr uint32_t SIGNED_LOAD = 1, WIDE_REGISTER = 2, STRONG = 4, ACQUIRE = 8, RELEASE = 16,
                   IN_CTA = 32, IN_CLUSTER = 64;  // a scope that is smaller than the GPU

inline Space space_named(std::string_view name) {
  return name == "shared::cluster"    ? Space::SharedCluster
         : name.starts_with("shared") ? Space::Shared
         : name == "global"           ? Space::Global
         : name == "local"            ? Space::Local
         : name.starts_with("param")  ? Space::Param
         : name == "const"            ? Space::Const
                                      : Space::Generic;
}

// The race detector watches memory at the granularity of a kernel's smallest access.
inline void note_width(Builder& b, Space space, uint32_t bytes) {
  const int log2 = std::countr_zero(std::min(bytes, 4u));
  Kernel& kernel = b.kernel();
  if (space == Space::Shared || space == Space::Generic) {
    kernel.race_granule_log2 = std::min(kernel.race_granule_log2, log2);
  }
  if (space == Space::Global || space == Space::Generic) {
    kernel.global_granule_log2 = std::min(kernel.global_granule_log2, log2);
  }
}

inline uint32_t order_flags(const Builder& b) {
  return (b.has("volatile") || b.has("relaxed") ? STRONG : 0) |
         (b.has("acquire") ? STRONG | ACQUIRE : 0) | (b.has("release") ? STRONG | RELEASE : 0) |
         (b.has("acq_rel") ? STRONG | ACQUIRE | RELEASE : 0) | (b.has("cta") ? IN_CTA : 0) |
         (b.has("cluster") ? IN_CLUSTER : 0);
}
inline SyncScope scope_of(const Instruction& instruction) {
  return instruction.flags & IN_CTA       ? SyncScope::Cta
         : instruction.flags & IN_CLUSTER ? SyncScope::Cluster
                                          : SyncScope::Gpu;
}

// The key of a synchronising variable in the race detector; it is unique over the spaces.
inline uint64_t variable_key(const Located& located, int lane) {
  return located.space[lane] == Space::Shared ? SHARED_WINDOW + located.address[lane]
                                              : located.address[lane];
}

}  // namespace archflash::sim
