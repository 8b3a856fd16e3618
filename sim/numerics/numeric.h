// What PTX's arithmetic instructions compute, one value at a time: pure functions without state.
//
// Values: .f32 is float, .f64 is double; .f16 and .bf16 are their bits in uint16_t; packed pairs
// (.f16x2, .bf16x2) are uint32_t with element 0 in the lower half; FP8 is its bits in uint8_t.
// Operands come in PTX's order. A name says the instruction and the type: fma_f32 is fma.*.f32.
//
// Exact: conversions, add, sub, mul, fma, div, sqrt and rcp with a rounding modifier, min, max and
// all integer functions. A NaN result is PTX's canonical NaN (0x7FFFFFFF, 0x7FFF); where PTX leaves
// bits open (NaN of .f64, fields beyond the top, division by zero) they are an H200's. Within a
// bound only: some of what PTX calls .approx (see each function); its special cases are exact.
//
// The functions expect the default floating-point environment (round to nearest, subnormals kept):
// a thread that may have another one (torch.set_flush_denormal) holds a FloatEnvironment.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace archflash::sim {

// Makes this thread's floating-point environment the default one for as long as it lives.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  uint32_t saved_;
};

// Rounding modifiers. RNA: ties away from zero. R?I: to an integral value, in cvt only.
enum class Round : uint8_t { NONE, RN, RZ, RM, RP, RNA, RNI, RZI, RMI, RPI };

// Modifiers of an arithmetic instruction. RN is what PTX takes where none is written.
struct FloatMode {
  Round round = Round::RN;
  bool ftz = false;  // .ftz: subnormal inputs and results become zeros of their sign
  bool sat = false;  // .sat: clamped to [0, 1], NaN becomes +0
};

// Modifiers of min and max.
struct MinMaxMode {
  bool ftz = false;
  bool nan = false;          // .NaN: a NaN operand makes the result NaN
  bool xorsign_abs = false;  // .xorsign.abs: of the magnitudes, with the XOR of the signs
};

constexpr uint32_t F32_NAN = 0x7FFFFFFFu;
constexpr uint16_t F16_NAN = 0x7FFFu;
constexpr uint16_t BF16_NAN = 0x7FFFu;

inline uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
inline uint64_t bits_of(double value) { return std::bit_cast<uint64_t>(value); }
inline float f32_of(uint32_t bits) { return std::bit_cast<float>(bits); }
inline double f64_of(uint64_t bits) { return std::bit_cast<double>(bits); }

inline bool is_nan(float value) { return (bits_of(value) & 0x7FFFFFFFu) > 0x7F800000u; }
inline float canonical(float value) { return is_nan(value) ? f32_of(F32_NAN) : value; }
inline float flush(float value) {  // a subnormal becomes the zero of its sign
  const uint32_t bits = bits_of(value);
  return (bits & 0x7F800000u) == 0 ? f32_of(bits & 0x80000000u) : value;
}
inline float saturate(float value) {  // .sat
  return value > 0.0f ? (value < 1.0f ? value : 1.0f) : 0.0f;
}

// ---- Conversions ------------------------------------------------------------------------------

// Exact widening. A NaN becomes the canonical NaN of the wider type.
float f32_of_f16(uint16_t bits);
inline float f32_of_bf16(uint16_t bits) { return canonical(f32_of(uint32_t{bits} << 16)); }
float f32_of_e4m3(uint8_t bits);
float f32_of_e5m2(uint8_t bits);
// What the tensor core reads of a .tf32 operand: the low 13 bits do not exist.
inline float f32_of_tf32(uint32_t bits) { return f32_of(bits & 0xFFFFE000u); }

// Narrowing, to nearest even: the hot forms of cvt.
uint16_t cvt_rn_f16_f32(float value);
uint16_t cvt_rn_bf16_f32(float value);

// Operand types of cvt, as PTX spells them.
enum class NumericType : uint8_t {
  U8,
  S8,
  U16,
  S16,
  U32,
  S32,
  U64,
  S64,
  F16,
  BF16,
  TF32,
  F32,
  F64,
  F16X2,
  BF16X2,
  E4M3X2,
  E5M2X2,
  E2M3X2,
  E3M2X2,
  E2M1X2,
  UE8M0X2,
};

struct CvtSpec {
  NumericType to, from;
  Round round = Round::NONE;
  bool ftz = false;
  bool sat = false;
  bool satfinite = false;
  bool relu = false;
};

