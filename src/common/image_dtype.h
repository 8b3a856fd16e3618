// The dtype of the image that is compiled, for which config.cuh of a folder states the tiles. Plans
// ask for their sizes alone, which are those of any dtype of 16 bits.
#pragma once

#include "common/dtype.h"

namespace archflash {

#ifdef ARCHFLASH_DTYPE
constexpr DType DTYPE = DType::ARCHFLASH_DTYPE;
#else
constexpr DType DTYPE = DType::F16;
#endif

}  // namespace archflash
