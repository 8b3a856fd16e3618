// Tiles of forward kernels that were made after those of config.cuh: short tiles of up to 96
// columns; up to 80 columns, where a sixth of the products of those for 96 would be of zeros; and
// up to 192 columns of V, which would fill three quarters of the tiles for 256.
#pragma once

#include "common/image_dtype.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

// clang-format off
using D96Turns      = Config<DTYPE, no_overlap({.head_dim = 96,  .warpgroups = 4, .block_k = 64, .stages = 3, .q_stages = 2})>;
using D80Large      = Config<DTYPE, in_turns({.head_dim = 80,  .warpgroups = 3, .block_k = 96, .stages = 2, .q_stages = 2})>;
using D80Turns      = Config<DTYPE, no_overlap({.head_dim = 80,  .warpgroups = 4, .block_k = 80, .stages = 3, .q_stages = 2})>;
using D192Square    = Config<DTYPE, through_v({.head_dim = 192, .warpgroups = 2, .block_k = 96, .stages = 2})>;
using D192SquareFew = Config<DTYPE, few({.head_dim = 192, .block_k = 64, .stages = 2})>;
// clang-format on

}  // namespace archflash::hopper
