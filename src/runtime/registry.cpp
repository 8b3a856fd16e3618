#include "runtime/registry.h"

#include <map>
#include <sstream>
#include <stdexcept>

#include "folders.inc"
#include "runtime/text.h"

namespace archflash {
namespace {

constexpr int ANY_NEWER = 9999;

const Folder& find_folder(std::string_view name) {
  for (const Folder& folder : FOLDERS) {
    if (name == folder.name) return folder;
  }
  throw std::invalid_argument(join("no implementation is called '", name, "'"));
}

// What code for `suffixed` ("80", "90a", "120f") runs on: plain code on its major version from its
// minor up, family code within the family (10.0 and 10.3; 12.0 and 12.1: the same rule),
// architecture-specific code on exactly that capability.
Target machine_code(const std::string& suffixed) {
  const int capability = std::stoi(suffixed);
  const bool exact = suffixed.back() == 'a';
  return {"sm_" + suffixed, capability, exact ? capability : capability / 10 * 10 + 9};
}

std::vector<Target> parse_groups(const char* text) {
  std::vector<Target> result;
  std::istringstream groups(text);
  std::string group, lowest;
  while (groups >> group) {
    const size_t colon = group.find(':');
    if (lowest.empty()) lowest = group.substr(0, colon);
    std::istringstream list(group.substr(colon + 1));
    for (std::string suffixed; std::getline(list, suffixed, ',');)
      result.push_back(machine_code(suffixed));
  }
  // PTX for one architecture or family stays there; plain PTX runs on everything newer.
  if (!lowest.empty()) {
    const bool plain = lowest.back() >= '0' && lowest.back() <= '9';
    const Target same = machine_code(lowest);
    result.push_back({"compute_" + lowest, same.first, plain ? ANY_NEWER : same.last});
  }
  return result;
}

std::string capability_text(int capability) { return join(capability / 10, '.', capability % 10); }

std::string targets_text(const std::vector<Target>& all) {
  std::string text;
  for (const Target& target : all) text += (text.empty() ? "" : ", ") + target.name;
  return text;
}

}  // namespace

std::vector<std::string> folder_names() {
  std::vector<std::string> names;
  for (const Folder& folder : FOLDERS) names.emplace_back(folder.name);
  return names;
}

Description describe(std::string_view name) { return find_folder(name).describe(); }

const std::vector<Target>& targets(std::string_view name) {
  static const auto& parsed = *new std::map<const Folder*, std::vector<Target>>([] {
    std::map<const Folder*, std::vector<Target>> all;
    for (const Folder& folder : FOLDERS) all[&folder] = parse_groups(folder.groups);
    return all;
  }());
  return parsed.at(&find_folder(name));
}

const Target* pick_target(const std::vector<Target>& all, int capability) {
  const Target* best = nullptr;
  for (const Target& target : all) {
    const bool fits = target.first <= capability && capability <= target.last;
    const bool is_ptx = target.name.starts_with("compute_");
    if (fits && (!best || (!is_ptx && target.first >= best->first))) best = &target;
  }
  return best;
}

PlanResult plan(std::string_view name, const Problem& problem, const Device& device) {
  const Folder& folder = find_folder(name);
  const std::vector<Target>& all = targets(name);
  if (all.empty()) {
    return Reasons{
        join("not compiled in this build (ARCHFLASH_ARCHS left it out): build again with "
             "ARCHFLASH_ARCHS=all or with ",
             name, " in it")};
  }
  const Target* target = pick_target(all, device.capability());
  if (!target) {
    return Reasons{join("compute capability ", capability_text(device.capability()), " (",
                        device.name, "): ", name, " is built for ", targets_text(all))};
  }
  PlanResult result = folder.plan(problem, device);
  if (auto* planned = std::get_if<LaunchPlan>(&result)) {
    planned->implementation = name;
    planned->problem = problem;
    planned->device = device;
    planned->code = target->name.starts_with("compute_")
                        ? target->name + " PTX, compiled by the driver at first use"
                        : target->name;
  }
  return result;
}

Notes notes(const LaunchPlan& plan) { return find_folder(plan.implementation).notes(plan); }

Bytes image(std::string_view name) {
  for (const Image& entry : IMAGES) {
    if (entry.name && name == entry.name) return {entry.begin, entry.end};
  }
  return {};
}

std::vector<std::string> image_names() {
  std::vector<std::string> names;
  for (const Image& entry : IMAGES) {
    if (entry.name) names.emplace_back(entry.name);
  }
  return names;
}

}  // namespace archflash
