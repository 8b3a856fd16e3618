// What tells tcgen05.mma where a tile lies in shared memory and what product to make.
#pragma once

#include <cstdint>

#include "common/math/host_device.h"
#include "common/plan.h"

namespace archflash::math {

// PTX ISA, "Matrix Descriptor Format in Tensor Memory" (the shared-memory descriptor of tcgen05):
// bits 0 to 13 address >> 4, 16 to 29 leading offset >> 4, 32 to 45 stride offset >> 4, 46 to 48
// the constant 1, 61 to 63 the swizzle. A Tile is a SlabTile whose address is a multiple of its
// ALIGNMENT. Descriptors are sums: fixed fields + address + step of the product's 32 bytes of K.
ARCHFLASH_HOST_DEVICE constexpr uint64_t matrix_descriptor_fields(int leading_bytes,
                                                                  int stride_bytes,
                                                                  Swizzle swizzle) {
  const uint64_t swizzle_field = swizzle == Swizzle::B128  ? 2
                                 : swizzle == Swizzle::B64 ? 4
                                 : swizzle == Swizzle::B32 ? 6
                                                           : 0;
  return uint64_t(leading_bytes >> 4) << 16 | uint64_t(stride_bytes >> 4) << 32 |
         uint64_t{1} << 46 | swizzle_field << 61;
}

constexpr uint64_t ADDRESS_MASK = 0x3FFFF;
ARCHFLASH_HOST_DEVICE constexpr uint64_t matrix_descriptor_address(uint32_t smem) {
  return (smem & ADDRESS_MASK) >> 4;
}

// K-major: the tile's rows are those of A or the columns of B, its columns are summed over: 16 at a
// time, or 32 of 8 bits, of which a SlabTile calls two one. The leading offset is not used; 1 is
// what CUTLASS writes.
template <class Tile>
constexpr uint64_t K_MAJOR_FIELDS =
    matrix_descriptor_fields(16, 8 * Tile::ROW_BYTES, Tile::SWIZZLE);
template <class Tile>
ARCHFLASH_HOST_DEVICE constexpr uint64_t k_major_step(int k) {
  const int column = 16 * k;
  return (column / Tile::SLAB * Tile::SLAB_BYTES + column % Tile::SLAB * 2) >> 4;
}

// MN-major: the tile's columns are those of B, its rows are summed over, DEPTH at a time: 16, or 32
// of 8 bits. The leading offset leads to the next slab.
template <class Tile>
constexpr uint64_t MN_MAJOR_FIELDS = matrix_descriptor_fields(
    Tile::SLABS > 1 ? Tile::SLAB_BYTES : 0, 8 * Tile::ROW_BYTES, Tile::SWIZZLE);
template <class Tile, int DEPTH>
ARCHFLASH_HOST_DEVICE constexpr uint64_t mn_major_step(int k) {
  return (DEPTH * k * Tile::ROW_BYTES) >> 4;
}

// PTX ISA, "Instruction descriptor" of kind::f16 and kind::f8f6f4: fp32 sums, A and B of one type,
// A K-major. What a type's code means depends on the kind.
ARCHFLASH_HOST_DEVICE constexpr uint32_t instruction_descriptor(DType dtype, int m, int n,
                                                                bool b_mn_major) {
  const uint32_t type = dtype == DType::BF16 || dtype == DType::E5M2 ? 1 : 0;
  return 1u << 4 | type << 7 | type << 10 | uint32_t{b_mn_major} << 16 | uint32_t(n >> 3) << 17 |
         uint32_t(m >> 4) << 24;
}

}  // namespace archflash::math
