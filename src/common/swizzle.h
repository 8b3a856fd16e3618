// How TMA permutes the 16-byte chunks of a tile's rows in shared memory, as CUDA numbers it.
#pragma once

#include <cstdint>

namespace archflash {

enum class Swizzle : int32_t { None = 0, B32 = 1, B64 = 2, B128 = 3 };  // by the bytes of a span

}  // namespace archflash
