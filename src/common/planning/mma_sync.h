// What folders with kernels on mma.sync plan alike. Pure host code.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "common/planning/launch.h"
#include "common/planning/order.h"
#include "common/planning/plan.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::mma_sync {

// The plan of a kernel that has one CTA for each row tile. `change` alters the parameters before
// they become part of it.
template <class Params>
PlanResult plan(const std::string& folder, std::span<const core::Tile> tiles,
                const Problem& problem, const Device& device,
                void (*change)(const Problem&, Params&) = nullptr) {
  const auto [tile, reasons] = core::choose(folder, tiles, problem, device);
  if (tile == nullptr) return reasons;
  Params params;
  core::init_params(problem, params);
  core::attention_of(params).order = core::choose_order(problem, device, *tile);
  if (change != nullptr) change(problem, params);
  return core::one_launch(folder, problem, device, *tile, core::tiles_of(problem, *tile), params);
}

// The plan of a call with 16-bit inputs, for the kernels of mma_sync/attention_fwd.cuh. Where keys
// are split, "<folder>_combine_<dtype>" follows.
PlanResult plan_16_bits(const std::string& folder, std::span<const core::Tile> tiles,
                        const Problem& problem, const Device& device);

// The plan of such a call with masks as data, for the kernels of mma_sync/masked_fwd.cuh, which are
// in the image "<folder>/masked_<dtype>".
PlanResult plan_masked(const std::string& folder, std::span<const core::Tile> tiles,
                       const Problem& problem, const Device& device);

// The plan of such a call with dropout and without masks as data, for the kernels of
// mma_sync/attention_fwd.cuh with C::DROPS, which are in the image "<folder>/dropout_<dtype>".
// Nothing where none of the tiles serves it: those of plan_masked() do.
std::optional<PlanResult> plan_dropout(const std::string& folder, std::span<const core::Tile> tiles,
                                       const Problem& problem, const Device& device);

}  // namespace archflash::mma_sync
