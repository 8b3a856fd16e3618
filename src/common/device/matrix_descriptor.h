// Descriptors for tcgen05.mma: where a tile lies in shared memory, and which product to compute.
#pragma once

#include <cstdint>

#include "common/device/host_device.h"
#include "common/dtype.h"
#include "common/swizzle.h"

namespace archflash::device {

// The shared-memory descriptor of tcgen05 (PTX ISA, "Matrix Descriptor Format in Tensor Memory"):
// bits 0 to 13 are address >> 4, 16 to 29 the leading offset >> 4, 32 to 45 the stride offset >> 4,
// 46 to 48 the constant 1, 61 to 63 the swizzle. A descriptor is the sum of three numbers: the
// fixed fields of its tile, the tile's address, and the step to the 32 bytes of K that one
// instruction multiplies. Tile is a SlabTile whose address is a multiple of its ALIGNMENT.
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

constexpr uint64_t ADDRESS_MASK = 0x3FFFF;  // 14 bits of address >> 4
ARCHFLASH_HOST_DEVICE constexpr uint64_t matrix_descriptor_address(uint32_t smem) {
  return (smem & ADDRESS_MASK) >> 4;
}

// K-major operand: the product sums over the tile's columns, and the tile's rows are rows of A or
// columns of B. Instruction k takes 16 columns of the SlabTile, which are 16 elements of 16 bits or
// 32 of 8 bits. The hardware ignores the leading offset; CUTLASS writes 1 (16 bytes) as this does.
template <class Tile>
constexpr uint64_t K_MAJOR_FIELDS =
    matrix_descriptor_fields(16, 8 * Tile::ROW_BYTES, Tile::SWIZZLE);
template <class Tile>
ARCHFLASH_HOST_DEVICE constexpr uint64_t k_major_step(int k) {
  const int column = 16 * k;
  return (column / Tile::SLAB * Tile::SLAB_BYTES + column % Tile::SLAB * 2) >> 4;
}

// MN-major operand: the product sums over the tile's rows, DEPTH per instruction (16, or 32 of 8
// bits), and the tile's columns are columns of B. The leading offset is the step to the next slab.
template <class Tile>
constexpr uint64_t MN_MAJOR_FIELDS = matrix_descriptor_fields(
    Tile::SLABS > 1 ? Tile::SLAB_BYTES : 0, 8 * Tile::ROW_BYTES, Tile::SWIZZLE);
template <class Tile, int DEPTH>
ARCHFLASH_HOST_DEVICE constexpr uint64_t mn_major_step(int k) {
  return (DEPTH * k * Tile::ROW_BYTES) >> 4;
}

// The instruction descriptor (PTX ISA, "Instruction descriptor") of kind::f16 and kind::f8f6f4 with
// fp32 sums, A and B of the same type. The kind decides what a type's code means. A in tensor
// memory is K-major.
ARCHFLASH_HOST_DEVICE constexpr uint32_t instruction_descriptor(DType dtype, int m, int n,
                                                                bool b_mn_major,
                                                                bool a_mn_major = false) {
  const uint32_t type = dtype == DType::BF16 || dtype == DType::E5M2 ? 1 : 0;
  return 1u << 4 | type << 7 | type << 10 | uint32_t{a_mn_major} << 15 |
         uint32_t{b_mn_major} << 16 | uint32_t(n >> 3) << 17 | uint32_t(m >> 4) << 24;
}

}  // namespace archflash::device
