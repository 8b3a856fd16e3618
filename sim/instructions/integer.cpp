// Integer arithmetic, logic, shifts and bit fields.
#include <algorithm>
#include <bit>
#include <limits>

#include "sim/instructions/elementwise.h"
#include "sim/load/builder.h"
#include "sim/numerics/numeric.h"

namespace archflash::sim {
namespace {

// Calls make<T>() with the C++ type of a PTX integer type.
template <class Make>
Handler by_type(Builder& b, Type t, Make make) {
  const bool is_signed = t.kind == 's';
  switch (t.bits) {
    case 16:
      return is_signed ? make.template operator()<int16_t>() : make.template operator()<uint16_t>();
    case 32:
      return is_signed ? make.template operator()<int32_t>() : make.template operator()<uint32_t>();
    case 64:
      return is_signed ? make.template operator()<int64_t>() : make.template operator()<uint64_t>();
    default:
      b.fail("an integer type of this width");
  }
}

// The handler of an operation on values of one integer type: OPERATION is a generic lambda, for
// every such type T a function of SOURCES values that returns T.
template <int SOURCES, auto OPERATION>
void handle_by_type(Builder& b, Type t) {
  const auto make = []<class T>() {
    if constexpr (SOURCES == 1)
      return elementwise<[](T x) -> T { return OPERATION(x); }>();
    else if constexpr (SOURCES == 2)
      return elementwise<[](T x, T y) -> T { return OPERATION(x, y); }>();
    else
      return elementwise<[](T x, T y, T z) -> T { return OPERATION(x, y, z); }>();
  };
  b.handler(by_type(b, t, make), Class::Integer);
}

template <class T>
using Unsigned = std::make_unsigned_t<T>;
// A type in which no promotion to int overflows.
template <class T>
using Wide = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

void operands(Builder& b, Type t, int sources) {
  b.destination(t);
  for (int i = 0; i < sources; ++i) b.source(t);
}

void build_add(Builder& b) {
  const Type t = b.type(1);
  operands(b, t, 2);
  if (b.has("sat")) {
    if (t.kind != 's' || t.bits != 32) b.fail(".sat is for .s32");
    b.handler(elementwise<[](int32_t x, int32_t y) { return saturate_s32(int64_t{x} + y); }>(),
              Class::Integer);
    return;
  }
  handle_by_type<2, []<class T>(T x, T y) -> T { return T(Wide<T>(x) + Wide<T>(y)); }>(b, t);
}

void build_sub(Builder& b) {
  const Type t = b.type(1);
  operands(b, t, 2);
  if (b.has("sat")) {
    if (t.kind != 's' || t.bits != 32) b.fail(".sat is for .s32");
    b.handler(elementwise<[](int32_t x, int32_t y) { return saturate_s32(int64_t{x} - y); }>(),
              Class::Integer);
    return;
  }
  handle_by_type<2, []<class T>(T x, T y) -> T { return T(Wide<T>(x) - Wide<T>(y)); }>(b, t);
}

template <class T>
T multiply_high(T x, T y) {
  if constexpr (sizeof(T) == 8) {
    if constexpr (std::is_signed_v<T>)
      return mul_hi_s64(x, y);
    else
      return mul_hi_u64(x, y);
  } else {
    using Double = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
    return T((Double{x} * Double{y}) >> (8 * sizeof(T)));
  }
}

template <class T>
using Twice =
    std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>,
                       std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;

// x * y at twice the width. Signed types use unsigned arithmetic, so that nothing overflows.
template <class T>
Twice<T> multiply_wide(T x, T y) {
  return Twice<T>(static_cast<int64_t>(x) * static_cast<int64_t>(y));
}

void build_mul(Builder& b) {
  const Type t = b.type(1);
  if (b.has("wide")) {
    if (t.bits == 64) b.fail(".wide is for 16 and 32 bits");
    b.destination({t.kind, 2 * t.bits});
    b.source(t);
    b.source(t);
    b.handler(t.bits == 16
                  ? (t.kind == 's'
                         ? elementwise<[](int16_t x, int16_t y) { return int32_t(x) * y; }>()
                         : elementwise<[](uint16_t x, uint16_t y) { return uint32_t(x) * y; }>())
                  : (t.kind == 's'
                         ? elementwise<[](int32_t x, int32_t y) { return int64_t{x} * y; }>()
                         : elementwise<[](uint32_t x, uint32_t y) { return uint64_t{x} * y; }>()),
              Class::Integer);
    return;
  }
  operands(b, t, 2);
  if (b.has("hi")) {
    handle_by_type<2, []<class T>(T x, T y) -> T { return multiply_high(x, y); }>(b, t);
    return;
  }
  handle_by_type<2, []<class T>(T x, T y) -> T { return T(Wide<T>(x) * Wide<T>(y)); }>(b, t);
}

void build_mad(Builder& b) {
  const Type t = b.type(2);
  if (b.has("wide")) {
    if (t.bits == 64) b.fail(".wide is for 16 and 32 bits");
    const Type twice{t.kind, 2 * t.bits};
    b.destination(twice);
    b.source(t);
    b.source(t);
    b.source(twice);
    b.handler(t.bits == 16 ? (t.kind == 's' ? elementwise<[](int16_t x, int16_t y, int32_t z) {
                return int32_t(uint32_t(int32_t(x) * y) + uint32_t(z));
              }>()
                                            : elementwise<[](uint16_t x, uint16_t y, uint32_t z) {
                                                return uint32_t(x) * y + z;
                                              }>())
                           : (t.kind == 's' ? elementwise<[](int32_t x, int32_t y, int64_t z) {
                               return int64_t(uint64_t(int64_t{x} * y) + uint64_t(z));
                             }>()
                                            : elementwise<[](uint32_t x, uint32_t y, uint64_t z) {
                                                return uint64_t{x} * y + z;
                                              }>()),
              Class::Integer);
    return;
  }
  operands(b, t, 3);
  if (b.has("sat")) {
    if (!b.has("hi") || t.kind != 's' || t.bits != 32) b.fail(".sat is for .hi.s32");
    b.handler(elementwise<[](int32_t x, int32_t y, int32_t z) {
                return saturate_s32(int64_t{mul_hi_s32(x, y)} + z);
              }>(),
              Class::Integer);
  } else if (b.has("hi")) {
    handle_by_type<3, []<class T>(T x, T y, T z) -> T {
      return T(Wide<T>(multiply_high(x, y)) + Wide<T>(z));
    }>(b, t);
  } else {
    handle_by_type<3, []<class T>(T x, T y, T z) -> T {
      return T(Wide<T>(x) * Wide<T>(y) + Wide<T>(z));
    }>(b, t);
  }
}

void build_mul24(Builder& b) {
  const Type t = b.type(1);
  operands(b, t, 2);
  const bool high = b.has("hi");
  if (t.kind == 's') {
    b.handler(high ? elementwise<[](int32_t x, int32_t y) { return mul24_hi_s32(x, y); }>()
                   : elementwise<[](int32_t x, int32_t y) { return mul24_lo_s32(x, y); }>(),
              Class::Integer);
  } else {
    b.handler(high ? elementwise<[](uint32_t x, uint32_t y) { return mul24_hi_u32(x, y); }>()
                   : elementwise<[](uint32_t x, uint32_t y) { return mul24_lo_u32(x, y); }>(),
              Class::Integer);
  }
}

void build_mad24(Builder& b) {
  const Type t = b.type(2);
  operands(b, t, 3);
  const bool high = b.has("hi");
  if (b.has("sat")) {
    if (!high || t.kind != 's') b.fail(".sat is for .hi.s32");
    b.handler(elementwise<[](int32_t x, int32_t y, int32_t z) {
                return saturate_s32(int64_t{mul24_hi_s32(x, y)} + z);
              }>(),
              Class::Integer);
  } else if (t.kind == 's') {
    b.handler(high ? elementwise<[](int32_t x, int32_t y, uint32_t z) {
                return uint32_t(mul24_hi_s32(x, y)) + z;
              }>()
                   : elementwise<[](int32_t x, int32_t y, uint32_t z) {
                       return uint32_t(mul24_lo_s32(x, y)) + z;
                     }>(),
              Class::Integer);
  } else {
    b.handler(high ? elementwise<[](uint32_t x, uint32_t y, uint32_t z) {
                return mul24_hi_u32(x, y) + z;
              }>()
                   : elementwise<[](uint32_t x, uint32_t y, uint32_t z) {
                       return mul24_lo_u32(x, y) + z;
                     }>(),
              Class::Integer);
  }
}

void build_div(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 2);
  // PTX leaves division by zero open. Here it gives all ones, as does rem, like an H200. The lowest
  // value divided by -1 is itself.
  handle_by_type<2, []<class T>(T x, T y) -> T {
    if (y == 0) return T(-1);
    if constexpr (std::is_signed_v<T>) {
      if (y == T(-1)) return T(Wide<T>(0) - Wide<T>(x));
    }
    return T(x / y);
  }>(b, t);
}

void build_rem(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 2);
  handle_by_type<2, []<class T>(T x, T y) -> T {
    if (y == 0) return T(-1);
    if constexpr (std::is_signed_v<T>) {
      if (y == T(-1)) return 0;
    }
    return T(x % y);
  }>(b, t);
}

