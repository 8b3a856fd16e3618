// Errors that Python sees, whose message comes in parts: wrong_value("window left is ", -3, ...).
#pragma once

#include <nanobind/nanobind.h>

#include "runtime/text.h"

namespace archflash {

template <class... Parts>
[[noreturn]] void wrong_value(const Parts&... parts) {
  throw nanobind::value_error(join(parts...).c_str());
}
template <class... Parts>
[[noreturn]] void wrong_type(const Parts&... parts) {
  throw nanobind::type_error(join(parts...).c_str());
}

}  // namespace archflash
