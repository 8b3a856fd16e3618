// What one call of quantize_fp8 asks for: numbers -> 8-bit ones and the descales that they stand
// by. Plain data.
#pragma once

#include <cstdint>

#include "common/problem.h"

namespace archflash {

// What shares a descale: the whole tensor, a head, or SCALE_ROWS rows of a head.
enum class QuantizePer : int32_t { Tensor = 0, Head = 1, Block = 2 };

struct QuantizeProblem {
  int64_t batch, heads, rows, d;
  Strides x, out;
  DType dtype, out_dtype;
  QuantizePer per;
};

}  // namespace archflash
