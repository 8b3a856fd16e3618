#include "sim/numerics/integer.h"

#include <algorithm>
#include <bit>

namespace archflash::sim {

uint64_t mul_hi_u64(uint64_t a, uint64_t b) {
  return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
}
int64_t mul_hi_s64(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<__int128>(a) * b >> 64);
}

uint32_t shf_l_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap) {
  const uint32_t amount = wrap ? c & 31 : std::min(c, 32u);
  return static_cast<uint32_t>((uint64_t{b} << 32 | a) << amount >> 32);
}
uint32_t shf_r_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap) {
  const uint32_t amount = wrap ? c & 31 : std::min(c, 32u);
  return static_cast<uint32_t>((uint64_t{b} << 32 | a) >> amount);
}

namespace {

// A position or length: the 32-bit forms take its low 8 bits, the 64-bit ones take all of it.
int field_operand(uint32_t operand, int bits) {
  return static_cast<int>(bits == 32 ? operand & 0xFF : std::min(operand, 255u));
}

}  // namespace

uint64_t bit_field(uint64_t a, int bits, bool is_signed, uint32_t position, uint32_t length) {
  const int start = field_operand(position, bits);
  const int count = field_operand(length, bits);
  if (count == 0) return 0;
  const int last = std::min(start + count - 1, bits - 1);
  const bool sign = is_signed && (a >> last & 1);
  const uint64_t fill = sign ? ~uint64_t{0} : 0;
  if (start >= bits) return low_bits(fill, bits);
  uint64_t field = low_bits(a, bits) >> start;
  const int available = bits - start;
  const int taken = std::min(count, available);
  field = low_bits(field, taken);
  if (taken < 64) field |= fill << taken;
  return low_bits(field, bits);
}

uint64_t with_bit_field(uint64_t a, uint64_t b, int bits, uint32_t position, uint32_t length) {
  const int start = field_operand(position, bits);
  const int count = field_operand(length, bits);
  if (start >= bits || count == 0) return b;
  const uint64_t mask = low_bits(~uint64_t{0}, std::min(count, bits - start)) << start;
  return (b & ~mask) | (a << start & mask);
}

uint32_t find_highest(uint64_t a, bool shiftamt, int bits) {
  if (a == 0) return 0xFFFFFFFFu;
  const int position = 63 - std::countl_zero(a);
  return static_cast<uint32_t>(shiftamt ? bits - 1 - position : position);
}

uint32_t bmsk_b32(uint32_t a, uint32_t b, bool wrap) {
  const uint32_t start = wrap ? a & 31 : std::min(a, 32u);
  const uint32_t count = wrap ? b & 31 : std::min(b, 32u);
  return static_cast<uint32_t>(((uint64_t{1} << count) - 1) << start);
}
uint32_t szext_u32(uint32_t a, uint32_t b, bool wrap) {
  const uint32_t count = wrap ? b & 31 : std::min(b, 32u);
  return static_cast<uint32_t>(low_bits(a, static_cast<int>(count)));
}
int32_t szext_s32(int32_t a, uint32_t b, bool wrap) {
  const uint32_t count = wrap ? b & 31 : std::min(b, 32u);
  if (count == 0) return 0;
  return static_cast<int32_t>(sign_extended(static_cast<uint32_t>(a), static_cast<int>(count)));
}

uint32_t fns_b32(uint32_t mask, uint32_t base, int32_t offset) {
  constexpr uint32_t NONE = 0xFFFFFFFFu;
  const int step = offset < 0 ? -1 : 1;
  int64_t wanted = offset < 0 ? -int64_t{offset} : offset;
  if (offset == INT32_MIN) return 0;  // which has no magnitude: what ptxas makes of it
  if (offset == 0) return base < 32 && (mask >> base & 1) ? base : NONE;
  for (int64_t position = base; position >= 0 && position < 32; position += step) {
    if ((mask >> position & 1) && --wanted == 0) return static_cast<uint32_t>(position);
  }
  return NONE;
}

uint32_t brev_b32(uint32_t a) {
  a = (a >> 1 & 0x55555555) | (a & 0x55555555) << 1;
  a = (a >> 2 & 0x33333333) | (a & 0x33333333) << 2;
  a = (a >> 4 & 0x0F0F0F0F) | (a & 0x0F0F0F0F) << 4;
  return __builtin_bswap32(a);
}
uint64_t brev_b64(uint64_t a) {
  return uint64_t{brev_b32(static_cast<uint32_t>(a))} << 32 | brev_b32(uint32_t(a >> 32));
}

uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t c, PrmtMode mode) {
  const uint64_t bytes = uint64_t{b} << 32 | a;
  const uint32_t control = c & 3;
  uint32_t result = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    uint32_t selector = 0;  // byte of {b, a}; bit 3: its sign, eight times
    switch (mode) {
      case PrmtMode::NONE:
        selector = c >> 4 * i & 0xF;
        break;
      case PrmtMode::F4E:
        selector = (control + i) & 7;
        break;
      case PrmtMode::B4E:
        selector = (control - i) & 7;
        break;
      case PrmtMode::RC8:
        selector = control;
        break;
      case PrmtMode::ECL:
        selector = std::max(control, i);
        break;
      case PrmtMode::ECR:
        selector = std::min(control, i);
        break;
      case PrmtMode::RC16:
        selector = (control & 1) * 2 + (i & 1);
        break;
    }
    uint32_t byte = bytes >> 8 * (selector & 7) & 0xFF;
    if (selector & 8) byte = byte & 0x80 ? 0xFF : 0;
    result |= byte << 8 * i;
  }
  return result;
}

namespace {

int32_t field_of(uint32_t value, int position, int bits, bool is_signed) {
  const uint32_t field = value >> position & ((1u << bits) - 1);
  return static_cast<int32_t>(is_signed ? sign_extended(field, bits) : field);
}

}  // namespace

uint32_t dp4a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c) {
  for (int i = 0; i < 4; ++i) {
    c += static_cast<uint32_t>(field_of(a, 8 * i, 8, a_signed) * field_of(b, 8 * i, 8, b_signed));
  }
  return c;
}

uint32_t dp2a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c, bool upper) {
  for (int i = 0; i < 2; ++i) {
    const int byte = 8 * i + (upper ? 16 : 0);
    c += static_cast<uint32_t>(field_of(a, 16 * i, 16, a_signed) * field_of(b, byte, 8, b_signed));
  }
  return c;
}

}  // namespace archflash::sim