// Takes and gives raw bits; bits above an operand's width are ignored on the way in and zero on the
// way out, but for signed integers narrower than 64 bits, which come out sign-extended to 64 bits
// (so that any wider destination register holds what PTX says). A packed destination made of two
// .f32 takes them in PTX's order: `a` becomes the upper half. `b` is ignored otherwise.
using CvtFunction = uint64_t (*)(const CvtSpec& spec, uint64_t a, uint64_t b);

// The function for a form of cvt, nullptr if PTX has no such form. Two_sources: packed from .f32.
CvtFunction find_cvt(const CvtSpec& spec);
bool cvt_has_two_sources(const CvtSpec& spec);

// ---- f32 --------------------------------------------------------------------------------------

// One rounding, in any direction. `mode` is a constant at most call sites: the general path is out
// of line, and without modifiers these are the host's own instructions.
float add_f32_general(float a, float b, FloatMode mode);
float mul_f32_general(float a, float b, FloatMode mode);
float fma_f32_general(float a, float b, float c, FloatMode mode);
float div_f32(float a, float b, FloatMode mode);  // div.{rn,rz,rm,rp}
float rcp_f32(float a, FloatMode mode);           // rcp.{rn,rz,rm,rp}
float sqrt_f32(float a, FloatMode mode);          // sqrt.{rn,rz,rm,rp}

inline float finish_f32(float value, FloatMode mode) {
  if (mode.ftz) value = flush(value);
  return mode.sat ? saturate(value) : canonical(value);
}

inline float add_f32(float a, float b, FloatMode mode = {}) {
  if (mode.round != Round::RN) return add_f32_general(a, b, mode);
  if (mode.ftz) a = flush(a), b = flush(b);
  return finish_f32(a + b, mode);
}
inline float sub_f32(float a, float b, FloatMode mode = {}) {
  return add_f32(a, f32_of(bits_of(b) ^ 0x80000000u), mode);
}
inline float mul_f32(float a, float b, FloatMode mode = {}) {
  if (mode.round != Round::RN) return mul_f32_general(a, b, mode);
  if (mode.ftz) a = flush(a), b = flush(b);
  return finish_f32(a * b, mode);
}
inline float fma_f32(float a, float b, float c, FloatMode mode = {}) {
#ifdef __FMA__
  if (mode.round == Round::RN && !mode.ftz && !mode.sat) return canonical(std::fma(a, b, c));
#endif
  return fma_f32_general(a, b, c, mode);
}

float min_f32(float a, float b, MinMaxMode mode = {});
float max_f32(float a, float b, MinMaxMode mode = {});
float neg_f32(float a, bool ftz = false);
float abs_f32(float a, bool ftz = false);

// Approximations. What stands behind each is PTX's own bound for the full range of inputs unless it
// says otherwise. ex2, lg2, rcp, rsqrt and the divisions give an H200's bits; sqrt and tanh are
// correctly rounded, sin and cos of the angle that it makes of its operand (how far they are from
// an H200: tests/sim/vectors/README.md).
float ex2_approx_f32(float a, bool ftz);    // 2 ulp; ex2(-inf) = +0, ex2(+-0) = 1
float lg2_approx_f32(float a, bool ftz);    // 2^-22 absolute in (0.5, 2), relative elsewhere
float rcp_approx_f32(float a, bool ftz);    // 1 ulp
float rsqrt_approx_f32(float a, bool ftz);  // 2^-22.9 relative
float sqrt_approx_f32(float a, bool ftz);   // 2^-23 relative
float sin_approx_f32(float a, bool ftz);    // 2^-20.5 absolute in [-2 pi, 2 pi]; elsewhere none
float cos_approx_f32(float a, bool ftz);    // likewise
float tanh_approx_f32(float a);             // 2^-11 relative
float div_approx_f32(float a, float b, bool ftz);  // 2 ulp for |b| in [2^-126, 2^126]
float div_full_f32(float a, float b, bool ftz);    // 2 ulp

// ---- f64 --------------------------------------------------------------------------------------

double add_f64(double a, double b, Round round = Round::RN);
double sub_f64(double a, double b, Round round = Round::RN);
double mul_f64(double a, double b, Round round = Round::RN);
double fma_f64(double a, double b, double c, Round round = Round::RN);
double div_f64(double a, double b, Round round = Round::RN);
double rcp_f64(double a, Round round = Round::RN);
double sqrt_f64(double a, Round round = Round::RN);
double min_f64(double a, double b);
double max_f64(double a, double b);
double neg_f64(double a);                     // a NaN keeps its sign
double abs_f64(double a);                     // likewise
double rcp_approx_ftz_f64(double a);          // 2^-20 relative; the result's low 32 bits are 0
double rsqrt_approx_f64(double a, bool ftz);  // likewise

