// mov, cvt, comparisons and selections, address conversions.
#include <cstring>

#include "sim/instructions/elementwise.h"
#include "sim/load/builder.h"
#include "sim/memory/memory.h"
#include "sim/numerics/numeric.h"
#include "sim/run/cta.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace archflash::sim {
namespace {

// ---- mov ----

template <class T>
void run_copy(Warp& warp, const Instruction& instruction, uint32_t mask) {
  T* d = warp.lanes<T>(instruction.operands[0]);
  const T* s = warp.lanes<const T>(instruction.operands[1]);
  if (mask == ALL_LANES) {
    std::memmove(d, s, sizeof(T) * LANES);
    return;
  }
  for (; mask != 0; mask &= mask - 1) d[std::countr_zero(mask)] = s[std::countr_zero(mask)];
}

struct Bits128 {
  uint64_t low, high;
};

void run_copy_predicate(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t& d = warp.predicate(instruction.operands[0]);
  const uint32_t s = warp.predicate(instruction.operands[1]);
  d = (d & ~mask) | ((instruction.flags & Builder::NEGATED ? ~s : s) & mask);
}

// How far the CTA has come, in warp-instructions: the simulator's only clock.
void run_clock(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const uint64_t now = warp.cta().time() + warp.executed();
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    if (instruction.bytes == 8)
      warp.lanes<uint64_t>(instruction.operands[0])[i] = now;
    else
      warp.lanes<uint32_t>(instruction.operands[0])[i] =
          static_cast<uint32_t>(now >> instruction.offset);
  }
}

uint64_t read_lane(Warp& warp, Ref ref, int lane, int bytes) {
  return bytes == 8 ? warp.lanes<const uint64_t>(ref)[lane] : warp.lanes<const uint32_t>(ref)[lane];
}
void write_lane(Warp& warp, Ref ref, int lane, int bytes, uint64_t value) {
  if (bytes == 8)
    warp.lanes<uint64_t>(ref)[lane] = value;
  else if (bytes == 4)
    warp.lanes<uint32_t>(ref)[lane] = static_cast<uint32_t>(value);
  else
    warp.lanes<uint32_t>(ref)[lane] = static_cast<uint32_t>(value & ((1u << 8 * bytes) - 1));
}

// mov.bN d, {a, b, ...}: `count` parts of `bytes` bytes each.
void run_pack(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const int count = instruction.count, bytes = instruction.bytes;
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    uint64_t parts[2] = {};
    for (int k = 0; k < count; ++k) {
      uint64_t part = read_lane(warp, instruction.operands[k + 1], i, bytes);
      if (bytes < 4) part &= (uint64_t{1} << 8 * bytes) - 1;
      parts[k * bytes / 8] |= part << (k * bytes % 8 * 8);
    }
    if (count * bytes == 16)
      warp.lanes<Bits128>(instruction.operands[0])[i] = {parts[0], parts[1]};
    else
      write_lane(warp, instruction.operands[0], i, count * bytes, parts[0]);
  }
}
// Two halves of 64 bits, of all lanes.
void run_unpack_pair(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* low = warp.lanes<uint32_t>(instruction.operands[0]);
  uint32_t* high = warp.lanes<uint32_t>(instruction.operands[1]);
  const uint64_t* whole = warp.lanes<const uint64_t>(instruction.operands[2]);
  if (mask == ALL_LANES) {
#pragma GCC ivdep
    for (int i = 0; i < LANES; ++i) {
      low[i] = static_cast<uint32_t>(whole[i]);
      high[i] = static_cast<uint32_t>(whole[i] >> 32);
    }
    return;
  }
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    low[i] = static_cast<uint32_t>(whole[i]);
    high[i] = static_cast<uint32_t>(whole[i] >> 32);
  }
}
void run_unpack(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const int count = instruction.count, bytes = instruction.bytes;
  const Ref source = instruction.operands[count];
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    uint64_t parts[2] = {};
    if (count * bytes == 16) {
      const Bits128 whole = warp.lanes<const Bits128>(source)[i];
      parts[0] = whole.low, parts[1] = whole.high;
    } else {
      parts[0] = read_lane(warp, source, i, count * bytes);
    }
    for (int k = 0; k < count; ++k) {
      write_lane(warp, instruction.operands[k], i, bytes,
                 parts[k * bytes / 8] >> (k * bytes % 8 * 8));
    }
  }
}

