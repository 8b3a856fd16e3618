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

template <class T, size_t>
using Repeated = T;
template <auto OPERATION, class T, size_t... V, size_t... C>
Handler typed_handler(std::index_sequence<V...>, std::index_sequence<C...>) {
  return elementwise<[](Repeated<T, V>... x, Repeated<uint32_t, C>... n) -> T {
    return OPERATION(x..., n...);
  }>();
}

// An operation whose result and first VALUES operands have one integer type, and whose further
// COUNTS operands are .u32. OPERATION is a generic lambda, for every such type T a function that
// returns T.
template <int VALUES, auto OPERATION, int COUNTS = 0>
void build_typed(Builder& b, Type t, Class counted = Class::Integer) {
  b.destination(t);
  for (int i = 0; i < VALUES; ++i) b.source(t);
  for (int i = 0; i < COUNTS; ++i) b.source({'u', 32});
  const auto make = []<class T>() {
    return typed_handler<OPERATION, T>(std::make_index_sequence<VALUES>(),
                                       std::make_index_sequence<COUNTS>());
  };
  b.handler(by_type(b, t, make), counted);
}
// The builder of a form whose type stands in its slot SLOT.
template <size_t SLOT, int VALUES, auto OPERATION, int COUNTS = 0, Class CLASS = Class::Integer>
void build(Builder& b) {
  build_typed<VALUES, OPERATION, COUNTS>(b, b.type(SLOT), CLASS);
}

template <class T>
using Unsigned = std::make_unsigned_t<T>;
template <class T>
constexpr int BITS = 8 * sizeof(T);
// A type in which no promotion to int overflows.
template <class T>
using Wide = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

void operands(Builder& b, Type t, int sources) {
  b.destination(t);
  for (int i = 0; i < sources; ++i) b.source(t);
}

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

template <auto OPERATION, uint32_t OF_PREDICATES>
void build_logic(Builder& b) {
  const Type t = b.type(0);
  if (t.kind == 'p') return build_logic_pred(b, OF_PREDICATES);
  build_typed<OF_PREDICATES == PRED_NOT ? 1 : 2, OPERATION>(b, t, Class::Logic);
}
constexpr auto AND = []<class T>(T x, T y) { return T(x & y); };
constexpr auto OR = []<class T>(T x, T y) { return T(x | y); };
constexpr auto XOR = []<class T>(T x, T y) { return T(x ^ y); };
constexpr auto NOT = []<class T>(T x) { return T(~x); };
constexpr auto CNOT = []<class T>(T x) { return T(x == 0); };
constexpr auto SHL = []<class T>(T x, uint32_t n) { return shl(x, n); };
constexpr auto SHR = []<class T>(T x, uint32_t n) { return shr(x, n); };

template <bool LEFT, bool WRAP>
Handler shf_handler() {
  return elementwise<[](uint32_t x, uint32_t y, uint32_t n) {
    return LEFT ? shf_l_b32(x, y, n, WRAP) : shf_r_b32(x, y, n, WRAP);
  }>();
}
void build_shf(Builder& b) {
  operands(b, {'b', 32}, 2);
  b.source({'u', 32});
  const bool wrap = b.has("wrap");
  b.handler(b.has("l") ? (wrap ? shf_handler<true, true>() : shf_handler<true, false>())
                       : (wrap ? shf_handler<false, true>() : shf_handler<false, false>()),
            Class::Logic);
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

// COUNT is a generic lambda that returns uint32_t.
template <auto COUNT>
void build_count(Builder& b, Type t) {
  b.destination({'u', 32});
  b.source(t);
  const auto make = []<class T>() {
    return elementwise<[](T x) -> uint32_t { return COUNT(x); }>();
  };
  b.handler(by_type(b, t, make), Class::Integer);
}
void build_popc(Builder& b) {
  build_count<[]<class T>(T x) { return std::popcount(Unsigned<T>(x)); }>(b, b.type(0));
}
void build_clz(Builder& b) {
  build_count<[]<class T>(T x) { return std::countl_zero(Unsigned<T>(x)); }>(b, b.type(0));
}
void build_bfind(Builder& b) {
  if (b.has("shiftamt"))
    build_count<[](auto x) { return bfind(x, true); }>(b, b.type(1));
  else
    build_count<[](auto x) { return bfind(x, false); }>(b, b.type(1));
}
constexpr auto BREV = []<class T>(T x) { return T(brev_b64(Unsigned<T>(x)) >> (64 - BITS<T>)); };
constexpr auto BFE = []<class T>(T x, uint32_t p, uint32_t n) {
  return T(bit_field(Unsigned<T>(x), BITS<T>, std::is_signed_v<T>, p, n));
};
constexpr auto BFI = []<class T>(T x, T y, uint32_t p, uint32_t n) {
  return T(with_bit_field(x, y, BITS<T>, p, n));
};
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
    {"and", "pred|b16|b32|b64", build_logic<AND, PRED_AND>},
    {"or", "pred|b16|b32|b64", build_logic<OR, PRED_OR>},
    {"xor", "pred|b16|b32|b64", build_logic<XOR, PRED_XOR>},
    {"not", "pred|b16|b32|b64", build_logic<NOT, PRED_NOT>},
    {"cnot", "$bits", build<0, 1, CNOT, 0, Class::Logic>},
    {"shl", "$bits", build<0, 1, SHL, 1, Class::Logic>},
    {"shr", "b16|b32|b64|u16|u32|u64|s16|s32|s64", build<0, 1, SHR, 1, Class::Logic>},
    {"shf", "l|r wrap|clamp b32", build_shf},
    {"lop3", "b32", build_lop3},
    {"popc", "b32|b64", build_popc},
    {"clz", "b32|b64", build_clz},
    {"bfind", "?shiftamt u32|u64|s32|s64", build_bfind},
    {"brev", "b32|b64", build<0, 1, BREV>},
    {"bfe", "u32|u64|s32|s64", build<0, 1, BFE, 2>},
    {"bfi", "b32|b64", build<0, 2, BFI, 2>},
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
