// What all folders with a backward pass plan alike. Pure host code.
#pragma once

#include <span>
#include <string>

#include "common/planning/backward_problem.h"
#include "common/planning/plan.h"

namespace archflash::core {

// One main kernel of each type of inputs. A call takes all of a table that have the first head
// dimensions that are large enough.
struct BackwardTile {
  const char* name;          // the last word of the kernel's name: "d128_keys"
  int head_dim, head_dim_v;  // it takes d and dv up to these
  bool owns_keys;            // each CTA owns rows of keys, otherwise of queries
  int rows;                  // of a CTA
  int threads;
  int shared_bytes;
};

// A row of a folder's table from the kernel's Config.
template <class C>
constexpr BackwardTile backward_tile(const char* name, bool owns_keys) {
  return {name, C::HEAD_DIM, C::HEAD_DIM_V, owns_keys, C::ROWS, C::THREADS, C::SHARED_BYTES};
}

// The plan, or the reasons why not: first the terms of each query row ("<folder>_backward_rows_
// <dtype>", into the workspace), then the main kernels ("<folder>_attention_bwd_<dtype>_<tile>"),
// and the gradient of the sinks ("<folder>_backward_sinks_<dtype>"), all of the image
// "<folder>/bwd_<dtype>".
PlanResult plan_backward(const Description& description, std::span<const BackwardTile> tiles,
                         const BackwardProblem& problem, const Device& device);

}  // namespace archflash::core
