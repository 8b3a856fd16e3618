// Which kernels are asked for the plan of a new problem, and in which order. Python decides it
// (python/archflash/_dispatch/choosing.py) once for each kind of problem (kinds.h): a call of
// another length does without Python.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/planning/plan.h"
#include "runtime/tensors.h"

namespace archflash {

// A kernel's plan for a device, or its reasons why not.
using PlanBy = std::function<PlanResult(const std::string& kernel, const Device& device)>;

// order(problem, device_index, forced) -> (device, kernels before `torch`, kernels behind it),
// where a kernel is (name, only if its plan has a launch that summarizes the masks); None: each
// problem of the kind is decided by itself. No function, None: so is every problem.
void set_order(nb::object function);
// Sets who tells which kernels are asked for gradients: order(device_index, forced) -> (device,
// kernels), where kernels are as above; None: each problem is decided by itself.
void set_order_of_gradients(nb::object function);

// The plan of the first kernel that has one; null: `torch` serves the problem, as some kernel
// could, too. Nothing: who serves it has to be decided in Python.
std::optional<std::shared_ptr<LaunchPlan>> plan_in_order(const Problem& problem, int device_index,
                                                         nb::handle implementation,
                                                         const PlanBy& plan_by);
std::shared_ptr<LaunchPlan> plan_gradients_in_order(int device_index, nb::handle implementation,
                                                    const PlanBy& plan_by);

void clear_orders();

}  // namespace archflash
