// The parameter of the kernels that compute gradients of calls with lists of keys.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/packed_heads.cuh"
#include "common/key_lists.h"

namespace archflash {

// dK and dV in fp32, to which the CTAs of all lists add: a row for each key of each head of K, of
// so many columns (a multiple of LIST_SUM_COLUMNS), which device::list_sum_place() permutes.
struct KeySums {
  float* dk_gmem;  // (batch, heads_kv, nk, dk_columns); null: no list names a key
  float* dv_gmem;
  int32_t dk_columns, dv_columns;
};

struct ListBackwardParams {
  BackwardParams call;
  KeyLists lists;
  KeySums sums;
  device::PackedHeads packed_heads;
};

constexpr int LIST_SUM_COLUMNS = 16;
constexpr int LIST_SUMS_THREADS = 256;  // of a CTA that makes dK and dV of their sums

}  // namespace archflash
