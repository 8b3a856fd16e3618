// tcgen05 instructions but for loads and stores of tensor memory: allocation, products, copies,
// commits, fences. Here is the table of all forms.
#include "sim/instructions/tcgen05.h"

#include <bit>
#include <cstring>

#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

// The number of CTAs that .cta_group states. It must be the same in all of a kernel's instructions.
int take_group(Builder& b, size_t slot) {
  const int ctas = b.slot(slot) == "cta_group::2" ? 2 : 1;
  int& of_kernel = b.kernel().tcgen05_group;
  if (of_kernel != 0 && of_kernel != ctas) {
    b.fail("a kernel with cta_group::" + std::to_string(of_kernel) + " and " +
           std::string(b.slot(slot)) + ": all of its tcgen05 instructions must have the same");
  }
  of_kernel = ctas;
  b.kernel().uses_tcgen05 = true;
  return ctas;
}

// ---- Allocation ----

// Operands: the place for the address, columns.
struct AllocationExtra {
  AddressOperand to;
  int ctas;
};

void run_alloc(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const AllocationExtra*>(instruction.extra);
  constexpr uint32_t BYTES = 4;
  const uint32_t columns = uniform(mask, "the columns of tcgen05.alloc", [&](int lane) {
    return warp.lanes<const uint32_t>(instruction.operands[1])[lane];
  });
  const int lane = std::countr_zero(mask);
  const SharedPlace at = locate_object(warp, lane, extra.to.of(instruction), BYTES, BYTES);
  Cta& cta = warp.cta();
  const std::optional<int> first = cta.tensor()->allocate(warp, extra.ctas, columns);
  if (!first) {
    warp.block(Wait::TensorMemory, columns, true);
    return;
  }
  if (RaceDetector* races = cta.races()) {
    const Race race = races->write({warp.agent(), lane, warp.pc()}, at.race_offset(), BYTES);
    if (race.found) {
      cta.report_race(warp, lane, race, true, false,
                      "shared memory at offset " + std::to_string(at.offset), at.address());
    }
  }
  const auto address = static_cast<uint32_t>(*first);
  std::memcpy(at.bytes(), &address, BYTES);
  std::memset(at.state(), VALID, BYTES);
}
void build_alloc(Builder& b) {
  AllocationExtra extra;
  extra.ctas = take_group(b, 1);
  extra.to = take_address(b, 0, b.has("shared::cta") ? Space::Shared : Space::Generic);
  b.source({'b', 32});
  b.instruction.extra = b.keep(extra);
  b.instruction.control = Control::Barrier;
  b.instruction.converge = Converge::Whole;
  b.handler(&run_alloc, Class::Other);
}

// Operands: address, columns.
void run_dealloc(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto value = [&](int i, const char* what) {
    return uniform(mask, what, [&](int lane) {
      return warp.lanes<const uint32_t>(instruction.operands[i])[lane];
    });
  };
  const uint32_t address = value(0, "the address of tcgen05.dealloc");
  warp.cta().tensor()->release(warp, address, value(1, "the columns of tcgen05.dealloc"));
}
void build_dealloc(Builder& b) {
  take_group(b, 1);
  b.source({'b', 32});
  b.source({'b', 32});
  b.instruction.converge = Converge::Whole;
  b.handler(&run_dealloc, Class::Other);
}

void run_relinquish(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->give_up_permit();
}
void build_relinquish(Builder& b) {
  take_group(b, 1);
  b.instruction.converge = Converge::Whole;
  b.handler(&run_relinquish, Class::Other);
}

// ---- Fences ----

void run_fence_before(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->fence_before(warp);
}
void run_fence_after(Warp& warp, const Instruction&, uint32_t) {
  warp.cta().tensor()->fence_after(warp);
}
void build_fence(Builder& b) {
  b.kernel().uses_tcgen05 = true;
  const bool before = b.slot(0) == "fence::before_thread_sync";
  b.handler(before ? &run_fence_before : &run_fence_after, Class::Fence);
}

