// Floating-point arithmetic: f32, f64, f16, bf16 and their packed pairs.
#include <algorithm>

#include "sim/instructions/elementwise.h"
#include "sim/load/builder.h"
#include "sim/numerics/numeric.h"

namespace archflash::sim {
namespace {

using I = const Instruction&;

// The modifiers of an instruction as flags, for handlers that read them when they run.
constexpr uint32_t FTZ = 1, SAT = 2, NAN_RESULT = 4, XORSIGN_ABS = 8, ROUND_SHIFT = 8;

uint32_t mode_flags(const Builder& b) {
  const Round round = b.has("rz")   ? Round::RZ
                      : b.has("rm") ? Round::RM
                      : b.has("rp") ? Round::RP
                                    : Round::RN;
  return (b.has("ftz") ? FTZ : 0) | (b.has("sat") ? SAT : 0) | (b.has("NaN") ? NAN_RESULT : 0) |
         (b.has("xorsign") ? XORSIGN_ABS : 0) | static_cast<uint32_t>(round) << ROUND_SHIFT;
}
FloatMode float_mode(const Instruction& i) {
  return {static_cast<Round>(i.flags >> ROUND_SHIFT & 15), (i.flags & FTZ) != 0,
          (i.flags & SAT) != 0};
}
MinMaxMode minmax_mode(const Instruction& i) {
  return {(i.flags & FTZ) != 0, (i.flags & NAN_RESULT) != 0, (i.flags & XORSIGN_ABS) != 0};
}

void operands(Builder& b, Type t, int sources) {
  b.destination(t);
  for (int i = 0; i < sources; ++i) b.source(t);
}

// A handler for forms that kernels seldom use. F is a function (const Instruction&, S...) -> D,
// which reads the instruction's modes.
template <auto F, class D, class... S, size_t... I>
void run_moded(Warp& warp, const Instruction& instruction, uint32_t mask,
               D (*)(const Instruction&, S...), std::index_sequence<I...>) {
  Slot<D>* d = warp.lanes<Slot<D>>(instruction.operands[0]);
  const std::tuple<const Slot<S>*...> s(warp.lanes<const Slot<S>>(instruction.operands[I + 1])...);
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    d[i] = to_slot<D>(F(instruction, from_slot<S>(std::get<I>(s)[i])...));
  }
}
template <class T>
struct Arity;
template <class D, class... S>
struct Arity<D (*)(const Instruction&, S...)> {
  using Indices = std::index_sequence_for<S...>;
};
template <class T>
constexpr int SOURCES_OF = int(Arity<T>::Indices::size());
template <auto F>
void moded_handler(Warp& warp, const Instruction& instruction, uint32_t mask) {
  run_moded<F>(warp, instruction, mask, +F, typename Arity<decltype(+F)>::Indices());
}

template <auto WHOLE>
void run_fma_whole(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint32_t* x = warp.lanes<const uint32_t>(instruction.operands[1]);
  const uint32_t* y = warp.lanes<const uint32_t>(instruction.operands[2]);
  const uint32_t* z = warp.lanes<const uint32_t>(instruction.operands[3]);
  if (mask == ALL_LANES) {
    WHOLE(d, x, y, z);
    return;
  }
  uint32_t result[LANES];
  WHOLE(result, x, y, z);
  for (; mask != 0; mask &= mask - 1) d[std::countr_zero(mask)] = result[std::countr_zero(mask)];
}

// ---- f32 and f64 ----

bool is_to_nearest(const Builder& b) { return !b.has("rz") && !b.has("rm") && !b.has("rp"); }

// OPERATION is add_f32, sub_f32 or mul_f32, called as (x, y) or (x, y, mode).
template <auto OPERATION>
void build_f32(Builder& b) {
  operands(b, {'f', 32}, 2);
  b.instruction.flags |= mode_flags(b);
  if (!is_to_nearest(b) || b.has("sat")) {
    b.handler(&moded_handler<[](I i, float x, float y) { return OPERATION(x, y, float_mode(i)); }>,
              Class::Float);
    return;
  }
  b.handler(b.has("ftz")
                ? elementwise<[](float x, float y) { return OPERATION(x, y, {Round::RN, true}); }>()
                : elementwise<[](float x, float y) { return OPERATION(x, y, {}); }>(),
            Class::Float);
}
void build_fma(Builder& b) {
  operands(b, {'f', 32}, 3);
  b.instruction.flags |= mode_flags(b);
  if (!is_to_nearest(b) || b.has("sat")) {
    b.handler(&moded_handler<[](I i, float x, float y, float z) {
      return fma_f32(x, y, z, float_mode(i));
    }>,
              Class::Float);
    return;
  }
  b.handler(b.has("ftz") ? &run_fma_whole<fma_rn_ftz_f32_warp> : &run_fma_whole<fma_rn_f32_warp>,
            Class::Float);
}

// F for each of the two f32 in a 64-bit register.
template <auto F>
uint64_t pairwise(I i, uint64_t x, uint64_t y, uint64_t z) {
  const auto half = [&](int shift) {
    return uint64_t{bits_of(F(i, f32_of(uint32_t(x >> shift)), f32_of(uint32_t(y >> shift)),
                              f32_of(uint32_t(z >> shift))))}
           << shift;
  };
  return half(0) | half(32);
}
// F for pairs of f32, where it rounds to nearest: a warp's pairs are 64 floats that follow one
// another.
template <auto F>
[[gnu::always_inline]] inline void apply_pairs(Warp& warp, const Instruction& instruction,
                                               uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint32_t* x = warp.lanes<const uint32_t>(instruction.operands[1]);
  const uint32_t* y = warp.lanes<const uint32_t>(instruction.operands[2]);
  if (mask == ALL_LANES) {
#pragma GCC ivdep
    for (int i = 0; i < 2 * LANES; ++i) d[i] = bits_of(F(f32_of(x[i]), f32_of(y[i])));
    return;
  }
  for (; mask != 0; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    for (int i = 2 * lane; i < 2 * lane + 2; ++i) d[i] = bits_of(F(f32_of(x[i]), f32_of(y[i])));
  }
}
template <auto F>
void pairs_baseline(Warp& warp, const Instruction& instruction, uint32_t mask) {
  apply_pairs<F>(warp, instruction, mask);
}
template <auto F>
ARCHFLASH_SIM_AVX2 void pairs_avx2(Warp& warp, const Instruction& instruction, uint32_t mask) {
  apply_pairs<F>(warp, instruction, mask);
}
template <auto F>
Handler pairs() {
  return uses_avx2() ? &pairs_avx2<F> : &pairs_baseline<F>;
}

template <auto WHOLE>
void run_fma_pairs(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint32_t* x = warp.lanes<const uint32_t>(instruction.operands[1]);
  const uint32_t* y = warp.lanes<const uint32_t>(instruction.operands[2]);
  const uint32_t* z = warp.lanes<const uint32_t>(instruction.operands[3]);
  uint32_t partial[2 * LANES];
  uint32_t* const result = mask == ALL_LANES ? d : partial;
  for (int first = 0; first < 2 * LANES; first += LANES) {
    WHOLE(result + first, x + first, y + first, z + first);
  }
  if (result == d) return;
  for (; mask != 0; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    std::copy_n(&partial[2 * lane], 2, &d[2 * lane]);
  }
}

template <auto OPERATION>
void build_f32x2(Builder& b) {
  operands(b, b.type(2), 2);
  b.instruction.flags |= mode_flags(b);
  if (is_to_nearest(b)) {
    b.handler(b.has("ftz")
                  ? pairs<[](float x, float y) { return OPERATION(x, y, {Round::RN, true}); }>()
                  : pairs<[](float x, float y) { return OPERATION(x, y, {}); }>(),
              Class::Float);
    return;
  }
  b.handler(&moded_handler<[](I i, uint64_t x, uint64_t y) {
    return pairwise<[](I in, float p, float q, float) { return OPERATION(p, q, float_mode(in)); }>(
        i, x, y, 0);
  }>,
            Class::Float);
}
void build_fma_f32x2(Builder& b) {
  operands(b, b.type(2), 3);
  b.instruction.flags |= mode_flags(b);
  if (is_to_nearest(b)) {
    b.handler(b.has("ftz") ? &run_fma_pairs<fma_rn_ftz_f32_warp> : &run_fma_pairs<fma_rn_f32_warp>,
              Class::Float);
    return;
  }
  b.handler(&moded_handler<[](I i, uint64_t x, uint64_t y, uint64_t z) {
    return pairwise<[](I in, float p, float q, float r) {
      return fma_f32(p, q, r, float_mode(in));
    }>(i, x, y, z);
  }>,
            Class::Float);
}

// OPERATION of f64 rounds as the instruction says.
template <auto OPERATION, int SOURCES>
void build_f64(Builder& b) {
  using D = double;
  operands(b, {'f', 64}, SOURCES);
  b.instruction.flags |= mode_flags(b);
  if constexpr (SOURCES == 1)
    b.handler(&moded_handler<[](I i, D x) { return OPERATION(x, float_mode(i).round); }>,
              Class::Double);
  else if constexpr (SOURCES == 2)
    b.handler(&moded_handler<[](I i, D x, D y) { return OPERATION(x, y, float_mode(i).round); }>,
              Class::Double);
  else
    b.handler(
        &moded_handler<[](I i, D x, D y, D z) { return OPERATION(x, y, z, float_mode(i).round); }>,
        Class::Double);
}

void build_div_f32(Builder& b) {
  operands(b, {'f', 32}, 2);
  b.instruction.flags |= mode_flags(b);
  const auto approximate = [&](Handler run) { b.handler(run, Class::Special); };
  if (b.has("approx"))
    return approximate(&moded_handler<[](I i, float x, float y) {
      return div_approx_f32(x, y, float_mode(i).ftz);
    }>);
  if (b.has("full"))
    return approximate(&moded_handler<[](I i, float x, float y) {
      return div_full_f32(x, y, float_mode(i).ftz);
    }>);
  b.handler(&moded_handler<[](I i, float x, float y) { return div_f32(x, y, float_mode(i)); }>,
            Class::Float);
}
// rcp and sqrt: APPROXIMATE(x, ftz) or EXACT(x, mode).
template <auto APPROXIMATE, auto EXACT>
void build_root(Builder& b) {
  operands(b, {'f', 32}, 1);
  b.instruction.flags |= mode_flags(b);
  if (b.has("approx"))
    b.handler(&moded_handler<[](I i, float x) { return APPROXIMATE(x, float_mode(i).ftz); }>,
              Class::Special);
  else
    b.handler(&moded_handler<[](I i, float x) { return EXACT(x, float_mode(i)); }>, Class::Float);
}
void build_rcp_approx_f64(Builder& b) {
  operands(b, {'f', 64}, 1);
  b.handler(&moded_handler<[](I, double x) { return rcp_approx_ftz_f64(x); }>, Class::Special);
}
void build_rsqrt_f64(Builder& b) {
  operands(b, {'f', 64}, 1);
  b.instruction.flags |= mode_flags(b);
  b.handler(&moded_handler<[](I i, double x) { return rsqrt_approx_f64(x, float_mode(i).ftz); }>,
            Class::Special);
}

// rsqrt, sin, cos, lg2, ex2 and tanh, in the form opcode.approx{.ftz}.f32.
template <float (*F)(float, bool)>
void build_approx(Builder& b) {
  operands(b, {'f', 32}, 1);
  b.instruction.flags |= mode_flags(b);
  b.handler(&moded_handler<[](I i, float x) { return F(x, float_mode(i).ftz); }>, Class::Special);
}
void run_ex2_ftz(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint32_t* x = warp.lanes<const uint32_t>(instruction.operands[1]);
  if (mask == ALL_LANES) {
    ex2_approx_ftz_f32_warp(d, x);
    return;
  }
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    d[i] = bits_of(ex2_approx_f32(f32_of(x[i]), true));
  }
}
void build_ex2(Builder& b) {
  build_approx<ex2_approx_f32>(b);
  if (b.has("ftz")) b.handler(&run_ex2_ftz, Class::Special);
}
void build_tanh(Builder& b) {
  operands(b, {'f', 32}, 1);
  b.handler(&moded_handler<[](I, float x) { return tanh_approx_f32(x); }>, Class::Special);
}

