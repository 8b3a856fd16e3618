// The way of an eager call of one of PyTorch's attention operators, while archflash stands in front
// of them (torch_operators/operators.h).
#pragma once

#include "runtime/call.h"

namespace archflash {

// Serves a call in which nothing but the kernel's own checks depends on gradients: autograd records
// the operator, not this call. What `attention` (call_path.h) would return, or the reason why
// PyTorch's own kernel is to serve the call, a str.
nb::object serve_operator(nb::handle q, nb::handle k, nb::handle v, nb::handle options,
                          nb::handle implementation, bool rows_before_heads, bool lse_column);
// decide(problem, device_index, forced) -> LaunchPlan, or a str: the reason why PyTorch's own
// kernel serves the problem.
void set_decide_operator(nb::object function);

void clear_cached_operators();

}  // namespace archflash