// ---- Products ----

// Operands: d, a, b, descriptor, lanes that are not written, predicate.
struct MmaExtra {
  MmaRequest request;  // the parts that the instruction itself states
  AddressOperand d, a;
  int a_descriptor = -1, b_descriptor = 0, descriptor = 0, skip = -1, predicate = 0;
  bool negated = false;
};

void run_mma(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const MmaExtra*>(instruction.extra);
  const auto operand = [&](int i) { return instruction.operands[i]; };
  if (std::popcount(mask) > 1) {
    warp.cta().report(Severity::Error, warp, -1, "tcgen05",
                      "tcgen05.mma by " + std::to_string(std::popcount(mask)) +
                          " lanes: each of them starts a product of its own");
  }
  for_each_lane(mask, [&](int lane) {
    MmaRequest request = extra.request;
    request.d = tensor_address(warp, instruction, extra.d, lane);
    if (request.a_in_tmem)
      request.a_tmem = tensor_address(warp, instruction, extra.a, lane);
    else
      request.a = warp.lanes<const uint64_t>(operand(extra.a_descriptor))[lane];
    request.b = warp.lanes<const uint64_t>(operand(extra.b_descriptor))[lane];
    request.descriptor = warp.lanes<const uint32_t>(operand(extra.descriptor))[lane];
    for (int i = 0; extra.skip >= 0 && i < TMEM_QUARTERS * request.ctas; ++i) {
      request.skip[static_cast<size_t>(i)] =
          warp.lanes<const uint32_t>(operand(extra.skip + i))[lane];
    }
    const bool adds = (warp.predicate(operand(extra.predicate)) >> lane & 1) != 0;
    request.accumulate = adds != extra.negated;
    warp.cta().tensor()->multiply(warp, lane, request);
  });
}

// Slots: mma, group, kind, ashift, collector.
void build_mma(Builder& b) {
  MmaExtra extra;
  MmaRequest& request = extra.request;
  request.ctas = take_group(b, 1);
  request.kind = b.slot(2) == "kind::f16"    ? MmaKind::F16
                 : b.slot(2) == "kind::tf32" ? MmaKind::TF32
                                             : MmaKind::F8F6F4;
  int next = 0;
  extra.d = take_address(b, next++, Space::Shared);
  request.a_in_tmem = b.peek().kind == Operand::Kind::Address;
  if (request.a_in_tmem) {
    extra.a = take_address(b, next++, Space::Shared);
  } else {
    extra.a_descriptor = next++;
    b.source({'b', 64});
  }
  extra.b_descriptor = next++;
  b.source({'b', 64});
  extra.descriptor = next++;
  b.source({'b', 32});
  if (b.peek().kind == Operand::Kind::Vector) {
    extra.skip = next;
    const int words = b.vector_source({'b', 32});
    if (words != TMEM_QUARTERS * request.ctas) b.fail("a vector of another size");
    next += words;
  }
  extra.predicate = next;
  b.predicate_source();
  extra.negated = (b.instruction.flags & Builder::NEGATED) != 0;
  b.instruction.flags &= ~Builder::NEGATED;
  if (b.operands_left() > 0) {
    constexpr int64_t MOST = 15;
    const int64_t scale = b.immediate();
    if (scale < 0 || scale > MOST) b.fail("a scale must be from 0 to 15");
    if (request.kind == MmaKind::F8F6F4) b.fail("only kind::f16 and kind::tf32 scale D");
    request.scale = static_cast<int>(scale);
  }
  b.instruction.extra = b.keep(extra);
  b.handler(&run_mma, Class::Matrix);
}

