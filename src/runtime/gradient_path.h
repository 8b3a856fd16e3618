// The way of an eager backward pass: read, look up, allocate, bind, launch. Which kernel computes
// the gradients of a new kind of call is asked in Python (python/archflash/_eager_gradients.py)
// once.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "runtime/call.h"
#include "runtime/execute.h"

namespace archflash {

// What the gradients of a call are computed from and written to.
struct GradientCall {
  nb::handle dout, q, k, v, out, lse, dlse;
  nb::handle options;          // the values of the call's options, a tuple
  nb::handle implementation;   // the forced one, or None
  nb::handle dq, dk, dv;       // None: new tensors
  bool accumulate;             // dq, dk and dv are added to
  bool mask_gradient;          // that of attn_mask is wanted
  bool sinks_gradient = true;  // that of sinks is wanted, where there are any
  bool deterministic;          // the same inputs must always give the same bits
  bool refuse_recorded;        // not if any tensor requires a gradient
  // Whether another implementation computes them where that one does not.
  bool or_others = false;
  bool keep = false;  // the plan is the operator_answer() of this thread
  // Tensors of options that stand for those of `options`.
  std::vector<std::pair<nb::handle Arguments::*, nb::handle>> tensors = {};
};

// (dq, dk, dv, dsinks, dmask), of which the last two may be None. Or NotImplemented, with nothing
// written: Python serves the call, or refuses it.
nb::object attention_backward(const GradientCall& given);

// What the node of autograd returns whose record() (call_path.h) was told `call` and which keeps
// `saved`: None and the gradients of q, k and v, and where `needed` has more than those four, of
// sinks and attn_mask. Or NotImplemented, as above. keep: the plan is the operator_answer() of this
// thread.
nb::object recorded_backward(nb::handle dout, nb::handle dlse, const nb::tuple& saved,
                             const nb::tuple& call, const nb::tuple& needed, bool deterministic,
                             bool keep);

// Who is expected to compute the gradients of a call that was not served yet: the backward pass is
// planned for a gradient of the output that lies as the output does. No plan: unknown.
struct ExpectedGradients {
  std::shared_ptr<PreparedPlan> plan;
  bool dlse = false, deterministic = false;  // what is expected of it, as it was of the last one
  bool dsinks = false;                       // whether it also computes the gradient of sinks
};
ExpectedGradients expect_gradients(const Arguments& a, const Call& call, nb::handle implementation);
// Keeps them for recorded_backward(). A node in C++ keeps them itself.
void keep_expected_gradients(const ExpectedGradients& expected, const Arguments& a,
                             const Call& call, nb::handle implementation);

// decide(problem, device_index, implementation, plan_of) -> LaunchPlan, or None for `torch`: who
// computes gradients, where plan_of(kernel, device) is a kernel's plan or its reasons why not.
// order: orders.h.
void set_decide_gradients(nb::object function, nb::object order);

void clear_cached_gradients();

}  // namespace archflash
