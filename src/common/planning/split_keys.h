// Keys of a row tile shared out over several CTAs, for calls of few query rows: how many shares,
// how heads that share a head of K are packed into a tile, and the second launch that combines what
// the shares leave in the workspace (partials.h). Pure host code.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <variant>

#include "common/device/packed_heads.cuh"
#include "common/partials.h"
#include "common/planning/core_set.h"
#include "common/planning/plan.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::core {

// Into how many shares to split the keys of each tile: what the caller asked for, else what the
// model below expects to be the fastest. otherwise: its time without a split.
//
// A time is the number of keys that a CTA passes with one tile: rounds of the shares over the CTAs
// that run at the same time (workers_of), times the keys of a share and the start of a CTA, plus
// the second kernel (Tile::split_costs). CTAs that share an SM read keys side by side, as if each
// had an SM. There are at most MOST_SPLITS shares and two rounds of CTAs.
//
// Sequences with pages may all be as long as their tables, or of any length: then the CTAs of the
// longest one end last, and the others have half of its keys. Both times count alike.
int64_t choose_splits(const Problem& problem, const Device& device, const Tile& tile,
                      int64_t otherwise);
constexpr int64_t MOST_SPLITS = 128;  // unless more are asked for

// How many shares of the keys a call has whose tile's shares are a cluster (Tile::most_joined); 1:
// a tile without a cluster is faster, which choose_splits() gives `combined` shares.
int64_t choose_joined(const Problem& problem, const Device& device, const Tile& tile,
                      int64_t combined);

// Keys that the longest tile passes without a split, in whole blocks; with cu_seqlens an estimate.
int64_t visited_keys(const Problem& problem, const Tile& tile);

// The time without a split, in keys that a CTA passes: rounds of tiles over the CTAs that run at
// the same time. costs: of the tile that would be split.
int64_t unsplit_time(const Problem& problem, const Device& device, const Tile& tile,
                     const SplitCosts& costs);

// CTAs of the second kernel.
int64_t combine_ctas(const Problem& problem);

// How the kernel of a tile that can_split reads which rows the tile has.
device::PackedHeads packed_heads(const Tile& tile);

// A tile of a folder's table, and the shares of its keys.
template <class T>
struct SplitChoice {
  T tile;
  int64_t splits = 1;
  int64_t share_keys = 0;  // Partials::share_keys

  bool combines() const { return splits > 1 || share_keys > 0; }
};

// The keys of a share where a row's bits must not depend on what else is in the call: shares begin
// at every so many keys of a sequence. Its value is a guess: no GPU was asked.
constexpr int64_t FIXED_SHARE_KEYS = 1024;

// How many such shares a call has; with cu_seqlens as many as its longest sequence may need.
int64_t fixed_shares(const Problem& problem);

// A reason if the partial results of so many shares need more memory than a call should take.
Reasons refuse_workspace(const Problem& problem, const std::string& folder, int64_t splits);
constexpr int64_t MOST_WORKSPACE_BYTES = int64_t{4} << 30;

// Whether two tiles of a table compete for the same calls.
template <class T>
bool has_columns_of(const T& tile, const T& other) {
  if constexpr (requires { tile.columns; }) {  // a tile may leave out some of the last slab
    return tile.columns == other.columns && tile.columns_v == other.columns_v;
  } else {
    return tile.head_dim == other.head_dim;
  }
}

template <class T>
using TimeWithout = std::function<int64_t(const T& few)>;