void build_abs(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 1);
  handle_by_type<1, []<class T>(T x) -> T {
    if constexpr (std::is_signed_v<T>) {
      return x < 0 ? T(Wide<T>(0) - Wide<T>(x)) : x;
    } else {
      return x;
    }
  }>(b, t);
}

void build_neg(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 1);
  handle_by_type<1, []<class T>(T x) -> T { return T(Wide<T>(0) - Wide<T>(x)); }>(b, t);
}

void build_min(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 2);
  handle_by_type<2, []<class T>(T x, T y) -> T { return x < y ? x : y; }>(b, t);
}

void build_max(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 2);
  handle_by_type<2, []<class T>(T x, T y) -> T { return y < x ? x : y; }>(b, t);
}

void build_min_relu(Builder& b) {
  operands(b, {'s', 32}, 2);
  b.handler(elementwise<[](int32_t x, int32_t y) { return std::max(0, x < y ? x : y); }>(),
            Class::Integer);
}
void build_max_relu(Builder& b) {
  operands(b, {'s', 32}, 2);
  b.handler(elementwise<[](int32_t x, int32_t y) { return std::max(0, x > y ? x : y); }>(),
            Class::Integer);
}

void build_sad(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 3);
  handle_by_type<3, []<class T>(T x, T y, T z) -> T {
    const Wide<T> distance = y < x ? Wide<T>(x) - Wide<T>(y) : Wide<T>(y) - Wide<T>(x);
    return T(Wide<T>(z) + distance);
  }>(b, t);
}

