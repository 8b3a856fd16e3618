// Calls whose gradients are needed: a kernel serves them, and autograd records them, by a node in
// C++ where it can and else by one in Python.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "runtime/call.h"
#include "runtime/execute.h"
#include "runtime/gradient_path.h"
#include "runtime/run_plan.h"

namespace archflash {

// What is known of the nodes of calls that are alike.
struct NodesOfCalls {
  // One that run_as_node() makes.
  struct Node {
    double number;
    std::vector<int> tensors;  // the places of options that are
  };
  // By where the rows of q are, and whether the gradients must be deterministic.
  std::optional<Node> nodes[2][2];
  bool are_none = false;        // such a call needs a node in Python
  ExpectedGradients gradients;  // until the first one is made
  Templates like;               // of calls with a node in Python, made for the first one
};

// Whether autograd is to record a call by record(): gradients are wanted of q, k, v, sinks and
// attn_mask alone, and nothing is written to a given tensor.
bool can_be_recorded(const Arguments& a, const Problem& problem);

// Runs and records a call by a plan that gives its log-sum-exp. has_template: the outputs of alike
// calls can be made from one template. Unless a kernel is forced others may compute the gradients:
// those that are to be deterministic, for example.
nb::object run_and_record(std::shared_ptr<PreparedPlan> plan, std::shared_ptr<NodesOfCalls> nodes,
                          bool has_template, const Arguments& a, Call& call,
                          nb::handle implementation);

// record((out, lse, tensors among the options, whether lse is returned, (options without tensors,
// their places, implementation)), q, k, v) returns what the call does, with a node in Python; with
// sinks or attn_mask both follow. deterministic: whether gradients asked for now must be so.
void set_record(nb::object function, nb::object deterministic);

}  // namespace archflash
