// The function in Python behind one of PyTorch's operators.
#pragma once

#include <nanobind/nanobind.h>

#include "torch_operators/arguments.h"
#include "torch_operators/kept_answers.h"

namespace archflash::torch_operators {

// Two functions of torch._C._aoti. tensor_of() makes a Python tensor of a handle, and handles_of()
// makes handles of a list of Python tensors. The caller has to delete the handles of both.
nb::object& tensor_of();
nb::object& handles_of();

// Serves a call by the function in Python, and keeps what later calls like it are to do. `call`: as
// it was read, or null.
void by_python(Operator& op, const OperatorArguments& arguments, const OperatorCall* call,
               Word* stack);

}  // namespace archflash::torch_operators
