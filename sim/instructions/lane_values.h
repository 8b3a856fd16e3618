// Reads and writes one lane of a register whose width is known only when the kernel is loaded.
#pragma once

#include <cstdint>

#include "sim/run/warp.h"

namespace archflash::sim {

inline uint64_t read_lane(Warp& warp, Ref ref, int lane, int bytes) {
  return bytes == 8 ? warp.lanes<const uint64_t>(ref)[lane] : warp.lanes<const uint32_t>(ref)[lane];
}
inline void write_lane(Warp& warp, Ref ref, int lane, int bytes, uint64_t value) {
  if (bytes == 8)
    warp.lanes<uint64_t>(ref)[lane] = value;
  else if (bytes == 4)
    warp.lanes<uint32_t>(ref)[lane] = static_cast<uint32_t>(value);
  else
    warp.lanes<uint32_t>(ref)[lane] = static_cast<uint32_t>(value & ((1u << 8 * bytes) - 1));
}

}  // namespace archflash::sim
