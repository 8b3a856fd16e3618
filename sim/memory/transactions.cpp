#include "sim/memory/transactions.h"

#include <algorithm>
#include <bit>

#include "sim/run/cta.h"

namespace archflash::sim {
namespace {

constexpr uint32_t BANKS = 32;
constexpr uint32_t BANK_BYTES = 4;
constexpr uint64_t SECTOR_BYTES = 32;

// The number of wavefronts that an access takes, and how many it would take without bank conflicts
// (`ideal`).
uint32_t bank_wavefronts(const uint32_t* offsets, uint32_t mask, uint32_t bytes, uint32_t& ideal) {
  const uint32_t unit = bytes <= BANK_BYTES ? BANK_BYTES : std::min(bytes, 16u);
  const uint32_t lanes_at_once = LANES * BANK_BYTES / unit;  // a wavefront moves 128 bytes
  const uint32_t columns = BANKS * BANK_BYTES / unit;
  uint32_t total = 0;
  ideal = 0;
  const auto log2 = static_cast<uint32_t>(std::countr_zero(unit));
  for (uint32_t first = 0; first < LANES; first += lanes_at_once) {
    uint32_t part = mask >> first;
    if (lanes_at_once < LANES) part &= (1u << lanes_at_once) - 1;
    if (part == 0) continue;
    ++ideal;
    uint32_t columns_used = 0;
    for (uint32_t rest = part; rest != 0; rest &= rest - 1) {
      const uint32_t at = offsets[first + static_cast<uint32_t>(std::countr_zero(rest))] >> log2;
      columns_used |= 1u << (at & (columns - 1));
    }
    if (columns_used == part || std::popcount(columns_used) == std::popcount(part)) {
      ++total;  // no two lanes meet in a bank
      continue;
    }
    // The rows that each column of banks has been asked for.
    uint32_t seen[LANES], seen_column[LANES];
    int seen_count = 0;
    uint32_t used = 0;
    bool conflict = false;
    for (uint32_t rest = part; rest != 0; rest &= rest - 1) {
      const uint32_t at = offsets[first + static_cast<uint32_t>(std::countr_zero(rest))] / unit;
      const uint32_t column = at & (columns - 1);
      if (used >> column & 1) {
        bool known = false;
        for (int k = seen_count - 1; k >= 0 && !known; --k) known = seen[k] == at;
        if (known) continue;
        conflict = true;
      }
      used |= 1u << column;
      seen[seen_count] = at;
      seen_column[seen_count++] = column;
    }
    uint32_t most = 1;
    if (conflict) {
      uint8_t count[LANES] = {};
      for (int k = 0; k < seen_count; ++k) {
        most = std::max<uint32_t>(most, ++count[seen_column[k]]);
      }
    }
    total += most;
  }
  return total;
}

}  // namespace

void count_shared(Warp& warp, const uint32_t* offsets, uint32_t mask, uint32_t bytes) {
  uint32_t ideal = 0;
  MemoryCounts& counts = warp.cta().counts().memory[warp.pc()];
  counts.wavefronts += bank_wavefronts(offsets, mask, bytes, ideal);
  counts.ideal += ideal;
}

void count_local(Warp& warp, uint32_t mask, uint32_t bytes) {
  const uint64_t moved = static_cast<uint64_t>(std::popcount(mask)) * bytes;
  warp.cta().counts().memory[warp.pc()].local += (moved + SECTOR_BYTES - 1) / SECTOR_BYTES;
}

void count_global(Warp& warp, const uint64_t* addresses, uint32_t mask, uint32_t bytes) {
  uint64_t sectors[LANES];
  int count = 0;
  bool sorted = true;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const uint64_t sector = addresses[std::countr_zero(rest)] / SECTOR_BYTES;
    if (count > 0) {
      if (sectors[count - 1] == sector) continue;
      sorted = sorted && sectors[count - 1] < sector;
    }
    sectors[count++] = sector;
  }
  if (!sorted) {
    std::sort(sectors, sectors + count);
    count = static_cast<int>(std::unique(sectors, sectors + count) - sectors);
  }
  warp.cta().counts().memory[warp.pc()].transactions +=
      static_cast<uint64_t>(count) * std::max<uint64_t>(1, bytes / SECTOR_BYTES);
}

}  // namespace archflash::sim
