// cvt: conversions between types of numbers.
#include "sim/numerics/convert.h"

#include <bit>

#include "sim/instructions/elementwise.h"
#include "sim/instructions/lane_values.h"
#include "sim/load/builder.h"
#include "sim/numerics/warp_wide.h"

namespace archflash::sim {
namespace {

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

// cvt.pack.sat.u8.s32.b32 d, a, b, c saturates a and b to bytes and puts them above the lower half
// of c.
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

constexpr Form FORMS[] = {
    {"cvt",
     "?rn|rz|rm|rp|rna|rni|rzi|rmi|rpi ?ftz ?relu ?sat|satfinite ?relu "
     "u8|s8|u16|s16|u32|s32|u64|s64|f16|bf16|tf32|f32|f64|f16x2|bf16x2|e4m3x2|e5m2x2|e2m3x2|e3m2x2|"
     "e2m1x2|ue8m0x2 "
     "u8|s8|u16|s16|u32|s32|u64|s64|f16|bf16|f32|f64|f16x2|bf16x2|e4m3x2|e5m2x2|e2m3x2|e3m2x2|"
     "e2m1x2|ue8m0x2",
     build_cvt},
    {"cvt", "pack sat u8|s8|u16|s16 s32 ?b32", build_cvt_pack},
};

}  // namespace

std::span<const Form> convert_forms() { return FORMS; }

}  // namespace archflash::sim
