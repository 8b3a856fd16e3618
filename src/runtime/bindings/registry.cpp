#include "runtime/registry.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "runtime/bindings/bindings.h"
#include "runtime/execute.h"
#include "runtime/known_devices.h"
#include "runtime/text.h"

namespace archflash {
namespace {

std::optional<Capability> capability_or_none(int number) {
  return number == 0 ? std::nullopt : std::optional(capability_pair(number));
}

std::vector<std::string> texts(const std::vector<std::string_view>& views) {
  return {views.begin(), views.end()};
}

std::string unpack_in_python(std::string_view archive, std::string_view image,
                             std::string_view target) {
  const nb::gil_scoped_acquire gil;
  const auto text = [](std::string_view view) { return nb::str(view.data(), view.size()); };
  try {
    const nb::object packed = nb::module_::import_("archflash._packed");
    const std::string_view stem = image.substr(image.find('/') + 1);
    const nb::object code =
        archive.data() == nullptr
            ? packed.attr("text")(text(image), text(target))
            : packed.attr("member")(nb::bytes(archive.data(), archive.size()), text(stem));
    const auto bytes = nb::cast<nb::bytes>(code);
    return {bytes.c_str(), bytes.size()};
  } catch (const nb::python_error& error) {
    throw LaunchFailure(join("unpacking ", image, " for ", target, ": ", error.what()));
  }
}

}  // namespace

void bind_registry(nb::module_& m) {
  using namespace nb::literals;
  m.def(
      "approximations",
      [] {
        std::vector<std::tuple<std::string, std::string, std::string>> rows;
        for (const Approximation& row : APPROXIMATIONS)
          rows.emplace_back(row.name, row.what, row.error);
        return rows;
      },
      "The words that attention's option `approximate` takes: each with what a kernel then "
      "computes, and the error to expect.");
  unpack = unpack_in_python;
  nb::class_<Description>(m, "Description", "What an implementation says of itself.")
      .def_ro("name", &Description::name)
      .def_ro("summary", &Description::summary)
      .def_ro("home_device", &Description::home_device)
      .def_prop_ro("dtypes",
                   [](const Description& d) {
                     std::vector<std::string> names;
                     for (DType dtype : d.dtypes) names.emplace_back(dtype_name(dtype));
                     return names;
                   })
      .def_ro("head_dims", &Description::head_dims)
      .def_ro("largest_head_dim", &Description::largest_head_dim)
      .def_ro("features", &Description::features)
      .def_prop_ro("needs_capability",
                   [](const Description& d) { return capability_pair(d.needs_capability); })
      .def_ro("uses_tensor_cores", &Description::uses_tensor_cores)
      .def_prop_ro(
          "sixteen_bits_made_for",
          [](const Description& d) { return capability_or_none(d.sixteen_bits_made_for); },
          "The capability that the tiles for 16-bit inputs are made for; None: every one.")
      .def_ro("only_forced_on_majors", &Description::only_forced_on_majors)
      .def_prop_ro(
          "masks_faster_on",
          [](const Description& d) { return capability_or_none(d.masks_faster_on); },
          "Where it was measured to read a dense attn_mask faster than PyTorch's fused kernels.")
      .def_prop_ro(
          "dropout_faster_on",
          [](const Description& d) { return capability_or_none(d.dropout_faster_on); },
          "Where it was measured to be faster with dropout, from the next two attributes on.")
      .def_ro("dropout_rows", &Description::dropout_rows,
              "Query rows, compared with kernels for any GPU.")
      .def_ro("dropout_head_dim", &Description::dropout_head_dim,
              "Compared with PyTorch's fused kernels.")
      .def_prop_ro(
          "fp8_sums_of_13_bits_on",
          [](const Description& d) {
            std::vector<Capability> on;
            for (const int capability : d.fp8_sums_of_13_bits_on)
              on.push_back(capability_pair(capability));
            return on;
          },
          "Where tensor cores keep 13 bits of a sum of 8-bit products.")
      .def_ro("proved_by_any_gpu", &Description::proved_by_any_gpu,
              "Whether a run on one GPU stands for all that it has code for.");

  nb::class_<Target>(m, "Target",
                     "Code of an implementation and the compute capabilities that it loads on.")
      .def_ro("name", &Target::name)
      .def_prop_ro("first", [](const Target& t) { return capability_pair(t.first); })
      .def_prop_ro(
          "last",
          [](const Target& t) {
            return t.last == ANY_NEWER ? std::nullopt : std::optional(capability_pair(t.last));
          },
          "None: every newer GPU.")
      .def(
          "loads_on", [](const Target& t, Capability on) { return t.loads_on(number_of(on)); },
          "capability"_a);

  nb::class_<DriverStatus>(m, "DriverStatus", "Whether CUDA works here, and if not, why.")
      .def_ro("usable", &DriverStatus::usable)
      .def_ro("device_count", &DriverStatus::device_count)
      .def_ro("cuda_version", &DriverStatus::cuda_version)
      .def_ro("problem", &DriverStatus::problem);

  nb::class_<KnownDevice>(m, "KnownDevice", "A row of the table of known GPUs.")
      .def_ro("device", &KnownDevice::device)
      .def_ro("boost_mhz", &KnownDevice::boost_mhz)
      .def_ro("bandwidth_gbps", &KnownDevice::bandwidth_gbps)
      .def_ro("fp32_tflops", &KnownDevice::fp32_tflops)
      .def_ro("fp16_tflops", &KnownDevice::fp16_tflops)
      .def_ro("fp8_tflops", &KnownDevice::fp8_tflops)
      .def_prop_ro("aliases", [](const KnownDevice& d) { return texts(d.aliases); })
      .def_prop_ro("unconfirmed", [](const KnownDevice& d) { return texts(d.unconfirmed); })
      .def_prop_ro("source", [](const KnownDevice& d) { return std::string(d.source); });

  m.def("folder_names", &folder_names,
        "Names of the architecture folders, compiled or not; newer instructions first.");
  m.def("describe", [](const std::string& name) { return describe(name); }, "name"_a);
  m.def(
      "targets", [](const std::string& name) { return targets(name); }, "name"_a,
      "What the folder is built for; empty when it was left out of this build.");
  m.def(
      "has_code",
      [](const std::string& name, Capability on) { return has_code(name, number_of(on)); },
      "name"_a, "capability"_a, "Whether code of the folder loads on a GPU of that capability.");
  m.def(
      "target", [](const std::string& name) { return target(name); }, "name"_a,
      "The target that a compiler calls by that name (sm_90a, compute_80). Raises ValueError for "
      "any other name.");
  m.def(
      "pick_target",
      [](const std::vector<std::string>& names, Capability on) -> std::optional<std::string> {
        std::vector<Target> targets;
        for (const std::string& name : names) targets.push_back(target(name));
        const Target* picked = pick_target(targets, number_of(on));
        return picked == nullptr ? std::nullopt : std::optional(picked->name);
      },
      "names"_a, "capability"_a,
      "The name among those of targets whose code a GPU of that capability runs: machine code "
      "before PTX, then the newest. None where none loads.");
  m.def(
      "plan",
      [](const std::string& name, const Problem& problem, const Device& device) {
        return plan(name, problem, device);
      },
      "name"_a, "problem"_a, "device"_a, "A LaunchPlan, or the list of reasons why not.");
  m.def("with_lse_for_pytorch", &with_lse_for_pytorch, "plan"_a, "self_attention"_a,
        "The plan, with a launch behind the others that gives +infinity to rows of the log-sum-exp "
        "that see no key, where there may be any; or the list of reasons why not. With "
        "self_attention the sequences of packed keys are those of the queries.");
  m.def(
      "code_of",
      [](const std::string& image, const std::string& target) {
        const std::string code = code_of(image, target);
        return nb::bytes(code.data(), code.size());
      },
      "image"_a, "target"_a,
      "The machine code of an image `<folder>/<file stem>` for a target (sm_90a), a cubin, or its "
      "PTX for newer GPUs (compute_80); empty when not compiled in.");
  m.def("left_out_targets", &left_out_targets,
        "The targets whose machine code is not in this build, which has their PTX.");
  m.def("image_names", &image_names, "The images of this build.");
  m.def(
      "add_image",
      [](const std::string& name, const nb::bytes& code) {
        add_image(name, {code.c_str(), code.size()});
      },
      "name"_a, "code"_a,
      "Adds a cubin or fatbin that is not in this build, for plans whose launches name it.");
  m.def("known_devices", [] { return known_devices(); });
  m.def(
      "find_known_device",
      [](const std::string& name) -> std::optional<KnownDevice> {
        const KnownDevice* found = find_known_device(name);
        return found ? std::optional(*found) : std::nullopt;
      },
      "name"_a);
  m.def("driver_status", &driver_status);
  m.def("query_device", &query_device, "device_index"_a);
}

}  // namespace archflash