// Says why an instruction that the simulator knows does not load.
void build_refused(Builder& b) {
  const auto starts = [&](std::string_view prefix) {
    for (size_t i = 0; i < 4; ++i) {
      if (b.slot(i).starts_with(prefix)) return true;
    }
    return false;
  };
  b.fail(starts("kind::mx")   ? "block-scaled products of tcgen05 are not simulated"
         : starts("ws")       ? "tcgen05.mma.ws is not simulated"
         : starts("sp")       ? "sparse products of tcgen05 are not simulated"
         : starts("kind::i8") ? "integer products of tcgen05 are not simulated"
         : starts("red")      ? "tcgen05.ld.red is not simulated"
                              : "tcgen05.mma with .ashift is not simulated");
}

// ---- Copies and shifts ----

// Operands: address, descriptor.
struct CopyExtra {
  CopyRequest request;
  AddressOperand to;
};

void run_copy(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CopyExtra*>(instruction.extra);
  for_each_lane(mask, [&](int lane) {
    CopyRequest request = extra.request;
    request.to = tensor_address(warp, instruction, extra.to, lane);
    request.source = warp.lanes<const uint64_t>(instruction.operands[1])[lane];
    warp.cta().tensor()->copy(warp, lane, request);
  });
}
// Slots: cp, group, shape, warps, formats.
void build_copy(Builder& b) {
  CopyExtra extra;
  CopyRequest& request = extra.request;
  request.ctas = take_group(b, 1);
  const std::string_view shape = b.slot(2), warps = b.slot(3);
  if (b.has("b8x16")) b.fail("tcgen05.cp that unpacks 6 or 4 bits is not simulated");
  if (shape == "4x256b") b.fail("tcgen05.cp of 4 rows is not simulated");
  request.bytes = shape == "128x256b" ? 32 : 16;
  const bool two = warps == "warpx2::02_13" || warps == "warpx2::01_23";
  if ((shape == "64x128b") != two || (shape == "32x128b") != (warps == "warpx4")) {
    b.fail("no such shape of tcgen05.cp");
  }
  if (warps == "warpx2::02_13") request.first = {0, 32, 0, 32};
  if (warps == "warpx2::01_23") request.first = {0, 0, 32, 32};
  if (warps == "warpx4") request.first = {0, 0, 0, 0};
  request.rows = two ? 64 : warps == "warpx4" ? 32 : 128;
  extra.to = take_address(b, 0, Space::Shared);
  b.source({'b', 64});
  b.instruction.extra = b.keep(extra);
  b.handler(&run_copy, Class::AsyncCopy);
}

// Operands: address.
void run_shift(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CopyExtra*>(instruction.extra);
  for_each_lane(mask, [&](int lane) {
    warp.cta().tensor()->shift(warp, lane, extra.request.ctas,
                               tensor_address(warp, instruction, extra.to, lane));
  });
}
void build_shift(Builder& b) {
  CopyExtra extra;
  extra.request.ctas = take_group(b, 1);
  extra.to = take_address(b, 0, Space::Shared);
  b.instruction.extra = b.keep(extra);
  b.handler(&run_shift, Class::Other);
}

// ---- Commits ----

// Operands: mbarrier, mask of CTAs.
struct CommitExtra {
  AddressOperand barrier;
  bool multicast;
};

void run_commit(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const CommitExtra*>(instruction.extra);
  for_each_lane(mask, [&](int lane) {
    const SharedPlace at =
        locate_object(warp, lane, extra.barrier.of(instruction), MBARRIER_BYTES, MBARRIER_BYTES);
    std::vector<SharedPlace> places{at};
    if (extra.multicast) {
      const uint32_t ctas = warp.lanes<const uint32_t>(instruction.operands[1])[lane] & 0xFFFF;
      Cluster& cluster = warp.cta().cluster();
      if (ctas == 0 || ctas >> cluster.size() != 0) {
        throw Fault{"multicast",
                    "a multicast to the CTAs of mask " + std::to_string(ctas) +
                        " in a cluster of " + std::to_string(cluster.size()),
                    lane};
      }
      places.clear();
      for_each_lane(ctas, [&](int rank) {
        Cta& cta = cluster.cta(rank);
        cluster.lifetimes().check_use(warp, lane, cta, "tcgen05.commit to",
                                      cta.shared_base() + at.offset);
        places.push_back({&cta, at.offset});
      });
    }
    warp.cta().tensor()->commit(warp, lane, std::move(places));
  });
}
void build_commit(Builder& b) {
  CommitExtra extra;
  take_group(b, 1);
  extra.multicast = b.has("multicast::cluster");
  extra.barrier =
      take_address(b, 0, b.has("shared::cluster") ? Space::SharedCluster : Space::Generic);
  if (extra.multicast) b.source({'b', 16});
  b.instruction.extra = b.keep(extra);
  b.handler(&run_commit, Class::Barrier);
}

