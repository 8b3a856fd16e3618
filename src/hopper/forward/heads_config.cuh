// The tiles of packed sequences whose rows of several heads, which share a head of K, fill each
// warpgroup (GroupHeads), so that few rows of a tile are left empty. The next tile's Q comes during
// this one. Most clear rows of V beside the producer, for which two have no registers.
#pragma once

#include "common/image_dtype.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

constexpr Variant heads_tile(Variant variant, bool clears_beside = true) {
  variant.q_stages = 2;
  variant.packs = true;
  variant.clears_beside = clears_beside;
  return variant;
}
// clang-format off
using D80Heads        = Config<DTYPE, no_overlap(heads_tile({.head_dim = 80,  .warpgroups = 4, .block_k = 64,  .stages = 3}))>;
using D96Heads        = Config<DTYPE, no_overlap(heads_tile({.head_dim = 96,  .warpgroups = 4, .block_k = 64,  .stages = 3}, false))>;
using D128Heads       = Config<DTYPE, no_overlap(heads_tile({.head_dim = 128, .warpgroups = 3, .block_k = 128, .stages = 2}, false))>;
using D192Heads       = Config<DTYPE, no_overlap(heads_tile({.head_dim = 192, .warpgroups = 3, .block_k = 64,  .stages = 2, .head_dim_v = 128}))>;
using D192SquareHeads = Config<DTYPE, in_turns(heads_tile({.head_dim = 192, .warpgroups = 2, .block_k = 80,  .stages = 2}))>;
using D256Heads       = Config<DTYPE, in_turns(heads_tile({.head_dim = 256, .warpgroups = 2, .block_k = 48,  .stages = 2}))>;
// clang-format on

}  // namespace archflash::hopper
