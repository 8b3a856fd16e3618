// How a folder states its kernels, and how one of them is chosen for a call. Pure host code.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>

#include "common/planning/plan.h"
#include "common/problem.h"
#include "common/swizzle.h"

namespace archflash::core {

// What one TMA copy moves, in elements. No rows: the kernel has no such tensor map.
struct Box {
  int columns = 0, rows = 0;
  Swizzle swizzle = Swizzle::None;
  int heads = 1;
};

// When a kernel serves a call whose head dimensions it takes: where all of this holds.
struct ServesFrom {
  // An SM of the device has room for this many of its CTAs.
  int min_ctas_per_sm = 1;
  // The call has more row tiles, of all heads together, than this for each SM of the device, and
  // its sequences use more than half of a tile's rows. 0: however few there are.
  double min_tiles_per_sm = 0;
  // The limit in place of min_tiles_per_sm where row tiles take unequal time, because of a mask or
  // of packed sequences.
  double min_uneven_tiles_per_sm = min_tiles_per_sm;
  // The call has so many keys.
  int64_t min_keys = 0, max_keys = INT64_MAX;
  // An SM of the device has so many bytes of shared memory at most.
  int64_t max_shared_per_sm = INT64_MAX;
};

// What keys shared out over several CTAs cost, in keys that a CTA could pass in that time
// (choose_splits). The numbers here are guesses: no GPU was asked.
struct SplitCosts {
  int64_t start = 256;           // of a CTA
  int64_t combine = 512;         // of the second kernel
  int64_t combine_share = 0;     // of the second kernel, for each share
  int64_t fewest_keys = 512;     // no share is shorter
  int64_t unsplit_start = 0;     // of all CTAs where no keys are shared out
  int64_t rows_per_key = 0;      // of shares that are written and combined in a key's time; 0: many
  int64_t combined_per_key = 0;  // rows, of however many shares, in a key's time; 0: many
  // Whether causal calls count with the mean length of their tiles, too. Else all count as having
  // the longest.
  bool by_mean = false;
};

// One kernel of each type of inputs. In a folder's table the kernels for the smallest head
// dimensions come first. Among those for the same ones the best comes first, and the last one
// serves whatever the others do not.
struct Tile {
  const char* name;          // the last word of the kernel's name: "d128_large"
  const char* reason;        // why it is there, for people
  int head_dim, head_dim_v;  // it takes d and dv up to these
  int block_q, block_k;      // query rows of the tile (of each packed head), keys at a time
  int threads;               // of a CTA
  int warps;                 // of them those that compute rows: no producers or other roles
  int rows_per_warp = 0;     // 0: warps share the rows
  int k_stages = 0;          // buffers for blocks of K,
  int v_stages = 0;          // and for V; 0: K and V share those of K
  int cluster = 1;           // CTAs that compute one tile together
  int packed_heads = 1;      // heads that share a head of K and lie in one tile
  // So many shares of a tile's keys at most, whose CTAs are a cluster and need no second kernel; 0:
  // shares are combined by one.
  int most_joined = 0;
  bool can_split = false;  // for few query rows: keys may be split, heads packed (split_keys.h)
  int ctas_per_sm;         // as many as the registers allow
  int shared_bytes;        // of a CTA
  Box q_box, k_box, v_box, out_box;
  ServesFrom serves = {};
  SplitCosts split_costs = {};
};

// A row of a folder's table, from the Config of its kernel. The folder adds what is special about
// it, such as boxes.
template <class C>
constexpr Tile tile(const char* name, ServesFrom serves, const char* reason) {
  Tile tile{.name = name,
            .reason = reason,
            .head_dim = C::HEAD_DIM,
            .head_dim_v = C::HEAD_DIM,
            .block_q = C::BLOCK_Q,
            .block_k = C::BLOCK_K,
            .threads = C::THREADS,
            .warps = C::WARPS,
            .rows_per_warp = C::WARP_ROWS,
            .ctas_per_sm = C::CTAS_PER_SM,
            .shared_bytes = C::SHARED_BYTES,
            .serves = serves};
  if constexpr (requires { C::HEAD_DIM_V; }) tile.head_dim_v = C::HEAD_DIM_V;
  if constexpr (requires { C::STAGES; }) tile.k_stages = tile.v_stages = C::STAGES;
  if constexpr (requires { C::CAN_SPLIT; }) tile.can_split = C::CAN_SPLIT;
  if constexpr (requires { C::MOST_JOINED; }) tile.most_joined = C::MOST_JOINED;
  return tile;
}

// The box of a device::SlabTile, which counts `pack` elements as one column.
template <class SlabTile>
constexpr Box box(int pack) {
  return {SlabTile::SLAB * pack, SlabTile::BOX_ROWS, SlabTile::SWIZZLE};
}

// Row tiles of one head, all sequences together; with cu_seqlens the bound that holds whatever the
// lengths are.
int64_t row_tiles(const Problem& problem, int block_q);
// Row tiles of all heads.
int64_t tiles_of(const Problem& problem, const Tile& tile);
// The row tiles of all heads that have rows: max_seqlen_q may say that others are empty.
int64_t filled_tiles(const Problem& problem, const Tile& tile);

int64_t rows_per_sequence(const Problem& problem);  // on average

// Whether all row tiles take the same time.
bool equal_tiles(const Problem& problem);

// Whether a mask hides keys after a row and none before it: causal, with any window_right.
bool is_triangle(const Problem& problem);

// CTAs that an SM of the device has room for: at least 1.
int64_t resident_ctas(const Tile& tile, const Device& device);

// Tiles that a device computes at the same time: at least 1.
int64_t workers_of(const Tile& tile, const Device& device);

// Bytes of K and V of one head of a sequence.
int64_t kv_head_bytes(const Problem& problem);

// Packs the heads that share a head of K into the rows of a tile, a power of two (PackedHeads),
// where that saves a quarter of the tiles: K and V are read that much less often. A tensor map
// cannot repeat a head, as an expanded q or out does.
void pack_heads(const Problem& problem, Tile& tile);

bool takes_head_dims(const Tile& tile, const Problem& problem);
bool serves(const Tile& tile, const Problem& problem, const Device& device);

// The reasons why none of a folder's tiles can be launched.
Reasons too_little_shared_memory(const std::string& folder, int64_t needed, const Device& device);
Reasons grid_too_large(int64_t ctas);
constexpr int64_t GRID_LIMIT = INT32_MAX;  // CUDA: CTAs along x

// Shared memory with which a device can serve every head dimension of a table.
template <class T>
int64_t shared_bytes_for_all(std::span<const T> tiles) {
  int64_t most = 0;
  for (const Tile& tile : tiles) {
    int64_t least = tile.shared_bytes;
    for (const Tile& other : tiles) {
      if (other.head_dim == tile.head_dim) least = std::min<int64_t>(least, other.shared_bytes);
    }
    most = std::max(most, least);
  }
  return most;
}

template <class T>
struct Choice {
  const T* tile = nullptr;
  Reasons reasons = {};  // where there is no tile
};

// Chooses from a table for one type of inputs. T is Tile, or a folder's own struct derived from it.
template <class T>
Choice<T> choose(const std::string& folder, std::span<const T> tiles, const Problem& problem,
                 const Device& device) {
  const T* chosen = nullptr;
  for (const T& tile : tiles) {
    if (!takes_head_dims(tile, problem)) continue;
    if (chosen != nullptr && tile.head_dim != chosen->head_dim) break;  // for larger heads
    if (tile.shared_bytes > device.shared_per_block) continue;
    chosen = &tile;
    if (serves(tile, problem, device)) break;
  }
  if (chosen == nullptr)
    return {.reasons = too_little_shared_memory(folder, shared_bytes_for_all(tiles), device)};
  const int64_t ctas = tiles_of(problem, *chosen);
  if (ctas > GRID_LIMIT) return {.reasons = grid_too_large(ctas)};
  return {.tile = chosen};
}

// The kernel of a table that a plan launches; null for a plan that launches none of them.
template <class T>
const T* taken(std::span<const T> tiles, const LaunchPlan& plan) {
  for (const T& tile : tiles) {
    if (plan.tile.name == tile.name) return &tile;
  }
  return nullptr;
}

}  // namespace archflash::core
