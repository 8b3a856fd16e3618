// The tiles of short sequences. A CTA has one warpgroup. Up to 128 columns several CTAs stay on an
// SM: the others multiply while one waits for its copies, starts or writes a tile. With 256 columns
// an SM has room for one CTA, and its next tile is copied meanwhile.
#pragma once

#include "common/image_dtype.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

constexpr Variant short_tile(int head_dim, int ctas_per_sm) {
  return {.head_dim = head_dim,
          .block_k = 64,
          .stages = 2,
          .q_stages = 2,
          .ctas_per_sm = ctas_per_sm,
          .overlaps = false};
}
using D64Short = Config<DTYPE, short_tile(64, 4)>;
using D96Short = Config<DTYPE, short_tile(96, 3)>;
using D128Short = Config<DTYPE, short_tile(128, 2)>;
using D256Short = Config<DTYPE, short_tile(256, 1)>;

}  // namespace archflash::hopper
