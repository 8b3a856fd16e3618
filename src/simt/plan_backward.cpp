// simt: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <variant>

#include "common/planning/backward.h"
#include "common/planning/core_set.h"
#include "common/planning/list_backward.h"
#include "simt/backward_config.cuh"
#include "simt/tensor_config.cuh"

namespace archflash::simt {

const Description& describe();

namespace {

using core::backward_tile;

// The first sets of head dimensions 64 and 128 need more than the 64 KB of 7.5.
constexpr core::BackwardTile TILES[] = {
    backward_tile<TiledD64>("d64_large"),
    backward_tile<BackwardD64<Owns::Keys>>("d64_keys"),
    backward_tile<BackwardD64<Owns::Queries>>("d64_queries"),
    backward_tile<TiledD128>("d128_large"),
    backward_tile<BackwardD128<Owns::Keys>>("d128_keys"),
    backward_tile<BackwardD128<Owns::Queries>>("d128_queries"),
    backward_tile<BackwardD256<Owns::Keys>>("d256_keys"),
    backward_tile<BackwardD256<Owns::Queries>>("d256_queries"),
};

// On tensor cores.
constexpr core::BackwardTile TENSOR_TILES[] = {
    backward_tile<TensorBackwardD64>("d64_tensor"),
    backward_tile<TensorBackwardD128>("d128_tensor"),
    backward_tile<TensorBackwardD256>("d256_tensor"),
};

// Sums of fewer keys or query rows do not even out what three products of TF32 leave out of S and
// dP: in some calls the errors are then more than twice those of plain fp32 (NOTES.md).
constexpr int64_t LONG_SUM = 64;

// Whether the kernels on tensor cores take a call: NOTES.md has their speeds and errors, which were
// measured on 9.0 only.
bool takes_tensor_cores(const Problem& call, const Device& device) {
  const int64_t sequences = call.varlen ? std::max<int64_t>(call.batch, 1) : 1;
  const int64_t window =
      std::min(call.window_left, LONG_SUM) + std::min(call.window_right, LONG_SUM) + 1;
  return device.capability() == 90 && call.d <= 256 && call.dv <= 256 &&
         std::min(call.nq, call.nk) / sequences >= LONG_SUM && window >= LONG_SUM &&
         !takes_masked_kernels(call);
}

template <class C>
constexpr core::BackwardTile masked_tile(const char* name) {
  return backward_tile<MaskedBackwardConfig<C>>(name);
}
constexpr core::BackwardTile MASKED_TILES[] = {
    masked_tile<BackwardD64<Owns::Keys>>("d64_keys_masked"),
    masked_tile<BackwardD64<Owns::Queries>>("d64_queries_masked"),
    masked_tile<BackwardD128<Owns::Keys>>("d128_keys_masked"),
    masked_tile<BackwardD128<Owns::Queries>>("d128_queries_masked"),
    masked_tile<BackwardD256<Owns::Keys>>("d256_keys_masked"),
    masked_tile<BackwardD256<Owns::Queries>>("d256_queries_masked"),
};

constexpr core::ListTile LIST_TILES[] = {
    core::list_tile<D64Lists>("d64_lists", 3500),
    core::list_tile<D128Lists>("d128_lists", 6100),
    core::list_tile<D256Lists>("d256_lists", 5800),
};

}  // namespace

PlanResult plan_backward(const BackwardProblem& problem, const Device& device) {
  if (problem.call.dtype != DType::F32) {
    return Reasons{std::string("dtype ") + dtype_name(problem.call.dtype) +
                   ": simt computes gradients of float32 inputs only; convert q, k and v" +
                   core::USE_TORCH};
  }
  if (problem.call.key_indices > 0)
    return core::plan_list_backward(describe(), LIST_TILES, problem, device);
  // CTAs add their parts of dQ in turns, which costs at most 3% (NOTES.md): the same inputs always
  // give the same bits.
  BackwardProblem in_turns = problem;
  in_turns.deterministic = true;
  const auto with_tiles = [&](std::span<const core::BackwardTile> tiles) {
    return core::plan_backward(describe(), tiles, in_turns, device, {.tiles = MASKED_TILES}, true);
  };
  if (!takes_tensor_cores(problem.call, device)) return with_tiles(TILES);
  PlanResult result = with_tiles(TENSOR_TILES);
  if (auto* plan = std::get_if<LaunchPlan>(&result)) {
    for (Launch& launch : plan->launches) {
      if (launch.kernel.ends_with("_tensor")) launch.image = "simt/tensor_bwd_f32";
    }
  }
  return result;
}

}  // namespace archflash::simt
