// Integer arithmetic.
#include <bit>

#include "sim/instructions/typed.h"
#include "sim/numerics/numeric.h"

namespace archflash::sim {
namespace {

constexpr auto ADD = []<class T>(T x, T y) { return T(Wide<T>(x) + Wide<T>(y)); };
constexpr auto SUB = []<class T>(T x, T y) { return T(Wide<T>(x) - Wide<T>(y)); };

template <auto OPERATION>
void build_sum(Builder& b) {
  const Type t = b.type(1);
  if (!b.has("sat")) return build_typed<2, OPERATION>(b, t);
  if (t.kind != 's' || t.bits != 32) b.fail(".sat is for .s32");
  operands(b, t, 2);
  b.handler(elementwise<[](int32_t x, int32_t y) {
              return saturate_s32(OPERATION(int64_t{x}, int64_t{y}));
            }>(),
            Class::Integer);
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

// x * y + z at twice the width, in unsigned arithmetic, in which nothing overflows.
template <class T>
Twice<T> multiply_wide(T x, T y, Twice<T> z = 0) {
  return Twice<T>(static_cast<uint64_t>(x) * static_cast<uint64_t>(y) + static_cast<uint64_t>(z));
}

// The operands of .wide.
Type wide_operands(Builder& b, Type t) {
  if (t.bits == 64) b.fail(".wide is for 16 and 32 bits");
  const Type twice{t.kind, 2 * t.bits};
  b.destination(twice);
  b.source(t);
  b.source(t);
  return twice;
}

void build_mul(Builder& b) {
  const Type t = b.type(1);
  if (b.has("wide")) {
    wide_operands(b, t);
    const auto make = []<class T>() {
      return elementwise<[](T x, T y) -> Twice<T> { return multiply_wide(x, y); }>();
    };
    return b.handler(by_type(b, t, make), Class::Integer);
  }
  if (b.has("hi"))
    return build_typed<2, []<class T>(T x, T y) { return multiply_high(x, y); }>(b, t);
  build_typed<2, []<class T>(T x, T y) { return T(Wide<T>(x) * Wide<T>(y)); }>(b, t);
}

void build_mad(Builder& b) {
  const Type t = b.type(2);
  if (b.has("wide")) {
    b.source(wide_operands(b, t));
    const auto make = []<class T>() {
      return elementwise<[](T x, T y, Twice<T> z) -> Twice<T> { return multiply_wide(x, y, z); }>();
    };
    return b.handler(by_type(b, t, make), Class::Integer);
  }
  if (b.has("sat")) {
    if (!b.has("hi") || t.kind != 's' || t.bits != 32) b.fail(".sat is for .hi.s32");
    operands(b, t, 3);
    b.handler(elementwise<[](int32_t x, int32_t y, int32_t z) {
                return saturate_s32(int64_t{multiply_high(x, y)} + z);
              }>(),
              Class::Integer);
  } else if (b.has("hi")) {
    build_typed<3, []<class T>(T x, T y, T z) { return ADD(multiply_high(x, y), z); }>(b, t);
  } else {
    build_typed<3, []<class T>(T x, T y, T z) { return T(Wide<T>(x) * Wide<T>(y) + Wide<T>(z)); }>(
        b, t);
  }
}

// The product of the low 24 bits, and of this bits 0 to 31 or 16 to 47.
template <class T>
auto product24(T x, T y) {
  const auto low = [](T value) {
    if constexpr (std::is_signed_v<T>)
      return sign_extended(static_cast<uint64_t>(value), 24);
    else
      return uint64_t{value} & 0xFFFFFF;
  };
  return low(x) * low(y);
}
constexpr auto MUL24_LO = []<class T>(T x, T y) { return T(product24(x, y)); };
constexpr auto MUL24_HI = []<class T>(T x, T y) { return T(product24(x, y) >> 16); };

void build_mul24(Builder& b) {
  if (b.has("hi")) return build_typed<2, MUL24_HI>(b, b.type(1));
  build_typed<2, MUL24_LO>(b, b.type(1));
}
void build_mad24(Builder& b) {
  const Type t = b.type(2);
  if (b.has("sat")) {
    if (!b.has("hi") || t.kind != 's') b.fail(".sat is for .hi.s32");
    operands(b, t, 3);
    b.handler(elementwise<[](int32_t x, int32_t y, int32_t z) {
                return saturate_s32(int64_t{MUL24_HI(x, y)} + z);
              }>(),
              Class::Integer);
  } else if (b.has("hi")) {
    build_typed<3, []<class T>(T x, T y, T z) { return ADD(MUL24_HI(x, y), z); }>(b, t);
  } else {
    build_typed<3, []<class T>(T x, T y, T z) { return ADD(MUL24_LO(x, y), z); }>(b, t);
  }
}

// PTX leaves division by zero open. Here it gives all ones, as does the remainder, like an H200.
// The lowest value divided by -1 is itself.
constexpr auto DIV = []<class T>(T x, T y) {
  if (y == 0) return T(-1);
  if (std::is_signed_v<T> && y == T(-1)) return SUB(T(0), x);
  return T(x / y);
};
constexpr auto REM = []<class T>(T x, T y) {
  if (y == 0) return T(-1);
  return std::is_signed_v<T> && y == T(-1) ? T(0) : T(x % y);
};
constexpr auto NEG = []<class T>(T x) { return SUB(T(0), x); };
constexpr auto ABS = []<class T>(T x) { return x < 0 ? NEG(x) : x; };
constexpr auto MIN = []<class T>(T x, T y) { return x < y ? x : y; };
constexpr auto MAX = []<class T>(T x, T y) { return y < x ? x : y; };
constexpr auto SAD = []<class T>(T x, T y, T z) { return ADD(z, y < x ? SUB(x, y) : SUB(y, x)); };
template <auto OPERATION>
constexpr auto RELU = []<class T>(T x, T y) { return MAX(T(0), OPERATION(x, y)); };

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
    {"add", "?sat $int", build_sum<ADD>},
    {"sub", "?sat $int", build_sum<SUB>},
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
    {"div", "$int", build<0, 2, DIV>},
    {"rem", "$int", build<0, 2, REM>},
    {"abs", "s16|s32|s64", build<0, 1, ABS>},
    {"neg", "s16|s32|s64", build<0, 1, NEG>},
    {"min", "$int", build<0, 2, MIN>},
    {"max", "$int", build<0, 2, MAX>},
    {"min", "relu s32", build<1, 2, RELU<MIN>>},
    {"max", "relu s32", build<1, 2, RELU<MAX>>},
    {"sad", "$int", build<0, 3, SAD>},
    {"dp4a", "u32|s32 u32|s32", build_dp4a},
    {"dp2a", "lo|hi u32|s32 u32|s32", build_dp2a},
};

}  // namespace

std::span<const Form> integer_forms() { return FORMS; }

}  // namespace archflash::sim
