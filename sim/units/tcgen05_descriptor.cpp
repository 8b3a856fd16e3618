// The descriptors of tcgen05: what a tile's and an instruction's bits say, and what they must not
// say.
#include <algorithm>
#include <initializer_list>
#include <string>
#include <tuple>

#include "sim/units/tcgen05.h"

namespace archflash::sim {
namespace {

bool is_one_of(int value, std::initializer_list<int> values) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

}  // namespace

std::string decode_tile(uint64_t bits, MatrixDescriptor& descriptor) {
  descriptor = decode_offsets(bits);
  if (bits >> 14 & 3) return "bits 14-15 are not zero";
  if (bits >> 30 & 3) return "bits 30-31 are not zero";
  if ((bits >> 46 & 7) != 1) {
    return "bits 46-48 are " + std::to_string(bits >> 46 & 7) + " and must be 1";
  }
  if (bits >> 52 & 1) return "bit 52: an absolute leading offset is not simulated";
  if (bits >> 53 & 0xFF) return "bits 53-60 are not zero";
  const auto mode = static_cast<int>(bits >> 61);
  switch (mode) {
    case 0:
      break;
    case 2:
      descriptor.span = 128;
      descriptor.mask = 7;
      break;
    case 4:
      descriptor.span = 64;
      descriptor.mask = 3;
      break;
    case 6:
      descriptor.span = 32;
      descriptor.mask = 1;
      break;
    case 1:
      return "swizzle (bits 61-63) 1, 128 bytes with atoms of 32, is not simulated";
    default:
      return "swizzle (bits 61-63) " + std::to_string(mode) + " does not exist";
  }
  if (descriptor.base_offset != 0 && !follows_pattern(descriptor)) {
    return "the start address is not where the swizzle's pattern begins, and the base offset "
           "(bits 49-51) does not say so";
  }
  return {};
}

std::string decode_mma(MmaKind kind, int ctas, bool a_in_tmem, uint32_t bits, MmaDescriptor& mma) {
  const auto field = [&](int first, int last) {
    return static_cast<int>(bits >> first & ((2u << (last - first)) - 1));
  };
  const auto is = [](const char* name, int value, const std::string& allowed) {
    return std::string(name) + " is " + std::to_string(value) + ": " + allowed;
  };
  if (field(0, 1) != 0) return "sparsity selector (bits 0-1) is not zero: A is dense here";
  if (field(2, 2) != 0) return "sparsity (bit 2) is set: A is dense here";
  if (field(3, 3) != 0) return "saturation (bit 3) is set: for kind::i8 only";
  if (field(6, 6) != 0) return "bit 6 is not zero";
  if (field(23, 23) != 0) return "bit 23 is not zero";
  if (field(29, 29) != 0) return "bit 29 is not zero";
  if (field(30, 31) != 0) return "the shift of .ws (bits 30-31) is not zero";
  const int d = field(4, 5), a = field(7, 9), b = field(10, 12);
  if (d > 1) return is("the type of D (bits 4-5)", d, "0 (f16) or 1 (f32)");
  mma.half = d == 0;
  switch (kind) {
    case MmaKind::F16: {
      if (a > 1) return is("the type of A (bits 7-9)", a, "0 (f16) or 1 (bf16)");
      if (b != a) return is("the type of B (bits 10-12)", b, "as A's, " + std::to_string(a));
      if (mma.half && a == 1) return "the type of D (bits 4-5) is f16 with A in bf16";
      mma.a = mma.b = a == 0 ? ElementType::F16 : ElementType::BF16;
      break;
    }
    case MmaKind::TF32:
      if (a != 2) return is("the type of A (bits 7-9)", a, "2 (tf32)");
      if (b != 2) return is("the type of B (bits 10-12)", b, "2 (tf32)");
      if (mma.half) return "the type of D (bits 4-5) is f16: f32 for tf32";
      mma.a = mma.b = ElementType::TF32;
      break;
    case MmaKind::F8F6F4:
      for (const auto& [name, code, type] : {std::tuple("the type of A (bits 7-9)", a, &mma.a),
                                             std::tuple("the type of B (bits 10-12)", b, &mma.b)}) {
        if (is_one_of(code, {3, 4, 5})) {
          return is(name, code, "types of 6 and 4 bits are not simulated");
        }
        if (code > 1) return is(name, code, "0 (e4m3) or 1 (e5m2)");
        *type = code == 0 ? ElementType::E4M3 : ElementType::E5M2;
      }
      break;
  }
  mma.k = PRODUCT_K_BYTES * 8 / element_bits(mma.a);
  mma.negate_a = field(13, 13) != 0;
  mma.negate_b = field(14, 14) != 0;
  mma.a_k_major = field(15, 15) == 0;
  mma.b_k_major = field(16, 16) == 0;
  if (a_in_tmem && !mma.a_k_major) {
    return "the transposition of A (bit 15) is set: in tensor memory A is K-major";
  }
  if (kind == MmaKind::TF32 && !(mma.a_k_major && mma.b_k_major)) {
    return "a transposition (bits 15-16) is set: tf32 that is MN-major is not simulated";
  }
  mma.m = field(24, 28) * 16;
  mma.n = field(17, 22) * 8;
  const std::string group = " with cta_group::" + std::to_string(ctas);
  if (!(ctas == 1 ? is_one_of(mma.m, {64, 128}) : is_one_of(mma.m, {128, 256}))) {
    return is("M (bits 24-28, in 16)", mma.m, (ctas == 1 ? "64 or 128" : "128 or 256") + group);
  }
  int step = 8 * ctas;
  // MN-major B with 8-bit elements takes twice the step.
  if (kind == MmaKind::F8F6F4 && !mma.b_k_major) step *= 2;
  if (mma.n < step || mma.n > 256 || mma.n % step != 0) {
    return is("N (bits 17-22, in 8)", mma.n,
              "a multiple of " + std::to_string(step) + " up to 256" + group);
  }
  if (a_in_tmem && mma.m == 128 * ctas && mma.n % (16 * ctas) != 0) {
    return is("N (bits 17-22, in 8)", mma.n,
              "a multiple of " + std::to_string(16 * ctas) + " with A in tensor memory" + group);
  }
  return {};
}

}  // namespace archflash::sim
