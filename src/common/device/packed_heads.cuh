// Query heads that share a head of K, packed as rows of one tile: K and V are then read once for
// all of them. Otherwise most rows of a tile are empty in a call of few query rows (decoding).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "common/device/host_device.h"

namespace archflash::device {

// A tile has the same 2^row_bits query rows of each of `count` neighbouring heads, head after head.
// Its last rows belong to no head if `count` is no power of two. `head` and `row` of a row of the
// tile are counted from the tile's first head and first query row.
//
// The TMA box of the tile's Q is rows() rows of as many heads as fill the tile. What it brings
// beyond `count` is another head or zeros: nothing of it may be written out. The box of the output
// is rows() rows of `count` heads, or where each warp writes its own rows, what a warp has of both.
struct PackedHeads {
  int32_t count;  // 1: nothing is packed
  int32_t row_bits;

  ARCHFLASH_HOST_DEVICE int rows() const { return 1 << row_bits; }
  ARCHFLASH_HOST_DEVICE int head(int row_of_tile) const { return row_of_tile >> row_bits; }
  ARCHFLASH_HOST_DEVICE int row(int row_of_tile) const { return row_of_tile & (rows() - 1); }
};

// How a tile of tile_rows rows, a power of two, packs heads of which heads_per_kv share a head of
// K: all of them, or if they are more than the tile has rows, the largest power of two that divides
// them.
inline PackedHeads pack_heads(int tile_rows, int heads_per_kv) {
  const int heads =
      heads_per_kv <= tile_rows ? heads_per_kv : std::min(heads_per_kv & -heads_per_kv, tile_rows);
  const int rows = tile_rows / static_cast<int>(std::bit_ceil(static_cast<unsigned>(heads)));
  return {heads, std::countr_zero(static_cast<unsigned>(rows))};
}

}  // namespace archflash::device
