// blackwell_dc: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include <utility>
#include <variant>

#include "blackwell_dc/backward_config.cuh"
#include "blackwell_dc/backward_params.h"
#include "common/planning/backward_rounds.h"

namespace archflash::blackwell_dc {

const Description& describe();

namespace {

constexpr core::RoundsTile TILES[] = {
    core::rounds_tile<BackwardD64>("d64"),
    core::rounds_tile<BackwardD128>("d128"),
};

}  // namespace

PlanResult plan_backward(const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  const core::RoundsTile& tile =
      call.d <= TILES[0].head_dim && call.dv <= TILES[0].head_dim_v ? TILES[0] : TILES[1];
  Reasons reasons = core::refuse_rounds(problem, "blackwell_dc");
  const core::BackwardTile& main_tile = tile;
  PlanResult result = core::plan_backward(describe(), {&main_tile, 1}, problem, device);
  if (const auto* more = std::get_if<Reasons>(&result))
    reasons.insert(reasons.end(), more->begin(), more->end());
  if (!reasons.empty()) return reasons;
  return core::complete_rounds<BackwardKernelParams>(
      std::get<LaunchPlan>(std::move(result)), problem, tile, "blackwell_dc",
      [](BackwardKernelParams&) {}, core::sums_of_round(problem, tile, device));
}

}  // namespace archflash::blackwell_dc
