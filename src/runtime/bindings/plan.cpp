#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "runtime/bindings/bindings.h"
#include "runtime/registry.h"

namespace archflash {

void bind_plan(nb::module_& m) {
  using namespace nb::literals;
  with_pickle(nb::class_<Device>(m, "Device", "A GPU as planning sees it."), &device_from_dict)
      .def_static("from_dict", &device_from_dict, "fields"_a.none(),
                  nb::sig("def from_dict(fields: dict[str, typing.Any]) -> Device"))
      .def(
          "to_dict", [](const Device& d) { return to_dict(d); },
          nb::sig("def to_dict(self) -> dict[str, typing.Any]"))
      .def_ro("name", &Device::name)
      .def_prop_ro("capability", [](const Device& d) { return Capability(d.major, d.minor); })
      .def_ro("sm_count", &Device::sm_count)
      .def_ro("shared_per_block", &Device::shared_per_block)
      .def_ro("shared_per_sm", &Device::shared_per_sm)
      .def_ro("l2_bytes", &Device::l2_bytes)
      .def_ro("registers_per_sm", &Device::registers_per_sm)
      .def_ro("threads_per_sm", &Device::threads_per_sm);

  nb::class_<TileChoice>(m, "TileChoice", "The tile that a plan took, and how it is used.")
      .def_ro("name", &TileChoice::name, "The last word of the kernel's name, as d128_large.")
      .def_ro("reason", &TileChoice::reason, "Why the implementation has this tile; may be empty.")
      .def_ro("head_dim", &TileChoice::head_dim, "The largest d that it takes, in elements.")
      .def_ro("head_dim_v", &TileChoice::head_dim_v, "The largest dv that it takes, in elements.")
      .def_ro("block_q", &TileChoice::block_q, "Query rows of the tile, of each packed head.")
      .def_ro("block_k", &TileChoice::block_k, "Keys that it takes at a time.")
      .def_ro("warps", &TileChoice::warps, "Warps of a CTA that compute rows.")
      .def_ro("rows_per_warp", &TileChoice::rows_per_warp)
      .def_ro("k_stages", &TileChoice::k_stages, "Buffers for blocks of K; 0: it has no stages.")
      .def_ro("v_stages", &TileChoice::v_stages,
              "Buffers for blocks of V; 0: they share those of K.")
      .def_ro("cluster", &TileChoice::cluster, "CTAs that compute one tile together.")
      .def_ro("packed_heads", &TileChoice::packed_heads,
              "Query heads that share a head of K and lie in one tile; 1: none do.")
      .def_ro("ctas_per_sm", &TileChoice::ctas_per_sm, "CTAs that an SM has room for.")
      .def_ro("ctas", &TileChoice::ctas, "CTAs of the launch.")
      .def_ro("tiles", &TileChoice::tiles, "Row tiles of all heads.")
      .def_ro("splits", &TileChoice::splits,
              "Shares into which the keys of each tile are split; 1: they are not.")
      .def_ro("v_slices", &TileChoice::v_slices,
              "Slices of the columns of V, each computed by CTAs of its own; 1: there are none.")
      .def_ro("heads_per_group", &TileChoice::heads_per_group,
              "Heads whose tiles follow one another; 0: there are no groups.")
      .def_ro("turned_begin", &TileChoice::turned_begin,
              "The tiles of a head come from the last to the first, but those at these places come "
              "in the opposite direction.")
      .def_ro("turned_end", &TileChoice::turned_end)
      .def_ro("summarizes_masks", &TileChoice::summarizes_masks,
              "Whether a launch before summarizes the masks as data for its kernel.")
      .def_ro("row_step", &TileChoice::row_step,
              "The tiles of a sequence end with it, as far as whole steps of so many rows take "
              "them there; 0: they begin with it.");

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
