// Plans made for given tensors, and given plans run on tensors: for replay, the simulator,
// gradients and the functions beside attention.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "runtime/call.h"

namespace archflash {

// The problem of a call.
Problem make_problem(nb::handle q, nb::handle k, nb::handle v, nb::handle options, int grad);

// Runs a given plan on given tensors, for replay.
nb::object execute_plan(const LaunchPlan& plan, nb::handle q, nb::handle k, nb::handle v,
                        nb::handle options);

// Every tensor that a given plan reads and writes, for the simulator.
nb::dict operands_of(const LaunchPlan& plan, nb::handle q, nb::handle k, nb::handle v,
                     nb::handle options);

// A plan that serves no attention call, on tensors that fit it: of one CUDA device, or of the CPU,
// where it is simulated.
void launch_plan(const LaunchPlan& plan, const nb::dict& tensors);

// The parameter bytes of one launch with (operand, address) pairs filled in.
nb::bytes bound_parameters(const LaunchPlan& plan, size_t launch,
                           const std::vector<std::pair<std::string, uintptr_t>>& addresses,
                           bool tensor_maps);

// The plan that quantizes x (batch, heads, rows, d). `per` counts tensor, head, block.
LaunchPlan plan_quantize_of(const std::string& out_dtype, int per, nb::handle x, nb::handle out,
                            const Device& device);

// The plan that merges outs (batch, heads, rows, dv) with lses (batch, heads, rows) into out.
LaunchPlan plan_merge_of(const std::vector<nb::object>& outs, const std::vector<nb::object>& lses,
                         nb::handle out, const Device& device);

// What the gradients of a call are planned for, beside its problem: tensors with heads before rows
// whatever the call's layout. Packed ones have a batch of 1. dmask: None if it is not wanted.
struct GradientTensors {
  nb::handle dout, dq, dk, dv, dmask;
};
PlanResult plan_backward_of(const std::string& name, const Problem& call, const Device& device,
                            const GradientTensors& tensors, bool accumulate, bool dlse, bool dsinks,
                            bool deterministic);

}  // namespace archflash
