#include "sim/units/tensor_map.h"

#include <cstring>

#include "sim/load/program.h"

namespace archflash::sim {
namespace {

constexpr uint64_t MAGIC = 0x70614D726F736E54u;
constexpr int64_t MAX_BOX = 256;
constexpr int64_t MAX_STEP = 8;
constexpr int64_t MAX_DIM = int64_t{1} << 32;
constexpr int64_t MAX_STRIDE = int64_t{1} << 40;
constexpr int64_t UNIT = 16;  // addresses, strides and rows are multiples of so many bytes

struct Encoded {
  uint64_t magic;
  uint64_t address;
  uint64_t dims[MAX_TENSOR_RANK];
  uint64_t strides[MAX_TENSOR_RANK - 1];
  uint16_t box[MAX_TENSOR_RANK];
  uint8_t element_steps[MAX_TENSOR_RANK];
  uint8_t type, swizzle, nan_fill, rank;
  uint8_t unused[13];
  uint64_t sum;  // a checksum of all bytes before it, so that other bytes are not taken for a map
};
static_assert(sizeof(Encoded) == TENSOR_MAP_BYTES);

uint64_t sum_of(const Encoded& encoded) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&encoded);
  uint64_t sum = 0xCBF29CE484222325u;
  for (size_t i = 0; i < offsetof(Encoded, sum); ++i) sum = (sum ^ bytes[i]) * 0x100000001B3u;
  return sum;
}

std::string str(int64_t value) { return std::to_string(value); }

[[noreturn]] void refuse(const std::string& what) { throw LoadError("a tensor map: " + what); }

}  // namespace

int map_type_bytes(MapType type) {
  static constexpr int BYTES[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  return BYTES[static_cast<int>(type)];
}

MapType map_type_named(const std::string& name) {
  static const char* const NAMES[] = {"u8",  "u16", "u32", "s32", "u64",
                                      "s64", "f16", "f32", "f64", "bf16"};
  for (int i = 0; i < 10; ++i) {
    if (name == NAMES[i]) return static_cast<MapType>(i);
  }
  refuse("the element type " + name + " is not simulated");
}

uint32_t swizzle_span(MapSwizzle swizzle) { return 16u << static_cast<int>(swizzle); }
uint32_t swizzle_mask(MapSwizzle swizzle) { return (1u << static_cast<int>(swizzle)) - 1; }
uint32_t swizzle_pattern_bytes(MapSwizzle swizzle) { return 128u << static_cast<int>(swizzle); }

TensorMap make_tensor_map(uint64_t address, MapType type, const std::vector<int64_t>& dims,
                          const std::vector<int64_t>& strides, const std::vector<int64_t>& box,
                          const std::vector<int64_t>& element_steps, MapSwizzle swizzle,
                          bool nan_fill) {
  const auto rank = static_cast<int>(dims.size());
  if (rank < 1 || rank > MAX_TENSOR_RANK || box.size() != dims.size() ||
      element_steps.size() != dims.size() || strides.size() + 1 != dims.size()) {
    refuse(str(rank) + " dimensions, " + str(static_cast<int64_t>(strides.size())) + " strides, " +
           str(static_cast<int64_t>(box.size())) + " box sizes and " +
           str(static_cast<int64_t>(element_steps.size())) +
           " element strides: 1 to 5 dimensions, one stride less and one of each other");
  }
  TensorMap map;
  map.address = address;
  map.type = type;
  map.swizzle = swizzle;
  map.nan_fill = nan_fill;
  map.rank = rank;
  if (address % UNIT != 0) refuse("its address is not a multiple of 16");
  map.strides[0] = map.element_bytes();
  for (int i = 0; i < rank; ++i) {
    const auto at = static_cast<size_t>(i);
    const std::string of = " of dimension " + str(i);
    if (dims[at] < 1 || dims[at] > MAX_DIM) {
      refuse("the size " + str(dims[at]) + of + ": 1 to 2^32 elements");
    }
    if (box[at] < 1 || box[at] > MAX_BOX) refuse("a box of " + str(box[at]) + of + ": 1 to 256");
    if (element_steps[at] < 1 || element_steps[at] > MAX_STEP) {
      refuse("an element stride of " + str(element_steps[at]) + of + ": 1 to 8");
    }
    map.dims[i] = static_cast<uint64_t>(dims[at]);
    map.box[i] = static_cast<uint32_t>(box[at]);
    map.element_steps[i] = static_cast<uint32_t>(element_steps[at]);
    if (i == 0) continue;
    const int64_t stride = strides[at - 1];
    if (stride < 0 || stride >= MAX_STRIDE || stride % UNIT != 0) {
      refuse("a stride of " + str(stride) + " bytes" + of + ": a multiple of 16 below 2^40");
    }
    map.strides[i] = static_cast<uint64_t>(stride);
  }
  const int64_t row = map.row_bytes();
  if (row % UNIT != 0) {
    refuse("a box of " + str(row) + " bytes along dimension 0: a multiple of 16");
  }
  if (swizzle != MapSwizzle::None && row > swizzle_span(swizzle)) {
    refuse("a box of " + str(row) + " bytes along dimension 0: with a swizzle of " +
           str(swizzle_span(swizzle)) + " bytes at most those");
  }
  if (nan_fill && type != MapType::F16 && type != MapType::BF16) {
    refuse("filling with NaN is simulated for 16-bit floating point only");
  }
  return map;
}

std::array<uint8_t, TENSOR_MAP_BYTES> encode(const TensorMap& map) {
  Encoded encoded{};
  encoded.magic = MAGIC;
  encoded.address = map.address;
  for (int i = 0; i < MAX_TENSOR_RANK; ++i) {
    encoded.dims[i] = map.dims[i];
    if (i > 0) encoded.strides[i - 1] = map.strides[i];
    encoded.box[i] = static_cast<uint16_t>(map.box[i]);
    encoded.element_steps[i] = static_cast<uint8_t>(map.element_steps[i]);
  }
  encoded.type = static_cast<uint8_t>(map.type);
  encoded.swizzle = static_cast<uint8_t>(map.swizzle);
  encoded.nan_fill = map.nan_fill;
  encoded.rank = static_cast<uint8_t>(map.rank);
  encoded.sum = sum_of(encoded);
  std::array<uint8_t, TENSOR_MAP_BYTES> bytes;
  std::memcpy(bytes.data(), &encoded, sizeof encoded);
  return bytes;
}

bool decode(const uint8_t* bytes, TensorMap& map) {
  Encoded encoded;
  std::memcpy(&encoded, bytes, sizeof encoded);
  if (encoded.magic != MAGIC || encoded.sum != sum_of(encoded)) return false;
  map.address = encoded.address;
  map.type = static_cast<MapType>(encoded.type);
  map.swizzle = static_cast<MapSwizzle>(encoded.swizzle);
  map.nan_fill = encoded.nan_fill != 0;
  map.rank = encoded.rank;
  map.strides[0] = map.element_bytes();
  for (int i = 0; i < MAX_TENSOR_RANK; ++i) {
    map.dims[i] = encoded.dims[i];
    if (i > 0) map.strides[i] = encoded.strides[i - 1];
    map.box[i] = encoded.box[i];
    map.element_steps[i] = encoded.element_steps[i];
  }
  return true;
}

}  // namespace archflash::sim
