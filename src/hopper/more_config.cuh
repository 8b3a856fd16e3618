// Tiles of forward kernels that were made after those of config.cuh: short tiles of up to 96
// columns; up to 80 columns, where a sixth of the products of those for 96 would be of zeros; and
// up to 192 columns of V, which would fill three quarters of the tiles for 256.
#pragma once

#include "hopper/config.cuh"

namespace archflash::hopper {

// clang-format off
template <DType T> using D96Turns      = Config<T, no_overlap({.head_dim = 96,  .warpgroups = 4, .block_k = 64, .stages = 3, .q_stages = 2})>;
template <DType T> using D80Large      = Config<T, in_turns({.head_dim = 80,  .warpgroups = 3, .block_k = 96, .stages = 2, .q_stages = 2})>;
template <DType T> using D80Turns      = Config<T, no_overlap({.head_dim = 80,  .warpgroups = 4, .block_k = 80, .stages = 3, .q_stages = 2})>;
template <DType T> using D192Square    = Config<T, in_turns({.head_dim = 192, .warpgroups = 2, .block_k = 96, .stages = 2})>;
template <DType T> using D192SquareFew = Config<T, few({.head_dim = 192, .block_k = 64, .stages = 2})>;
// clang-format on

}  // namespace archflash::hopper