// add.cc, addc, sub.cc, subc, mad.cc and madc keep the carry flag in a predicate register of its
// own.
constexpr uint32_t CARRY_IN = 1, CARRY_OUT = 2, CARRY_SUB = 4;

template <class U>
void run_carry(Warp& warp, const Instruction& instruction, uint32_t mask) {
  U* d = warp.lanes<U>(instruction.operands[0]);
  const U* x = warp.lanes<const U>(instruction.operands[1]);
  const U* y = warp.lanes<const U>(instruction.operands[2]);
  uint32_t& flag = warp.predicate(instruction.operands[3]);
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int i = std::countr_zero(rest);
    const U in = instruction.flags & CARRY_IN ? flag >> i & 1 : 0;
    U result;
    bool out;
    if (instruction.flags & CARRY_SUB) {
      const U partial = x[i] - y[i];
      result = partial - in;
      out = x[i] < y[i] || partial < in;
    } else {
      const U partial = x[i] + y[i];
      result = partial + in;
      out = partial < x[i] || result < partial;
    }
    d[i] = result;
    if (instruction.flags & CARRY_OUT) flag = (flag & ~(1u << i)) | uint32_t{out} << i;
  }
}

void build_carry(Builder& b, uint32_t flags, Type t) {
  b.destination(t);
  b.source(t);
  b.source(t);
  if (flags & CARRY_IN)
    b.add_carry(Role::Read);
  else
    b.add_carry(Role::Write);
  if ((flags & CARRY_IN) && (flags & CARRY_OUT)) b.add_carry(Role::Write);
  b.instruction.flags |= flags;
  b.handler(t.bits == 64 ? &run_carry<uint64_t> : &run_carry<uint32_t>, Class::Integer);
}

