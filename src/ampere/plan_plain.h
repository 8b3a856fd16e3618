// The plans of gradients by the kernels without rare options: those of bwd_plain.cu, bwd_only.cu
// and bwd_packed.cu. Pure host code.
#pragma once

#include <optional>
#include <span>

#include "common/mma_sync/params.h"
#include "common/planning/backward.h"
#include "common/planning/plan.h"

namespace archflash::ampere {

// On 10.x, which has the memory too, PyTorch's kernels come first: they are not built for it.
bool has_plain_kernels(const Device& device);

// The tile of a kernel for heads whose keys are one tile, if one serves a call; else none.
std::span<const core::BackwardTile> only_tiles(const Problem& call, const Device& device);

// The tile of a kernel with dropout for heads whose keys are one tile, if one serves a call, of
// which `undropped` is all but the dropout; else none.
std::span<const core::BackwardTile> only_dropout_tiles(const Problem& undropped,
                                                       const Device& device);

// Turns the main launch of a plan for that tile into one of its kernel. of_main: what kernels of
// more tiles are given.
void make_only_dropout(Launch& main, const Problem& call,
                       const mma_sync::DroppingBackwardParams& of_main);

// Makes a plan launch the kernel of PLAIN_TILES or BULK_TILES in the place of its main one, and
// says whether CTAs share out tiles.
bool make_plain(LaunchPlan& plan, const BackwardProblem& problem, const Device& device);

// The plan of packed sequences for the kernels of bwd_packed.cu. Nothing where they do not take the
// call, or where most sequences are far shorter than the longest one, so that most CTAs would have
// nothing to do.
std::optional<PlanResult> plan_packed_backward(const BackwardProblem& problem,
                                               const Device& device);

}  // namespace archflash::ampere
