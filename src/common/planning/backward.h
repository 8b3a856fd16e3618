// What all folders with a backward pass plan alike. Pure host code.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/backward_params.h"
#include "common/dropped_heads.h"
#include "common/planning/backward_problem.h"
#include "common/planning/plan.h"

namespace archflash::core {

// One main kernel of each type of inputs. Consecutive rows of a table that compute all gradients
// together are a set. A call takes the first set of large enough head dimensions for which the
// device has the shared memory.
struct BackwardTile {
  const char* name;          // the last word of the kernel's name: "d128_keys"
  int head_dim, head_dim_v;  // it takes d and dv up to these
  int gradients;             // which ones it computes: DQ | DK | DV
  int rows;                  // that a CTA owns: of queries if it computes dQ alone, else of keys
  int threads;
  int shared_bytes;
  int dq_block;  // query rows that pass by at a time where CTAs of keys add to sums of dQ; else 0
  // Where every query sees every key: the blocks of a CTA, for each other CTA of its head that runs
  // at the same time, from which on turns are faster (measured; an SM has one CTA of these).
  // 0: they never are.
  double turns_from;
  int ctas_per_sm = 2;      // at most: ptxas is told to allow no more
  int min_ctas_per_sm = 1;  // for which an SM must have the shared memory
};

// A row of a folder's table from the kernel's Config.
template <class C>
constexpr BackwardTile backward_tile(const char* name, double turns_from = 0) {
  constexpr bool ALL = C::GRADIENTS == (DQ | DK | DV);
  constexpr int CTAS = [] {
    if constexpr (requires { C::CTAS_PER_SM; }) return C::CTAS_PER_SM;
    return 2;
  }();
  return {name,       C::HEAD_DIM,     C::HEAD_DIM_V,      C::GRADIENTS, C::ROWS,
          C::THREADS, C::SHARED_BYTES, ALL ? C::BLOCK : 0, turns_from,   CTAS};
}

// How many CTAs of a tile run at the same time.
int64_t workers_of(const BackwardTile& tile, const Device& device);

// The end of a reason why a folder does not compute gradients.
constexpr const char* OTHERS_COMPUTE_THEM = "; kernels of another folder compute them";

// The main kernels for calls with masks as data or dropout, whose parameter is a
// MaskedBackwardParams and whose image is "<folder>/bwd_masked_<dtype>".
struct MaskedBackwardTiles {
  std::span<const BackwardTile> tiles;  // none: the folder has no such kernels
  bool base_2 = false;                  // scores are logarithms to base 2, not natural ones
};

constexpr int64_t ROW_TERMS_BYTES = 8;  // of the workspace for each query row: two floats

// Why a folder computes no gradients of a call, whichever kernels it has.
Reasons why_not_backward(const BackwardProblem& problem, const Description& description,
                         bool takes_masks, bool takes_lists = false);

// Where the parts of the workspace start, in bytes.
struct WorkspaceParts {
  int64_t turns = -1, terms = -1;  // none
  int64_t sums = 0;
};

// What every kernel of the backward pass is told of a call, and the addresses in it.
BackwardParams backward_params(const BackwardProblem& problem, const DqSums& sums);
std::vector<PointerSlot> backward_pointers(const BackwardProblem& problem, const DqSums& sums,
                                           const WorkspaceParts& parts);

// By which numbers of heads a call, or a part of one, draws what is dropped.
DroppedHeads dropped_heads(const BackwardProblem& problem);

// The plan, or the reasons why not: first the terms of each query row and zeros for the sums of dQ
// ("<folder>_backward_rows_<dtype>", into the workspace), unless nobody needs them, then the main
// kernels ("<folder>_attention_bwd_<dtype>_<tile>"), dQ from its sums if they made such
// ("<folder>_backward_dq_<dtype>"), and the gradient of the sinks
// ("<folder>_backward_sinks_<dtype>"), all of the image "<folder>/bwd_<dtype>".
//
// shares_heads: the folder has a kernel that adds up shares ("<folder>_backward_shares_<dtype>"),
// and so several CTAs may share out the query heads of a tile of keys.
PlanResult plan_backward(const Description& description, std::span<const BackwardTile> tiles,
                         const BackwardProblem& problem, const Device& device,
                         const MaskedBackwardTiles& masked = {}, bool shares_heads = false);

}  // namespace archflash::core
