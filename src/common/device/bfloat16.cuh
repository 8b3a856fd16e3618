// Conversions between bfloat16 and float, whose upper half it is. They use integer arithmetic only,
// because the conversion instruction exists from sm_80 on and simt runs on sm_75 too.
#pragma once

#include <cstdint>

#include "common/device/host_device.h"

namespace archflash::device {

// The bits of the float that equals this bfloat16.
ARCHFLASH_HOST_DEVICE inline uint32_t float_bits_of_bfloat16(uint16_t bfloat16_bits) {
  return static_cast<uint32_t>(bfloat16_bits) << 16;
}

// The bfloat16 nearest to the float with these bits; ties round to even, and a NaN stays a NaN.
ARCHFLASH_HOST_DEVICE inline uint16_t bfloat16_of_float_bits(uint32_t float_bits) {
  constexpr uint32_t INFINITY_BITS = 0x7F800000u;
  constexpr uint16_t QUIET_NAN = 0x7FFF;
  if ((float_bits & 0x7FFFFFFFu) > INFINITY_BITS) return QUIET_NAN;
  const uint32_t half_ulp_or_less = 0x7FFFu + ((float_bits >> 16) & 1u);
  return static_cast<uint16_t>((float_bits + half_ulp_or_less) >> 16);
}

}  // namespace archflash::device
