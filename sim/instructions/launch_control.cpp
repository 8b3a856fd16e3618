// clusterlaunchcontrol.try_cancel asks for the work of a cluster that has not started, and
// clusterlaunchcontrol.query_cancel reads the response.
#include "sim/units/launch_control.h"

#include <string>

#include "sim/instructions/operands.h"
#include "sim/units/mbarrier.h"

namespace archflash::sim {
namespace {

struct RequestExtra {
  AddressOperand to, barrier;
  bool multicast = false;  // to every CTA of the cluster
};

SharedPlace own_place(Warp& warp, const Address& address, int lane, uint32_t bytes) {
  const SharedPlace at = locate_object(warp, lane, address, bytes, bytes);
  if (at.cta == &warp.cta()) return at;
  throw Fault{"launch-control", "clusterlaunchcontrol.try_cancel with an address of another CTA",
              lane, at.address()};
}

// Operands: the address of the response, the mbarrier.
void run_request(Warp& warp, const Instruction& instruction, uint32_t mask) {
  const auto& extra = *static_cast<const RequestExtra*>(instruction.extra);
  Cta& own = warp.cta();
  for_each_lane(mask, [&](int lane) {
    const SharedPlace to = own_place(warp, extra.to.of(instruction), lane, RESPONSE_BYTES);
    const SharedPlace barrier =
        own_place(warp, extra.barrier.of(instruction), lane, MBARRIER_BYTES);
    if (own.was_refused()) {
      throw Fault{"launch-control",
                  "a request after the CTA has seen that an earlier one failed is undefined", lane};
    }
    std::vector<BulkTarget> targets;
    if (!extra.multicast) targets.push_back({to, barrier});
    for (int rank = 0; extra.multicast && rank < own.cluster().size(); ++rank) {
      Cta& cta = own.cluster().cta(rank);
      if (cta.exited()) {
        throw Fault{"exited-cta",
                    "a response for CTA " + std::to_string(cta.index()) + " too, which has exited",
                    lane, cta.shared_base() + to.offset};
      }
      targets.push_back({{&cta, to.offset}, {&cta, barrier.offset}});
    }
    start_launch_request(warp, lane, std::move(targets));
  });
}

// Slots: try_cancel, async, space, completion, multicast, b128.
void build_request(Builder& b) {
  RequestExtra extra;
  const Space space = b.slot(2).empty() ? Space::Generic : Space::Shared;
  extra.to = take_address(b, 0, space);
  extra.barrier = take_address(b, 1, space);
  extra.multicast = !b.slot(4).empty();
  b.kernel().takes_unstarted = true;
  b.instruction.extra = b.keep(extra);
  b.handler(&run_request, Class::AsyncCopy);
}

Response response_of(Warp& warp, Ref operand, int lane) {
  const Response response = warp.lanes<const Response>(operand)[lane];
  if (response.is_valid()) return response;
  throw Fault{"launch-control",
              "clusterlaunchcontrol.query_cancel of 16 bytes that are no response to a request",
              lane};
}

// Operands: predicate, response.
void run_is_canceled(Warp& warp, const Instruction& instruction, uint32_t mask) {
  uint32_t& p = warp.predicate(instruction.operands[0]);
  for_each_lane(mask, [&](int lane) {
    const bool canceled = response_of(warp, instruction.operands[1], lane).is_canceled();
    p = canceled ? p | 1u << lane : p & ~(1u << lane);
    if (!canceled) warp.cta().note_refusal();
  });
}
void build_is_canceled(Builder& b) {
  b.predicate_destination();
  b.source({'b', 128});
  b.handler(&run_is_canceled, Class::Other);
}

// Operands: the coordinates that are wanted, response. `offset` is the first coordinate's number.
void run_first_cta(Warp& warp, const Instruction& instruction, uint32_t mask) {
  constexpr uint32_t UNSPECIFIED = 0xDEADC1C5;
  for_each_lane(mask, [&](int lane) {
    const Response response = response_of(warp, instruction.operands[instruction.count], lane);
    if (!response.is_canceled()) {
      throw Fault{"launch-control",
                  "get_first_ctaid of the response to a request that failed is undefined", lane};
    }
    const Dim3 first = response.first_cta();
    const uint32_t values[] = {static_cast<uint32_t>(first.x), static_cast<uint32_t>(first.y),
                               static_cast<uint32_t>(first.z), UNSPECIFIED};
    for (int i = 0; i < instruction.count; ++i)
      warp.lanes<uint32_t>(instruction.operands[i])[lane] = values[instruction.offset + i];
  });
}
void build_first_cta(Builder& b) {
  const std::string_view which = b.slot(1);
  b.instruction.offset = which.back() == 'y' ? 1 : which.back() == 'z' ? 2 : 0;
  b.instruction.count = 1;
  if (b.has("v4")) {
    if (b.vector_destination({'b', 32}) != 4) b.fail("a vector of 4 registers is due");
    b.instruction.count = 4;
  } else {
    b.destination({'b', 32});
  }
  b.source({'b', 128});
  b.handler(&run_first_cta, Class::Other);
}

constexpr Form FORMS[] = {
    {"clusterlaunchcontrol",
     "try_cancel async ?shared::cta mbarrier::complete_tx::bytes ?multicast::cluster::all b128",
     build_request},
    {"clusterlaunchcontrol", "query_cancel is_canceled pred b128", build_is_canceled},
    {"clusterlaunchcontrol", "query_cancel get_first_ctaid v4 b32 b128", build_first_cta},
    {"clusterlaunchcontrol",
     "query_cancel get_first_ctaid::x|get_first_ctaid::y|get_first_ctaid::z b32 b128",
     build_first_cta},
};

}  // namespace

std::span<const Form> launch_control_forms() { return FORMS; }

}  // namespace archflash::sim
