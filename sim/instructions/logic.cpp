// Logic, shifts and bit fields.
#include <bit>

#include "sim/instructions/typed.h"
#include "sim/numerics/numeric.h"

namespace archflash::sim {
namespace {

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

constexpr Form FORMS[] = {
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
};

}  // namespace

std::span<const Form> logic_forms() { return FORMS; }

}  // namespace archflash::sim
