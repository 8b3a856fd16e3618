// Comparisons and selections: setp, set, selp, slct, testp.
#include <bit>
#include <cmath>
#include <string>

#include "sim/instructions/elementwise.h"
#include "sim/instructions/lane_values.h"
#include "sim/load/builder.h"
#include "sim/numerics/convert.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace archflash::sim {
namespace {

enum class Compare : uint8_t { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };
using OfIntegers = std::make_index_sequence<6>;
using OfFloats = std::make_index_sequence<14>;

Compare compare_named(Builder& b, std::string_view name, Type t) {
  struct Row {
    const char* name;
    Compare compare;
    bool floats, integers, unsigneds;
  };
  static const Row ROWS[] = {
      {"eq", Compare::EQ, true, true, false},    {"ne", Compare::NE, true, true, false},
      {"lt", Compare::LT, true, true, false},    {"le", Compare::LE, true, true, false},
      {"gt", Compare::GT, true, true, false},    {"ge", Compare::GE, true, true, false},
      {"lo", Compare::LT, false, false, true},   {"ls", Compare::LE, false, false, true},
      {"hi", Compare::GT, false, false, true},   {"hs", Compare::GE, false, false, true},
      {"equ", Compare::EQU, true, false, false}, {"neu", Compare::NEU, true, false, false},
      {"ltu", Compare::LTU, true, false, false}, {"leu", Compare::LEU, true, false, false},
      {"gtu", Compare::GTU, true, false, false}, {"geu", Compare::GEU, true, false, false},
      {"num", Compare::NUM, true, false, false}, {"nan", Compare::NAN_, true, false, false}};
  for (const Row& row : ROWS) {
    if (name != row.name) continue;
    const bool fits = t.kind == 'f'   ? row.floats
                      : t.kind == 'b' ? row.compare == Compare::EQ || row.compare == Compare::NE
                      : t.kind == 'u' ? row.integers || row.unsigneds
                                      : row.integers;
    if (!fits) b.fail("." + std::string(name) + " does not compare this type");
    return row.compare;
  }
  b.fail("unknown comparison");
}

template <Compare C, class T>
[[gnu::always_inline]] inline bool compare_values(T x, T y) {
  if constexpr (C == Compare::EQ) return x == y;
  if constexpr (C == Compare::NE) {
    if constexpr (std::is_floating_point_v<T>)
      return x < y || y < x;
    else
      return x != y;
  }
  if constexpr (C == Compare::LT) return x < y;
  if constexpr (C == Compare::LE) return x <= y;
  if constexpr (C == Compare::GT) return x > y;
  if constexpr (C == Compare::GE) return x >= y;
  if constexpr (C == Compare::EQU) return !(x < y || y < x);
  if constexpr (C == Compare::NEU) return !(x == y);
  if constexpr (C == Compare::LTU) return !(x >= y);
  if constexpr (C == Compare::LEU) return !(x > y);
  if constexpr (C == Compare::GTU) return !(x <= y);
  if constexpr (C == Compare::GEU) return !(x < y);
  if constexpr (C == Compare::NUM) return x == x && y == y;
  if constexpr (C == Compare::NAN_) return !(x == x && y == y);
}

// Packs 32 lanes, each of which is all ones or all zeros, into one bit each.
[[gnu::always_inline]] inline uint32_t pack_lanes(const uint32_t* lanes) {
  uint32_t mask = 0;
#if defined(__SSE2__)
  for (int i = 0; i < LANES; i += 4) {
    const __m128i four = _mm_load_si128(reinterpret_cast<const __m128i*>(lanes + i));
    mask |= static_cast<uint32_t>(_mm_movemask_ps(_mm_castsi128_ps(four))) << i;
  }
#else
  for (int i = 0; i < LANES; ++i) mask |= (lanes[i] & 1) << i;
#endif
  return mask;
}

constexpr uint32_t COMBINE_AND = 1, COMBINE_OR = 2, COMBINE_XOR = 3, COMPARE_FTZ = 4;

// Writes the results of setp: p and q. A third predicate may be combined with both.
void store_predicates(Warp& warp, const Instruction& instruction, uint32_t mask, uint32_t of_p,
                      uint32_t of_q) {
  if (const uint32_t combine = instruction.flags & 3; combine != 0) {
    uint32_t c = warp.predicate(instruction.operands[4]);
    if (instruction.flags & Builder::NEGATED) c = ~c;
    const auto with_c = [&](uint32_t x) {
      return combine == COMBINE_AND ? x & c : combine == COMBINE_OR ? x | c : x ^ c;
    };
    of_p = with_c(of_p);
    of_q = with_c(of_q);
  }
  uint32_t& q = warp.predicate(instruction.operands[1]);
  q = (q & ~mask) | (of_q & mask);
  uint32_t& p = warp.predicate(instruction.operands[0]);
  p = (p & ~mask) | (of_p & mask);
}

template <Compare C, class T>
[[gnu::always_inline]] inline void setp_lanes(Warp& warp, const Instruction& instruction,
                                              uint32_t mask) {
  const Slot<T>* x = warp.lanes<const Slot<T>>(instruction.operands[2]);
  const Slot<T>* y = warp.lanes<const Slot<T>>(instruction.operands[3]);
  alignas(64) uint32_t lanes[LANES];
  for (int i = 0; i < LANES; ++i) {
    lanes[i] = compare_values<C>(from_slot<T>(x[i]), from_slot<T>(y[i])) ? ~0u : 0u;
  }
  const uint32_t result = pack_lanes(lanes);
  store_predicates(warp, instruction, mask, result, ~result);
}
template <Compare C, class T>
void setp_baseline(Warp& warp, const Instruction& instruction, uint32_t mask) {
  setp_lanes<C, T>(warp, instruction, mask);
}
template <Compare C, class T>
ARCHFLASH_SIM_AVX2 void setp_avx2(Warp& warp, const Instruction& instruction, uint32_t mask) {
  setp_lanes<C, T>(warp, instruction, mask);
}
template <Compare C, class T>
Handler setp_handler() {
  return uses_avx2() ? &setp_avx2<C, T> : &setp_baseline<C, T>;
}

template <class T, size_t... C>
Handler setp_handler(Compare c, std::index_sequence<C...>) {
  const Handler handlers[] = {setp_handler<static_cast<Compare>(C), T>()...};
  return handlers[static_cast<size_t>(c)];
}

template <class T, size_t... C>
bool compare_now(Compare c, T x, T y, std::index_sequence<C...>) {
  bool result = false;
  ((c == static_cast<Compare>(C) && (result = compare_values<static_cast<Compare>(C)>(x, y))), ...);
  return result;
}
template <class T>
bool compare_now(Compare c, T x, T y) {
  return compare_now(c, x, y, OfFloats());
}

// Comparisons of f16 and bf16, and of f32 with .ftz, go lane by lane.
enum class Decode : uint8_t { F32, F16, BF16 };
struct CompareExtra {
  Compare compare;
  Decode decode;
  bool pair;  // packed operands: p compares the lower halves, q the upper ones
};

float decode(Decode as, uint32_t bits, bool ftz) {
  const float value = as == Decode::F32   ? f32_of(bits)
                      : as == Decode::F16 ? f32_of_f16(static_cast<uint16_t>(bits))
                                          : f32_of_bf16(static_cast<uint16_t>(bits));
  if (!ftz) return value;
  if (as == Decode::F16) return (bits & 0x7C00) == 0 ? f32_of((bits & 0x8000) << 16) : value;
  return flush(value);
}

void run_setp_decoded(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CompareExtra*>(instruction.extra);
  const uint32_t* x = warp.lanes<const uint32_t>(instruction.operands[2]);
  const uint32_t* y = warp.lanes<const uint32_t>(instruction.operands[3]);
  const bool ftz = instruction.flags & COMPARE_FTZ;
  const auto compare = [&](uint32_t p, uint32_t q) -> uint32_t {
    return compare_now(extra.compare, decode(extra.decode, p, ftz), decode(extra.decode, q, ftz));
  };
  uint32_t low = 0, high = 0;
  for (int i = 0; i < LANES; ++i) {
    low |= compare(x[i], y[i]) << i;
    if (extra.pair) high |= compare(x[i] >> 16, y[i] >> 16) << i;
  }
  store_predicates(warp, instruction, mask, low, extra.pair ? high : ~low);
}

uint32_t combine_flags(Builder& b) {
  return b.has("and") ? COMBINE_AND : b.has("or") ? COMBINE_OR : b.has("xor") ? COMBINE_XOR : 0;
}

void build_setp(Builder& b) {
  const std::string_view type_name = b.slot(3);
  const Type t = b.type(3);
  const bool pair = type_name == "f16x2" || type_name == "bf16x2";
  const bool half = type_name == "f16" || type_name == "bf16" || pair;
  const Compare compare = compare_named(b, b.slot(0), t);
  b.predicate_destinations();
  const Type operand{half ? 'b' : t.kind, t.bits};
  b.source(operand);
  b.source(operand);
  b.instruction.flags |= combine_flags(b) | (b.has("ftz") ? COMPARE_FTZ : 0);
  if (combine_flags(b)) b.predicate_source();
  if (b.has("ftz") && t.kind != 'f') b.fail(".ftz is for floating point");
  Handler run;
  if (half || (t.kind == 'f' && t.bits == 32 && b.has("ftz"))) {
    const Decode as = !half                                        ? Decode::F32
                      : type_name == "f16" || type_name == "f16x2" ? Decode::F16
                                                                   : Decode::BF16;
    b.instruction.extra = b.keep(CompareExtra{compare, as, pair});
    run = &run_setp_decoded;
  } else if (t.kind == 'f') {
    run = t.bits == 64 ? setp_handler<double>(compare, OfFloats())
                       : setp_handler<float>(compare, OfFloats());
  } else if (t.kind == 's') {
    run = t.bits == 64   ? setp_handler<int64_t>(compare, OfIntegers())
          : t.bits == 32 ? setp_handler<int32_t>(compare, OfIntegers())
                         : setp_handler<int16_t>(compare, OfIntegers());
  } else {
    run = t.bits == 64   ? setp_handler<uint64_t>(compare, OfIntegers())
          : t.bits == 32 ? setp_handler<uint32_t>(compare, OfIntegers())
                         : setp_handler<uint16_t>(compare, OfIntegers());
  }
  b.handler(run, Class::Compare);
}

// set.CMP{.bool}{.ftz}.dtype.stype gives all ones, or 1.0, where the comparison holds, else zero.
struct SetExtra {
  Compare compare;
  Type source;
  Decode decode;
  bool decoded;
};
void run_set(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const SetExtra*>(instruction.extra);
  const uint32_t c = instruction.flags & 3 ? warp.predicate(instruction.operands[3]) : 0;
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    bool result;
    const uint64_t x =
        read_lane(warp, instruction.operands[1], i, extra.source.bits / 8 < 8 ? 4 : 8);
    const uint64_t y =
        read_lane(warp, instruction.operands[2], i, extra.source.bits / 8 < 8 ? 4 : 8);
    const bool ftz = instruction.flags & COMPARE_FTZ;
    if (extra.decoded) {
      result = compare_now(extra.compare, decode(extra.decode, uint32_t(x), ftz),
                           decode(extra.decode, uint32_t(y), ftz));
    } else if (extra.source.kind == 'f') {
      result = compare_now(extra.compare, f64_of(x), f64_of(y));
    } else if (extra.source.kind == 's') {
      const int shift = 64 - extra.source.bits;
      result = compare_now(extra.compare, static_cast<int64_t>(x << shift) >> shift,
                           static_cast<int64_t>(y << shift) >> shift);
    } else {
      result = compare_now(extra.compare, x, y);
    }
    if (const uint32_t combine = instruction.flags & 3; combine != 0) {
      const bool bit = (c >> i & 1) != ((instruction.flags & Builder::NEGATED) != 0);
      result = combine == COMBINE_AND  ? result && bit
               : combine == COMBINE_OR ? result || bit
                                       : result != bit;
    }
    warp.lanes<uint32_t>(instruction.operands[0])[i] =
        result ? static_cast<uint32_t>(instruction.offset) : 0;
  }
}
void build_set(Builder& b) {
  const Type to = b.type(3), from = b.type(4);
  const std::string_view name = b.slot(4);
  const bool half = name == "f16" || name == "bf16";
  SetExtra extra{compare_named(b, b.slot(0), from), from,
                 name == "f16"    ? Decode::F16
                 : name == "bf16" ? Decode::BF16
                                  : Decode::F32,
                 half || name == "f32"};
  b.destination({to.kind == 'f' && to.bits == 16 ? 'b' : to.kind, to.bits});
  const Type operand{half ? 'b' : from.kind, from.bits};
  b.source(operand);
  b.source(operand);
  b.instruction.flags |= combine_flags(b) | (b.has("ftz") ? COMPARE_FTZ : 0);
  if (combine_flags(b)) b.predicate_source();
  b.instruction.offset = b.slot(3) == "f32"    ? 0x3F800000
                         : b.slot(3) == "f16"  ? 0x3C00
                         : b.slot(3) == "bf16" ? 0x3F80
                         : to.bits == 16       ? 0xFFFF
                                               : 0xFFFFFFFF;
  b.instruction.extra = b.keep(extra);
  b.handler(&run_set, Class::Compare);
}

