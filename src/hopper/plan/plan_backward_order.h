// In which order hopper's backward kernels take the tiles of keys (backward_order.cuh), and when
// they take turns. Pure host code.
#pragma once

#include <cstdint>

#include "common/planning/backward_rounds.h"
#include "common/planning/backward_shares.h"
#include "hopper/plan/plan_backward_tiles.h"

namespace archflash::hopper {

// One share has all query rows of a tile of keys.
core::RowShares whole_rows(const Problem& call, const core::RoundsTile& tile);

// How the CTAs of a tile of keys share out what it has to do: so many share the query heads, as if
// each had a head of K of its own, and of each of these so many the query rows, in whole rounds.
struct Shares {
  int64_t heads;
  core::RowShares rows;
  int64_t heads_of_share;  // at most
  int64_t all() const { return heads * rows.shares; }
};

// A call whose heads of K are those that its CTAs see.
Problem with_shared_heads(const Problem& call, int64_t head_shares);

// Finds the shares with which a call takes the least time by a model of the makespan. Query heads
// are shared out first, because CTAs with rows of the same heads add to the same sums of dQ at the
// same time. Of packed sequences, as if all had the mean length, heads alone.
Shares share_out(const Problem& call, const BackwardTile& tile, const Device& device);

// The order in which the tiles of keys of all heads come. BackwardKernelParams says what each field
// does to it.
struct KeyTileOrder {
  int64_t group_heads;
  int64_t upward_heads = 0;
  int64_t tiles_in_a_row = 1;
  int64_t packed_rows = INT32_MAX;
  int64_t packed_tiles = 0;
  int64_t upward_work = 0;
  int64_t packed_sequences = 1;
};

// How CTAs take turns: how many sums of dQ a round has, and at which of so many steps tiles that
// run together start. BackwardKernelParams says how a kernel reads them.
struct Turns {
  int64_t sums = 1;
  int64_t tiles = 0, steps_shift = 0;
};

// A causal mask, a window, or both.
bool is_windowed(const Problem& call);

// Whether a call has rows and keys and none of the options that most kernels leave out, and every
// row sees every key, or at least the first one and no more than those up to a diagonal.
bool is_plain(const Problem& call);
bool is_plain_or_causal(const Problem& call);

// Whether a call is of packed sequences of up to so many rows and keys in the mean, none of which
// is known to be far longer.
bool is_packed_short(const Problem& call, int64_t rows);

// Whether two tiles of keys have so many rows that turns save more than the second one waits.
bool has_many_rows(const Problem& call);

// Whether CTAs take turns though nobody asks for it. Then the first one to add to a sum of dQ
// writes it, and no launch has to clear it. Measured on an H200 (docs/lab/hopper.md) that was
// faster for many heads with few keys, and where many rows are shared out, when more CTAs add to
// the same sums; CTAs with shares of few rows wait for one another.
bool turns_are_faster(const Problem& call, const core::RoundsTile& tile, const Shares& shares,
                      const Device& device);

// Groups have those heads whose Q, dO and sums of dQ stay in L2, measured on an H200
// (docs/lab/hopper.md). In turns more of them, because the tiles of a head that are computed at the
// same time wait for one another; under a mask up to 128 columns all, which was faster there.
//
// Without a mask the groups are smaller, where that does not make more than TILES_AT_A_TIME tiles
// of a head be computed at the same time, or in turns more than half as many as it has rounds.
//
// In turns under a causal mask a tile of keys has fewer rounds than the one before. From the last
// tile to the first, over rounds upwards, each comes to a round just behind the one that it waits
// for. The last group goes the other way, from the longest tile to the shortest, so that all CTAs
// end together. These groups are smaller, because tiles of a head that run at the same time are at
// far apart rounds. Where query heads share a head of K they are so far apart that each tile reads
// Q and dO from memory again: so these calls go the first way, with tiles in a row.
KeyTileOrder order_tiles(const BackwardProblem& problem, const BackwardTile& tile,
                         const core::RowShares& split, const Device& device);

// How a call takes turns whose heads come in groups of group_heads.
//
// Tiles that run together start apart where there are rounds enough of all heads: then the turn has
// mostly come before a CTA comes to a round, with two sums for each chain of tiles. Measured on an
// H200 (docs/lab/hopper.md), where keys are more than rows or heads share a head of K.
// takes_chains: whether a kernel knows of more than one.
Turns find_turns(const BackwardProblem& problem, const core::RoundsTile& tile,
                 const core::RowShares& split, int64_t group_heads, bool takes_chains,
                 const Device& device);

// How a call takes turns whose CTAs list the rounds that they go over (backward_lists.cuh).
// ctas: how many of them run at a time.
Turns find_turns_of_lists(const BackwardProblem& problem, const core::RoundsTile& tile,
                          int64_t ctas);

}  // namespace archflash::hopper
