// The types of the elements that matrix instructions take, and their values.
#pragma once

#include <cstdint>

namespace archflash::sim {

// E2M3, E3M2 and E2M1_IN_BYTE are the types of .kind::f8f6f4 and mxf8f6f4 with fewer than 8 bits:
// each element has a byte, of which e2m3 and e3m2 use the lower six bits and e2m1 bits 2 to 5. E2M1
// is packed, two in a byte. UE8M0 and UE4M3 are the types of block scales.
enum class ElementType : uint8_t {
  F16,
  BF16,
  TF32,
  F32,
  F64,
  E4M3,
  E5M2,
  E2M3,
  E3M2,
  E2M1,
  E2M1_IN_BYTE,
  UE8M0,
  UE4M3,
  S8,
  U8,
  S4,
  U4,
  B1,
  S32
};

inline int element_bits(ElementType type) {
  switch (type) {
    case ElementType::F64:
      return 64;
    case ElementType::F32:
    case ElementType::TF32:
    case ElementType::S32:
      return 32;
    case ElementType::F16:
    case ElementType::BF16:
      return 16;
    case ElementType::S4:
    case ElementType::U4:
    case ElementType::E2M1:
      return 4;
    case ElementType::B1:
      return 1;
    default:
      return 8;
  }
}

inline bool is_fp8(ElementType type) {
  return type == ElementType::E4M3 || type == ElementType::E5M2;
}
// A type of .kind::f8f6f4 and .kind::mxf8f6f4.
inline bool is_f8f6f4(ElementType type) {
  return is_fp8(type) || type == ElementType::E2M3 || type == ElementType::E3M2 ||
         type == ElementType::E2M1_IN_BYTE;
}
inline bool is_int8(ElementType type) { return type == ElementType::S8 || type == ElementType::U8; }
inline bool is_int4(ElementType type) { return type == ElementType::S4 || type == ElementType::U4; }

// The 4-bit element at an index: two lie in a byte, the lower half first.
inline int nibble(const uint8_t* bytes, int index, bool is_signed) {
  const int value = bytes[index / 2] >> index % 2 * 4 & 0xF;
  return is_signed && value > 7 ? value - 16 : value;
}

// Converts `count` elements that follow one another in memory to floats, exactly. TF32 loses its
// low 13 bits as in the tensor core. F64, B1, S32 and scales are not supported.
void decode_row(ElementType type, const void* source, int count, float* out);

}  // namespace archflash::sim