void build_add_cc(Builder& b) { build_carry(b, CARRY_OUT, b.type(1)); }
void build_addc(Builder& b) { build_carry(b, CARRY_IN | (b.has("cc") ? CARRY_OUT : 0), b.type(1)); }
void build_sub_cc(Builder& b) { build_carry(b, CARRY_OUT | CARRY_SUB, b.type(1)); }
void build_subc(Builder& b) {
  build_carry(b, CARRY_IN | CARRY_SUB | (b.has("cc") ? CARRY_OUT : 0), b.type(1));
}

constexpr uint32_t MAD_HIGH = 8;

template <class T>
void run_mad_carry(Warp& warp, const Instruction& instruction, uint32_t mask) {
  using U = Unsigned<T>;
  U* d = warp.lanes<U>(instruction.operands[0]);
  const T* x = warp.lanes<const T>(instruction.operands[1]);
  const T* y = warp.lanes<const T>(instruction.operands[2]);
  const U* z = warp.lanes<const U>(instruction.operands[3]);
  uint32_t& flag = warp.predicate(instruction.operands[4]);
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int i = std::countr_zero(rest);
    const U product =
        instruction.flags & MAD_HIGH ? U(multiply_high(x[i], y[i])) : U(x[i]) * U(y[i]);
    const U in = instruction.flags & CARRY_IN ? flag >> i & 1 : 0;
    const U partial = product + z[i];
    const U result = partial + in;
    const bool out = partial < product || result < partial;
    d[i] = result;
    if (instruction.flags & CARRY_OUT) flag = (flag & ~(1u << i)) | uint32_t{out} << i;
  }
}

void build_mad_carry(Builder& b, uint32_t flags) {
  const Type t = b.type(2);
  b.destination(t);
  for (int i = 0; i < 3; ++i) b.source(t);
  b.add_carry(flags & CARRY_IN ? Role::Read : Role::Write);
  if ((flags & CARRY_IN) && (flags & CARRY_OUT)) b.add_carry(Role::Write);
  b.instruction.flags |= flags | (b.has("hi") ? MAD_HIGH : 0);
  if (t.bits == 64) {
    b.handler(t.kind == 's' ? &run_mad_carry<int64_t> : &run_mad_carry<uint64_t>, Class::Integer);
  } else {
    b.handler(t.kind == 's' ? &run_mad_carry<int32_t> : &run_mad_carry<uint32_t>, Class::Integer);
  }
}
void build_mad_cc(Builder& b) { build_mad_carry(b, CARRY_OUT); }
void build_madc(Builder& b) { build_mad_carry(b, CARRY_IN | (b.has("cc") ? CARRY_OUT : 0)); }

// ---- Logic and shifts ----

// Logic on predicates: one word holds a whole warp.
constexpr uint32_t PRED_AND = 0, PRED_OR = 1, PRED_XOR = 2, PRED_NOT = 3;

void run_predicate_logic(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t& d = warp.predicate(instruction.operands[0]);
  const uint32_t x = warp.predicate(instruction.operands[1]);
  const uint32_t operation = instruction.flags & 3;
  const uint32_t y = operation == PRED_NOT ? 0 : warp.predicate(instruction.operands[2]);
  const uint32_t result = operation == PRED_AND   ? x & y
                          : operation == PRED_OR  ? x | y
                          : operation == PRED_XOR ? x ^ y
                                                  : ~x;
  d = (d & ~mask) | (result & mask);
}

