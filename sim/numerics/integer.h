// Integer arithmetic, shifts, bit fields and logic.
#pragma once

#include <bit>
#include <cstdint>

namespace archflash::sim {

inline uint64_t low_bits(uint64_t value, int count) {
  return count == 64 ? value : value & ((uint64_t{1} << count) - 1);
}
inline int64_t sign_extended(uint64_t value, int count) {
  return static_cast<int64_t>(value << (64 - count)) >> (64 - count);
}

inline uint32_t mul_hi_u32(uint32_t a, uint32_t b) { return (uint64_t{a} * b) >> 32; }
inline int32_t mul_hi_s32(int32_t a, int32_t b) { return (int64_t{a} * b) >> 32; }
uint64_t mul_hi_u64(uint64_t a, uint64_t b);
int64_t mul_hi_s64(int64_t a, int64_t b);

// mul24 multiplies the operands' low 24 bits; .hi gives bits 16 to 47 of the 48-bit product.
inline uint32_t mul24_lo_u32(uint32_t a, uint32_t b) { return (a & 0xFFFFFFu) * (b & 0xFFFFFFu); }
inline uint32_t mul24_hi_u32(uint32_t a, uint32_t b) {
  return (uint64_t{a & 0xFFFFFFu} * (b & 0xFFFFFFu)) >> 16;
}
inline int64_t low24_signed(int32_t a) { return static_cast<int32_t>(uint32_t(a) << 8) >> 8; }
inline int32_t mul24_lo_s32(int32_t a, int32_t b) {
  return static_cast<int32_t>(low24_signed(a) * low24_signed(b));
}
inline int32_t mul24_hi_s32(int32_t a, int32_t b) {
  return static_cast<int32_t>((low24_signed(a) * low24_signed(b)) >> 16);
}

inline int32_t saturate_s32(int64_t value) {  // add.sat.s32, sub.sat.s32, mad.hi.sat.s32, ...
  return value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : int32_t(value);
}

// Shift amounts beyond the width are clamped to it.
inline uint32_t shl_b32(uint32_t a, uint32_t b) { return b > 31 ? 0 : a << b; }
inline uint32_t shr_u32(uint32_t a, uint32_t b) { return b > 31 ? 0 : a >> b; }
inline int32_t shr_s32(int32_t a, uint32_t b) { return a >> (b > 31 ? 31 : b); }
inline uint64_t shl_b64(uint64_t a, uint32_t b) { return b > 63 ? 0 : a << b; }
inline uint64_t shr_u64(uint64_t a, uint32_t b) { return b > 63 ? 0 : a >> b; }
inline int64_t shr_s64(int64_t a, uint32_t b) { return a >> (b > 63 ? 63 : b); }

// shf shifts the 64 bits {b, a} (b is the upper half) by c & 31 (`wrap`) or by c clamped to 32. The
// left shift gives the upper half of that, the right shift the lower half.
uint32_t shf_l_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap);
uint32_t shf_r_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap);

// A field of a: its position is b, its length c. The 32-bit forms take the low 8 bits of both.
uint32_t bfe_u32(uint32_t a, uint32_t b, uint32_t c);
int32_t bfe_s32(int32_t a, uint32_t b, uint32_t c);
uint64_t bfe_u64(uint64_t a, uint32_t b, uint32_t c);
int64_t bfe_s64(int64_t a, uint32_t b, uint32_t c);
uint32_t bfi_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t d);  // a into b at c, d bits
uint64_t bfi_b64(uint64_t a, uint64_t b, uint32_t c, uint32_t d);
uint32_t bmsk_b32(uint32_t a, uint32_t b, bool wrap);            // b ones from bit a on
uint32_t szext_u32(uint32_t a, uint32_t b, bool wrap);           // low b bits, zero-extended
int32_t szext_s32(int32_t a, uint32_t b, bool wrap);             // low b bits, sign-extended
uint32_t fns_b32(uint32_t mask, uint32_t base, int32_t offset);  // the n-th set bit from base on

// The position of the highest bit that differs from the sign, counted from bit 0; with `shiftamt`,
// the left shift that brings it to the top. 0xFFFFFFFF if there is no such bit.
uint32_t bfind_u32(uint32_t a, bool shiftamt);
uint32_t bfind_s32(int32_t a, bool shiftamt);
uint32_t bfind_u64(uint64_t a, bool shiftamt);
uint32_t bfind_s64(int64_t a, bool shiftamt);
inline uint32_t clz_b32(uint32_t a) { return std::countl_zero(a); }
inline uint32_t clz_b64(uint64_t a) { return std::countl_zero(a); }
inline uint32_t popc_b32(uint32_t a) { return std::popcount(a); }
inline uint32_t popc_b64(uint64_t a) { return std::popcount(a); }
uint32_t brev_b32(uint32_t a);
uint64_t brev_b64(uint64_t a);

// lop3: bit i of `table` is the result where the bits of (a, b, c) spell the number i.
inline uint32_t lop3_b32(uint32_t a, uint32_t b, uint32_t c, uint8_t table) {
  uint32_t result = 0;
  if (table & 0x01) result |= ~a & ~b & ~c;
  if (table & 0x02) result |= ~a & ~b & c;
  if (table & 0x04) result |= ~a & b & ~c;
  if (table & 0x08) result |= ~a & b & c;
  if (table & 0x10) result |= a & ~b & ~c;
  if (table & 0x20) result |= a & ~b & c;
  if (table & 0x40) result |= a & b & ~c;
  if (table & 0x80) result |= a & b & c;
  return result;
}

enum class PrmtMode : uint8_t { NONE, F4E, B4E, RC8, ECL, ECR, RC16 };
uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t c, PrmtMode mode = PrmtMode::NONE);

inline uint32_t sad_u32(uint32_t a, uint32_t b, uint32_t c) { return c + (a > b ? a - b : b - a); }
inline uint32_t sad_s32(int32_t a, int32_t b, uint32_t c) {
  return c + (a > b ? uint32_t(a) - uint32_t(b) : uint32_t(b) - uint32_t(a));
}

// dp4a adds the dot product of four bytes to c; dp2a that of the two 16-bit halves of a and the
// lower or upper two bytes of b. Each operand may be signed or not; the sum wraps.
uint32_t dp4a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c);
uint32_t dp2a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c, bool upper);

}  // namespace archflash::sim