// ---- f16 and bf16 -----------------------------------------------------------------------------
// Packed forms apply these to each half: packed(f, a, b). mode.round is RN throughout.

enum class Relu : uint8_t { NONE, RELU, OOB, OOB_RELU };  // .relu: max(0, x), NaN stays NaN

uint16_t add_f16(uint16_t a, uint16_t b, FloatMode mode = {});
uint16_t sub_f16(uint16_t a, uint16_t b, FloatMode mode = {});
uint16_t mul_f16(uint16_t a, uint16_t b, FloatMode mode = {});
uint16_t fma_f16(uint16_t a, uint16_t b, uint16_t c, FloatMode mode = {}, Relu relu = Relu::NONE);
uint16_t min_f16(uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t max_f16(uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t neg_f16(uint16_t a, bool ftz = false);
uint16_t abs_f16(uint16_t a, bool ftz = false);
uint16_t ex2_approx_f16(uint16_t a);   // 2^-9.9 relative; an H200's bits
uint16_t tanh_approx_f16(uint16_t a);  // 2^-10.987 absolute; subnormals are kept

uint16_t add_bf16(uint16_t a, uint16_t b);
uint16_t sub_bf16(uint16_t a, uint16_t b);
uint16_t mul_bf16(uint16_t a, uint16_t b);
uint16_t fma_bf16(uint16_t a, uint16_t b, uint16_t c, Relu relu = Relu::NONE);
uint16_t min_bf16(uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t max_bf16(uint16_t a, uint16_t b, MinMaxMode mode = {});
uint16_t neg_bf16(uint16_t a);
uint16_t abs_bf16(uint16_t a);
uint16_t ex2_approx_ftz_bf16(uint16_t a);  // 2^-7 relative; an H200's bits
uint16_t tanh_approx_bf16(uint16_t a);     // 2^-8 relative

template <class Function, class... Operands>
uint32_t packed(Function function, Operands... operands) {
  const uint32_t lower = function(static_cast<uint16_t>(operands)...);
  const uint32_t upper = function(static_cast<uint16_t>(operands >> 16)...);
  return lower | upper << 16;
}

// ---- Whole warps of the hottest instructions ---------------------------------------------------
// 32 lanes, all of them computed; AVX2 where the machine has it, the same bits where not. d may be
// one of the operands.

void fma_rn_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c);
void fma_rn_ftz_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c);
void ex2_approx_ftz_f32_warp(uint32_t* d, const uint32_t* a);
void cvt_rn_f16x2_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b);   // a: upper half
void cvt_rn_bf16x2_f32_warp(uint32_t* d, const uint32_t* a, const uint32_t* b);  // a: upper half

// ---- Integers ---------------------------------------------------------------------------------

inline uint32_t mul_hi_u32(uint32_t a, uint32_t b) { return (uint64_t{a} * b) >> 32; }
inline int32_t mul_hi_s32(int32_t a, int32_t b) { return (int64_t{a} * b) >> 32; }
uint64_t mul_hi_u64(uint64_t a, uint64_t b);
int64_t mul_hi_s64(int64_t a, int64_t b);

// The operands' low 24 bits; .hi is bits 16..47 of the 48-bit product.
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

// shf: the 64 bits {b, a} (b upper) shifted by c, `wrap` c & 31 or clamped to 32. The upper half of
// the left shift, the lower half of the right shift.
uint32_t shf_l_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap);
uint32_t shf_r_b32(uint32_t a, uint32_t b, uint32_t c, bool wrap);

// Position b and length c: of the 32-bit forms their low 8 bits count.
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

// Distance of the highest bit that differs from the sign, from bit 0; .shiftamt: as a left shift.
// 0xFFFFFFFF if there is none.
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

// lop3: bit i of table is the result where the bits of (a, b, c) spell i.
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

// dp4a: c + the dot product of four bytes; dp2a: of two 16-bit halves of a and the lower or upper
// two bytes of b. Each operand signed or not; the sum wraps.
uint32_t dp4a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c);
uint32_t dp2a(uint32_t a, bool a_signed, uint32_t b, bool b_signed, uint32_t c, bool upper);

}  // namespace archflash::sim
