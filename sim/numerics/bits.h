// Bits of floating-point values, and the modifiers that arithmetic instructions share.
#pragma once

#include <bit>
#include <cstdint>

namespace archflash::sim {

// Rounding modifiers. RNA rounds ties away from zero. RNI, RZI, RMI and RPI round to an integral
// value, in cvt only.
enum class Round : uint8_t { NONE, RN, RZ, RM, RP, RNA, RNI, RZI, RMI, RPI };

// Modifiers of an arithmetic instruction. PTX takes RN where none is written.
struct FloatMode {
  Round round = Round::RN;
  bool ftz = false;  // .ftz: subnormal inputs and results become zeros of their sign
  bool sat = false;  // .sat: clamped to [0, 1], NaN becomes +0
};

// Modifiers of min and max.
struct MinMaxMode {
  bool ftz = false;
  bool nan = false;          // .NaN: a NaN operand makes the result NaN
  bool xorsign_abs = false;  // .xorsign.abs: takes the magnitudes; the sign is the XOR of the signs
};

constexpr uint32_t F32_NAN = 0x7FFFFFFFu;
constexpr uint16_t F16_NAN = 0x7FFFu;
constexpr uint16_t BF16_NAN = 0x7FFFu;

inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
inline uint64_t bits_of(double value) { return std::bit_cast<uint64_t>(value); }
inline float f32_of(uint32_t bits) { return std::bit_cast<float>(bits); }
inline double f64_of(uint64_t bits) { return std::bit_cast<double>(bits); }

inline bool is_nan(float value) { return (bits_of(value) & 0x7FFFFFFFu) > 0x7F800000u; }
inline float canonical(float value) { return is_nan(value) ? f32_of(F32_NAN) : value; }
inline float flush(float value) {  // a subnormal becomes the zero of its sign
  const uint32_t bits = bits_of(value);
  return (bits & 0x7F800000u) == 0 ? f32_of(bits & 0x80000000u) : value;
}
inline float saturate(float value) {  // .sat
  return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f;
}

}  // namespace archflash::sim
