#include "runtime/targets.h"

#include <charconv>
#include <stdexcept>
#include <tuple>

#include "runtime/text.h"

namespace archflash {

Target target(std::string_view name) {
  const size_t underscore = name.find('_');
  const std::string_view kind = name.substr(0, underscore);
  int capability = 0;
  const char* const end = name.data() + name.size();
  const char* const digits = underscore == name.npos ? end : name.data() + underscore + 1;
  const auto [suffix, error] = std::from_chars(digits, end, capability);
  const std::string_view limit(suffix, static_cast<size_t>(end - suffix));
  const bool known_kind = kind == "sm" || kind == "compute";
  const bool known_limit = limit.empty() || limit == "f" || limit == "a";
  if (!known_kind || error != std::errc() || capability < 10 || !known_limit)
    throw std::invalid_argument(join("'", name, "' is no target: sm_80, sm_120f, compute_90a are"));
  const int last_of_major = capability / 10 * 10 + 9;
  const int last = limit == "a"                         ? capability
                   : limit.empty() && kind == "compute" ? ANY_NEWER
                                                        : last_of_major;
  return {std::string(name), capability, last};
}

const Target* pick_target(const std::vector<Target>& targets, int capability) {
  const auto rank = [](const Target& target) {
    return std::tuple(!target.is_ptx(), target.first, -target.last);
  };
  const Target* best = nullptr;
  for (const Target& target : targets) {
    if (target.loads_on(capability) && (best == nullptr || rank(*best) < rank(target)))
      best = &target;
  }
  return best;
}

}  // namespace archflash
