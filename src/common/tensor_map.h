// The space for a TMA tensor map in a parameter block. Its format belongs to the hardware; bind()
// has it encoded from a TensorMapSpec.
#pragma once

namespace archflash {

struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

}  // namespace archflash