void build_logic_pred(Builder& b, uint32_t operation) {
  b.predicate_destination();
  b.predicate_source();
  if (operation != PRED_NOT) b.predicate_source();
  if (b.instruction.flags & Builder::NEGATED) b.fail("'!' is not allowed here");
  b.instruction.flags = operation;
  b.handler(&run_predicate_logic, Class::Logic);
}

void build_and(Builder& b) {
  const Type t = b.type(0);
  if (t.kind == 'p') return build_logic_pred(b, PRED_AND);
  operands(b, t, 2);
  b.handler(t.bits == 64 ? elementwise<[](uint64_t x, uint64_t y) { return x & y; }>()
                         : elementwise<[](uint32_t x, uint32_t y) { return x & y; }>(),
            Class::Logic);
}
void build_or(Builder& b) {
  const Type t = b.type(0);
  if (t.kind == 'p') return build_logic_pred(b, PRED_OR);
  operands(b, t, 2);
  b.handler(t.bits == 64 ? elementwise<[](uint64_t x, uint64_t y) { return x | y; }>()
                         : elementwise<[](uint32_t x, uint32_t y) { return x | y; }>(),
            Class::Logic);
}
void build_xor(Builder& b) {
  const Type t = b.type(0);
  if (t.kind == 'p') return build_logic_pred(b, PRED_XOR);
  operands(b, t, 2);
  b.handler(t.bits == 64 ? elementwise<[](uint64_t x, uint64_t y) { return x ^ y; }>()
                         : elementwise<[](uint32_t x, uint32_t y) { return x ^ y; }>(),
            Class::Logic);
}
void build_not(Builder& b) {
  const Type t = b.type(0);
  if (t.kind == 'p') return build_logic_pred(b, PRED_NOT);
  operands(b, t, 1);
  b.handler(t.bits == 64   ? elementwise<[](uint64_t x) { return ~x; }>()
            : t.bits == 32 ? elementwise<[](uint32_t x) { return ~x; }>()
                           : elementwise<[](uint16_t x) { return uint16_t(~x); }>(),
            Class::Logic);
}
void build_cnot(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 1);
  b.handler(t.bits == 64   ? elementwise<[](uint64_t x) { return uint64_t{x == 0}; }>()
            : t.bits == 32 ? elementwise<[](uint32_t x) { return uint32_t{x == 0}; }>()
                           : elementwise<[](uint16_t x) { return uint16_t{x == 0}; }>(),
            Class::Logic);
}

void build_shl(Builder& b) {
  const Type t = b.type(0);
  b.destination(t);
  b.source(t);
  b.source({'u', 32});
  b.handler(t.bits == 64 ? elementwise<[](uint64_t x, uint32_t n) { return shl_b64(x, n); }>()
            : t.bits == 32
                ? elementwise<[](uint32_t x, uint32_t n) { return shl_b32(x, n); }>()
                : elementwise<[](uint16_t x, uint32_t n) { return uint16_t(shl_b32(x, n)); }>(),
            Class::Logic);
}
void build_shr(Builder& b) {
  const Type t = b.type(0);
  b.destination(t);
  b.source(t);
  b.source({'u', 32});
  Handler run;
  if (t.kind == 's') {
    run = t.bits == 64 ? elementwise<[](int64_t x, uint32_t n) { return shr_s64(x, n); }>()
          : t.bits == 32
              ? elementwise<[](int32_t x, uint32_t n) { return shr_s32(x, n); }>()
              : elementwise<[](int16_t x, uint32_t n) { return int16_t(shr_s32(x, n)); }>();
  } else {
    run = t.bits == 64 ? elementwise<[](uint64_t x, uint32_t n) { return shr_u64(x, n); }>()
          : t.bits == 32
              ? elementwise<[](uint32_t x, uint32_t n) { return shr_u32(x, n); }>()
              : elementwise<[](uint16_t x, uint32_t n) { return uint16_t(shr_u32(x, n)); }>();
  }
  b.handler(run, Class::Logic);
}
void build_shf(Builder& b) {
  operands(b, {'b', 32}, 2);
  b.source({'u', 32});
  const bool wrap = b.has("wrap");
  Handler run;
  if (b.has("l")) {
    run = wrap ? elementwise<[](uint32_t x, uint32_t y, uint32_t n) {
      return shf_l_b32(x, y, n, true);
    }>()
               : elementwise<[](uint32_t x, uint32_t y, uint32_t n) {
                   return shf_l_b32(x, y, n, false);
                 }>();
  } else {
    run = wrap ? elementwise<[](uint32_t x, uint32_t y, uint32_t n) {
      return shf_r_b32(x, y, n, true);
    }>()
               : elementwise<[](uint32_t x, uint32_t y, uint32_t n) {
                   return shf_r_b32(x, y, n, false);
                 }>();
  }
  b.handler(run, Class::Logic);
}

