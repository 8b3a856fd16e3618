#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "runtime/bindings/bindings.h"
#include "runtime/call.h"

namespace archflash {
namespace {

const char* kind_name(OptionKind kind) {
  switch (kind) {
    case OptionKind::Flag:
      return "flag";
    case OptionKind::Number:
      return "number";
    case OptionKind::Integer:
      return "integer";
    case OptionKind::Tensor:
      return "tensor";
    case OptionKind::IntegerOrTensor:
      return "integer or tensor";
    case OptionKind::Window:
      return "window";
    case OptionKind::Dtype:
      return "dtype";
    case OptionKind::Text:
      return "text";
    case OptionKind::Output:
      return "output";
  }
  return "";
}

std::vector<const char*> dimension_names(const Option& option) {
  constexpr const char* NAMES[] = {"", "batch", "heads_q", "nq", "blocks_q", "blocks_k"};
  std::vector<const char*> names;
  for (int i = 0; i < dimensions_of(option); ++i)
    names.push_back(NAMES[static_cast<int>(option.dimensions[i].extent)]);
  return names;
}

nb::object default_of(const Option& option) {
  if (option.kind == OptionKind::Flag) return nb::bool_(false);
  return option.default_text == nullptr ? nb::none() : nb::cast(option.default_text);
}

bool is_default(const Option& option, nb::handle value) {
  if (option.kind == OptionKind::Flag) return value.is(Py_False);
  if (option.default_text == nullptr) return value.is_none();
  return PyUnicode_Check(value.ptr()) &&
         PyUnicode_CompareWithASCIIString(value.ptr(), option.default_text) == 0;
}

// The options on which an exact result depends, but for those at their defaults.
nb::dict options_for_torch(nb::handle options) {
  const Arguments a =
      arguments_of(nb::none(), nb::none(), nb::none(), options, static_cast<int>(Grad::Off));
  nb::dict given;
  for (int i = 0; i < OPTION_COUNT; ++i) {
    const Option& option = OPTIONS[i];
    const nb::handle value = a.*ARGUMENTS[i];
    if (!option.advice && !is_default(option, value)) given[option.name] = value;
  }
  return given;
}

std::vector<const char*> dtype_names() {
  std::vector<const char*> names;
  for (bool fp8 : {false, true}) {
    for (int i = 0; i < DTYPE_COUNT; ++i) {
      const DType dtype = static_cast<DType>(i);
      if (is_fp8(dtype) == fp8) names.push_back(dtype_name(dtype));
    }
  }
  return names;
}

}  // namespace

void bind_options(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Option>(m, "Option",
                     "A row of the table of a call's options (src/common/options.inc).")
      .def_ro("name", &Option::name)
      .def_prop_ro("kind", [](const Option& o) { return kind_name(o.kind); })
      .def_prop_ro("default", &default_of, nb::sig("def default(self) -> typing.Any"))
      .def_prop_ro("may_be_tensor", [](const Option& o) { return may_be_tensor(o.kind); })
      .def_ro("differentiable", &Option::differentiable)
      .def_ro("advice", &Option::advice, "Whether the exact result is the same without it.")
      .def_ro("of_attention", &Option::of_attention, "Whether attention has it.")
      .def_ro("of_cache", &Option::of_cache, "Whether attention_with_kvcache has it.")
      .def_ro("of_backward", &Option::of_backward, "Whether attention_backward has it.")
      .def_prop_ro(
          "operand",
          [](const Option& o) {
            return o.operand ? std::optional(operand_name(*o.operand)) : std::nullopt;
          },
          "The name of the operand that an option which is a tensor becomes; None for others.")
      .def_prop_ro(
          "field",
          [](const Option& o) { return o.flag ? std::optional(flag_field(o)) : std::nullopt; },
          "The attribute of a Problem that a flag sets; None for options of other kinds.")
      .def_prop_ro(
          "feature", [](const Option& o) { return feature_of(o); },
          "How a folder that serves a flag lists it among its features.")
      .def_prop_ro("dimensions", &dimension_names,
                   "What the dimensions of a strided tensor are: batch, heads_q and so on; empty "
                   "for other options.")
      .def_ro("doc", &Option::doc, "How its entry in the docstring of attention() begins.");
  m.def("dtypes", &dtype_names, "Those that q, k and v may have, as torch spells them; FP8 last.");
  m.def(
      "call_options", [] { return std::vector<Option>(std::begin(OPTIONS), std::end(OPTIONS)); },
      "The options of a call beside q, k, v and implementation, in the order in which "
      "`attention`, `make_problem`, `execute` and `operands` take their values: all, or those "
      "before the first of a cache.");
  m.def("options_for_torch", &options_for_torch, "options"_a,
        nb::sig("def options_for_torch(options: collections.abc.Sequence[typing.Any]) -> dict[str, "
                "typing.Any]"),
        "The options that the implementation `torch` takes, without those at their defaults.");
}

}  // namespace archflash
