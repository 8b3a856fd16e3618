// Counts what the lanes of an instruction cost in memory: wavefronts of shared memory and sectors
// of 32 bytes. Each active lane accesses `bytes` bytes at its offset or address.
#pragma once

#include <cstdint>

#include "sim/run/warp.h"

namespace archflash::sim {

// Wavefronts: with `bytes` of 4, 8 or 16; less counts as 4.
void count_shared(Warp& warp, const uint32_t* offsets, uint32_t mask, uint32_t bytes);
// Sectors. A card interleaves the lanes' local memory word by word.
void count_local(Warp& warp, uint32_t mask, uint32_t bytes);
// Sectors.
void count_global(Warp& warp, const uint64_t* addresses, uint32_t mask, uint32_t bytes);

}  // namespace archflash::sim
