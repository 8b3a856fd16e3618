// Where a TMA tensor map stands in a parameter block. Filled in by bind() from a TensorMapSpec,
// never by hand: the format is the hardware's.
#pragma once

namespace archflash {

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

}  // namespace archflash
