#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "common/merge_parts.h"
#include "runtime/bindings/bindings.h"
#include "runtime/plans_on_tensors.h"
#include "runtime/registry.h"

namespace archflash {

void bind_functions(nb::module_& m) {
  using namespace nb::literals;
  m.def("quantizer_names", &quantizer_names, "The names that quantize_fp8 has for its kernels.");
  m.def(
      "has_quantizer", [](Capability on) { return has_quantizer(number_of(on)); }, "capability"_a,
      "Whether kernels of quantize_fp8 run on a GPU of that capability.");
  m.def(
      "plan_quantize", &plan_quantize_of, "out_dtype"_a, "per"_a, "x"_a, "out"_a, "device"_a,
      "The plan that makes 8-bit numbers of x (batch, heads, rows, d); 'per' counts tensor, head, "
      "block.");
  m.attr("MERGE_PARTS") = MERGE_PARTS;
  m.def("merger_names", &merger_names, "The names that merge_attention has for its kernels.");
  m.def(
      "has_merger", [](Capability on) { return has_merger(number_of(on)); }, "capability"_a,
      "Whether a kernel of merge_attention runs on a GPU of that capability.");
  m.def("plan_merge", &plan_merge_of, "outs"_a, "lses"_a, "out"_a, "device"_a,
        nb::sig("def plan_merge(outs: list[typing.Any], lses: list[typing.Any], out: typing.Any, "
                "device: Device) -> LaunchPlan"),
        "The plan that merges outs (batch, heads, rows, dv) with lses (batch, heads, rows) into "
        "out.");
  m.def(
      "has_backward", [](const std::string& name) { return has_backward(name); }, "name"_a,
      "Whether a folder has a backward pass.");
  m.def(
      "plan_backward",
      [](const std::string& name, const Problem& call, const Device& device, nb::handle dout,
         nb::handle dq, nb::handle dk, nb::handle dv, bool accumulate, bool dlse, bool dsinks,
         bool deterministic, nb::handle dmask) {
        return plan_backward_of(name, call, device, {dout, dq, dk, dv, dmask}, accumulate, dlse,
                                dsinks, deterministic);
      },
      "name"_a, "call"_a, "device"_a, "dout"_a, "dq"_a, "dk"_a, "dv"_a, "accumulate"_a, "dlse"_a,
      "dsinks"_a, "deterministic"_a, "dmask"_a.none() = nb::none(),
      "The plan of a folder for the gradients of a call, or the list of reasons why not. The "
      "tensors have heads before rows whatever the call's layout; packed ones have a batch of 1. "
      "'accumulate': gradients are added to what dq, dk and dv hold; 'dlse': the log-sum-exp has a "
      "gradient, too; 'dsinks': that of the sinks is wanted; 'deterministic': the same inputs must "
      "always give the same bits; 'dmask': what the gradient of attn_mask is added to, float32 "
      "(batch or 1, heads or 1, nq or 1, nk or 1), None if it is not wanted.");
}

}  // namespace archflash
