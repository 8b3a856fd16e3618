// Runs one instruction of sim/numerics on arrays, by its PTX text: the tests of that folder call
// this through ctypes. Every operand is an array of uint64_t, one value in the low bits of each;
// matrix fragments have 32 lanes a warp and one array a register.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "sim/numerics/ldmatrix.h"
#include "sim/numerics/mma.h"
#include "sim/numerics/numeric.h"
#include "sim/numerics/tile_product.h"

namespace archflash::sim {
namespace {

using Value = uint64_t;
using Function = std::function<Value(Value, Value, Value, Value)>;

struct Instruction {
  std::string opcode;
  std::vector<std::string> types;
  std::set<std::string> modifiers;
  bool has(const std::string& modifier) const { return modifiers.count(modifier) != 0; }
  const std::string& type() const { return types.at(0); }
};

const std::map<std::string, NumericType> NUMERIC_TYPES = {
    {"u8", NumericType::U8},          {"s8", NumericType::S8},
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

const std::map<std::string, ElementType> ELEMENT_TYPES = {
    {"f16", ElementType::F16},   {"bf16", ElementType::BF16}, {"tf32", ElementType::TF32},
    {"f32", ElementType::F32},   {"f64", ElementType::F64},   {"e4m3", ElementType::E4M3},
    {"e5m2", ElementType::E5M2}, {"s8", ElementType::S8},     {"u8", ElementType::U8},
    {"s4", ElementType::S4},     {"u4", ElementType::U4},     {"b1", ElementType::B1},
    {"s32", ElementType::S32}};

const std::map<std::string, Round> ROUNDS = {
    {"rn", Round::RN},   {"rz", Round::RZ},   {"rm", Round::RM},
    {"rp", Round::RP},   {"rna", Round::RNA}, {"rni", Round::RNI},
    {"rzi", Round::RZI}, {"rmi", Round::RMI}, {"rpi", Round::RPI}};

Instruction parse(const std::string& text) {
  Instruction result;
  size_t start = 0;
  while (start <= text.size()) {
    const size_t end = std::min(text.find('.', start), text.size());
    const std::string part = text.substr(start, end - start);
    const bool is_type =
        NUMERIC_TYPES.count(part) || ELEMENT_TYPES.count(part) || part == "b32" || part == "b64";
    if (result.opcode.empty()) {
      result.opcode = part;
    } else if (is_type) {
      result.types.push_back(part);
    } else {
      result.modifiers.insert(part);
    }
    start = end + 1;
  }
  return result;
}

Round round_of(const Instruction& instruction, Round otherwise) {
  for (const auto& [name, round] : ROUNDS) {
    if (instruction.has(name)) return round;
  }
  return otherwise;
}

FloatMode float_mode(const Instruction& instruction) {
  return {round_of(instruction, Round::RN), instruction.has("ftz"), instruction.has("sat")};
}

MinMaxMode min_max_mode(const Instruction& instruction) {
  return {instruction.has("ftz"), instruction.has("NaN"), instruction.has("xorsign")};
}

Relu relu_of(const Instruction& instruction) {
  if (instruction.has("oob")) return instruction.has("relu") ? Relu::OOB_RELU : Relu::OOB;
  return instruction.has("relu") ? Relu::RELU : Relu::NONE;
}

float as_f32(Value value) { return f32_of(static_cast<uint32_t>(value)); }

Function cvt(const Instruction& instruction) {
  CvtSpec spec{NUMERIC_TYPES.at(instruction.types.at(0)), NUMERIC_TYPES.at(instruction.types.at(1)),
               round_of(instruction, Round::NONE)};
  spec.ftz = instruction.has("ftz");
  spec.sat = instruction.has("sat");
  spec.satfinite = instruction.has("satfinite");
  spec.relu = instruction.has("relu");
  const CvtFunction function = find_cvt(spec);
  if (function == nullptr) return nullptr;
  return [=](Value a, Value b, Value, Value) { return function(spec, a, b); };
}

Function arithmetic_f32(const Instruction& i) {
  const FloatMode mode = float_mode(i);
  const MinMaxMode min_max = min_max_mode(i);
  const std::string& op = i.opcode;
  const auto unary = [](auto f) -> Function {
    return [=](Value a, Value, Value, Value) { return bits_of(f(as_f32(a))); };
  };
  const auto binary = [](auto f) -> Function {
    return [=](Value a, Value b, Value, Value) { return bits_of(f(as_f32(a), as_f32(b))); };
  };
  if (op == "add") return binary([=](float a, float b) { return add_f32(a, b, mode); });
  if (op == "sub") return binary([=](float a, float b) { return sub_f32(a, b, mode); });
  if (op == "mul") return binary([=](float a, float b) { return mul_f32(a, b, mode); });
  if (op == "min") return binary([=](float a, float b) { return min_f32(a, b, min_max); });
  if (op == "max") return binary([=](float a, float b) { return max_f32(a, b, min_max); });
  if (op == "div" && i.has("approx")) {
    return binary([=](float a, float b) { return div_approx_f32(a, b, mode.ftz); });
  }
  if (op == "div" && i.has("full")) {
    return binary([=](float a, float b) { return div_full_f32(a, b, mode.ftz); });
  }
  if (op == "div") return binary([=](float a, float b) { return div_f32(a, b, mode); });
  if (op == "fma") {
    return [=](Value a, Value b, Value c, Value) {
      return bits_of(fma_f32(as_f32(a), as_f32(b), as_f32(c), mode));
    };
  }
  if (op == "neg") return unary([=](float a) { return neg_f32(a, mode.ftz); });
  if (op == "abs") return unary([=](float a) { return abs_f32(a, mode.ftz); });
  if (i.has("approx")) {
    const bool ftz = mode.ftz;
    if (op == "ex2") return unary([=](float a) { return ex2_approx_f32(a, ftz); });
    if (op == "lg2") return unary([=](float a) { return lg2_approx_f32(a, ftz); });
    if (op == "rcp") return unary([=](float a) { return rcp_approx_f32(a, ftz); });
    if (op == "rsqrt") return unary([=](float a) { return rsqrt_approx_f32(a, ftz); });
    if (op == "sqrt") return unary([=](float a) { return sqrt_approx_f32(a, ftz); });
    if (op == "sin") return unary([=](float a) { return sin_approx_f32(a, ftz); });
    if (op == "cos") return unary([=](float a) { return cos_approx_f32(a, ftz); });
    if (op == "tanh") return unary([=](float a) { return tanh_approx_f32(a); });
  }
  if (op == "rcp") return unary([=](float a) { return rcp_f32(a, mode); });
  if (op == "sqrt") return unary([=](float a) { return sqrt_f32(a, mode); });
  return nullptr;
}

Function arithmetic_f64(const Instruction& i) {
  const Round round = round_of(i, Round::RN);
  const std::string& op = i.opcode;
  const bool ftz = i.has("ftz");
  const auto binary = [](auto f) -> Function {
    return [=](Value a, Value b, Value c, Value) {
      return bits_of(f(f64_of(a), f64_of(b), f64_of(c)));
    };
  };
  if (op == "add") return binary([=](double a, double b, double) { return add_f64(a, b, round); });
  if (op == "sub") return binary([=](double a, double b, double) { return sub_f64(a, b, round); });
  if (op == "mul") return binary([=](double a, double b, double) { return mul_f64(a, b, round); });
  if (op == "fma") {
    return binary([=](double a, double b, double c) { return fma_f64(a, b, c, round); });
  }
  if (op == "div") return binary([=](double a, double b, double) { return div_f64(a, b, round); });
  if (op == "min") return binary([=](double a, double b, double) { return min_f64(a, b); });
  if (op == "max") return binary([=](double a, double b, double) { return max_f64(a, b); });
  if (op == "neg") return binary([=](double a, double, double) { return neg_f64(a); });
  if (op == "abs") return binary([=](double a, double, double) { return abs_f64(a); });
  if (op == "sqrt") return binary([=](double a, double, double) { return sqrt_f64(a, round); });
  if (op == "rcp" && i.has("approx")) {
    return binary([=](double a, double, double) { return rcp_approx_ftz_f64(a); });
  }
  if (op == "rcp") return binary([=](double a, double, double) { return rcp_f64(a, round); });
  if (op == "rsqrt") {
    return binary([=](double a, double, double) { return rsqrt_approx_f64(a, ftz); });
  }
  return nullptr;
}

using Half = std::function<uint16_t(uint16_t, uint16_t, uint16_t)>;

Half arithmetic_f16(const Instruction& i) {
  const FloatMode mode = float_mode(i);
  const MinMaxMode min_max = min_max_mode(i);
  const Relu relu = relu_of(i);
  const std::string& op = i.opcode;
  using H = uint16_t;
  if (op == "add") return [=](H a, H b, H) { return add_f16(a, b, mode); };
  if (op == "sub") return [=](H a, H b, H) { return sub_f16(a, b, mode); };
  if (op == "mul") return [=](H a, H b, H) { return mul_f16(a, b, mode); };
  if (op == "fma") return [=](H a, H b, H c) { return fma_f16(a, b, c, mode, relu); };
  if (op == "min") return [=](H a, H b, H) { return min_f16(a, b, min_max); };
  if (op == "max") return [=](H a, H b, H) { return max_f16(a, b, min_max); };
  if (op == "neg") return [=](H a, H, H) { return neg_f16(a, mode.ftz); };
  if (op == "abs") return [=](H a, H, H) { return abs_f16(a, mode.ftz); };
  if (op == "ex2") return [=](H a, H, H) { return ex2_approx_f16(a); };
  if (op == "tanh") return [=](H a, H, H) { return tanh_approx_f16(a); };
  return nullptr;
}

Half arithmetic_bf16(const Instruction& i) {
  const MinMaxMode min_max = min_max_mode(i);
  const Relu relu = relu_of(i);
  const std::string& op = i.opcode;
  using H = uint16_t;
  if (op == "add") return [=](H a, H b, H) { return add_bf16(a, b); };
  if (op == "sub") return [=](H a, H b, H) { return sub_bf16(a, b); };
  if (op == "mul") return [=](H a, H b, H) { return mul_bf16(a, b); };
  if (op == "fma") return [=](H a, H b, H c) { return fma_bf16(a, b, c, relu); };
  if (op == "min") return [=](H a, H b, H) { return min_bf16(a, b, min_max); };
  if (op == "max") return [=](H a, H b, H) { return max_bf16(a, b, min_max); };
  if (op == "neg") return [=](H a, H, H) { return neg_bf16(a); };
  if (op == "abs") return [=](H a, H, H) { return abs_bf16(a); };
  if (op == "ex2") return [=](H a, H, H) { return ex2_approx_ftz_bf16(a); };
  if (op == "tanh") return [=](H a, H, H) { return tanh_approx_bf16(a); };
  return nullptr;
}

Function half_function(const Half& half, bool is_packed) {
  if (half == nullptr) return nullptr;
  if (!is_packed) {
    return [=](Value a, Value b, Value c, Value) {
      return Value{half(uint16_t(a), uint16_t(b), uint16_t(c))};
    };
  }
  return [=](Value a, Value b, Value c, Value) {
    return Value{packed(half, uint32_t(a), uint32_t(b), uint32_t(c))};
  };
}

PrmtMode prmt_mode(const Instruction& i) {
  if (i.has("f4e")) return PrmtMode::F4E;
  if (i.has("b4e")) return PrmtMode::B4E;
  if (i.has("rc8")) return PrmtMode::RC8;
  if (i.has("ecl")) return PrmtMode::ECL;
  if (i.has("ecr")) return PrmtMode::ECR;
  if (i.has("rc16")) return PrmtMode::RC16;
  return PrmtMode::NONE;
}

// `f` on the operands' low 32 bits, signed ones as int32_t.
template <class Operation>
Function words(Operation f) {
  return [=](Value a, Value b, Value c, Value d) {
    return Value{static_cast<uint32_t>(f(uint32_t(a), uint32_t(b), uint32_t(c), uint32_t(d)))};
  };
}

template <class Operation>
Function doublewords(Operation f) {
  return [=](Value a, Value b, Value c, Value d) { return static_cast<Value>(f(a, b, c, d)); };
}

Function integer(const Instruction& i) {
  using U = uint32_t;
  using S = int32_t;
  const std::string& op = i.opcode;
  const std::string& type = i.type();
  const bool is_signed = type == "s32" || type == "s64";
  const bool wide = type == "u64" || type == "s64" || type == "b64";
  const bool wrap = i.has("wrap");
  if (type == "u16" || type == "s16") return nullptr;  // of 32 and 64 bits only
  if (op == "lop3") return words([](U a, U b, U c, U d) { return lop3_b32(a, b, c, uint8_t(d)); });
  if (op == "prmt") {
    const PrmtMode mode = prmt_mode(i);
    return words([=](U a, U b, U c, U) { return prmt_b32(a, b, c, mode); });
  }
  if (op == "shf") {
    const bool left = i.has("l");
    return words([=](U a, U b, U c, U) {
      return left ? shf_l_b32(a, b, c, wrap) : shf_r_b32(a, b, c, wrap);
    });
  }
  if (op == "shl" && wide)
    return doublewords([](Value a, Value b, Value, Value) { return shl_b64(a, U(b)); });
  if (op == "shl") return words([](U a, U b, U, U) { return shl_b32(a, b); });
  if (op == "shr" && wide) {
    return doublewords([=](Value a, Value b, Value, Value) {
      return is_signed ? static_cast<Value>(shr_s64(int64_t(a), U(b))) : shr_u64(a, U(b));
    });
  }
  if (op == "shr") {
    return words([=](U a, U b, U, U) { return is_signed ? U(shr_s32(S(a), b)) : shr_u32(a, b); });
  }
  if (op == "bfe" && wide) {
    return doublewords([=](Value a, Value b, Value c, Value) {
      return is_signed ? static_cast<Value>(bfe_s64(int64_t(a), U(b), U(c)))
                       : bfe_u64(a, U(b), U(c));
    });
  }
  if (op == "bfe") {
    return words(
        [=](U a, U b, U c, U) { return is_signed ? U(bfe_s32(S(a), b, c)) : bfe_u32(a, b, c); });
  }
  if (op == "bfi" && wide) {
    return doublewords(
        [](Value a, Value b, Value c, Value d) { return bfi_b64(a, b, U(c), U(d)); });
  }
  if (op == "bfi") return words([](U a, U b, U c, U d) { return bfi_b32(a, b, c, d); });
  if (op == "bmsk") return words([=](U a, U b, U, U) { return bmsk_b32(a, b, wrap); });
  if (op == "szext") {
    return words([=](U a, U b, U, U) {
      return is_signed ? U(szext_s32(S(a), b, wrap)) : szext_u32(a, b, wrap);
    });
  }
  if (op == "fns") return words([](U a, U b, U c, U) { return fns_b32(a, b, S(c)); });
  if (op == "bfind") {
    const bool shiftamt = i.has("shiftamt");
    return [=](Value a, Value, Value, Value) {
      if (wide) {
        return Value{is_signed ? bfind_s64(int64_t(a), shiftamt) : bfind_u64(a, shiftamt)};
      }
      return Value{is_signed ? bfind_s32(S(a), shiftamt) : bfind_u32(U(a), shiftamt)};
    };
  }
  if (op == "clz")
    return [=](Value a, Value, Value, Value) { return Value{wide ? clz_b64(a) : clz_b32(U(a))}; };
  if (op == "popc")
    return [=](Value a, Value, Value, Value) { return Value{wide ? popc_b64(a) : popc_b32(U(a))}; };
  if (op == "brev")
    return [=](Value a, Value, Value, Value) { return wide ? brev_b64(a) : Value{brev_b32(U(a))}; };
  if (op == "sad" && !wide) {
    return words(
        [=](U a, U b, U c, U) { return is_signed ? sad_s32(S(a), S(b), c) : sad_u32(a, b, c); });
  }
  if (op == "mul" && i.has("hi") && wide) {
    return doublewords([=](Value a, Value b, Value, Value) {
      return is_signed ? static_cast<Value>(mul_hi_s64(int64_t(a), int64_t(b))) : mul_hi_u64(a, b);
    });
  }
  if (op == "mul" && i.has("hi")) {
    return words(
        [=](U a, U b, U, U) { return is_signed ? U(mul_hi_s32(S(a), S(b))) : mul_hi_u32(a, b); });
  }
  if (op == "mul24") {
    const bool high = i.has("hi");
    return words([=](U a, U b, U, U) {
      if (is_signed) return U(high ? mul24_hi_s32(S(a), S(b)) : mul24_lo_s32(S(a), S(b)));
      return high ? mul24_hi_u32(a, b) : mul24_lo_u32(a, b);
    });
  }
  if ((op == "add" || op == "sub") && i.has("sat")) {
    const int sign = op == "add" ? 1 : -1;
    return words(
        [=](U a, U b, U, U) { return U(saturate_s32(int64_t{S(a)} + int64_t{sign} * S(b))); });
  }
  if (op == "dp4a" || op == "dp2a") {
    const bool four = op == "dp4a";
    const bool a_signed = i.types.at(0) == "s32";
    const bool b_signed = i.types.at(1) == "s32";
    const bool upper = i.has("hi");
    return words([=](U a, U b, U c, U) {
      return four ? dp4a(a, a_signed, b, b_signed, c) : dp2a(a, a_signed, b, b_signed, c, upper);
    });
  }
  return nullptr;
}

Function find(const Instruction& instruction) {
  if (instruction.types.empty()) return nullptr;
  if (instruction.opcode == "cvt") return cvt(instruction);
  const std::string& type = instruction.type();
  if (type == "f32") return arithmetic_f32(instruction);
  if (type == "f64") return arithmetic_f64(instruction);
  if (type == "f16" || type == "f16x2") {
    return half_function(arithmetic_f16(instruction), type == "f16x2");
  }
  if (type == "bf16" || type == "bf16x2") {
    return half_function(arithmetic_bf16(instruction), type == "bf16x2");
  }
  return integer(instruction);
}

constexpr int WARP = 32;

// Whole warps of a matrix instruction. Returns whether there is such a form.
const TensorCore* card = &tensor_core_of(90);  // whose tensor cores add up

bool run_mma(const Instruction& instruction, int64_t warps, const Value* const* inputs,
             Value* const* outputs) {
  MmaShape shape{};
  for (const std::string& modifier : instruction.modifiers) {
    std::sscanf(modifier.c_str(), "m%dn%dk%d", &shape.m, &shape.n, &shape.k);
  }
  if (instruction.types.size() != 4) return false;
  shape.d = ELEMENT_TYPES.at(instruction.types[0]);
  shape.a = ELEMENT_TYPES.at(instruction.types[1]);
  shape.b = ELEMENT_TYPES.at(instruction.types[2]);
  shape.c = ELEMENT_TYPES.at(instruction.types[3]);
  shape.satfinite = instruction.has("satfinite");
  shape.b1_and = instruction.has("and");
  // A set of modifiers has no order: `colA` and `rowB` stand for A's .col and B's .row.
  shape.a_column_major = instruction.has("colA");
  shape.b_row_major = instruction.has("rowB");
  const MmaFunction function = find_mma(shape);
  if (function == nullptr) return false;
  const MmaRegisters count = mma_registers(shape);
  const bool f64 = shape.d == ElementType::F64;
  const auto pack = [&](const Value* lanes, Value* target) {
    for (int lane = 0; lane < WARP; ++lane) {
      if (f64) {
        target[lane] = lanes[lane];
      } else {
        reinterpret_cast<uint32_t*>(target)[lane] = static_cast<uint32_t>(lanes[lane]);
      }
    }
  };
  alignas(64) Value registers[28][WARP];
  for (int64_t warp = 0; warp < warps; ++warp) {
    MmaOperands operands{};
    int used = 0;
    const auto take = [&](const void** fragment, int registers_in) {
      for (int i = 0; i < registers_in; ++i, ++used) {
        pack(inputs[used] + warp * WARP, registers[used]);
        fragment[i] = registers[used];
      }
    };
    take(operands.a, count.a);
    take(operands.b, count.b);
    take(operands.c, count.c);
    for (int i = 0; i < count.d; ++i) operands.d[i] = registers[used + i];
    function(shape, operands, *card);
    for (int i = 0; i < count.d; ++i) {
      for (int lane = 0; lane < WARP; ++lane) {
        outputs[i][warp * WARP + lane] =
            f64 ? registers[used + i][lane]
                : reinterpret_cast<const uint32_t*>(registers[used + i])[lane];
      }
    }
  }
  return true;
}

// The warp-wide forms, which only promise the bits of the others.
bool run_warp(const std::string& name, int64_t warps, const Value* const* inputs,
              Value* const* outputs) {
  uint32_t operand[3][WARP], result[WARP];
  const bool fma = name == "fma.rn.f32" || name == "fma.rn.ftz.f32";
  const int count = fma ? 3 : name == "ex2.approx.ftz.f32" ? 1 : 2;
  for (int64_t warp = 0; warp < warps; ++warp) {
    for (int i = 0; i < count; ++i) {
      for (int lane = 0; lane < WARP; ++lane) {
        operand[i][lane] = static_cast<uint32_t>(inputs[i][warp * WARP + lane]);
      }
    }
    if (name == "fma.rn.f32") {
      fma_rn_f32_warp(result, operand[0], operand[1], operand[2]);
    } else if (name == "fma.rn.ftz.f32") {
      fma_rn_ftz_f32_warp(result, operand[0], operand[1], operand[2]);
    } else if (name == "ex2.approx.ftz.f32") {
      ex2_approx_ftz_f32_warp(result, operand[0]);
    } else if (name == "cvt.rn.f16x2.f32") {
      cvt_rn_f16x2_f32_warp(result, operand[0], operand[1]);
    } else if (name == "cvt.rn.bf16x2.f32") {
      cvt_rn_bf16x2_f32_warp(result, operand[0], operand[1]);
    } else {
      return false;
    }
    for (int lane = 0; lane < WARP; ++lane) outputs[0][warp * WARP + lane] = result[lane];
  }
  return true;
}

}  // namespace
}  // namespace archflash::sim

using namespace archflash::sim;  // the C interface below

extern "C" {

// One value at a time: `count` values of up to four operands. 0 if done, 1 if the text names no
// instruction of these files.
int direct_run(const char* text, int64_t count, const uint64_t* const* inputs, int input_count,
               uint64_t* output) {
  const Function function = find(parse(text));
  if (function == nullptr) return 1;
  const FloatEnvironment environment;
  const auto at = [&](int operand, int64_t i) {
    return operand < input_count ? inputs[operand][i] : 0;
  };
  for (int64_t i = 0; i < count; ++i) output[i] = function(at(0, i), at(1, i), at(2, i), at(3, i));
  return 0;
}

int direct_mma(const char* text, int64_t warps, const uint64_t* const* inputs,
               uint64_t* const* outputs) {
  return run_mma(parse(text), warps, inputs, outputs) ? 0 : 1;
}

int direct_warp(const char* text, int64_t warps, const uint64_t* const* inputs,
                uint64_t* const* outputs) {
  return run_warp(text, warps, inputs, outputs) ? 0 : 1;
}

// The lane maps of one 8 x 8 matrix: "ldmatrix" and "movmatrix" give registers (32 lanes),
// "stmatrix" gives the matrix, as 32 words in memory order.
int direct_matrix_map(const char* name, int trans, const uint32_t* source, uint32_t* target) {
  uint16_t rows[8][8];
  const std::string opcode = name;
  if (opcode == "ldmatrix") {
    std::memcpy(rows, source, sizeof(rows));
    ldmatrix_m8n8_b16(rows, trans != 0, target);
  } else if (opcode == "stmatrix") {
    stmatrix_m8n8_b16(source, trans != 0, rows);
    std::memcpy(target, rows, sizeof(rows));
  } else if (opcode == "movmatrix") {
    movmatrix_m8n8_trans_b16(source, target);
  } else {
    return 1;
  }
  return 0;
}

// d (m, n) = a (m, k) * b (k, n) + d of elements that are decoded from memory first.
int direct_multiply(const char* a_type, const char* b_type, int m, int n, int k, const void* a,
                    const void* b, float* d, int accumulate) {
  std::vector<float> a_values(m * k), b_values(k * n);
  decode_row(ELEMENT_TYPES.at(a_type), a, m * k, a_values.data());
  decode_row(ELEMENT_TYPES.at(b_type), b, k * n, b_values.data());
  const TileShape shape{m, n, k, ELEMENT_TYPES.at(a_type), ELEMENT_TYPES.at(b_type)};
  multiply_accumulate(shape, is_fp8(shape.a) ? card->fp8_async : card->wide, a_values.data(), k,
                      b_values.data(), n, d, n, accumulate != 0);
  return 0;
}

void direct_set_capability(int capability) { card = &tensor_core_of(capability); }
void direct_set_avx2(int enabled) { set_avx2(enabled != 0); }
int direct_uses_avx2() { return uses_avx2(); }
}
