// The architecture folders of this build: what each says of itself, what it is built for, and its
// plan().
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "common/plan.h"

namespace archflash {

// Machine code or PTX of a folder, and the compute capabilities that it loads on (both ends
// included).
struct Target {
  std::string name;  // "sm_80", "sm_120f", "sm_90a", "compute_75"
  int first, last;   // capability as 10 * major + minor
};

std::vector<std::string> folder_names();
Description describe(std::string_view name);
// Empty when the folder is not compiled in.
const std::vector<Target>& targets(std::string_view name);

// Machine code for the capability if there is any, else the PTX; nullptr when neither loads.
const Target* pick_target(const std::vector<Target>& targets, int capability);

// The folder's plan(), after asking whether its code loads on the device at all.
PlanResult plan(std::string_view name, const Problem& problem, const Device& device);

// What the folder says of a plan that it made.
Notes notes(const LaunchPlan& plan);

struct Bytes {
  const unsigned char* begin = nullptr;
  const unsigned char* end = nullptr;
};
Bytes image(std::string_view name);  // fatbin "<folder>/<stem>", empty when not compiled in
std::vector<std::string> image_names();

}  // namespace archflash
