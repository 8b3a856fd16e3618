// Python objects that C++ keeps, such as functions of the package that it calls.
#pragma once

#include <nanobind/nanobind.h>

namespace archflash {

// One object for each TAG, a lambda that each use writes anew. It is never destroyed, because
// Python objects must not be released after the interpreter ends.
template <auto TAG>
nanobind::object& kept_object() {
  static auto& instance = *new nanobind::object;
  return instance;
}

}  // namespace archflash