template <class T>
[[gnu::always_inline]] inline void select_lanes(Warp& warp, const Instruction& instruction,
                                                uint32_t mask) {
  T* d = warp.lanes<T>(instruction.operands[0]);
  const T* x = warp.lanes<const T>(instruction.operands[1]);
  const T* y = warp.lanes<const T>(instruction.operands[2]);
  const uint32_t p = warp.predicate(instruction.operands[3]);
  if (mask == ALL_LANES) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; ++i) d[i] = p >> i & 1 ? x[i] : y[i];
    return;
  }
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    d[i] = p >> i & 1 ? x[i] : y[i];
  }
}
template <class T>
void select_baseline(Warp& warp, const Instruction& instruction, uint32_t mask) {
  select_lanes<T>(warp, instruction, mask);
}
template <class T>
ARCHFLASH_SIM_AVX2 void select_avx2(Warp& warp, const Instruction& instruction, uint32_t mask) {
  select_lanes<T>(warp, instruction, mask);
}
void build_selp(Builder& b) {
  const Type t = b.type(0);
  b.destination(t);
  b.source(t);
  b.source(t);
  b.predicate_source();
  if (b.instruction.flags & Builder::NEGATED) b.fail("'!' is not allowed here");
  if (t.bits == 64)
    b.handler(uses_avx2() ? &select_avx2<uint64_t> : &select_baseline<uint64_t>, Class::Compare);
  else
    b.handler(uses_avx2() ? &select_avx2<uint32_t> : &select_baseline<uint32_t>, Class::Compare);
}

