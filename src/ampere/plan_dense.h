// Plans of calls in which every query sees every key.
#pragma once

#include <cstdint>
#include <optional>

#include "common/planning/plan.h"
#include "common/problem.h"

namespace archflash::ampere {

// What an SM of 8.6 and 8.9, and of 8.0, has of shared memory.
constexpr int64_t KB_100 = 100 * 1024, KB_164 = 164 * 1024;

// The plan of a call for DENSE_TILES. Tiles of 64 rows beside those of 128 are for calls that have
// at most one of the latter for each SM. Nothing where it asks for more than they know, where the
// one for its head dimensions does not serve it, or on GPUs from 10.0 on, for which dense.cu has no
// machine code.
std::optional<LaunchPlan> plan_dense(const Problem& problem, const Device& device);

// The plan of such a call with dropout, of up to 64 columns: none where masks are given as data.
std::optional<LaunchPlan> plan_dense_dropout(const Problem& problem, const Device& device);

}  // namespace archflash::ampere
