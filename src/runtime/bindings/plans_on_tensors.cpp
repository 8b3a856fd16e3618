#include "runtime/plans_on_tensors.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "runtime/bindings/bindings.h"
#include "runtime/execute.h"

namespace archflash {

void bind_plans_on_tensors(nb::module_& m) {
  using namespace nb::literals;
  m.def("make_problem", &make_problem, "q"_a.none(), "k"_a.none(), "v"_a.none(), "options"_a,
        "grad"_a, "What a call asks for.");
  m.def("execute", &execute_plan, "plan"_a, "q"_a, "k"_a, "v"_a, "options"_a,
        "Runs a plan on tensors that make exactly its problem; what `attention` would return.");
  m.def("operands", &operands_of, "plan"_a, "q"_a, "k"_a, "v"_a, "options"_a,
        nb::sig("def operands(plan: LaunchPlan, q: typing.Any, k: typing.Any, v: typing.Any, "
                "options: tuple[typing.Any, ...]) -> dict[str, typing.Any]"),
        "The tensors that a plan reads and writes, by operand name: those given, which must make "
        "exactly its problem, and newly allocated outputs and workspace.");
  m.def("launch", &launch_plan, "plan"_a, "tensors"_a,
        nb::sig("def launch(plan: LaunchPlan, tensors: dict[str, typing.Any]) -> None"),
        "Launches a plan on tensors by operand name: each that the plan has an address of. On the "
        "CPU the simulator runs it. Their shapes and strides must be those that it was made for.");
  m.def(
      "load_kernels",
      [](const LaunchPlan& plan, int device_index) {
        const auto prepared = prepare(std::make_shared<LaunchPlan>(plan));
        const nb::gil_scoped_release release;
        load_kernels(*prepared, device_index);
      },
      "plan"_a, "device_index"_a,
      "Loads the kernels of a plan onto a CUDA device before their first launch would.");
  m.def(
      "bound_parameters", &bound_parameters, "plan"_a, "launch"_a, "addresses"_a,
      "tensor_maps"_a = true,
      "The parameter bytes of one launch with (operand, address) pairs filled in, and tensor maps "
      "encoded by the driver where they are wanted.");
}

}  // namespace archflash
