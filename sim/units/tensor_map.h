// Tensor maps describe a tensor in global memory to TMA. A map is 128 bytes of the simulator's own
// format, in place of those that the driver's cuTensorMapEncodeTiled writes.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace archflash::sim {

constexpr int MAX_TENSOR_RANK = 5;
constexpr uint64_t TENSOR_MAP_BYTES = 128;
constexpr uint64_t TENSOR_MAP_ALIGN = 64;

enum class MapType : uint8_t { U8, U16, U32, S32, U64, S64, F16, F32, F64, BF16 };
enum class MapSwizzle : uint8_t { None, B32, B64, B128 };

int map_type_bytes(MapType type);
MapType map_type_named(const std::string& name);  // "u8", "f16", ...; throws LoadError
// The bytes after which the pattern of a swizzle repeats, at addresses that are multiples of them;
// the bytes within which it moves a row; which address bits, from bit 7 on, it uses.
uint32_t swizzle_pattern_bytes(MapSwizzle swizzle);
uint32_t swizzle_span(MapSwizzle swizzle);
uint32_t swizzle_mask(MapSwizzle swizzle);
// The address to which a swizzle moves the 16-byte unit at a shared address.
constexpr uint32_t swizzled(uint32_t address, uint32_t mask) {
  return address ^ (address >> 7 & mask) << 4;
}

struct TensorMap {
  uint64_t address = 0;
  MapType type = MapType::U8;
  MapSwizzle swizzle = MapSwizzle::None;
  bool nan_fill = false;
  int rank = 0;
  uint64_t dims[MAX_TENSOR_RANK] = {};           // elements, the contiguous one first
  uint64_t strides[MAX_TENSOR_RANK] = {};        // bytes; strides[0] is the size of an element
  uint32_t box[MAX_TENSOR_RANK] = {};            // elements
  uint32_t element_steps[MAX_TENSOR_RANK] = {};  // n: every nth element is moved

  uint32_t element_bytes() const { return static_cast<uint32_t>(map_type_bytes(type)); }
  // The elements that a box has in shared memory along dimension i.
  uint32_t extent(int i) const {
    return i == 0 ? box[0] : (box[i] + element_steps[i] - 1) / element_steps[i];
  }
  uint32_t row_bytes() const { return box[0] * element_bytes(); }
  // The distance of rows in shared memory. A swizzled row takes the whole span.
  uint32_t pitch() const {
    return swizzle == MapSwizzle::None ? row_bytes() : swizzle_span(swizzle);
  }
  uint32_t rows() const {
    uint32_t count = 1;
    for (int i = 1; i < rank; ++i) count *= extent(i);
    return count;
  }
  uint32_t box_bytes() const { return row_bytes() * rows(); }
};

// Makes the checks of the driver; throws LoadError. `strides` are in bytes, from dimension 1 on.
TensorMap make_tensor_map(uint64_t address, MapType type, const std::vector<int64_t>& dims,
                          const std::vector<int64_t>& strides, const std::vector<int64_t>& box,
                          const std::vector<int64_t>& element_steps, MapSwizzle swizzle,
                          bool nan_fill);

std::array<uint8_t, TENSOR_MAP_BYTES> encode(const TensorMap& map);
// Returns false if these bytes are no tensor map.
bool decode(const uint8_t* bytes, TensorMap& map);

}  // namespace archflash::sim