// Selects by the sign of c. A NaN selects b; with .ftz a subnormal is a zero, which selects a.
template <bool FTZ, class T, class S>
T select_by_sign(T a, T b, S c) {
  if constexpr (FTZ) c = flush(c);
  return c >= 0 ? a : b;
}
template <class S, bool FTZ>
Handler slct_handler(bool wide) {
  return wide ? elementwise<[](uint64_t a, uint64_t b, S c) {
    return select_by_sign<FTZ>(a, b, c);
  }>()
              : elementwise<[](uint32_t a, uint32_t b, S c) {
                  return select_by_sign<FTZ>(a, b, c);
                }>();
}
void build_slct(Builder& b) {
  const Type t = b.type(1);
  const bool by_float = b.slot(2) == "f32", wide = t.bits == 64;
  b.destination(t);
  b.source(t);
  b.source(t);
  b.source({by_float ? 'f' : 's', 32});
  b.handler(!by_float      ? slct_handler<int32_t, false>(wide)
            : b.has("ftz") ? slct_handler<float, true>(wide)
                           : slct_handler<float, false>(wide),
            Class::Compare);
}

// testp: properties of a floating-point value.
void run_testp(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t result = 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int i = std::countr_zero(rest);
    const bool wide = instruction.bytes == 8;
    const uint64_t bits = read_lane(warp, instruction.operands[1], i, instruction.bytes);
    const uint64_t exponent_mask = wide ? 0x7FF0000000000000u : 0x7F800000u;
    const uint64_t magnitude = bits & (wide ? 0x7FFFFFFFFFFFFFFFu : 0x7FFFFFFFu);
    const bool finite = magnitude<exponent_mask, nan = magnitude> exponent_mask;
    const bool zero_exponent = (bits & exponent_mask) == 0;
    const bool properties[] = {finite,
                               magnitude == exponent_mask,
                               !nan,
                               nan,
                               finite && (!zero_exponent || magnitude == 0),  // zero is normal
                               zero_exponent && magnitude != 0};
    const bool holds = properties[instruction.offset];
    result |= uint32_t{holds} << i;
  }
  uint32_t& p = warp.predicate(instruction.operands[0]);
  p = (p & ~mask) | result;
}
void build_testp(Builder& b) {
  static const char* const NAMES[] = {"finite",     "infinite", "number",
                                      "notanumber", "normal",   "subnormal"};
  const Type t = b.type(1);
  b.predicate_destination();
  b.source(t);
  for (int i = 0; i < 6; ++i) {
    if (b.slot(0) == NAMES[i]) b.instruction.offset = i;
  }
  b.instruction.bytes = static_cast<uint8_t>(t.bits / 8);
  b.handler(&run_testp, Class::Compare);
}

constexpr Form FORMS[] = {
    {"setp", "$cmp ?$bool ?ftz b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64|f16|bf16|f16x2|bf16x2",
     build_setp},
    {"set", "$cmp ?$bool ?ftz u32|s32|f32|u16|f16|bf16 $setp", build_set},
    {"selp", "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64", build_selp},
    {"slct", "?ftz b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64 s32|f32", build_slct},
    {"testp", "finite|infinite|number|notanumber|normal|subnormal f32|f64", build_testp},
};

}  // namespace

std::span<const Form> compare_forms() { return FORMS; }

}  // namespace archflash::sim
