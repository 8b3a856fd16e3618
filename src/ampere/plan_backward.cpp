// ampere: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "ampere/backward_config.cuh"
#include "common/planning/backward.h"

namespace archflash::ampere {

const Description& describe();

namespace {

using core::backward_tile;

// NOTES.md has their speeds. The last sets of each head dimension fit 99 KB.
constexpr core::BackwardTile TILES[] = {
    backward_tile<D64Wide<DType::F16>>("d64_wide", true),
    backward_tile<D64<DType::F16>>("d64"),
    backward_tile<D128Wide<DType::F16>>("d128_wide", true),
    backward_tile<D128<DType::F16>>("d128"),
    backward_tile<D192Keys<DType::F16>>("d192_keys"),
    backward_tile<D192Queries<DType::F16>>("d192_queries"),
    backward_tile<D256Wide<DType::F16>>("d256_wide"),
    backward_tile<D256Values<DType::F16>>("d256_values"),
    backward_tile<D256Keys<DType::F16>>("d256_keys"),
    backward_tile<D256Queries<DType::F16>>("d256_queries"),
};

constexpr core::BackwardTile MASKED_TILES[] = {
    backward_tile<D64Masked<DType::F16>>("d64_masked"),
    backward_tile<D128Masked<DType::F16>>("d128_masked"),
    backward_tile<D256ValuesMasked<DType::F16>>("d256_values_masked"),
    backward_tile<D256KeysMasked<DType::F16>>("d256_keys_masked"),
    backward_tile<D256QueriesMasked<DType::F16>>("d256_queries_masked"),
};

}  // namespace

PlanResult plan_backward(const BackwardProblem& problem, const Device& device) {
  const core::MaskedBackwardTiles masked{.tiles = MASKED_TILES, .base_2 = true};
  return core::plan_backward(describe(), TILES, problem, device, masked);
}

}  // namespace archflash::ampere