void build_mov(Builder& b) {
  const Type t = b.type(0);
  const bool unpacks = b.peek().kind == Operand::Kind::Vector;
  if (t.kind == 'p') {
    b.predicate_destination();
    b.predicate_source();
    b.handler(&run_copy_predicate, Class::Move);
    return;
  }
  if (unpacks) {
    const auto parts = static_cast<int>(b.peek().items.size());
    if ((parts != 2 && parts != 4) || t.kind != 'b' || t.bits / parts < 8) b.fail("bad vector");
    b.vector_destination({'b', t.bits / parts});
    b.source(t);
    b.instruction.count = static_cast<uint8_t>(parts);
    b.instruction.bytes = static_cast<uint8_t>(t.bits / parts / 8);
    b.handler(parts == 2 && t.bits == 64 ? &run_unpack_pair : &run_unpack, Class::Move);
    return;
  }
  b.destination(t);
  const Operand& source = b.peek();
  if (source.kind == Operand::Kind::Vector) {
    const auto parts = static_cast<int>(source.items.size());
    if ((parts != 2 && parts != 4) || t.kind != 'b' || t.bits / parts < 8) b.fail("bad vector");
    b.vector_source({'b', t.bits / parts});
    b.instruction.count = static_cast<uint8_t>(parts);
    b.instruction.bytes = static_cast<uint8_t>(t.bits / parts / 8);
    const bool pair = parts == 2 && t.bits == 64;
    b.handler(
        pair ? elementwise<[](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; }>()
             : &run_pack,
        Class::Move);
    return;
  }
  if (source.kind == Operand::Kind::Special &&
      (source.text == "%clock" || source.text == "%clock_hi" || source.text == "%clock64" ||
       source.text == "%globaltimer" || source.text == "%globaltimer_lo" ||
       source.text == "%globaltimer_hi")) {
    const bool wide = source.text == "%clock64" || source.text == "%globaltimer";
    if (t.bits != (wide ? 64 : 32)) b.fail("a clock of another width");
    b.instruction.bytes = wide ? 8 : 4;
    b.instruction.offset = source.text.ends_with("_hi") ? 32 : 0;
    b.take();
    b.handler(&run_clock, Class::Move);
    return;
  }
  b.source(t);
  b.handler(t.bits == 128  ? &run_copy<Bits128>
            : t.bits == 64 ? &run_copy<uint64_t>
                           : &run_copy<uint32_t>,
            Class::Move);
}

// ---- cvt ----

NumericType numeric_type(Builder& b, std::string_view name) {
  struct Row {
    const char* name;
    NumericType type;
  };
  static const Row ROWS[] = {{"u8", NumericType::U8},          {"s8", NumericType::S8},
                             {"u16", NumericType::U16},        {"s16", NumericType::S16},
                             {"u32", NumericType::U32},        {"s32", NumericType::S32},
                             {"u64", NumericType::U64},        {"s64", NumericType::S64},
                             {"f16", NumericType::F16},        {"bf16", NumericType::BF16},
                             {"tf32", NumericType::TF32},      {"f32", NumericType::F32},
                             {"f64", NumericType::F64},        {"f16x2", NumericType::F16X2},
                             {"bf16x2", NumericType::BF16X2},  {"e4m3x2", NumericType::E4M3X2},
                             {"e5m2x2", NumericType::E5M2X2},  {"e2m3x2", NumericType::E2M3X2},
                             {"e3m2x2", NumericType::E3M2X2},  {"e2m1x2", NumericType::E2M1X2},
                             {"ue8m0x2", NumericType::UE8M0X2}};
  for (const Row& row : ROWS) {
    if (name == row.name) return row.type;
  }
  b.fail("unknown type");
}

struct CvtExtra {
  CvtSpec spec;
  CvtFunction function;
  int to_bytes, a_bytes;
  bool two;
};

void run_cvt(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CvtExtra*>(instruction.extra);
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    const uint64_t x = read_lane(warp, instruction.operands[1], i, extra.a_bytes);
    const uint64_t y = extra.two ? read_lane(warp, instruction.operands[2], i, 4) : 0;
    write_lane(warp, instruction.operands[0], i, extra.to_bytes, extra.function(extra.spec, x, y));
  }
}

