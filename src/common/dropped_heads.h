// What dropout has to know of the heads of a backward pass that is computed in parts.
#pragma once

#include <cstdint>

namespace archflash {

// The numbers of a part's heads among all heads of q of its call, by which random bits are drawn:
// head h of the part's sequence b is number first + b * of_sequence + h.
struct DroppedHeads {
  int32_t first;
  int32_t of_sequence;
};

}  // namespace archflash
