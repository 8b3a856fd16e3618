// join("window left is ", -3, ": ...") -> std::string. For messages; nothing here is on a hot path.
#pragma once

#include <sstream>
#include <string>

namespace archflash {

template <class... Parts>
std::string join(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

}  // namespace archflash
