// Plain data <-> Python dicts, and so JSON: what `to_dict` gives, `from_dict` takes.
#pragma once

#include <nanobind/nanobind.h>

#include "common/planning/plan.h"

namespace archflash {

nanobind::dict to_dict(const Problem& problem);
nanobind::dict to_dict(const Device& device);
nanobind::dict to_dict(const LaunchPlan& plan);

// Throw nb::value_error naming a field that is missing, unknown, of the wrong kind or out of range.
Problem problem_from_dict(nanobind::handle dict);
Device device_from_dict(nanobind::handle dict);

// The plan that its problem, device and implementation come to. Nothing else is taken from `dict`:
// where it says anything different, nb::value_error shows the differences.
LaunchPlan plan_from_dict(nanobind::handle dict);

// Whatever launches `dict` has, which may read and write any address: for tests and tools of this
// project, never for a file.
LaunchPlan unchecked_plan_from_dict(nanobind::handle dict);

}  // namespace archflash
