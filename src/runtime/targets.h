// Which compiled code loads on which GPU: the one place that knows CUDA's rules of compatibility.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace archflash {

// Machine code or PTX, named as the compiler names it, and the compute capabilities that it loads
// on (10 * major + minor, both ends included).
struct Target {
  std::string name;  // "sm_80", "sm_120f", "sm_90a", "compute_75"
  int first, last;

  bool loads_on(int capability) const { return first <= capability && capability <= last; }
  bool is_ptx() const { return name.starts_with("compute_"); }
};

constexpr int ANY_NEWER = 9999;  // as `last`: the code loads on every newer GPU

// The target of that name. Plain machine code loads on its major version from its minor version on,
// plain PTX on everything newer too. A suffix limits both: `f` to the family (10.0, 10.3 and 10.7;
// 12.0 and 12.1), `a` to exactly that capability. Throws std::invalid_argument for any other name.
Target target(std::string_view name);

// The target that is used on a capability, among those that load: machine code before PTX, then the
// newest, then the most specific. nullptr if none loads.
const Target* pick_target(const std::vector<Target>& targets, int capability);

}  // namespace archflash