constexpr Form FORMS[] = {
    {"tcgen05", "alloc cta_group::1|cta_group::2 sync aligned ?shared::cta b32", build_alloc},
    {"tcgen05", "dealloc cta_group::1|cta_group::2 sync aligned b32", build_dealloc},
    {"tcgen05", "relinquish_alloc_permit cta_group::1|cta_group::2 sync aligned", build_relinquish},
    {"tcgen05",
     "ld sync aligned 32x32b|16x64b|16x128b|16x256b|16x32bx2 x1|x2|x4|x8|x16|x32|x64|x128 "
     "?pack::16b b32",
     build_transfer},
    {"tcgen05",
     "st sync aligned 32x32b|16x64b|16x128b|16x256b|16x32bx2 x1|x2|x4|x8|x16|x32|x64|x128 "
     "?unpack::16b b32",
     build_transfer},
    {"tcgen05", "wait::ld|wait::st sync aligned", build_wait},
    {"tcgen05", "fence::before_thread_sync|fence::after_thread_sync", build_fence},
    {"tcgen05", "mma cta_group::1|cta_group::2 kind::f16|kind::tf32|kind::f8f6f4 ?$collector",
     build_mma},
    {"tcgen05",
     "cp cta_group::1|cta_group::2 128x256b|4x256b|128x128b|64x128b|32x128b "
     "?warpx2::02_13|warpx2::01_23|warpx4 ?b8x16 ?b6x16_p32|b4x16_p64",
     build_copy},
    {"tcgen05", "shift cta_group::1|cta_group::2 down", build_shift},
    {"tcgen05",
     "commit cta_group::1|cta_group::2 mbarrier::arrive::one ?shared::cluster "
     "?multicast::cluster b64",
     build_commit},
};

// The simulator knows these instructions and refuses them when they are loaded.
constexpr Form REFUSED[] = {
    {"tcgen05",
     "mma cta_group::1|cta_group::2 kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4 block_scale "
     "?scale_vec::1X|scale_vec::2X|scale_vec::4X|block16|block32 ?$collector",
     build_refused},
    {"tcgen05", "mma cta_group::1|cta_group::2 kind::i8 ?ashift ?$collector", build_refused},
    {"tcgen05",
     "mma cta_group::1|cta_group::2 kind::f16|kind::tf32|kind::f8f6f4 ashift ?$collector",
     build_refused},
    {"tcgen05", "mma ws ?sp cta_group::1 kind::f16|kind::tf32|kind::f8f6f4|kind::i8 ?$collector_b",
     build_refused},
    {"tcgen05",
     "mma sp cta_group::1|cta_group::2 "
     "kind::f16|kind::tf32|kind::f8f6f4|kind::i8|kind::mxf8f6f4|kind::mxf4|kind::mxf4nvf4 "
     "?block_scale ?scale_vec::1X|scale_vec::2X|scale_vec::4X|block16|block32 ?ashift ?$collector",
     build_refused},
    {"tcgen05",
     "ld red sync aligned 32x32b|16x32bx2 x2|x4|x8|x16|x32|x64|x128 min|max ?abs ?NaN f32|u32|s32",
     build_refused},
};

}  // namespace

std::span<const Form> tcgen05_forms() { return FORMS; }
std::span<const Form> tcgen05_refused_forms() { return REFUSED; }

}  // namespace archflash::sim
