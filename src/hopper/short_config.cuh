// The tile of short sequences. A CTA has one warpgroup, and four of them stay on an SM: the others
// multiply while one waits for its copies, starts or writes a tile.
#pragma once

#include "hopper/config.cuh"

namespace archflash::hopper {

template <DType T>
using D64Short = Config<T, Variant{.head_dim = 64,
                                   .block_k = 64,
                                   .stages = 2,
                                   .q_stages = 2,
                                   .ctas_per_sm = 4,
                                   .overlaps = false}>;

}  // namespace archflash::hopper
