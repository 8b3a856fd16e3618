// The tiles of hopper's forward kernels, and which of them serves a call. Pure host code.
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "common/planning/plan.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::hopper {

// Where packed sequences fill the GPU: the time that an SM takes for the start and end of a tile,
// and for each key of a whole one, in ns. Measured (docs/lab/hopper.md).
struct PackedTimes {
  double start = 0, key = 0;  // 0: unmeasured
};

constexpr double SHARED_BY_GROUPS = 0.55;  // as core::share_of_rows() has it

// A row of the tables.
struct KernelTile : core::Tile {
  int columns = 0, columns_v = 0;  // of the tiles of Q and K, and of V: whole slabs
  int q_stages = 0;
  int barriers = 0;
  int producer_registers = 0, consumer_registers = 0;  // of a thread; 0: the same for all
  bool in_turns = false;
  int row_step = 0;
  int v_columns_of_cta = 0;
  int grouped_slabs = 0;       // of K and V, if they lie in GroupedTiles, else 0
  bool cuts_tiles = false;     // the last ones into parts
  bool is_short = false;       // for short sequences: small CTAs that stay on an SM
  int tail_keys = 0;           // of a last block, which are multiplied alone; 0: all
  bool packs = false;          // each warpgroup may have rows of several heads (GroupHeads)
  bool clears_beside = false;  // rows of V that do not count
  bool takes_lists = false;    // of the tiles of packed sequences (order_packed.cuh)
  bool dense = false;          // its kernel reads a summary of attn_mask
  int streams = 0;  // of a CTA, in kernels for calls whose only mask as data is block_mask
  bool in_full_rounds = false;  // only for calls whose tiles leave little of the last round empty
  bool copies_own = false;      // its warps copy the elements of attn_mask (copies_own())
  bool mixed = false;           // for packed sequences of mixed lengths (mixed_params.h)
  // Whether a kernel for 8 bits can transpose V, whether it takes V that was transposed before, and
  // the box in which TMA brings the V that it transposes.
  bool transposes_v = false, takes_transposed_v = false;
  core::Box raw_v_box = {};
  const char* image = nullptr;  // the kernel is in an image of this name; null: in that of `fwd`
  // For the model of choose_tile(): the scores that an SM computes in a time, relative to the first
  // tile of the table for the same head dimensions, and the time that a tile's start and end take
  // beyond core::TILE_KEYS, in keys. No speed: the rules of `serves` choose among the table's
  // tiles.
  double speed = 0;
  // That speed where has_odd_rows(), and where a call's tiles take unequal times; 0: the same.
  double odd_speed = 0, uneven_speed = 0;
  int start_keys = 0;
  // The share of the time of its keys that the first tile of a head takes even if few warpgroups
  // have rows; the rest is in proportion to these. Up to 64 columns it is less where a whole tile
  // follows, which the other warpgroups begin meanwhile.
  double shared_by_groups = SHARED_BY_GROUPS;
  PackedTimes packed = {};
  PackedTimes odd_packed = {};  // where has_odd_rows(); 0: the same
};

// The table of the tiles that can serve a call: there is one for each kind of kernels.
std::span<const KernelTile> tiles_for(const Problem& problem);

// The tile of such a table with which a call is expected to be done first, and into how many shares
// its keys are split; or why there is none.
std::variant<core::SplitChoice<KernelTile>, Reasons> choose_tile(const Problem& problem,
                                                                 const Device& device);

// Whether packed sequences are known to be of such different lengths that few of them have most of
// the work.
bool has_far_longer_ones(const Problem& problem);

// Whether the times of KernelTile::packed are for a call, if its tile has them: packed sequences
// that fill the GPU. And that time, in ns (plan_packed.cpp).
bool are_many_packed(const Problem& problem, const Device& device);
// Whether rows of heads begin in the middle of a sector of memory, so that TMA's boxes have parts
// of more sectors.
bool has_odd_rows(const Problem& problem);
// Whether a tile of short sequences serves packed ones of fewer columns than its own, too: odd rows
// come sooner in boxes of 64 columns, and 192 columns have no such tile.
bool takes_wider(const Problem& problem, const KernelTile& tile);
double packed_time(const Problem& problem, const Device& device, const KernelTile& tile);
// Whether the longest of the packed sequences is known to be so much longer than the mean that its
// tiles would often be the last.
bool is_uneven(const Problem& problem);
// A tile whose kernel can do that with the heads that share a head of K packed into its rows, where
// that time is shorter then; else the tile as it is.
KernelTile pack_if_faster(const Problem& problem, const Device& device, const KernelTile& tile);
int groups_of(const KernelTile& tile);  // warpgroups of consumers
// Whether no sequence has rows for a second warpgroup of such a tile of more than 128 columns of V.
// The tile of short sequences is faster then: 1 to 8 rows 8/1 heads D=192 60.9 us of 74.7.
bool leaves_groups_empty(const Problem& problem, const KernelTile& tile);
// Whether a kernel before lists the tiles of packed sequences, the longest first.
bool lists_tiles(const Problem& problem, const KernelTile& tile);
// The tile by which a second kernel serves the packed sequences of up to `rows` rows, where calls
// with few long ones are done sooner; rows = 0: they are not.
struct FewRows {
  KernelTile tile;
  int64_t rows = 0;
  double time = 0;  // of the whole call, in ns
};
FewRows few_rows_of(const Problem& problem, const Device& device, const KernelTile& tile);

// The row tiles of a head of one sequence, with a tile of the tables, as the model of makespans has
// them. Packed sequences count as having the mean length.
struct HeadModel {
  int64_t nq, nk;
  std::vector<double> times;  // in keys, from the last row tile to the first
  // The time of a head's only tile, with rows for some of the warpgroups, where CTAs take many such
  // tiles one after another; 0: it has more tiles, or all rows.
  double time_among_others = 0;

  HeadModel(const Problem& problem, const KernelTile& tile);
};

// Which heads' row tiles follow one another: TileOrder::heads_per_group.
int32_t heads_per_group(const Problem& problem, const Device& device, const KernelTile& tile);

// Whether packed sequences are known to have one row tile of a head at most, so that a kernel need
// not look for the sequence of a tile. Rows of no sequence are cleared by the CTAs of their tiles,
// of which there are as many as of all rows then.
bool has_one_tile_each(const Problem& problem, const KernelTile& tile);

// The row tiles that are left for the last round of CTAs that stay, if they are so few that cut
// into parts of `rows` rows they still fit into one round. rows = 0: none are cut.
struct CutTiles {
  int64_t whole = 0, rows = 0;
};
CutTiles cut_last_round(const Problem& problem, const Device& device, const KernelTile& tile,
                        const HeadModel& head, int64_t tiles, int64_t ctas);

// Whether the CTAs count the tiles that they have taken, so that the one that is done first takes
// the next one. Else they take them in rounds, of which every second one is handed out in reverse
// order.
bool counts_tiles(const LaunchPlan& plan, const Problem& problem, const KernelTile& tile);

}  // namespace archflash::hopper
