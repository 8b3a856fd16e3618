// What bulk copies move: boxes of tensors, by tensor maps, and plain runs of bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/units/tensor_map.h"

namespace archflash::sim {

constexpr uint32_t SWIZZLE_UNIT =
    16;  // bytes that a swizzle moves as one; a store ends at such a unit

// What a bulk copy moves: rows of a box, or one run of bytes.
struct BulkShape {
  struct Piece {
    uint32_t place;       // offset from the box's start in shared memory, before swizzling
    uint32_t begin, end;  // the bytes of the piece that are within the tensor
    uint64_t address;     // byte `begin` lies here in global memory
    bool operator==(const Piece&) const = default;
  };
  std::vector<Piece> pieces;
  uint32_t piece_bytes = 0;   // the size of each piece
  uint32_t pitch = 0;         // the distance from one piece to the next
  uint32_t slab_pieces = 0;   // of a box: pieces of one slab, along the box's second dimension
  uint32_t group_pieces = 0;  // along its second and third; 0: it has no fifth dimension
  uint32_t swizzle = 0;       // swizzle_mask
  bool is_box = false;
  uint32_t element_bytes = 1;
  MapType type = MapType::U8;
  bool nan_fill = false;
  uint64_t bytes = 0;  // what an mbarrier counts
};

BulkShape flat_shape(uint64_t address, uint32_t bytes);
// The box at these coordinates, which begin with dimension 0. A store is clipped at multiples of 16
// bytes.
BulkShape box_shape(const TensorMap& map, const int32_t* coordinates, bool stores);

}  // namespace archflash::sim
