// Tensor maps, by which TMA copies, and what they cannot describe. Pure host code.
#pragma once

#include <string>

#include "common/planning/plan.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::core {

// Adds what TMA cannot describe of a call, beyond the limits of the core set. `stores`: the output
// goes by TMA too.
void add_tma_reasons(const Problem& problem, const std::string& implementation, bool stores,
                     Reasons& reasons);

// Adds what TMA cannot describe of the strides of one tensor with so many rows.
void add_stride_reasons(const char* name, const Strides& strides, int64_t rows, DType dtype,
                        const std::string& implementation, Reasons& reasons);

// The map of Q, K, V or Out at `offset` of a parameter block: (columns, rows, heads, batch). A
// dimension of stride 0 has size 1 there, and the kernel does not move along it.
TensorMapSpec tensor_map(const Problem& problem, Operand operand, int offset, const Box& box);

}  // namespace archflash::core
