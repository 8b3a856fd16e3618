// Partial results of a call whose keys are split. Several CTAs compute one row tile, each for a
// share of its keys, and leave what is declared here in the workspace; device/combine_splits.cuh
// combines it. split_keys.h decides how many shares there are.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/host_device.h"

namespace archflash {

// The softmax of a row over one share of its keys: base is a logarithm to base 2, sum the sum of
// 2^(score - base). sum is 0 if the row sees no key of the share.
struct alignas(8) PartialEnd {
  float base, sum;
};

// What the shares leave in the workspace. `rows` counts the query rows of all heads, in the order
// of the LSE.
struct Partials {
  float* rows_gmem;       // (splits, rows, dv): sum of 2^(score - base) v; unwritten if sum is 0
  PartialEnd* ends_gmem;  // (splits, rows)
  int64_t rows;
  int32_t splits;
  // The keys of a share, whose number s begins at key s * share_keys: a multiple of every block.
  // 0: the shares of a tile are equal parts of the keys that it sees.
  int32_t share_keys;

  // Without it the keys are not split, and a CTA writes its rows of the output itself.
  ARCHFLASH_HOST_DEVICE bool wanted() const { return ends_gmem != nullptr; }

  ARCHFLASH_HOST_DEVICE int64_t index(int split, int64_t row) const { return split * rows + row; }
};

// The parameter block of the kernel that combines the shares.
struct CombineParams {
  AttentionParams attention;
  Partials partials;
};

// The parameter block of the kernel that combines the shares of decoding calls.
struct CombineSharesParams : CombineParams {
  int32_t warps_of_row;  // 1 or COMBINE_WARPS: so many of a CTA share out the shares of a row
  // 0, or the launch was for packed sequences of at most so many rows. Of the rows that Partials
  // counts each head of each sequence then has so many.
  int32_t few_rows;
  // What the bases of shares are multiplied by to become logarithms to base 2. Those of fp32
  // kernels are scores: a product would be rounded for each share. All others have 1.
  float base_scale;
};

constexpr int COMBINE_WARPS = 4;  // warps of a CTA of those kernels

}  // namespace archflash
