#include "common/options.h"

#include <algorithm>
#include <array>
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
  // Whether a problem tells of an option, and the option changes a result.
  static constexpr auto is_told = [](const Option& option) {
    return option.flag || (!option.advice && (option.present || option.given));
  };
  static constexpr auto TOLD = [] {
    std::array<int, std::count_if(std::begin(OPTIONS), std::end(OPTIONS), is_told)> places{};
    size_t count = 0;
    for (int i = 0; i < OPTION_COUNT; ++i) {
      if (is_told(OPTIONS[i])) places[count++] = i;
    }
    return places;
  }();
  Reasons reasons;
  for (const int place : TOLD) {
    const Option& option = OPTIONS[place];
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
