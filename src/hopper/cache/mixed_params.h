// The one parameter of the hopper kernels for packed sequences of mixed lengths over a KV cache in
// pages: requests that decode beside prompts, as a server's steps have them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/partials.h"
#include "common/tensor_map.h"
#include "hopper/cache/cache_params.h"

namespace archflash::hopper {

// A row tile of all heads of a sequence, as the ordering kernel (mixed_order.cuh) finds it.
struct alignas(16) TileEntry {
  int32_t sequence;
  int32_t first_row;
  int32_t nq, nk;  // lengths of the sequence
  // 0: rows of one head. Else the sequence has few rows, a tile has some of all heads that share a
  // head of K, and so many CTAs share out its keys; this is number `share`. Where there are
  // several, the shares of head h of K leave their results at slot * heads_kv + h * shares + share.
  int32_t shares, share, slot;
};
static_assert(sizeof(TileEntry) == 32);

struct TileCounts {
  int32_t taken;      // 0: each layer has its own count of taken tiles, at Params::taken_gmem
  int32_t few, many;  // tiles of packed heads, and of one head, of all heads
};

// What the ordering kernel leaves in the workspace for the attention kernel, and what the shares of
// a tile leave there for the CTA that is done last.
struct MixedTiles {
  TensorMap q_map;  // as Params::q_map, with boxes of packed heads
  TileCounts* counts_gmem;
  TileEntry* few_gmem;   // (batch * tiles_of_few + most_extra_shares,)
  TileEntry* many_gmem;  // (row tiles of a head, all sequences together,)
  int32_t* done_gmem;    // (slots, 4): warps that have left their rows of a tile, at its first slot
  PartialEnd* ends_gmem;  // (slots, 64 rows)
  float* rows_gmem;       // (slots, 64 rows, dv)
  int32_t slots;  // of the ordering kernel one more: it clears Params::taken_gmem behind done_gmem
  int32_t most_many;         // entries that there is room for
  int32_t ctas;              // that take the tiles
  int32_t block_q, block_k;  // of the attention kernel
  int32_t heads_kv;
  int32_t page_shift;  // pages have 2^page_shift rows
};

struct MixedParams : CacheParams {
  MixedTiles tiles;
  static constexpr size_t TILES = sizeof(CacheParams);  // where they lie
};
static_assert(sizeof(MixedParams) == MixedParams::TILES + sizeof(MixedTiles));

// Sequences of at most so many rows have tiles of packed heads: one warpgroup computes those.
constexpr int FEW_ROWS = 64;
// Blocks of keys that are not shared out.
constexpr int FEWEST_SHARED_BLOCKS = 8;
constexpr int ORDER_MIXED_THREADS = 256;

// The most slots: the ordering kernel gives no share less than the part of all work that half a CTA
// has, which makes at most 2 * ctas shares beyond the first ones of the tiles that are shared out,
// and those tiles are no more.
constexpr int64_t most_slots(int64_t ctas) { return 4 * ctas; }
// The most entries beyond one for each sequence.
constexpr int64_t most_extra_shares(int64_t ctas, int64_t heads_kv) {
  return 2 * ctas / heads_kv + 1;
}

}  // namespace archflash::hopper
