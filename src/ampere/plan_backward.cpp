// ampere: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "ampere/backward_config.cuh"
#include "common/planning/backward.h"

namespace archflash::ampere {

const Description& describe();

namespace {

using core::backward_tile;

// Chosen by registers and shared memory; unmeasured (NOTES.md).
constexpr core::BackwardTile TILES[] = {
    backward_tile<D64Keys<DType::F16>>("d64_keys", true),
    backward_tile<D64Queries<DType::F16>>("d64_queries", false),
    backward_tile<D128Keys<DType::F16>>("d128_keys", true),
    backward_tile<D128Queries<DType::F16>>("d128_queries", false),
    backward_tile<D192Keys<DType::F16>>("d192_keys", true),
    backward_tile<D192Queries<DType::F16>>("d192_queries", false),
    backward_tile<D256Values<DType::F16>>("d256_values", true),
    backward_tile<D256Keys<DType::F16>>("d256_keys", true),
    backward_tile<D256Queries<DType::F16>>("d256_queries", false),
};

}  // namespace

PlanResult plan_backward(const BackwardProblem& problem, const Device& device) {
  return core::plan_backward(describe(), TILES, problem, device);
}

}  // namespace archflash::ampere