template <void (*WHOLE)(uint32_t*, const uint32_t*, const uint32_t*)>
void run_cvt_pair(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint32_t* x = warp.lanes<const uint32_t>(instruction.operands[1]);
  const uint32_t* y = warp.lanes<const uint32_t>(instruction.operands[2]);
  if (mask == ALL_LANES) {
    WHOLE(d, x, y);
    return;
  }
  uint32_t result[LANES];
  WHOLE(result, x, y);
  for (; mask != 0; mask &= mask - 1) d[std::countr_zero(mask)] = result[std::countr_zero(mask)];
}

void build_cvt(Builder& b) {
  const std::string_view to_name = b.slot(5), from_name = b.slot(6);
  CvtExtra extra;
  extra.spec.to = numeric_type(b, to_name);
  extra.spec.from = numeric_type(b, from_name);
  const std::string_view round = b.slot(0);
  extra.spec.round = round == "rn"    ? Round::RN
                     : round == "rz"  ? Round::RZ
                     : round == "rm"  ? Round::RM
                     : round == "rp"  ? Round::RP
                     : round == "rna" ? Round::RNA
                     : round == "rni" ? Round::RNI
                     : round == "rzi" ? Round::RZI
                     : round == "rmi" ? Round::RMI
                     : round == "rpi" ? Round::RPI
                                      : Round::NONE;
  extra.spec.ftz = b.has("ftz");
  extra.spec.sat = b.has("sat");
  extra.spec.satfinite = b.has("satfinite");
  extra.spec.relu = b.has("relu");
  extra.function = find_cvt(extra.spec);
  if (extra.function == nullptr) b.fail("PTX has no such conversion");
  extra.two = cvt_has_two_sources(extra.spec);
  const Type to = b.type(5), from = b.type(6);
  const int to_bits = b.destination_at_least(to);
  int from_bits = b.source_at_least(from);
  if (extra.two) b.source(from);
  extra.to_bytes = to_bits / 8;
  extra.a_bytes = from_bits / 8;
  const bool integers = to.kind != 'f' && from.kind != 'f' && to.kind != 'b' && from.kind != 'b';
  const bool exact_width = to_bits == to.bits && from_bits == from.bits;
  if (integers && exact_width && !extra.spec.sat && to.bits == 64 && from.bits == 32) {
    b.handler(from.kind == 's' ? elementwise<[](int32_t x) { return int64_t{x}; }>()
                               : elementwise<[](uint32_t x) { return uint64_t{x}; }>(),
              Class::Convert);
    return;
  }
  if (integers && exact_width && !extra.spec.sat && to.bits == 32 && from.bits == 64) {
    b.handler(elementwise<[](uint64_t x) { return uint32_t(x); }>(), Class::Convert);
    return;
  }
  const bool plain = extra.spec.round == Round::RN && !extra.spec.relu && !extra.spec.satfinite &&
                     !extra.spec.ftz && !extra.spec.sat && extra.spec.from == NumericType::F32;
  if (plain && extra.spec.to == NumericType::F16X2) {
    b.handler(&run_cvt_pair<cvt_rn_f16x2_f32_warp>, Class::Convert);
    return;
  }
  if (plain && extra.spec.to == NumericType::BF16X2) {
    b.handler(&run_cvt_pair<cvt_rn_bf16x2_f32_warp>, Class::Convert);
    return;
  }
  b.instruction.extra = b.keep(extra);
  b.handler(&run_cvt, Class::Convert);
}

