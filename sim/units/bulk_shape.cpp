#include "sim/units/bulk_shape.h"

#include <algorithm>

namespace archflash::sim {

BulkShape flat_shape(uint64_t address, uint32_t bytes) {
  BulkShape shape;
  shape.piece_bytes = shape.pitch = bytes;
  shape.bytes = bytes;
  shape.pieces.push_back({0, 0, bytes, address});
  return shape;
}

BulkShape box_shape(const TensorMap& map, const int32_t* coordinates, bool stores) {
  BulkShape shape;
  shape.piece_bytes = map.row_bytes();
  shape.pitch = map.pitch();
  shape.slab_pieces = static_cast<uint32_t>(map.rank > 1 ? map.extent(1) : 1);
  if (map.rank > 4) shape.group_pieces = shape.slab_pieces * static_cast<uint32_t>(map.extent(2));
  shape.swizzle = swizzle_mask(map.swizzle);
  shape.is_box = true;
  shape.element_bytes = map.element_bytes();
  shape.type = map.type;
  shape.nan_fill = map.nan_fill;
  shape.bytes = map.box_bytes();
  const auto clamp = [&](int64_t elements) {
    return static_cast<uint32_t>(std::clamp<int64_t>(elements, 0, map.box[0])) *
           map.element_bytes();
  };
  const int64_t first = coordinates[0];
  const uint32_t begin = clamp(-first);
  uint32_t end = clamp(static_cast<int64_t>(map.dims[0]) - first);
  if (stores)
    end = std::min(shape.piece_bytes, (end + SWIZZLE_UNIT - 1) / SWIZZLE_UNIT * SWIZZLE_UNIT);
  const uint32_t rows = map.rows();
  for (uint32_t row = 0; row < rows; ++row) {
    BulkShape::Piece piece{row * shape.pitch, 0, 0, 0};
    int64_t address = static_cast<int64_t>(map.address) + first * map.element_bytes();
    bool inside = begin < end;
    uint32_t rest = row;
    for (int i = 1; i < map.rank; ++i) {
      const int64_t index = coordinates[i] + int64_t{rest % map.extent(i)} * map.element_steps[i];
      rest /= map.extent(i);
      inside = inside && index >= 0 && index < static_cast<int64_t>(map.dims[i]);
      address += index * static_cast<int64_t>(map.strides[i]);
    }
    if (inside) {
      piece.begin = begin;
      piece.end = end;
      piece.address = static_cast<uint64_t>(address + begin);
    }
    shape.pieces.push_back(piece);
  }
  return shape;
}

}  // namespace archflash::sim
