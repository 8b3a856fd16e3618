// Scales of parts of a row or a column: of MXFP8, 8-bit numbers with scales of type ue8m0, powers
// of two, and of NVFP4, numbers of four bits with scales of type ue4m3. Plain C++.
#pragma once

namespace archflash {

// Numbers along the sum of a product that share a scale: columns of q and k, keys of v.
constexpr int SCALED_NUMBERS = 32;  // of MXFP8
constexpr int NVFP4_GROUP = 16;

}  // namespace archflash
