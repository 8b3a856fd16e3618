#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <functional>
#include <optional>
#include <string_view>

#include "common/options.h"
#include "runtime/bindings/bindings.h"
#include "runtime/kinds.h"

namespace archflash {

void bind_problem(nb::module_& m) {
  using namespace nb::literals;
  auto problem = nb::class_<Problem>(
      m, "Problem", "What one call asks for: shapes, strides, options. No addresses.");
  def_fields(problem);  // before those that say it in another way
  with_pickle(problem, &problem_from_dict)
      .def_static("from_dict", &problem_from_dict, "fields"_a.none(),
                  nb::sig("def from_dict(fields: dict[str, typing.Any]) -> Problem"))
      .def(
          "to_dict", [](const Problem& p) { return to_dict(p); },
          nb::sig("def to_dict(self) -> dict[str, typing.Any]"))
      .def(
          "__eq__",
          [](const Problem& a, const Problem& b) {
            return std::memcmp(&a, &b, sizeof(Problem)) == 0;
          },
          nb::is_operator(), nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def("__hash__",
           [](const Problem& p) {
             const std::string_view bytes(reinterpret_cast<const char*>(&p), sizeof(p));
             return static_cast<int64_t>(std::hash<std::string_view>()(bytes) >> 1);
           })
      .def_prop_ro(
          "kind",
          [](const Problem& p) {
            const Kind kind = kind_of(p);
            return nb::bytes(reinterpret_cast<const char*>(&kind), sizeof kind);
          },
          "Equal for problems that are alike in all that decides in which order kernels are asked.")
      .def_prop_ro("window", &has_window)
      .def_prop_ro(
          "given",
          [](const Problem& p) {
            std::vector<const char*> names;
            for (const Option& option : OPTIONS) {
              if (is_given(option, p)) names.push_back(option.name);
            }
            return names;
          },
          "The options that the call gives, of those by which calls are described.")
      .def_prop_ro("approximate",
                   [](const Problem& p) -> std::optional<std::string> {
                     if (p.approximate == 0) return std::nullopt;
                     return approximation(p.approximate).name;
                   })
      .def_prop_ro("num_splits",
                   [](const Problem& p) -> std::optional<int64_t> {
                     if (p.num_splits == 0) return std::nullopt;
                     return p.num_splits;
                   })
      .def_prop_ro("q_offset_given", [](const Problem& p) { return !p.q_offset_default; })
      .def_prop_ro("sinks", [](const Problem& p) { return p.sinks != 0; })
      .def_prop_ro("attn_mask", [](const Problem& p) { return p.mask != 0; })
      .def_prop_ro("bool_mask", [](const Problem& p) { return p.mask == 1; })
      .def_prop_ro("key_ranges", [](const Problem& p) { return p.key_ranges != 0; })
      .def_prop_ro(
          "masked", [](const Problem& p) { return is_masked(p); },
          "Whether attn_mask, key_ranges, alibi_slopes or block_mask is given.")
      .def(
          "as_if_on_cuda",
          [](Problem p) {
            p.on_cuda = true;
            return p;
          },
          "The same problem with its tensors on a GPU.")
      .def(
          "approximating",
          [](Problem p, bool approximates) {
            p.approximate_if_served = false;
            if (!approximates) p.approximate = 0;
            return p;
          },
          "approximates"_a, "The same problem served approximately as it asks, or exactly.");
}

}  // namespace archflash
