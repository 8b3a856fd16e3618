// A node of autograd in C++ for eager calls of archflash.attention whose gradients are needed, so
// that their backward passes do without Python.
//
// PyTorch has no way to add one from outside but by an operator of its own whose derivative it
// knows. `_scaled_dot_product_flash_attention_for_cpu` has the arguments and results of a plain
// call, and no kernel for CUDA: it gets ours, which serves calls of run_as_node() alone, and so
// does its backward operator. What else there is to know of a call has a number, which takes the
// place of dropout_p, and a tensor beside q, k and v that of attn_mask.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <vector>

#include "runtime/call.h"
#include "runtime/execute.h"
#include "runtime/gradient_path.h"

namespace archflash {

namespace nb = nanobind;

// Launches a plan of a call that has no results but the output, which it returns with its node, and
// one tensor beside q, k and v at most: `other`, or None. of_call: what the node's backward pass is
// told of the call (gradient_path.h), and whether its gradients must be deterministic; each pair
// has a number. deterministic: the latter. gradients: what is expected of the backward pass, if
// anything. A null object, with nothing launched: such a node cannot be made.
nb::object run_as_node(const PreparedPlan& prepared, const Arguments& a, Call& call,
                       nb::handle other, double number, bool deterministic,
                       const ExpectedGradients& gradients);
// The number of what a backward pass is told, and of what the other tensor is to its plan; nothing
// where this PyTorch cannot have such nodes.
std::optional<double> number_of_node(nb::handle of_call, const std::vector<Operand>& other);

void forget_gradients_of_nodes();  // drops all decisions, as clear_cached_gradients() does
void bind_node(nb::module_& m);

}  // namespace archflash