// cvt.pack.sat.u8.s32.b32 d, a, b, c: a and b saturated to bytes, in front of c's.
constexpr uint32_t PACK_SIGNED_8 = 1, PACK_16 = 2, PACK_SIGNED_16 = 4;
void run_cvt_pack(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const uint32_t flags = instruction.flags;
  const auto clamp = [&](int32_t x) -> uint32_t {
    const int32_t low = flags & PACK_16 ? (flags & PACK_SIGNED_16 ? -32768 : 0)
                                        : (flags & PACK_SIGNED_8 ? -128 : 0);
    const int32_t high = flags & PACK_16 ? (flags & PACK_SIGNED_16 ? 32767 : 65535)
                                         : (flags & PACK_SIGNED_8 ? 127 : 255);
    const int32_t y = x < low ? low : x > high ? high : x;
    return static_cast<uint32_t>(y) & (flags & PACK_16 ? 0xFFFFu : 0xFFu);
  };
  const bool third = instruction.count == 3;
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    const uint32_t x = clamp(warp.lanes<const int32_t>(instruction.operands[1])[i]);
    const uint32_t y = clamp(warp.lanes<const int32_t>(instruction.operands[2])[i]);
    const uint32_t z = third ? warp.lanes<const uint32_t>(instruction.operands[3])[i] : 0;
    warp.lanes<uint32_t>(instruction.operands[0])[i] =
        flags & PACK_16 ? x << 16 | y : z << 16 | x << 8 | y;
  }
}
void build_cvt_pack(Builder& b) {
  b.destination({'b', 32});
  b.source({'s', 32});
  b.source({'s', 32});
  const std::string_view to = b.slot(2);
  b.instruction.count = 2;
  if (to == "s16" || to == "u16") {
    b.instruction.flags = PACK_16 | (to == "s16" ? PACK_SIGNED_16 : 0);
    if (b.has("b32")) b.fail("16-bit results leave no room for c");
  } else {
    if (!b.has("b32")) b.fail("8-bit results need .b32 and c");
    b.source({'b', 32});
    b.instruction.count = 3;
    b.instruction.flags = to == "s8" ? PACK_SIGNED_8 : 0;
  }
  b.handler(&run_cvt_pack, Class::Convert);
}

// ---- Comparisons ----

enum class Compare : uint8_t { EQ, NE, LT, LE, GT, GE, EQU, NEU, LTU, LEU, GTU, GEU, NUM, NAN_ };

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

// Lanes of all ones or zeros -> one bit each.
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

