#include "sim/numerics/element.h"

#include "sim/numerics/convert.h"
#include "sim/numerics/formats.h"

namespace archflash::sim {
namespace {

struct ByteTable {
  float value[256];
};

template <class Decode>
ByteTable byte_table(Decode decode) {
  ByteTable table;
  for (int i = 0; i < 256; ++i) table.value[i] = decode(static_cast<uint8_t>(i));
  return table;
}

// The number that the bits of a byte from FIRST on encode in FORMAT.
template <const Format& FORMAT, int FIRST = 0>
float small_float(uint8_t byte) {
  return static_cast<float>(decode(FORMAT, byte >> FIRST & ((1u << FORMAT.bits()) - 1)));
}

const ByteTable E4M3_VALUES = byte_table(f32_of_e4m3);
const ByteTable E5M2_VALUES = byte_table(f32_of_e5m2);
const ByteTable E2M3_VALUES = byte_table(small_float<E2M3>);
const ByteTable E3M2_VALUES = byte_table(small_float<E3M2>);
const ByteTable E2M1_IN_BYTE_VALUES = byte_table(small_float<E2M1, 2>);

}  // namespace

void decode_row(ElementType type, const void* source, int count, float* out) {
  const auto* bytes = static_cast<const uint8_t*>(source);
  const auto* halves = static_cast<const uint16_t*>(source);
  const auto* words = static_cast<const uint32_t*>(source);
  switch (type) {
    case ElementType::F16:
      for (int i = 0; i < count; ++i) out[i] = f32_of_f16(halves[i]);
      break;
    case ElementType::BF16:
      for (int i = 0; i < count; ++i) out[i] = f32_of(uint32_t{halves[i]} << 16);
      break;
    case ElementType::TF32:
      for (int i = 0; i < count; ++i) out[i] = f32_of_tf32(words[i]);
      break;
    case ElementType::F32:
      for (int i = 0; i < count; ++i) out[i] = f32_of(words[i]);
      break;
    case ElementType::E4M3:
      for (int i = 0; i < count; ++i) out[i] = E4M3_VALUES.value[bytes[i]];
      break;
    case ElementType::E5M2:
      for (int i = 0; i < count; ++i) out[i] = E5M2_VALUES.value[bytes[i]];
      break;
    case ElementType::E2M3:
      for (int i = 0; i < count; ++i) out[i] = E2M3_VALUES.value[bytes[i]];
      break;
    case ElementType::E3M2:
      for (int i = 0; i < count; ++i) out[i] = E3M2_VALUES.value[bytes[i]];
      break;
    case ElementType::E2M1_IN_BYTE:
      for (int i = 0; i < count; ++i) out[i] = E2M1_IN_BYTE_VALUES.value[bytes[i]];
      break;
    case ElementType::E2M1:
      for (int i = 0; i < count; ++i) {
        out[i] = small_float<E2M1>(static_cast<uint8_t>(nibble(bytes, i, false)));
      }
      break;
    case ElementType::S8:
      for (int i = 0; i < count; ++i) out[i] = static_cast<int8_t>(bytes[i]);
      break;
    case ElementType::U8:
      for (int i = 0; i < count; ++i) out[i] = bytes[i];
      break;
    case ElementType::S4:
    case ElementType::U4:
      for (int i = 0; i < count; ++i) {
        out[i] = static_cast<float>(nibble(bytes, i, type == ElementType::S4));
      }
      break;
    default:
      break;
  }
}

}  // namespace archflash::sim