// abs and neg.
template <auto F>
void build_sign_f32(Builder& b) {
  operands(b, {'f', 32}, 1);
  b.handler(b.has("ftz") ? elementwise<[](float x) { return F(x, true); }>()
                         : elementwise<[](float x) { return F(x, false); }>(),
            Class::Float);
}
template <auto F>
void build_sign_f64(Builder& b) {
  operands(b, {'f', 64}, 1);
  b.handler(elementwise<[](double x) { return F(x); }>(), Class::Double);
}
void build_copysign(Builder& b) {
  const Type t = b.type(0);
  operands(b, t, 2);  // the result has the sign of a and the magnitude of b
  b.handler(t.bits == 64 ? elementwise<[](uint64_t x, uint64_t y) {
              return (x & 0x8000000000000000u) | (y & 0x7FFFFFFFFFFFFFFFu);
            }>()
                         : elementwise<[](uint32_t x, uint32_t y) {
                             return (x & 0x80000000u) | (y & 0x7FFFFFFFu);
                           }>(),
            Class::Float);
}

// Plain min and max: if one operand is a NaN the other is the result, two NaN give the canonical
// NaN, and -0 < +0.
[[gnu::always_inline]] inline float plain_max(float x, float y) {
  const float larger = x < y ? y : x;
  const float ordered = x == y ? f32_of(bits_of(x) & bits_of(y)) : larger;
  return is_nan(x) ? canonical(y) : is_nan(y) ? x : ordered;
}
[[gnu::always_inline]] inline float plain_min(float x, float y) {
  const float smaller = y < x ? y : x;
  const float ordered = x == y ? f32_of(bits_of(x) | bits_of(y)) : smaller;
  return is_nan(x) ? canonical(y) : is_nan(y) ? x : ordered;
}
// F obeys the instruction's modes, PLAIN is that without any.
template <auto F, auto PLAIN>
void build_min_max_f32(Builder& b) {
  const bool three = b.operands_left() == 4;
  if (three) b.require_target("100");
  operands(b, {'f', 32}, three ? 3 : 2);
  b.instruction.flags |= mode_flags(b);
  Handler run = elementwise<[](float x, float y) { return PLAIN(x, y); }>();
  if (three)
    run = &moded_handler<[](I i, float x, float y, float z) {
      return F(F(x, y, minmax_mode(i)), z, minmax_mode(i));
    }>;
  else if (mode_flags(b) & (FTZ | NAN_RESULT | XORSIGN_ABS))
    run = &moded_handler<[](I i, float x, float y) { return F(x, y, minmax_mode(i)); }>;
  b.handler(run, Class::Float);
}
template <auto F>
void build_min_max_f64(Builder& b) {
  operands(b, {'f', 64}, 2);
  b.handler(&moded_handler<[](I, double x, double y) { return F(x, y); }>, Class::Double);
}

