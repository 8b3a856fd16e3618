// Integer arithmetic, shifts, bit fields and logic.
#pragma once

#include <cstdint>
#include <type_traits>

namespace archflash::sim {

inline uint64_t low_bits(uint64_t value, int count) {
  return count == 64 ? value : value & ((uint64_t{1} << count) - 1);
}
inline int64_t sign_extended(uint64_t value, int count) {
  return static_cast<int64_t>(value << (64 - count)) >> (64 - count);
}

uint64_t mul_hi_u64(uint64_t a, uint64_t b);
int64_t mul_hi_s64(int64_t a, int64_t b);

// mul24 multiplies the operands' low 24 bits; .hi gives bits 16 to 47 of the 48-bit product.
inline int32_t saturate_s32(int64_t value) {  // add.sat.s32, sub.sat.s32, mad.hi.sat.s32, ...
  return value > INT32_MAX ? INT32_MAX : value < INT32_MIN ? INT32_MIN : int32_t(value);
}

// Shift amounts beyond the width are clamped to it.
template <class T>
T shl(T a, uint32_t count) {
  return count < 8 * sizeof(T) ? T(std::make_unsigned_t<T>(a) << count) : T(0);
}
template <class T>
T shr(T a, uint32_t count) {
  constexpr uint32_t BITS = 8 * sizeof(T);
  if (std::is_signed_v<T>) return T(a >> (count < BITS ? count : BITS - 1));
  return count < BITS ? T(a >> count) : T(0);
}

uint32_t shf_l_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap);
uint32_t shf_r_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap);

// A field of a: its position is b, its length c. The 32-bit forms take the low 8 bits of both.
// bfe: `length` of a's `bits` bits at `position`. Those beyond the top are zero or, in a signed
// field, copies of its sign.
uint64_t bit_field(uint64_t a, int bits, bool is_signed, uint32_t position, uint32_t length);
// bfi: b with `length` of its `bits` bits at `position` from a.
uint64_t with_bit_field(uint64_t a, uint64_t b, int bits, uint32_t position, uint32_t length);
uint32_t bmsk_b32(uint32_t a, uint32_t b, bool wrap);            // b ones from bit a on
uint32_t szext_u32(uint32_t a, uint32_t b, bool wrap);           // low b bits, zero-extended
int32_t szext_s32(int32_t a, uint32_t b, bool wrap);             // low b bits, sign-extended
uint32_t fns_b32(uint32_t mask, uint32_t base, int32_t offset);  // the n-th set bit from base on

// The position of the highest bit that differs from the sign, counted from bit 0; with `shiftamt`,
// the left shift that brings it to the top. 0xFFFFFFFF if there is no such bit.
uint32_t find_highest(uint64_t a, bool shiftamt, int bits);
template <class T>
uint32_t bfind(T a, bool shiftamt) {
  return find_highest(static_cast<std::make_unsigned_t<T>>(a < 0 ? ~a : a), shiftamt,
                      8 * sizeof(T));
}
uint32_t brev_b32(uint32_t a);
uint64_t brev_b64(uint64_t a);

// lop3: bit i of `table` is the result where the bits of (a, b, c) spell the number i.
enum class PrmtMode : uint8_t { NONE, F4E, B4E, RC8, ECL, ECR, RC16 };
uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t c, PrmtMode mode = PrmtMode::NONE);

uint32_t dp4a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c);
uint32_t dp2a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c, bool upper);

}  // namespace archflash::sim
