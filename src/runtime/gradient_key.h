// What a backward pass is looked up by, and the problem that it stands for.
#pragma once

#include "common/planning/backward_problem.h"
#include "runtime/call.h"
#include "runtime/plan_cache.h"
#include "runtime/reading/reading.h"

namespace archflash {

constexpr int GRADIENTS = 3;  // dq, dk, dv
constexpr const char* GRADIENT_NAMES[GRADIENTS] = {"dq", "dk", "dv"};
// The members of a problem that describe dq, dk and dv.
constexpr BackwardTensor BackwardProblem::* GRADIENTS_OF[GRADIENTS] = {
    &BackwardProblem::dq, &BackwardProblem::dk, &BackwardProblem::dv};

// What a backward pass is asked beside what its call is.
struct GradientOptions {
  bool dlse, deterministic, dsinks;
};

using GradientKey = CacheKey<BackwardProblem>;

// What is forced, in a key, where a kernel is asked first and others may serve in its place: below
// -1. So a node of autograd asks for the kernel of its forward pass.
inline int64_t asked_first(int64_t index) { return -2 - index; }

// Writes no padding, which is part of a cache's key.
void describe(const TensorView& t, const reading::Axes& x, BackwardTensor& to);

// Sets every byte of a key. What belongs to new gradients follows from the inputs, and stays out of
// it.
void start_key(const Arguments& a, const Problem& call, const GradientOptions& options,
               GradientKey& key);
// The key of the backward pass that is expected of a call, but for what is forced.
GradientKey expected_key(const Arguments& a, const Call& call, const GradientOptions& options);

// The problem of a key. like: gets what those of the GRADIENTS are made from that are not given, or
// is null where nothing is to be made.
BackwardProblem asked_of(const GradientKey& key, const nb::handle (&inputs)[GRADIENTS],
                         const nb::handle (&targets)[GRADIENTS], const reading::Axes& axes,
                         nb::object* like);
BackwardProblem asked_of(const GradientKey& key, const Arguments& a,
                         nb::object* like);  // none given

}  // namespace archflash
