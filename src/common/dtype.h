// The types of the elements of tensors, and the rows that share a descale: what kernels and
// planning both need.
#pragma once

#include <cstdint>

namespace archflash {

enum class DType : int32_t { F32 = 0, F16 = 1, BF16 = 2, E4M3 = 3, E5M2 = 4, F64 = 5 };
constexpr int DTYPE_COUNT = 6;

constexpr const char* dtype_name(DType dtype) {  // as torch spells it
  constexpr const char* NAMES[DTYPE_COUNT] = {"float32",       "float16",     "bfloat16",
                                              "float8_e4m3fn", "float8_e5m2", "float64"};
  return NAMES[static_cast<int>(dtype)];
}
constexpr int dtype_bytes(DType dtype) {
  constexpr int BYTES[DTYPE_COUNT] = {4, 2, 2, 1, 1, 8};
  return BYTES[static_cast<int>(dtype)];
}

constexpr bool is_fp8(DType dtype) { return dtype == DType::E4M3 || dtype == DType::E5M2; }

constexpr int SCALE_ROWS = 64;  // rows of a sequence that share a descale given per block

}  // namespace archflash
