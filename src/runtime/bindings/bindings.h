// The subjects of the extension module archflash._archflash, a file each. runtime/module.cpp calls
// them in this order, so that the stub that is made of the module knows each type before its use.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <string>
#include <type_traits>
#include <utility>

#include "runtime/serialize.h"

namespace archflash {

namespace nb = nanobind;

void bind_options(nb::module_& m);  // the table of options
void bind_problem(nb::module_& m);  // Problem
void bind_plan(nb::module_& m);     // Device, TileChoice, LaunchPlan
void bind_walks(nb::module_& m);    // models of the order of tiles
void bind_registry(
    nb::module_& m);  // what the folders of this build are, their plans and code, known GPUs
void bind_calls(nb::module_& m);  // the way of a call, its caches, and how tensors are read
void bind_plans_on_tensors(nb::module_& m);  // plans of given tensors, and given plans on tensors
void bind_functions(nb::module_& m);  // quantize_fp8, merge_attention and gradients: their plans

// Compute capabilities as Python has them, (major, minor), and as 10 * major + minor.
using Capability = std::pair<int, int>;
inline Capability capability_pair(int number) { return {number / 10, number % 10}; }
inline int number_of(Capability capability) { return 10 * capability.first + capability.second; }

// Makes the numbers, words and flags that for_each_field() lists of a struct its attributes.
template <class T>
void def_fields(nb::class_<T>& type) {
  T value{};
  for_each_field(value, [&]<class Field>(const char* name, const Field& field) {
    const ptrdiff_t offset =
        reinterpret_cast<const char*>(&field) - reinterpret_cast<const char*>(&value);
    const auto read = [offset](const T& of) -> const Field& {
      return *reinterpret_cast<const Field*>(reinterpret_cast<const char*>(&of) + offset);
    };
    if constexpr (std::is_same_v<Field, Flag>)
      type.def_prop_ro(name, [read](const T& of) { return static_cast<bool>(read(of)); });
    else if constexpr (std::is_same_v<Field, DType>)
      type.def_prop_ro(name, [read](const T& of) { return dtype_name(read(of)); });
    else if constexpr (std::is_arithmetic_v<Field> || std::is_same_v<Field, std::string>)
      type.def_prop_ro(name, [read](const T& of) { return read(of); });
  });
}

// A pickle of a plan is planned anew from the problem in it, which does not tell the tensors of a
// backward pass.
void refuse_gradients_in_pickle(const LaunchPlan& plan);

// Lets a struct be pickled through its to_dict and from_dict, and copied as it is.
template <class T>
nb::class_<T> with_pickle(nb::class_<T> type, T (*from_dict)(nb::handle)) {
  type.def(
      "__getstate__",
      [](const T& value) {
        if constexpr (std::is_same_v<T, LaunchPlan>) refuse_gradients_in_pickle(value);
        return to_dict(value);
      },
      nb::sig("def __getstate__(self) -> dict[str, typing.Any]"));
  type.def(
      "__setstate__",
      [from_dict](T& value, nb::handle fields) { new (&value) T(from_dict(fields)); },
      nb::sig("def __setstate__(self, fields: dict[str, typing.Any], /) -> None"));
  type.def("__copy__", [](const T& value) { return T(value); });
  type.def("__deepcopy__", [](const T& value, nb::handle) { return T(value); });
  return type;
}

}  // namespace archflash
