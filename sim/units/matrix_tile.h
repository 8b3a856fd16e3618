// Tiles of matrices in shared memory that wgmma and tcgen05 read through descriptors: the places of
// their elements, the checks of a tile, its values.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "sim/numerics/element.h"
#include "sim/run/cta.h"

namespace archflash::sim {

constexpr uint32_t TILE_UNIT = 16;  // bytes that lie together, whatever the swizzle
constexpr uint32_t TILE_GROUP = 8;  // rows of a core matrix

// A decoded matrix descriptor.
struct MatrixDescriptor {
  uint32_t start = 0;    // address in the shared window, below 256 KB
  uint32_t leading = 0;  // this and the next are offsets in bytes
  uint32_t stride = 0;
  uint32_t base_offset = 0;
  uint32_t span = 0;  // the bytes within which the swizzle moves a row; 0: no swizzle
  uint32_t mask = 0;  // which address bits, from bit 7 on, the swizzle uses
};

// Rows first .. first + count along M or N, `k` elements of `type` along K.
struct MatrixTile {
  MatrixDescriptor descriptor;
  bool k_major = true;
  uint32_t first = 0, count = 0;
  int k = 0;
  ElementType type = ElementType::F16;
};

// Decodes what descriptors of all instructions have at the same bits: start, offsets, base offset.
MatrixDescriptor decode_offsets(uint64_t bits);
// Whether the start is where the swizzle's pattern begins, or the base offset says where that is.
bool follows_pattern(const MatrixDescriptor& descriptor);

// The address of a 16-byte unit of a tile, before swizzling. In a K-major tile it is unit `unit` (0
// or 1) of row `line`; in an MN-major one unit `unit` along M or N of row `line` of K.
inline uint32_t tile_place(const MatrixDescriptor& d, bool k_major, uint32_t line, uint32_t unit) {
  const uint32_t in_group = line % TILE_GROUP, group = line / TILE_GROUP;
  if (d.span == 0) {
    return k_major ? d.start + in_group * TILE_UNIT + group * d.stride + unit * d.leading
                   : d.start + unit * d.stride + in_group * TILE_UNIT + group * d.leading;
  }
  if (k_major) return d.start + in_group * d.span + group * d.stride + unit * TILE_UNIT;
  const uint32_t along = unit * TILE_UNIT;  // the span is a power of two
  return d.start + (along & (d.span - 1)) + (along >> std::countr_zero(d.span)) * d.leading +
         in_group * d.span + group * d.stride;
}
// The address after swizzling.
inline uint32_t tile_address(const MatrixDescriptor& d, uint32_t place) {
  return place ^ ((((place >> 7) - d.base_offset) & d.mask) << 4);
}

// `warp` starts to read a tile in the shared memory of `owner`; its matrix agent has done so by
// `clock`. Checks bounds (throws Fault), that the bytes hold values, races, and that the tile
// follows the boxes that TMA wrote there. `operand` is a name such as "matrix B of wgmma", for
// reports.
void open_tile(Warp& warp, Cta& owner, const char* operand, const MatrixTile& tile, Clock clock);

// Reads the tile's values into out[row * row_step + k * k_step].
void read_tile(Cta& owner, const MatrixTile& tile, float* out, size_t row_step, size_t k_step);

}  // namespace archflash::sim