void run_lop3(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint32_t* x = warp.lanes<const uint32_t>(instruction.operands[1]);
  const uint32_t* y = warp.lanes<const uint32_t>(instruction.operands[2]);
  const uint32_t* z = warp.lanes<const uint32_t>(instruction.operands[3]);
  const auto lut = static_cast<uint8_t>(instruction.offset);
  // Each minterm of the table becomes a mask, so that lanes are computed without branches.
  uint32_t term[8];
  for (int i = 0; i < 8; ++i) term[i] = lut >> i & 1 ? ~0u : 0;
  uint32_t result[LANES];
  for (int i = 0; i < LANES; ++i) {
    const uint32_t p = x[i], q = y[i], r = z[i];
    const uint32_t low =
        (~q & ((~r & term[0]) | (r & term[1]))) | (q & ((~r & term[2]) | (r & term[3])));
    const uint32_t high =
        (~q & ((~r & term[4]) | (r & term[5]))) | (q & ((~r & term[6]) | (r & term[7])));
    result[i] = (~p & low) | (p & high);
  }
  if (mask == ALL_LANES) {
    for (int i = 0; i < LANES; ++i) d[i] = result[i];
  } else {
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      d[std::countr_zero(rest)] = result[std::countr_zero(rest)];
    }
  }
}

void build_lop3(Builder& b) {
  operands(b, {'b', 32}, 3);
  b.instruction.offset = b.immediate();
  if (b.instruction.offset < 0 || b.instruction.offset > 255) b.fail("a table beyond 0..255");
  b.handler(&run_lop3, Class::Logic);
}

// ---- Bit fields and counts ----

