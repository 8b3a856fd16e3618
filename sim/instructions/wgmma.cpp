// wgmma: products of a warpgroup, their fences and groups.
#include "sim/units/wgmma.h"

#include <bit>
#include <cstdio>
#include <functional>
#include <string>

#include "sim/load/builder.h"
#include "sim/run/cluster.h"

namespace archflash::sim {
namespace {

bool is_integer(ElementType type) { return type == ElementType::S8 || type == ElementType::U8; }

struct WgmmaExtra {
  WgmmaShape shape;
  bool negated =
      false;  // whether the predicate, which says that products are added to d, is negated
};

// Operands: d (written), d (read), a in registers or its descriptor, b's descriptor, predicate.
void run_wgmma(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const WgmmaExtra*>(instruction.extra);
  const WgmmaShape& shape = extra.shape;
  const int lane = std::countr_zero(mask);
  const Ref* next = instruction.operands + shape.d_registers();
  const auto uniform = [&](Ref ref) {
    const uint64_t* lanes = warp.lanes<const uint64_t>(ref);
    for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
      if (lanes[std::countr_zero(rest)] != lanes[lane]) {
        throw Fault{"descriptor", "lanes disagree about a descriptor of wgmma",
                    std::countr_zero(rest)};
      }
    }
    return lanes[lane];
  };
  next += shape.a_registers ? 4 : 0;
  const uint64_t a = shape.a_registers ? 0 : uniform(*next++);
  const uint64_t b = uniform(*next++);
  uint32_t adds = warp.predicate(*next);
  if (extra.negated) adds = ~adds;
  if ((adds & mask) != 0 && (adds & mask) != mask) {
    throw Fault{"wgmma", "lanes disagree about scale-d of wgmma", lane};
  }
  warp.matrix().issue(shape, instruction.operands, a, b, (adds & mask) != 0);
}

ElementType type_of(std::string_view name) {
  return name == "f16"    ? ElementType::F16
         : name == "bf16" ? ElementType::BF16
         : name == "tf32" ? ElementType::TF32
         : name == "e4m3" ? ElementType::E4M3
         : name == "e5m2" ? ElementType::E5M2
         : name == "s8"   ? ElementType::S8
         : name == "u8"   ? ElementType::U8
         : name == "s32"  ? ElementType::S32
                          : ElementType::F32;
}

// Slots: mma_async, sync, aligned, shape, satfinite, d, a, b.
void build_wgmma(Builder& b) {
  WgmmaExtra extra;
  WgmmaShape& shape = extra.shape;
  if (std::sscanf(std::string(b.slot(3)).c_str(), "m64n%dk%d", &shape.n, &shape.k) != 2) {
    b.fail("bad shape");
  }
  shape.satfinite = b.has("satfinite");
  shape.d = type_of(b.slot(5));
  shape.a = type_of(b.slot(6));
  shape.b = type_of(b.slot(7));
  const bool fp8 = shape.a == ElementType::E4M3 || shape.a == ElementType::E5M2;
  const bool b_fp8 = shape.b == ElementType::E4M3 || shape.b == ElementType::E5M2;
  const bool integer = is_integer(shape.a);
  const bool half = shape.a == ElementType::F16 || shape.a == ElementType::BF16;
  const bool types = fp8 ? b_fp8 : integer ? is_integer(shape.b) : shape.a == shape.b;
  const bool result = integer                       ? shape.d == ElementType::S32
                      : shape.d == ElementType::F16 ? fp8 || shape.a == ElementType::F16
                                                    : shape.d == ElementType::F32;
  if (!types || !result || shape.k * element_bits(shape.a) != 256 ||
      (shape.satfinite && !integer) ||
      (integer && shape.n > 32 && shape.n % 16 != 0 && shape.n != 24)) {
    b.fail("PTX has no such matrix product");
  }
  const Operand& d = b.take();
  if (d.kind != Operand::Kind::Vector || static_cast<int>(d.items.size()) != shape.d_registers()) {
    b.fail("a vector of another size");
  }
  for (const Operand& item : d.items) b.add_destination(item, {'b', 32});
  shape.a_registers = b.peek().kind == Operand::Kind::Vector;
  if (shape.a_registers) {
    if (b.vector_source({'b', 32}) != 4) b.fail("a fragment of another size");
  } else {
    b.source({'b', 64});
  }
  b.source({'b', 64});
  b.predicate_source();
  extra.negated = (b.instruction.flags & Builder::NEGATED) != 0;
  b.instruction.flags &= ~Builder::NEGATED;
  const auto scale = [&] {
    const int64_t value = b.immediate();
    if (value != 1 && value != -1) b.fail("a scale must be 1 or -1");
    return value == -1;
  };
  const auto k_major = [&] {
    const int64_t value = b.immediate();
    if (value != 0 && value != 1) b.fail("a transposition must be 0 or 1");
    return value == 0;
  };
  if (!integer) {
    shape.negate_a = scale();
    shape.negate_b = scale();
  }
  if (half) {
    if (!shape.a_registers) shape.a_k_major = k_major();
    shape.b_k_major = k_major();
  }
  for (const Operand& item : d.items) b.add_source(item, {'b', 32});  // the old values of d
  b.kernel().uses_wgmma = true;
  b.instruction.extra = b.keep(extra);
  b.instruction.converge = Converge::Whole;
  b.instruction.pinned = true;
  b.handler(&run_wgmma, Class::Matrix);
}

void run_fence(Warp& warp, const Instruction&, uint32_t) {
  warp.matrix().remember();
  warp.matrix().fence();
}
void build_fence(Builder& b) {
  b.instruction.converge = Converge::Whole;
  b.handler(&run_fence, Class::Fence);
}
void run_commit(Warp& warp, const Instruction&, uint32_t) {
  warp.matrix().remember();
  warp.matrix().commit();
}
void build_commit(Builder& b) {
  b.instruction.converge = Converge::Whole;
  b.handler(&run_commit, Class::Matrix);
}
void run_wait(Warp& warp, const Instruction& instruction, uint32_t) {
  warp.matrix().remember();
  warp.matrix().wait(static_cast<uint32_t>(instruction.offset));
}
void build_wait(Builder& b) {
  b.instruction.offset = b.immediate();
  if (b.instruction.offset < 0 || b.instruction.offset > 7) b.fail("0 to 7 groups");
  b.instruction.converge = Converge::Whole;
  b.handler(&run_wait, Class::Matrix);
}

constexpr Form FORMS[] = {
    {"wgmma", "fence sync aligned", build_fence},
    {"wgmma",
     "mma_async sync aligned $wgmma ?satfinite f16|f32|s32 f16|bf16|tf32|e4m3|e5m2|s8|u8 "
     "f16|bf16|tf32|e4m3|e5m2|s8|u8",
     build_wgmma},
    {"wgmma", "commit_group sync aligned", build_commit},
    {"wgmma", "wait_group sync aligned", build_wait},
};

}  // namespace

std::span<const Form> wgmma_forms() { return FORMS; }

}  // namespace archflash::sim
