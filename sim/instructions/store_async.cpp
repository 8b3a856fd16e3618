// st.async and red.async bring values from registers to the shared memory of a CTA of the cluster.
// A value is under way until its bytes complete on an mbarrier of that CTA. These accesses are not
// in the async proxy.
#include <array>
#include <bit>
#include <cstring>

#include "sim/instructions/operands.h"
#include "sim/numerics/atomic.h"
#include "sim/run/cluster.h"
#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

constexpr int MOST_ELEMENTS = 4;

struct StoreExtra {
  int count = 1;         // elements
  uint32_t element = 4;  // its bytes
  AddressOperand to, barrier;
  bool updates = false;
  AtomicUpdate update{};

  uint32_t bytes() const { return element * static_cast<uint32_t>(count); }
};

class Delivery : public AsyncOperation {
 public:
  using Values = std::array<uint64_t, MOST_ELEMENTS>;

  Delivery(Warp& warp, int lane, const StoreExtra& extra, const Values& values, SharedPlace to,
           SharedPlace barrier, int unit)
      : AsyncOperation(warp, lane),
        extra_(extra),
        values_(values),
        to_(to),
        barrier_(barrier),
        unit_(unit),
        issued_(warp.cta().time()) {}

  bool step() override {
    for (int i = 0; i < extra_.count; ++i) {
      uint8_t* const at = to_.bytes() + extra_.element * static_cast<uint32_t>(i);
      uint64_t value = values_[static_cast<size_t>(i)];
      if (extra_.updates) {
        uint64_t old = 0;
        std::memcpy(&old, at, extra_.element);
        value = apply_atomic(extra_.update, old, value, 0);
      }
      std::memcpy(at, &value, extra_.element);
    }
    const Clock clock = barrier_.cta->mbarriers().landed(*this, barrier_.offset, extra_.bytes());
    std::memset(to_.state(), VALID, extra_.bytes());
    if (RaceDetector* races = to_.cta->races()) {
      races->landed(unit_, clock, to_.race_offset(), extra_.bytes());
    }
    Cta& cta = warp().cta();
    if (cta.traced()) {
      TraceEvent event;
      event.begin = issued_;
      event.end = event.seen = cta.time() + 1;
      event.pc = pc();
      event.bytes = extra_.bytes();
      event.label = extra_.updates ? "red.async" : "st.async";
      cta.trace().add_async(BULK_TRACK, std::move(event));
    }
    return true;
  }

 private:
  const StoreExtra& extra_;
  Values values_;
  SharedPlace to_, barrier_;
  int unit_;
  uint64_t issued_;
};

// Operands: the address, the values, the mbarrier.
void run(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const StoreExtra*>(instruction.extra);
  for (; mask != 0; mask &= mask - 1) {
    const int lane = std::countr_zero(mask);
    const SharedPlace to =
        locate_object(warp, lane, extra.to.of(instruction), extra.bytes(), extra.bytes());
    const Ref* next = instruction.operands + 1;
    Delivery::Values values{};
    for (int i = 0; i < extra.count; ++i, ++next) {
      values[static_cast<size_t>(i)] = extra.element == 8 ? warp.lanes<const uint64_t>(*next)[lane]
                                                          : warp.lanes<const uint32_t>(*next)[lane];
    }
    const SharedPlace barrier =
        locate_object(warp, lane, extra.barrier.of(instruction), MBARRIER_BYTES, MBARRIER_BYTES);
    const char* const name = extra.updates ? "red.async" : "st.async";
    if (to.cta != barrier.cta) {
      throw Fault{
          "mbarrier",
          std::string("the mbarrier of ") + name + " is in another CTA than its destination", lane,
          barrier.address()};
    }
    uint8_t* const state = to.state();
    if (std::memchr(state, MBARRIER, extra.bytes()) != nullptr) {
      throw Fault{"mbarrier", std::string(name) + " overwrites an mbarrier object", lane,
                  to.address()};
    }
    const int unit = barrier.cta->mbarriers().subscribe(warp, lane, barrier.offset);
    if (extra.updates && !all_valid(state, extra.bytes())) {
      warp.cta().report(
          Severity::Error, warp, lane,
          std::memchr(state, IN_FLIGHT, extra.bytes()) ? "in-flight" : "uninitialised",
          "red.async changes bytes of shared memory at offset " + std::to_string(to.offset) +
              " that nothing has written",
          to.address());
    }
    if (!extra.updates) std::memset(state, IN_FLIGHT, extra.bytes());
    if (RaceDetector* races = to.cta->races()) {
      const Race race =
          races->async_write({warp.agent(), lane, warp.pc()}, unit, to.race_offset(), extra.bytes(),
                             extra.updates ? AsyncWrite::Update : AsyncWrite::Generic);
      if (race.found) {
        warp.cta().report_race(warp, lane, race, true, false,
                               std::to_string(extra.bytes()) +
                                   " bytes of shared memory at offset " +
                                   std::to_string(to.offset) + " by " + name,
                               to.address());
      }
    }
    warp.cta().cluster().start(
        std::make_shared<Delivery>(warp, lane, extra, values, to, barrier, unit));
  }
}

void finish(Builder& b, StoreExtra extra, Type type) {
  extra.element = static_cast<uint32_t>(type.bits / 8);
  extra.to = take_address(b, 0, Space::SharedCluster);
  if (b.vector_source(type) != extra.count) b.fail("a vector of another size");
  extra.barrier = take_address(b, 1 + extra.count, Space::SharedCluster);
  b.instruction.extra = b.keep(extra);
  b.handler(&run, Class::AsyncCopy);
}

// Slots: async, weak, space, completion, vec, type.
void build_st_async(Builder& b) {
  StoreExtra extra;
  if (!b.slot(4).empty()) extra.count = b.slot(4)[1] - '0';
  finish(b, extra, b.type(5));
}

// Slots: async, relaxed, cluster, space, completion, operation, type.
void build_red_async(Builder& b) {
  StoreExtra extra;
  extra.updates = true;
  extra.update.operation = atomic_named(b.slot(5));
  const std::string_view type = b.slot(6);
  const Atomic operation = extra.update.operation;
  const bool bitwise =
      operation == Atomic::And || operation == Atomic::Or || operation == Atomic::Xor;
  const bool counts = operation == Atomic::Inc || operation == Atomic::Dec;
  if ((type == "b32") != bitwise || (counts && type != "u32") ||
      (type.ends_with("64") && operation != Atomic::Add)) {
    b.fail("no such reduction");
  }
  extra.update.type = type == "s32"   ? NumericType::S32
                      : type == "u64" ? NumericType::U64
                      : type == "s64" ? NumericType::S64
                                      : NumericType::U32;
  finish(b, extra, b.type(6));
}

constexpr Form FORMS[] = {
    {"st",
     "async ?weak ?shared::cluster ?mbarrier::complete_tx::bytes ?v2|v4 "
     "b32|b64|u32|u64|s32|s64|f32|f64",
     build_st_async},
    {"red",
     "async relaxed cluster ?shared::cluster mbarrier::complete_tx::bytes "
     "inc|dec|min|max|add|and|or|xor b32|u32|s32|u64|s64",
     build_red_async},
};

}  // namespace

std::span<const Form> store_async_forms() { return FORMS; }

}  // namespace archflash::sim
