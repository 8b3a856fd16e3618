#include "hopper/plan/plan_kept_scores.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "common/planning/launch.h"
#include "common/planning/workspace.h"
#include "hopper/backward/mask_sums_params.h"

namespace archflash::hopper {
namespace {

// The gradient of a score is kept in 16 bits, as PyTorch's kernels keep it.
constexpr int64_t BYTES_OF_BLOCK = int64_t{2} * MASK_BLOCK * MASK_BLOCK;

}  // namespace

bool keeps_scores(const BackwardProblem& problem) {
  const Problem& call = problem.call;
  if (!problem.dmask || call.mask < 2) return false;
  const bool of_each_score =
      (call.nq <= 1 || problem.dmask_strides.row != 0) && (call.nk <= 1 || problem.dmask_key != 0);
  const int64_t blocks = call.batch * call.heads_q * core::ceil_div(call.nq, MASK_BLOCK) *
                         core::ceil_div(call.nk, MASK_BLOCK);
  return of_each_score &&
         (problem.deterministic || blocks * BYTES_OF_BLOCK <= LaunchPlan::MOST_KEPT_BYTES);
}

KeptScores keep_scores(LaunchPlan& plan, const BackwardProblem& problem, int64_t row_step,
                       int64_t key_step, bool lists_rounds) {
  const Problem& call = problem.call;
  const auto blocks_of = [](int64_t size, int64_t step) {
    return core::ceil_div(core::ceil_div(size, step) * step, MASK_BLOCK);
  };
  KeptScores scores;
  KeptScoresParams& kept = scores.params;
  std::memset(static_cast<void*>(&kept), 0, sizeof kept);  // equal plans are equal bytes
  kept.row_blocks = static_cast<int32_t>(blocks_of(call.nq, row_step));
  kept.key_blocks = static_cast<int32_t>(blocks_of(call.nk, key_step));
  const int64_t blocks = call.batch * call.heads_q * kept.row_blocks * kept.key_blocks;
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  if (lists_rounds) {
    constexpr int64_t CLEARED_AT_ONCE = 16;
    kept.is_kept_bytes = core::ceil_div(blocks, CLEARED_AT_ONCE) * CLEARED_AT_ONCE;
    scores.is_kept_start = workspace.add(kept.is_kept_bytes);
  }
  plan.kept_bytes = blocks * BYTES_OF_BLOCK;
  scores.start = workspace.add(plan.kept_bytes);
  plan.workspace_bytes = workspace.bytes();
  return scores;
}

void add_kept_scores(Launch& launch, const KeptScores& kept, size_t offset) {
  using P = KeptScoresParams;
  add_pointer(launch, Operand::Workspace, offset + offsetof(P, gmem), kept.start);
  if (kept.params.is_kept_bytes > 0)
    add_pointer(launch, Operand::Workspace, offset + offsetof(P, is_kept_gmem), kept.is_kept_start);
}

void add_mask_sums(LaunchPlan& plan, const KeptScores& kept, const BackwardProblem& problem,
                   bool by_rows) {
  using P = MaskSumsParams;
  const Problem& call = problem.call;
  P params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  params.kept = kept.params;
  const Strides& dmask = problem.dmask_strides;
  params.dmask.batch = dmask.batch, params.dmask.head = dmask.head, params.dmask.row = dmask.row;
  params.dmask.key = problem.dmask_key;
  params.batch = static_cast<int32_t>(call.batch);
  params.heads = static_cast<int32_t>(call.heads_q);
  params.nq = static_cast<int32_t>(call.nq), params.nk = static_cast<int32_t>(call.nk);
  params.by_rows = by_rows;
  plan.writes_dmask = problem.heads_of_sequence == 0;  // parts of a call add to one gradient
  params.adds = !plan.writes_dmask;
  Launch sums;
  sums.kernel = std::string("hopper_sum_mask_gradients_") + core::dtype_word(call.dtype);
  sums.image = std::string("hopper/bwd_dense_") + core::dtype_word(call.dtype);
  const int64_t slices = (dmask.batch != 0 ? call.batch : 1) * (dmask.head != 0 ? call.heads_q : 1);
  const int64_t added_up = call.batch * call.heads_q / slices;
  constexpr int64_t PARTS = SUMMING_THREADS / DENSE_THREADS, FEW = 2 * PARTS;
  params.shares = added_up > FEW;
  const int64_t blocks =
      slices * core::ceil_div(call.nq, MASK_BLOCK) * core::ceil_div(call.nk, MASK_BLOCK);
  sums.grid = {blocks * (params.shares != 0 ? PARTS : 1), 1, 1};
  sums.block = {SUMMING_THREADS, 1, 1};
  sums.params = core::bytes(params);
  add_kept_scores(sums, kept, offsetof(P, kept));
  add_pointer(sums, Operand::DMask, offsetof(P, dmask) + offsetof(MaskGradientParams, gmem));
  sums.uses_pdl = true;
  plan.launches.push_back(std::move(sums));
}

}  // namespace archflash::hopper
