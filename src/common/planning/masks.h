// Masks as data, in planning: which of them a call has, and what its kernel is told of them. Pure
// host code.
#pragma once

#include <array>
#include <utility>
#include <vector>

#include "common/dropout_params.h"
#include "common/mask_params.h"
#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash::core {

// The options that are masks as data, named as features of a folder are, and whether they are
// given.
std::array<std::pair<const char*, bool>, 4> masks_of(const Problem& problem);

// The dtype of the elements of an attn_mask that are added: Problem::mask is above 1.
inline DType added_dtype(const Problem& problem) { return static_cast<DType>(problem.mask - 2); }

MaskParams mask_params(const Problem& problem);

// Where a parameter block with MaskParams at `offset` has their addresses.
std::vector<PointerSlot> mask_pointers(const Problem& problem, int offset);

// The parameters of dropout, and where a parameter block with them at `offset` has their addresses.
DropoutParams dropout_params(const Problem& problem);
std::vector<PointerSlot> dropout_pointers(const Problem& problem, int offset);

}  // namespace archflash::core