// Of setp: p and, negated, q, both combined with a third predicate.
void store_predicates(Warp& warp, const Instruction& instruction, uint32_t mask, uint32_t result) {
  uint32_t opposite = ~result;
  if (const uint32_t combine = instruction.flags & 3; combine != 0) {
    uint32_t c = warp.predicate(instruction.operands[4]);
    if (instruction.flags & Builder::NEGATED) c = ~c;
    const auto with_c = [&](uint32_t x) {
      return combine == COMBINE_AND ? x & c : combine == COMBINE_OR ? x | c : x ^ c;
    };
    result = with_c(result);
    opposite = with_c(opposite);
  }
  uint32_t& q = warp.predicate(instruction.operands[1]);
  q = (q & ~mask) | (opposite & mask);
  uint32_t& p = warp.predicate(instruction.operands[0]);
  p = (p & ~mask) | (result & mask);
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
  store_predicates(warp, instruction, mask, pack_lanes(lanes));
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

template <class T>
Handler integer_setp(Compare c) {
  switch (c) {
    case Compare::EQ:
      return setp_handler<Compare::EQ, T>();
    case Compare::NE:
      return setp_handler<Compare::NE, T>();
    case Compare::LT:
      return setp_handler<Compare::LT, T>();
    case Compare::LE:
      return setp_handler<Compare::LE, T>();
    case Compare::GT:
      return setp_handler<Compare::GT, T>();
    default:
      return setp_handler<Compare::GE, T>();
  }
}
template <class T>
Handler float_setp(Compare c) {
  switch (c) {
    case Compare::EQU:
      return setp_handler<Compare::EQU, T>();
    case Compare::NEU:
      return setp_handler<Compare::NEU, T>();
    case Compare::LTU:
      return setp_handler<Compare::LTU, T>();
    case Compare::LEU:
      return setp_handler<Compare::LEU, T>();
    case Compare::GTU:
      return setp_handler<Compare::GTU, T>();
    case Compare::GEU:
      return setp_handler<Compare::GEU, T>();
    case Compare::NUM:
      return setp_handler<Compare::NUM, T>();
    case Compare::NAN_:
      return setp_handler<Compare::NAN_, T>();
    default:
      return integer_setp<T>(c);
  }
}

template <class T>
bool compare_now(Compare c, T x, T y) {
  switch (c) {
    case Compare::EQ:
      return compare_values<Compare::EQ>(x, y);
    case Compare::NE:
      return compare_values<Compare::NE>(x, y);
    case Compare::LT:
      return compare_values<Compare::LT>(x, y);
    case Compare::LE:
      return compare_values<Compare::LE>(x, y);
    case Compare::GT:
      return compare_values<Compare::GT>(x, y);
    case Compare::GE:
      return compare_values<Compare::GE>(x, y);
    case Compare::EQU:
      return compare_values<Compare::EQU>(x, y);
    case Compare::NEU:
      return compare_values<Compare::NEU>(x, y);
    case Compare::LTU:
      return compare_values<Compare::LTU>(x, y);
    case Compare::LEU:
      return compare_values<Compare::LEU>(x, y);
    case Compare::GTU:
      return compare_values<Compare::GTU>(x, y);
    case Compare::GEU:
      return compare_values<Compare::GEU>(x, y);
    case Compare::NUM:
      return compare_values<Compare::NUM>(x, y);
    case Compare::NAN_:
      return compare_values<Compare::NAN_>(x, y);
  }
  return false;
}

// Comparisons of f16 and bf16, and of f32 with .ftz: lane by lane.
enum class Decode : uint8_t { F32, F16, BF16 };
struct CompareExtra {
  Compare compare;
  Decode decode;
  bool pair;  // p from the lower half, q from the upper one
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
  uint32_t low = 0, high = 0;
  for (int i = 0; i < LANES; ++i) {
    low |= uint32_t{compare_now(extra.compare, decode(extra.decode, x[i], ftz),
                                decode(extra.decode, y[i], ftz))}
           << i;
    if (extra.pair) {
      high |= uint32_t{compare_now(extra.compare, decode(extra.decode, x[i] >> 16, ftz),
                                   decode(extra.decode, y[i] >> 16, ftz))}
              << i;
    }
  }
  if (!extra.pair) {
    store_predicates(warp, instruction, mask, low);
    return;
  }
  if (const uint32_t combine = instruction.flags & 3; combine != 0) {
    uint32_t c = warp.predicate(instruction.operands[4]);
    if (instruction.flags & Builder::NEGATED) c = ~c;
    low = combine == COMBINE_AND ? low & c : combine == COMBINE_OR ? low | c : low ^ c;
    high = combine == COMBINE_AND ? high & c : combine == COMBINE_OR ? high | c : high ^ c;
  }
  uint32_t& p = warp.predicate(instruction.operands[0]);
  p = (p & ~mask) | (low & mask);
  uint32_t& q = warp.predicate(instruction.operands[1]);
  q = (q & ~mask) | (high & mask);
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
    run = t.bits == 64 ? float_setp<double>(compare) : float_setp<float>(compare);
  } else if (t.kind == 's') {
    run = t.bits == 64   ? integer_setp<int64_t>(compare)
          : t.bits == 32 ? integer_setp<int32_t>(compare)
                         : integer_setp<int16_t>(compare);
  } else {
    run = t.bits == 64   ? integer_setp<uint64_t>(compare)
          : t.bits == 32 ? integer_setp<uint32_t>(compare)
                         : integer_setp<uint16_t>(compare);
  }
  b.handler(run, Class::Compare);
}

// set.CMP{.bool}{.ftz}.dtype.stype: all ones, or 1.0, where the comparison holds.
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

