#include "common/options.h"

#include <algorithm>
#include <string_view>

namespace archflash {

const char* flag_field(const Option& option) {
  static const Problem problem{};
  const char* found = nullptr;
  for_each_field(problem, [&](const char* name, const auto& field) {
    const void* wanted = &(problem.*option.flag);
    if (static_cast<const void*>(&field) == wanted) found = name;
  });
  return found;
}

Reasons refused_options(bool flags_alone, const Problem& problem, const Description& description) {
  Reasons reasons;
  for (const Option& option : OPTIONS) {
    if (option.advice && !option.flag) continue;
    if ((flags_alone && !option.flag) || !is_given(option, problem)) continue;
    const std::string_view feature = feature_of(option);
    const auto& features = description.features;
    if (feature.empty() || std::find(features.begin(), features.end(), feature) != features.end())
      continue;
    reasons.push_back(std::string(option.name) + (option.flag ? "=True: " : ": ") +
                      description.name + " does not serve this option; leave it at " +
                      (option.flag ? "False" : "None") + " or use implementation='torch'");
  }
  return reasons;
}

}  // namespace archflash