// Chooses between `unsplit`, the tile of a folder's table that serves a call best without a split,
// and the tile of the table for few query rows, which can_split. That one is taken where it is
// `unsplit`, where packed heads save a quarter of the CTAs, and where a split is asked for or
// expected to be faster. A folder whose table has no such tile for the problem's head dimensions
// does not split, and neither does one that writes fp32 outputs.
// time_without: how long `unsplit` takes, in keys that a CTA of the tile for few rows passes; null:
// its rounds times the keys of a tile, as if both tiles computed equally fast.
template <class T>
std::variant<SplitChoice<T>, Reasons> choose_splits_of(const std::string& folder, const T* unsplit,
                                                       std::span<const T> tiles,
                                                       const Problem& problem, const Device& device,
                                                       const TimeWithout<T>& time_without = {}) {
  SplitChoice<T> choice{*unsplit};
  if (writes_f32(problem)) return choice;  // rows of packed heads are written in 16 bits
  const T* found = unsplit;
  if (!unsplit->can_split) {
    const auto other = std::find_if(tiles.begin(), tiles.end(), [&](const T& tile) {
      return tile.can_split && has_columns_of(tile, *unsplit) && takes_head_dims(tile, problem) &&
             serves(tile, problem, device);
    });
    if (other == tiles.end()) return choice;
    found = &*other;
  }
  T few = *found;
  if (few.shared_bytes > device.shared_per_block) {
    if (problem.num_splits > 1 || problem.batch_invariant)
      return too_little_shared_memory(folder, few.shared_bytes, device);
    return choice;
  }
  pack_heads(problem, few);
  if (problem.batch_invariant) {
    // Neither the kernel nor the shares depend on how many rows, heads or sequences there are. How
    // heads are packed may: it does not change the bits of a row.
    const int64_t splits = fixed_shares(problem);
    const int64_t ctas = std::max(tiles_of(problem, few) * splits, combine_ctas(problem));
    if (ctas > GRID_LIMIT) return grid_too_large(ctas);
    const Reasons too_much = refuse_workspace(problem, folder, splits);
    if (!too_much.empty()) return too_much;
    return SplitChoice<T>{few, splits, FIXED_SHARE_KEYS};
  }
  const bool packing_pays =
      few.packed_heads > 1 && 4 * tiles_of(problem, few) <= 3 * tiles_of(problem, *unsplit);
  if (unsplit->can_split || packing_pays) choice.tile = few;
  int64_t otherwise = unsplit_time(problem, device, choice.tile, few.split_costs);
  if (time_without && !choice.tile.can_split) otherwise = time_without(few);
  choice.splits = choose_splits(problem, device, few, otherwise);
  if (choice.splits > 1) choice.tile = few;
  const int64_t ctas = tiles_of(problem, choice.tile) * choice.splits;
  const int64_t largest = std::max(ctas, choice.splits > 1 ? combine_ctas(problem) : 0);
  if (largest > GRID_LIMIT) return grid_too_large(largest);
  return choice;
}

// choose_splits_of() with the tile that the table's rules choose.
template <class T>
std::variant<SplitChoice<T>, Reasons> choose_with_splits(const std::string& folder,
                                                         std::span<const T> tiles,
                                                         const Problem& problem,
                                                         const Device& device) {
  const auto [unsplit, reasons] = choose(folder, tiles, problem, device);
  if (unsplit == nullptr) return reasons;
  return choose_splits_of(folder, unsplit, tiles, problem, device);
}

// Adds a reason if a split is asked for with what a folder does not split, such as
// "float8_e4m3fn". The second function does the same for batch_invariant.
void refuse_splits(const Problem& problem, const std::string& folder, const std::string& given,
                   Reasons& reasons);
void refuse_batch_invariant(const Problem& problem, const std::string& folder,
                            const std::string& given, Reasons& reasons);

// Makes a plan for `problem` split: its only launch gets its partials at `offset` of its
// parameters, the second kernel, of the same image, follows. share_keys: Partials::share_keys.
// partial_rows: Partials::rows, where they are not all rows of q.
void split_keys(LaunchPlan& plan, const Problem& problem, int64_t splits, int64_t share_keys,
                size_t offset, const std::string& combine_kernel, int64_t partial_rows = 0);

// Makes the second launch of such a plan one of device/combine_shares.cuh. It may start early
// (Launch::uses_pdl) if its image has code compiled for 9.0.
// one_warp: for each row, as fixed shares need it, which keep a row's bits, and rows of which most
// have few shares. few_rows, base_scale: those of CombineSharesParams.
void combine_shares(Launch& combine, int64_t splits, bool one_warp, int64_t few_rows = 0,
                    float base_scale = 1.0f);

}  // namespace archflash::core