void build_popc(Builder& b) {
  const Type t = b.type(0);
  b.destination({'u', 32});
  b.source(t);
  b.handler(t.bits == 64 ? elementwise<[](uint64_t x) { return popc_b64(x); }>()
                         : elementwise<[](uint32_t x) { return popc_b32(x); }>(),
            Class::Integer);
}
void build_clz(Builder& b) {
  const Type t = b.type(0);
  b.destination({'u', 32});
  b.source(t);
  b.handler(t.bits == 64 ? elementwise<[](uint64_t x) { return clz_b64(x); }>()
                         : elementwise<[](uint32_t x) { return clz_b32(x); }>(),
            Class::Integer);
}
void build_bfind(Builder& b) {
  const Type t = b.type(1);
  b.destination({'u', 32});
  b.source(t);
  Handler run;
  if (b.has("shiftamt")) {
    run = t.bits == 64
              ? (t.kind == 's' ? elementwise<[](int64_t x) { return bfind_s64(x, true); }>()
                               : elementwise<[](uint64_t x) { return bfind_u64(x, true); }>())
              : (t.kind == 's' ? elementwise<[](int32_t x) { return bfind_s32(x, true); }>()
                               : elementwise<[](uint32_t x) { return bfind_u32(x, true); }>());
  } else {
    run = t.bits == 64
              ? (t.kind == 's' ? elementwise<[](int64_t x) { return bfind_s64(x, false); }>()
                               : elementwise<[](uint64_t x) { return bfind_u64(x, false); }>())
              : (t.kind == 's' ? elementwise<[](int32_t x) { return bfind_s32(x, false); }>()
                               : elementwise<[](uint32_t x) { return bfind_u32(x, false); }>());
  }
  b.handler(run, Class::Integer);
}
void build_brev(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 1);
  b.handler(t.bits == 64 ? elementwise<[](uint64_t x) { return brev_b64(x); }>()
                         : elementwise<[](uint32_t x) { return brev_b32(x); }>(),
            Class::Integer);
}
void build_bfe(Builder& b) {
  const Type t = b.type(0);
  b.destination(t);
  b.source(t);
  b.source({'u', 32});
  b.source({'u', 32});
  Handler run;
  if (t.bits == 64) {
    run = t.kind == 's'
              ? elementwise<[](int64_t x, uint32_t p, uint32_t n) { return bfe_s64(x, p, n); }>()
              : elementwise<[](uint64_t x, uint32_t p, uint32_t n) { return bfe_u64(x, p, n); }>();
  } else {
    run = t.kind == 's'
              ? elementwise<[](int32_t x, uint32_t p, uint32_t n) { return bfe_s32(x, p, n); }>()
              : elementwise<[](uint32_t x, uint32_t p, uint32_t n) { return bfe_u32(x, p, n); }>();
  }
  b.handler(run, Class::Integer);
}
void build_bfi(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 2);
  b.source({'u', 32});
  b.source({'u', 32});
  b.handler(t.bits == 64 ? elementwise<[](uint64_t x, uint64_t y, uint32_t p, uint32_t n) {
              return bfi_b64(x, y, p, n);
            }>()
                         : elementwise<[](uint32_t x, uint32_t y, uint32_t p, uint32_t n) {
                             return bfi_b32(x, y, p, n);
                           }>(),
            Class::Integer);
}
void build_bmsk(Builder& b) {
  operands(b, {'b', 32}, 2);
  b.handler(b.has("wrap")
                ? elementwise<[](uint32_t x, uint32_t y) { return bmsk_b32(x, y, true); }>()
                : elementwise<[](uint32_t x, uint32_t y) { return bmsk_b32(x, y, false); }>(),
            Class::Integer);
}
void build_szext(Builder& b) {
  const Type t = b.type(1);
  operands(b, t, 1);
  b.source({'u', 32});
  Handler run;
  if (t.kind == 's') {
    run = b.has("wrap")
              ? elementwise<[](int32_t x, uint32_t n) { return szext_s32(x, n, true); }>()
              : elementwise<[](int32_t x, uint32_t n) { return szext_s32(x, n, false); }>();
  } else {
    run = b.has("wrap")
              ? elementwise<[](uint32_t x, uint32_t n) { return szext_u32(x, n, true); }>()
              : elementwise<[](uint32_t x, uint32_t n) { return szext_u32(x, n, false); }>();
  }
  b.handler(run, Class::Integer);
}
void build_fns(Builder& b) {
  b.destination({'b', 32});
  b.source({'b', 32});
  b.source({'b', 32});
  b.source({'s', 32});
  b.handler(elementwise<[](uint32_t x, uint32_t base, int32_t n) { return fns_b32(x, base, n); }>(),
            Class::Integer);
}

template <PrmtMode MODE>
Handler prmt_handler() {
  return elementwise<[](uint32_t x, uint32_t y, uint32_t c) { return prmt_b32(x, y, c, MODE); }>();
}
void build_prmt(Builder& b) {
  operands(b, {'b', 32}, 3);
  b.handler(b.has("f4e")    ? prmt_handler<PrmtMode::F4E>()
            : b.has("b4e")  ? prmt_handler<PrmtMode::B4E>()
            : b.has("rc8")  ? prmt_handler<PrmtMode::RC8>()
            : b.has("ecl")  ? prmt_handler<PrmtMode::ECL>()
            : b.has("ecr")  ? prmt_handler<PrmtMode::ECR>()
            : b.has("rc16") ? prmt_handler<PrmtMode::RC16>()
                            : prmt_handler<PrmtMode::NONE>(),
            Class::Logic);
}

