// PyTorch's own kernels of its attention operators.
#pragma once

#include "torch_operators/arguments.h"
#include "torch_operators/kept_answers.h"

namespace archflash::torch_operators {

// Calls PyTorch's own kernel with arguments, and puts its results on the stack.
void call_original(const Operator& op, const OperatorArguments& a, Word* stack);

}  // namespace archflash::torch_operators