// ---- f16 and bf16, single and packed ----

constexpr uint32_t RELU = 16, OOB = 32;

Relu relu_mode(const Instruction& i) {
  return i.flags & OOB    ? (i.flags & RELU ? Relu::OOB_RELU : Relu::OOB)
         : i.flags & RELU ? Relu::RELU
                          : Relu::NONE;
}

// Applies F, a function (const Instruction&, uint16_t...) -> uint16_t, to each half of a packed
// pair.
template <auto F, class... S>
void run_half(Warp& warp, const Instruction& instruction, uint32_t mask,
              uint16_t (*)(const Instruction&, S...)) {
  constexpr size_t SOURCES = sizeof...(S);
  uint32_t* d = warp.lanes<uint32_t>(instruction.operands[0]);
  const uint32_t* s[3] = {};
  for (size_t k = 0; k < SOURCES; ++k)
    s[k] = warp.lanes<const uint32_t>(instruction.operands[k + 1]);
  const bool pair = instruction.count == 2;
  for (; mask != 0; mask &= mask - 1) {
    const int i = std::countr_zero(mask);
    const auto half = [&](int shift) -> uint32_t {
      const auto x = [&](size_t k) { return static_cast<uint16_t>(s[k][i] >> shift); };
      if constexpr (SOURCES == 1)
        return F(instruction, x(0));
      else if constexpr (SOURCES == 2)
        return F(instruction, x(0), x(1));
      else
        return F(instruction, x(0), x(1), x(2));
    };
    d[i] = pair ? half(0) | half(16) << 16 : half(0);
  }
}
template <auto F>
void half_handler(Warp& warp, const Instruction& instruction, uint32_t mask) {
  run_half<F>(warp, instruction, mask, +F);
}