template <bool A, bool B>
Handler dp4a_handler() {
  return elementwise<[](uint32_t x, uint32_t y, uint32_t z) { return dp4a(x, A, y, B, z); }>();
}
void build_dp4a(Builder& b) {
  operands(b, {'b', 32}, 3);
  const bool first = b.slot(0) == "s32", second = b.slot(1) == "s32";
  b.handler(first ? (second ? dp4a_handler<true, true>() : dp4a_handler<true, false>())
                  : (second ? dp4a_handler<false, true>() : dp4a_handler<false, false>()),
            Class::Integer);
}
template <bool A, bool B>
Handler dp2a_handler(bool upper) {
  return upper ? elementwise<[](uint32_t x, uint32_t y, uint32_t z) {
    return dp2a(x, A, y, B, z, true);
  }>()
               : elementwise<[](uint32_t x, uint32_t y, uint32_t z) {
                   return dp2a(x, A, y, B, z, false);
                 }>();
}
void build_dp2a(Builder& b) {
  operands(b, {'b', 32}, 3);
  const bool upper = b.has("hi"), first = b.slot(1) == "s32", second = b.slot(2) == "s32";
  b.handler(first ? (second ? dp2a_handler<true, true>(upper) : dp2a_handler<true, false>(upper))
                  : (second ? dp2a_handler<false, true>(upper) : dp2a_handler<false, false>(upper)),
            Class::Integer);
}

constexpr Form FORMS[] = {
    {"add", "?sat $int", build_add},
    {"sub", "?sat $int", build_sub},
    {"mul", "lo|hi|wide $int", build_mul},
    {"mad", "lo|hi|wide ?sat $int", build_mad},
    {"mul24", "lo|hi u32|s32", build_mul24},
    {"mad24", "lo|hi ?sat u32|s32", build_mad24},
    {"add", "cc u32|s32|u64|s64", build_add_cc},
    {"addc", "?cc u32|s32|u64|s64", build_addc},
    {"sub", "cc u32|s32|u64|s64", build_sub_cc},
    {"subc", "?cc u32|s32|u64|s64", build_subc},
    {"mad", "lo|hi cc u32|s32|u64|s64", build_mad_cc},
    {"madc", "lo|hi ?cc u32|s32|u64|s64", build_madc},
    {"div", "$int", build_div},
    {"rem", "$int", build_rem},
    {"abs", "s16|s32|s64", build_abs},
    {"neg", "s16|s32|s64", build_neg},
    {"min", "$int", build_min},
    {"max", "$int", build_max},
    {"min", "relu s32", build_min_relu},
    {"max", "relu s32", build_max_relu},
    {"sad", "$int", build_sad},
    {"and", "pred|b16|b32|b64", build_and},
    {"or", "pred|b16|b32|b64", build_or},
    {"xor", "pred|b16|b32|b64", build_xor},
    {"not", "pred|b16|b32|b64", build_not},
    {"cnot", "$bits", build_cnot},
    {"shl", "$bits", build_shl},
    {"shr", "b16|b32|b64|u16|u32|u64|s16|s32|s64", build_shr},
    {"shf", "l|r wrap|clamp b32", build_shf},
    {"lop3", "b32", build_lop3},
    {"popc", "b32|b64", build_popc},
    {"clz", "b32|b64", build_clz},
    {"bfind", "?shiftamt u32|u64|s32|s64", build_bfind},
    {"brev", "b32|b64", build_brev},
    {"bfe", "u32|u64|s32|s64", build_bfe},
    {"bfi", "b32|b64", build_bfi},
    {"bmsk", "wrap|clamp b32", build_bmsk},
    {"szext", "wrap|clamp u32|s32", build_szext},
    {"fns", "b32", build_fns},
    {"prmt", "b32 ?f4e|b4e|rc8|ecl|ecr|rc16", build_prmt},
    {"dp4a", "u32|s32 u32|s32", build_dp4a},
    {"dp2a", "lo|hi u32|s32 u32|s32", build_dp2a},
};

}  // namespace

std::span<const Form> integer_forms() { return FORMS; }

}  // namespace archflash::sim
