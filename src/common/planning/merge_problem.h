// What one call of merge_attention asks for: partial attention results of the same rows over
// different keys -> the result over all of these keys. Plain data.
#pragma once

#include <array>
#include <cstdint>

#include "common/merge_parts.h"
#include "common/problem.h"

namespace archflash {

// The outputs of one part, and its log-sum-exps.
struct MergePart {
  Strides out, lse;
  DType dtype;
};

struct MergeProblem {
  int64_t batch, heads, rows, dv;
  int32_t parts;  // used of these
  std::array<MergePart, MERGE_PARTS> part;
  Strides out;  // of the result; its log-sum-exps are dense
  DType out_dtype;
};

}  // namespace archflash