using H = uint16_t;

// OF_F16 or OF_BF16 by the instruction's type, each a function (I, H...) -> H.
template <auto OF_F16, auto OF_BF16 = OF_F16, Class CLASS = Class::Half>
void build_half(Builder& b) {
  const bool pair = b.has("f16x2") || b.has("bf16x2");
  operands(b, {'b', pair ? 32 : 16}, SOURCES_OF<decltype(+OF_F16)>);
  b.instruction.count = pair ? 2 : 1;
  b.instruction.flags |= mode_flags(b) | (b.has("relu") ? RELU : 0) | (b.has("oob") ? OOB : 0);
  const bool is_bf16 = b.has("bf16") || b.has("bf16x2");
  b.handler(is_bf16 ? &half_handler<OF_BF16> : &half_handler<OF_F16>, CLASS);
}
// OPERATION of f16 with the instruction's modes; of bf16, which has none.
template <auto OPERATION>
constexpr auto F16 = [](I i, H x, H y) -> H { return OPERATION(x, y, float_mode(i)); };
template <auto OPERATION>
constexpr auto BF16 = [](I, H x, H y) -> H { return OPERATION(x, y); };
template <auto OPERATION>
constexpr auto MIN_MAX = [](I i, H x, H y) -> H { return OPERATION(x, y, minmax_mode(i)); };
template <auto OPERATION>
constexpr auto SIGN_F16 = [](I i, H x) -> H { return OPERATION(x, float_mode(i).ftz); };
template <auto OPERATION>
constexpr auto ONE = [](I, H x) -> H { return OPERATION(x); };
constexpr auto FMA_F16 = [](I i, H x, H y, H z) -> H {
  return fma_f16(x, y, z, float_mode(i), relu_mode(i));
};
constexpr auto FMA_BF16 = [](I i, H x, H y, H z) -> H { return fma_bf16(x, y, z, relu_mode(i)); };

