#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "runtime/bindings/bindings.h"
#include "runtime/registry.h"

namespace archflash {

void refuse_gradients_in_pickle(const LaunchPlan& plan) {
  const auto is_of_gradients = [](const auto& read) { return read.operand == Operand::DOut; };
  for (const Launch& launch : plan.launches) {
    if (std::ranges::any_of(launch.pointers, is_of_gradients) ||
        std::ranges::any_of(launch.tensor_maps, is_of_gradients)) {
      throw nb::type_error(
          "a plan of gradients cannot be pickled: pickle str(decision) or plan.to_dict()");
    }
  }
}

void bind_plan(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Device> device(m, "Device", "A GPU as planning sees it.");
  with_pickle(device, &device_from_dict)
      .def_static("from_dict", &device_from_dict, "fields"_a.none(),
                  nb::sig("def from_dict(fields: dict[str, typing.Any]) -> Device"))
      .def(
          "to_dict", [](const Device& d) { return to_dict(d); },
          nb::sig("def to_dict(self) -> dict[str, typing.Any]"))
      .def_prop_ro("capability", [](const Device& d) { return Capability(d.major, d.minor); })
      .def(
          "as_if_present",
          [](Device d) {
            d.present = true;
            return d;
          },
          "The same GPU as one of this machine, whose kernels need machine code.");
  def_fields(device);

  nb::class_<TileChoice> tile(m, "TileChoice",
                              "The tile that a plan took, and how it is used: TileChoice of "
                              "src/common/planning/plan.h says what each attribute is.");
  def_fields(tile);

  with_pickle(nb::class_<LaunchPlan>(m, "LaunchPlan",
                                     "Everything a launch needs but the addresses of the tensors."),
              &plan_from_dict)
      .def_static("from_dict", &plan_from_dict, "fields"_a.none(),
                  nb::sig("def from_dict(fields: dict[str, typing.Any]) -> LaunchPlan"),
                  "Plans anew what `to_dict` gave: for the problem, device and implementation "
                  "that it names. Raises ValueError with the differences where it says anything "
                  "else than this version plans.")
      .def_static("unchecked_from_dict", &unchecked_plan_from_dict, "fields"_a.none(),
                  nb::sig("def unchecked_from_dict(fields: dict[str, typing.Any]) -> LaunchPlan"),
                  "Unsafe, for tests and tools of this project only: a plan made by hand, which "
                  "may launch any kernel with any parameters and so read and write any address. "
                  "Files go through `from_dict`.")
      .def(
          "to_dict", [](const LaunchPlan& p) { return to_dict(p); },
          nb::sig("def to_dict(self) -> dict[str, typing.Any]"))
      .def_ro("implementation", &LaunchPlan::implementation)
      .def_ro("problem", &LaunchPlan::problem)
      .def_ro("device", &LaunchPlan::device)
      .def_prop_ro(
          "tile",
          [](const LaunchPlan& p) {
            return p.tile.name.empty() ? std::nullopt : std::optional(p.tile);
          },
          "None for a plan that computes nothing by tiles.")
      .def_ro("workspace_bytes", &LaunchPlan::workspace_bytes)
      .def_ro("zeroed_bytes", &LaunchPlan::zeroed_bytes)
      .def_ro("accumulates", &LaunchPlan::accumulates,
              "Whether the gradients that it writes are added to what is there.")
      .def_prop_ro(
          "orders_mask_sums", [](const LaunchPlan& p) { return p.kept_bytes > 0; },
          "Whether the gradient of an attn_mask that heads or sequences share is added up in a "
          "fixed order.")
      .def_prop_ro("kernels",
                   [](const LaunchPlan& p) {
                     std::vector<std::string> names;
                     for (const Launch& launch : p.launches) names.push_back(launch.kernel);
                     return names;
                   })
      .def_ro("code", &LaunchPlan::code)
      .def_prop_ro("notes", &notes);
}

}  // namespace archflash
