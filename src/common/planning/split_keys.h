// Keys of a row tile shared out over several CTAs, for calls of few query rows: how many shares,
// and the second launch that combines what they leave in the workspace (partials.h). Pure host
// code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "common/partials.h"
#include "common/planning/plan.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::core {

// Into how many shares to split the keys of each tile: what the caller asked for, else what the
// model below expects to be the fastest. otherwise: its time without a split.
//
// A time is the number of keys that a CTA passes with one tile: rounds of the shares over the CTAs
// that run at the same time (workers_of), times the keys of a share and START_KEYS for its start,
// plus COMBINE_KEYS for the second kernel. CTAs that share an SM read keys side by side, as if each
// had an SM. No share is shorter than FEWEST_KEYS, and there are at most MOST_SPLITS shares and two
// rounds of CTAs. The numbers are guesses: no GPU was asked.
int64_t choose_splits(const Problem& problem, const Device& device, const Tile& tile,
                      int64_t otherwise);
constexpr int64_t START_KEYS = 256;
constexpr int64_t COMBINE_KEYS = 512;
constexpr int64_t FEWEST_KEYS = 512;
constexpr int64_t MOST_SPLITS = 128;  // unless more are asked for

// Keys that the longest tile passes without a split, in whole blocks; with cu_seqlens an estimate.
int64_t visited_keys(const Problem& problem, const Tile& tile);

// CTAs of the second kernel.
int64_t combine_ctas(const Problem& problem);

// Makes a plan for `problem` split: its only launch gets its partials at `offset` of its
// parameters, the second kernel, of the same image, follows.
void split_keys(LaunchPlan& plan, const Problem& problem, int64_t splits, size_t offset,
                const std::string& combine_kernel);

}  // namespace archflash::core
