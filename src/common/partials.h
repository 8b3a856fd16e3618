// What the CTAs that share out the keys of a row tile leave in the workspace, and the parameter of
// the kernel that makes the output of it (math/combine_splits.cuh). Who splits and how:
// split_keys.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"
#include "common/math/host_device.h"

namespace archflash {

// How a row ends in one share of its keys: base in powers of two, the sum of 2^(score - base), 0
// where it sees none of them.
struct alignas(8) PartialEnd {
  float base, sum;
};

// What the shares leave in the workspace, of each share all query rows: (heads, rows) as the LSE.
struct Partials {
  float* rows_gmem;  // (splits, rows, dv): the sum of 2^(score - base) v; unwritten if sum is 0
  PartialEnd* ends_gmem;  // (splits, rows)
  int64_t rows;
  int32_t splits;  // 1: no workspace, the rows are finished at once

  ARCHFLASH_HOST_DEVICE int64_t index(int split, int64_t row) const { return split * rows + row; }
};

// The one parameter of the second kernel.
struct CombineParams {
  AttentionParams attention;
  Partials partials;
};
static_assert(std::is_trivially_copyable_v<CombineParams>);

constexpr int COMBINE_WARPS = 4;  // of a CTA, each for one row

}  // namespace archflash
