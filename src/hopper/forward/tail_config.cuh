// Tiles for numbers of keys that are a little more than a multiple of a block's, such as those of
// images whose patches come with one more token: of the last block they multiply TAIL_KEYS keys
// alone. Kernels of their own have them, because others would pay for the branch.
#pragma once

#include "common/image_dtype.h"
#include "hopper/config.cuh"
#include "hopper/forward/more_config.cuh"
#include "hopper/forward/short_config.cuh"

namespace archflash::hopper {

constexpr Variant with_tail(Variant variant, int keys) {
  variant.tail_keys = keys;
  return variant;
}
using D64ShortTail = Config<DTYPE, with_tail(D64Short::VARIANT, 16)>;
using D64MediumTail = Config<DTYPE, with_tail(D64Medium::VARIANT, 32)>;
using D64TurnsTail = Config<DTYPE, with_tail(D64Turns::VARIANT, 32)>;
using D80TurnsTail = Config<DTYPE, with_tail(D80Turns::VARIANT, 32)>;
using D128LargeTail = Config<DTYPE, with_tail(D128Large::VARIANT, 32)>;

}  // namespace archflash::hopper
