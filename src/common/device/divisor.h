// Division by a number that the host knows and the kernel does not: a product and a shift in place
// of the many instructions of an integer division, each of which waits for the one before.
#pragma once

#include <bit>
#include <cstdint>

#include "common/device/host_device.h"

namespace archflash::device {

// x / divisor = x * multiplier >> shift for 0 <= x < 2^31, where multiplier is 2^shift / divisor
// rounded up and shift is 31 + log2(divisor) rounded up: the multiplier is too large by less than
// divisor / 2^shift of itself, so the quotient by less than x / 2^shift < 1 / divisor.
struct Divisor {
  uint32_t multiplier;
  uint32_t shift;

  ARCHFLASH_HOST_DEVICE int quotient(int x) const {
    return static_cast<int>(static_cast<uint64_t>(static_cast<uint32_t>(x)) * multiplier >> shift);
  }
};

// divisor: from 1 to 2^31 - 1.
inline Divisor make_divisor(int64_t divisor) {
  const auto bits = static_cast<uint32_t>(std::bit_width(static_cast<uint64_t>(divisor - 1)));
  const uint64_t power = uint64_t{1} << (31 + bits);
  const auto by = static_cast<uint64_t>(divisor);
  return {static_cast<uint32_t>((power + by - 1) / by), 31 + bits};
}

}  // namespace archflash::device