constexpr Form FORMS[] = {
    {"add", "?$rnd ?ftz ?sat f32", build_f32<add_f32>},
    {"sub", "?$rnd ?ftz ?sat f32", build_f32<sub_f32>},
    {"mul", "?$rnd ?ftz ?sat f32", build_f32<mul_f32>},
    {"fma", "$rnd ?ftz ?sat f32", build_fma},
    {"mad", "$rnd ?ftz ?sat f32", build_fma},
    {"add", "?$rnd ?ftz f32x2", build_f32x2<add_f32>},
    {"sub", "?$rnd ?ftz f32x2", build_f32x2<sub_f32>},
    {"mul", "?$rnd ?ftz f32x2", build_f32x2<mul_f32>},
    {"fma", "$rnd ?ftz f32x2", build_fma_f32x2},
    {"add", "?$rnd f64", build_f64<add_f64, 2>},
    {"sub", "?$rnd f64", build_f64<sub_f64, 2>},
    {"mul", "?$rnd f64", build_f64<mul_f64, 2>},
    {"fma", "$rnd f64", build_f64<fma_f64, 3>},
    {"mad", "$rnd f64", build_f64<fma_f64, 3>},
    {"div", "approx|full|rn|rz|rm|rp ?ftz f32", build_div_f32},
    {"div", "$rnd f64", build_f64<div_f64, 2>},
    {"rcp", "approx|rn|rz|rm|rp ?ftz f32", build_root<rcp_approx_f32, rcp_f32>},
    {"rcp", "$rnd f64", build_f64<rcp_f64, 1>},
    {"rcp", "approx ftz f64", build_rcp_approx_f64},
    {"sqrt", "approx|rn|rz|rm|rp ?ftz f32", build_root<sqrt_approx_f32, sqrt_f32>},
    {"sqrt", "$rnd f64", build_f64<sqrt_f64, 1>},
    {"rsqrt", "approx ?ftz f32", build_approx<rsqrt_approx_f32>},
    {"rsqrt", "approx ?ftz f64", build_rsqrt_f64},
    {"sin", "approx ?ftz f32", build_approx<sin_approx_f32>},
    {"cos", "approx ?ftz f32", build_approx<cos_approx_f32>},
    {"lg2", "approx ?ftz f32", build_approx<lg2_approx_f32>},
    {"ex2", "approx ?ftz f32", build_ex2},
    {"tanh", "approx f32", build_tanh},
    {"abs", "?ftz f32", build_sign_f32<abs_f32>},
    {"neg", "?ftz f32", build_sign_f32<neg_f32>},
    {"abs", "f64", build_sign_f64<abs_f64>},
    {"neg", "f64", build_sign_f64<neg_f64>},
    {"copysign", "f32|f64", build_copysign},
    {"min", "?ftz ?NaN ?xorsign ?abs f32", build_min_max_f32<min_f32, plain_min>},
    {"max", "?ftz ?NaN ?xorsign ?abs f32", build_min_max_f32<max_f32, plain_max>},
    {"min", "f64", build_min_max_f64<min_f64>},
    {"max", "f64", build_min_max_f64<max_f64>},
    {"add", "?rn ?ftz ?sat f16|f16x2", build_half<F16<add_f16>>},
    {"sub", "?rn ?ftz ?sat f16|f16x2", build_half<F16<sub_f16>>},
    {"mul", "?rn ?ftz ?sat f16|f16x2", build_half<F16<mul_f16>>},
    {"fma", "rn ?ftz ?sat f16|f16x2", build_half<FMA_F16, FMA_BF16>},
    {"fma", "rn ?ftz relu f16|f16x2", build_half<FMA_F16, FMA_BF16>},
    {"add", "?rn bf16|bf16x2", build_half<BF16<add_bf16>>},
    {"sub", "?rn bf16|bf16x2", build_half<BF16<sub_bf16>>},
    {"mul", "?rn bf16|bf16x2", build_half<BF16<mul_bf16>>},
    {"fma", "rn ?oob ?relu f16|f16x2|bf16|bf16x2", build_half<FMA_F16, FMA_BF16>},
    {"min", "?ftz ?NaN ?xorsign ?abs f16|f16x2|bf16|bf16x2",
     build_half<MIN_MAX<min_f16>, MIN_MAX<min_bf16>>},
    {"max", "?ftz ?NaN ?xorsign ?abs f16|f16x2|bf16|bf16x2",
     build_half<MIN_MAX<max_f16>, MIN_MAX<max_bf16>>},
    {"neg", "?ftz f16|f16x2|bf16|bf16x2", build_half<SIGN_F16<neg_f16>, ONE<neg_bf16>>},
    {"abs", "?ftz f16|f16x2|bf16|bf16x2", build_half<SIGN_F16<abs_f16>, ONE<abs_bf16>>},
    {"ex2", "approx f16|f16x2",
     build_half<ONE<ex2_approx_f16>, ONE<ex2_approx_f16>, Class::Special>},
    {"ex2", "approx ftz bf16|bf16x2",
     build_half<ONE<ex2_approx_ftz_bf16>, ONE<ex2_approx_ftz_bf16>, Class::Special>},
    {"tanh", "approx f16|f16x2|bf16|bf16x2",
     build_half<ONE<tanh_approx_f16>, ONE<tanh_approx_bf16>, Class::Special>},
};

}  // namespace

std::span<const Form> float_forms() { return FORMS; }

}  // namespace archflash::sim
