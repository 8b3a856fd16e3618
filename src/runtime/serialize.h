// Plain data <-> Python dicts, and so JSON: what `to_dict` gives, `from_dict` takes.
#pragma once

#include <nanobind/nanobind.h>

#include "common/plan.h"

namespace archflash {

nanobind::dict to_dict(const Problem& problem);
nanobind::dict to_dict(const Device& device);
nanobind::dict to_dict(const LaunchPlan& plan);

// Throw nb::value_error naming a field that is missing, unknown or of the wrong kind.
Problem problem_from_dict(const nanobind::dict& dict);
Device device_from_dict(const nanobind::dict& dict);
LaunchPlan plan_from_dict(const nanobind::dict& dict);

}  // namespace archflash
