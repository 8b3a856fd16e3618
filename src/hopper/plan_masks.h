// The launches of a call with masks as data. Pure host code.
#pragma once

#include <cstdint>

#include "common/planning/plan.h"
#include "common/problem.h"
#include "hopper/plan_tiles.h"

namespace archflash::hopper {

// Whether the kernels that read a summary can serve a call: attn_mask, key_ranges or alibi_slopes,
// which need none, are the only mask as data, and a tensor map describes the elements of attn_mask
// if they are added.
bool reads_summary(const Problem& problem);

// Turns the launch of `plan` into that of a kernel that takes masks as data.
void add_masks(LaunchPlan& plan, const Problem& problem);

// How many of the last tiles of a call with block_mask are ordered by their work.
int64_t ordered_tiles(const LaunchPlan& plan, const Problem& problem, const KernelTile& tile);

// Puts the launch that orders `ordered` tiles before that of `plan`. It zeroes the counter of
// tiles.
void order_tiles(LaunchPlan& plan, const Problem& problem, int64_t ordered);

// Turns the launch of `plan` into that of a kernel that reads a summary of a mask, and puts the
// launch that makes the summary before it. That one zeroes the counter of tiles, too.
void add_summary(LaunchPlan& plan, const Problem& problem);

}  // namespace archflash::hopper
