// Copies of a call's tensors that let kernels serve it whose rows have to be contiguous, start at
// multiples of 16 bytes and have a whole number of chunks of 16 bytes. What is not so is copied
// into the workspace before the kernels run, and back behind them what they write; further columns
// are zeros, which change no score and give columns of the output that nobody reads. Pure host
// code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/planning/backward_problem.h"
#include "common/planning/plan.h"

namespace archflash::copy {

// One tensor: where it is, and where the kernels find it.
struct Tensor {
  Operand operand;
  DType dtype;
  int64_t batch, heads, rows, columns;  // that are copied: repeated batches and heads only once
  Strides given;                        // in elements
  int64_t given_column;
  int32_t given_align;
  Strides dense;
  int64_t dense_columns;
  bool gathered, scattered;  // copied before the kernels run, and behind them
};

struct Copies {
  std::vector<Tensor> tensors;  // empty: the kernels take the call as it is
  bool any() const { return !tensors.empty(); }
};

// Makes the problem that kernels are asked for of one that a caller gives, and returns what has to
// be copied. Caches are never copied, and calls with a second query are left alone.
Copies prepare(Problem& problem);
Copies prepare(BackwardProblem& problem);

// Lets a plan for the prepared problem copy: more workspace, a launch before the others for all
// that is read, and one behind them for all that is written.
void add_to(LaunchPlan& plan, const Copies& copies);

// Adds a launch behind the others that gives +infinity to each row of the log-sum-exp that sees no
// key, as PyTorch's flash kernel does: its backward pass relies on that.
void add_lse_for_pytorch(LaunchPlan& plan);

// What a plan copies, for people: "q (a strided last dimension) into the workspace: 12 MB are read
// and written beside the call's own". Empty if it copies nothing.
std::string text_of(const LaunchPlan& plan);

}  // namespace archflash::copy
