#include <cxxabi.h>

#include <cstdlib>
#include <string>
#include <string_view>

#include "sim/load/program.h"

namespace archflash::sim {

// Drops template arguments, parameters and namespaces from the demangled name.
std::string short_function_name(const std::string& linkage_name) {
  constexpr size_t LONGEST = 4096;
  if (!linkage_name.starts_with("_Z") || linkage_name.size() > LONGEST) return linkage_name;
  int status = 0;
  char* const whole = abi::__cxa_demangle(linkage_name.c_str(), nullptr, nullptr, &status);
  if (whole == nullptr) return linkage_name;
  const std::string text(whole);
  std::free(whole);
  if (text.find("::{lambda(") != std::string::npos) return "lambda";

  std::string name;  // the component at hand
  int depth = 0;     // of <>
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (depth == 0 && c == '(') {
      constexpr std::string_view NAMELESS = "(anonymous namespace)";
      if (std::string_view(text).substr(i).starts_with(NAMELESS)) {
        i += NAMELESS.size() - 1;
        continue;
      }
      if (name != "operator") break;  // the parameters
    }
    if (c == '<' && name != "operator") {
      ++depth;
    } else if (c == '>' && depth > 0) {
      --depth;
    } else if (depth == 0 &&
               (c == ' ' || (c == ':' && i + 1 < text.size() && text[i + 1] == ':'))) {
      i += c == ':' ? 1 : 0;
      name.clear();  // it was a return type or a namespace
    } else if (depth == 0) {
      name += c;
    }
  }
  return name.empty() ? linkage_name : name;
}

}  // namespace archflash::sim