void build_slct(Builder& b) {
  const Type t = b.type(1);
  const bool by_float = b.slot(2) == "f32";
  b.destination(t);
  b.source(t);
  b.source(t);
  b.source({by_float ? 'f' : 's', 32});
  Handler run;
  if (by_float) {
    // A NaN selects b; with .ftz a subnormal is a zero, which selects a.
    run = b.has("ftz") ? (t.bits == 64 ? elementwise<[](uint64_t x, uint64_t y, float z) {
      return flush(z) >= 0.0f ? x : y;
    }>()
                                       : elementwise<[](uint32_t x, uint32_t y, float z) {
                                           return flush(z) >= 0.0f ? x : y;
                                         }>())
                       : (t.bits == 64 ? elementwise<[](uint64_t x, uint64_t y, float z) {
                           return z >= 0.0f ? x : y;
                         }>()
                                       : elementwise<[](uint32_t x, uint32_t y, float z) {
                                           return z >= 0.0f ? x : y;
                                         }>());
  } else {
    run = t.bits == 64
              ? elementwise<[](uint64_t x, uint64_t y, int32_t z) { return z >= 0 ? x : y; }>()
              : elementwise<[](uint32_t x, uint32_t y, int32_t z) { return z >= 0 ? x : y; }>();
  }
  b.handler(run, Class::Compare);
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
    bool holds = false;
    switch (instruction.offset) {
      case 0:
        holds = finite;
        break;
      case 1:
        holds = magnitude == exponent_mask;
        break;
      case 2:
        holds = !nan;
        break;
      case 3:
        holds = nan;
        break;
      case 4:
        holds = finite && ((bits & exponent_mask) != 0 || magnitude == 0);  // zero is normal
        break;
      case 5:
        holds = (bits & exponent_mask) == 0 && magnitude != 0;
        break;
    }
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

// ---- Addresses ----

uint64_t window_of(std::string_view space) {
  return space.starts_with("shared")  ? SHARED_WINDOW
         : space == "local"           ? LOCAL_WINDOW
         : space.starts_with("param") ? PARAM_WINDOW
         : space == "const"           ? CONST_WINDOW
                                      : 0;
}

void run_cvta(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint64_t* d = warp.lanes<uint64_t>(instruction.operands[0]);
  const uint64_t* s = warp.lanes<const uint64_t>(instruction.operands[1]);
  const auto addend = static_cast<uint64_t>(instruction.offset);
  for (; mask != 0; mask &= mask - 1) {
    d[std::countr_zero(mask)] = s[std::countr_zero(mask)] + addend;
  }
}
void build_cvta(Builder& b) {
  const bool to = b.has("to");
  b.destination({'u', 64});
  b.source({'u', 64});
  const uint64_t window = window_of(b.slot(1));
  b.instruction.offset = static_cast<int64_t>(to ? 0 - window : window);
  b.handler(&run_cvta, Class::Move);
}

void run_isspacep(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const uint64_t* s = warp.lanes<const uint64_t>(instruction.operands[1]);
  const auto window = static_cast<uint64_t>(instruction.offset);
  uint32_t result = 0;
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    const int i = std::countr_zero(rest);
    const bool inside = window == 0 ? s[i] >= GLOBAL_BASE : s[i] - window < WINDOW_BYTES;
    result |= uint32_t{inside} << i;
  }
  uint32_t& p = warp.predicate(instruction.operands[0]);
  p = (p & ~mask) | result;
}
void build_isspacep(Builder& b) {
  b.predicate_destination();
  b.source({'u', 64});
  b.instruction.offset = static_cast<int64_t>(window_of(b.slot(0)));
  b.handler(&run_isspacep, Class::Move);
}

constexpr Form FORMS[] = {
    {"mov", "pred|b16|b32|b64|b128|u16|u32|u64|s16|s32|s64|f32|f64", build_mov},
    {"cvt",
     "?rn|rz|rm|rp|rna|rni|rzi|rmi|rpi ?ftz ?relu ?sat|satfinite ?relu "
     "u8|s8|u16|s16|u32|s32|u64|s64|f16|bf16|tf32|f32|f64|f16x2|bf16x2|e4m3x2|e5m2x2|e2m3x2|e3m2x2|"
     "e2m1x2|ue8m0x2 "
     "u8|s8|u16|s16|u32|s32|u64|s64|f16|bf16|f32|f64|f16x2|bf16x2|e4m3x2|e5m2x2|e2m3x2|e3m2x2|"
     "e2m1x2|ue8m0x2",
     build_cvt},
    {"cvt", "pack sat u8|s8|u16|s16 s32 ?b32", build_cvt_pack},
    {"setp", "$cmp ?$bool ?ftz b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64|f16|bf16|f16x2|bf16x2",
     build_setp},
    {"set", "$cmp ?$bool ?ftz u32|s32|f32|u16|f16|bf16 $setp", build_set},
    {"selp", "b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64", build_selp},
    {"slct", "?ftz b16|b32|b64|u16|u32|u64|s16|s32|s64|f32|f64 s32|f32", build_slct},
    {"testp", "finite|infinite|number|notanumber|normal|subnormal f32|f64", build_testp},
    {"cvta", "?to global|shared|shared::cta|shared::cluster|local|const|param|param::entry u64",
     build_cvta},
    {"isspacep", "global|shared|shared::cta|shared::cluster|local|const|param|param::entry",
     build_isspacep},
};

}  // namespace

std::span<const Form> move_forms() { return FORMS; }

}  // namespace archflash::sim
