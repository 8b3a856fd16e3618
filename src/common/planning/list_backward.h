// What folders plan alike for the gradients of calls with lists of keys. Pure host code.
#pragma once

#include <cstdint>
#include <span>

#include "common/planning/backward_problem.h"
#include "common/planning/plan.h"

namespace archflash::core {

// A main kernel of each type of inputs. In a folder's table those for the smallest head dimensions
// come first.
struct ListTile {
  const char* name;          // the last word of the kernel's name: "d128_lists"
  int head_dim, head_dim_v;  // it takes d and dv up to these
  int rows;                  // of a list, that a CTA has
  int fewest_rows;           // it is not launched for fewer
  int threads, shared_bytes;
  int ctas_per_sm;
  // Picoseconds that both passes take for each key of a CTA's list, where CTAs fill an H200.
  int time;
  // The name of the kernel for deterministic gradients that keeps what sums consist of (KeptKeys);
  // null: there is none, and CTAs take turns.
  const char* kept;
};

template <class C>
constexpr ListTile list_tile(const char* name, int time, int fewest_rows = 1,
                             const char* kept = nullptr) {
  return {name,       C::HEAD_DIM,     C::HEAD_DIM_V,  C::BLOCK_Q, fewest_rows,
          C::THREADS, C::SHARED_BYTES, C::CTAS_PER_SM, time,       kept};
}

// The plan, or the reasons why not: the terms of each query row and cleared sums of dK and dV
// ("<folder>_backward_rows_<dtype>_lists"), for deterministic sums lists in order
// ("<folder>_backward_order_<dtype>_lists"), the main kernel
// ("<folder>_attention_bwd_<dtype>_<tile>"), dK and dV of their sums
// ("<folder>_backward_keys_<dtype>_lists") or of what is kept, maybe of some lists after others
// ("<folder>_backward_kept_<dtype>_lists"), all of the image "<folder>/bwd_lists_<dtype>", and the
// gradient of the sinks. The parameter is a ListBackwardParams.
PlanResult plan_list_backward(const Description& description, std::span<const ListTile> tiles,
                              const BackwardProblem& problem, const Device& device);

}  // namespace archflash::core
