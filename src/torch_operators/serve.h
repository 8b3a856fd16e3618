// Serving a call of an operator as an earlier call like it was served.
#pragma once

#include <span>

#include "torch_operators/arguments.h"
#include "torch_operators/kept_answers.h"

namespace archflash::torch_operators {

// Makes the results of a call, launches its plan and puts the results on the stack. of_last: what
// the tensor behind operands_of(known) is to the plan.
void serve(Known known, const KeptAnswer& kept, const OperatorCall& call, Word* stack,
           std::span<const Operand> of_last = {});

}  // namespace archflash::torch_operators
