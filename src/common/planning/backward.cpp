#include "common/planning/backward.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "common/backward_params.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/tiles.h"

namespace archflash::core {
namespace {

constexpr int64_t TERMS_BYTES = 8;  // RowTerms: two floats for each query row

Reasons why_not_backward(const BackwardProblem& problem, const Description& description) {
  Reasons reasons = why_not(problem.call, description);
  for (const auto& [name, given] : masks_of(problem.call)) {
    if (!given) continue;
    reasons.push_back(std::string(name) +
                      " in a call whose gradients are needed: " + description.name +
                      " computes gradients without masks as data only; drop " + name + USE_TORCH);
  }
  const auto check = [&](const char* name, const BackwardTensor& tensor, bool gradient) {
    add_layout_reasons(description.name, name, tensor.strides, tensor.unit, tensor.align,
                       tensor.dtype, reasons);
    if (gradient && tensor.dtype != problem.call.dtype && tensor.dtype != DType::F32) {
      reasons.push_back(std::string(name) + " has dtype " + dtype_name(tensor.dtype) + ": " +
                        description.name + " writes " + dtype_name(problem.call.dtype) +
                        " or float32; pass one of them" + USE_TORCH);
    }
  };
  check("dout", problem.dout, false);
  check("dq", problem.dq, true);
  if (problem.call.nk > 0) check("dk", problem.dk, true), check("dv", problem.dv, true);
  return reasons;
}

GradientParams gradient_params(const BackwardTensor& tensor, bool accumulate) {
  return {nullptr,   tensor.strides.batch, tensor.strides.head, tensor.strides.row, tensor.dtype,
          accumulate};
}

BackwardParams backward_params(const BackwardProblem& problem) {
  BackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  params.attention = attention_params(problem.call);
  params.dout_batch = problem.dout.strides.batch, params.dout_head = problem.dout.strides.head,
  params.dout_row = problem.dout.strides.row;
  params.dq = gradient_params(problem.dq, problem.accumulate);
  params.dk = gradient_params(problem.dk, problem.accumulate);
  params.dv = gradient_params(problem.dv, problem.accumulate);
  params.scale = static_cast<float>(problem.call.scale);
  return params;
}

std::vector<PointerSlot> backward_pointers(const BackwardProblem& problem) {
  using P = BackwardParams;
  std::vector<PointerSlot> slots = pointers(problem.call);
  const auto add = [&](Operand operand, size_t offset) {
    slots.push_back({operand, static_cast<int32_t>(offset), 0});
  };
  add(Operand::DOut, offsetof(P, dout_gmem));
  if (problem.dlse) add(Operand::DLse, offsetof(P, dlse_gmem));
  add(Operand::Workspace, offsetof(P, terms_gmem));
  add(Operand::DQ, offsetof(P, dq) + offsetof(GradientParams, gmem));
  add(Operand::DK, offsetof(P, dk) + offsetof(GradientParams, gmem));
  add(Operand::DV, offsetof(P, dv) + offsetof(GradientParams, gmem));
  if (problem.dsinks) add(Operand::DSinks, offsetof(P, dsinks_gmem));
  return slots;
}

}  // namespace

PlanResult plan_backward(const Description& description, std::span<const BackwardTile> tiles,
                         const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  Reasons reasons = why_not_backward(problem, description);
  if (!reasons.empty()) return reasons;

  const auto fits = [&](const BackwardTile& tile) {
    return call.d <= tile.head_dim && call.dv <= tile.head_dim_v;
  };
  const auto chosen = std::find_if(tiles.begin(), tiles.end(), fits);
  const std::string word = dtype_word(call.dtype);
  LaunchPlan plan;
  plan.accumulates = problem.accumulate;
  const auto params = bytes(backward_params(problem));
  const auto slots = backward_pointers(problem);
  int64_t most_ctas = 0;
  const auto add = [&](const std::string& kernel, int64_t ctas, int threads, int shared_bytes) {
    if (ctas == 0) return;
    most_ctas = std::max(most_ctas, ctas);
    Launch launch;
    launch.kernel = description.name + "_" + kernel;
    launch.image = description.name + "/bwd_" + word;
    launch.grid = {ctas, 1, 1};
    launch.block = {threads, 1, 1};
    launch.shared_bytes = shared_bytes;
    launch.params = params;
    launch.pointers = slots;
    plan.launches.push_back(std::move(launch));
  };

  const int64_t rows = (call.varlen ? 1 : call.batch) * call.heads_q * call.nq;
  plan.workspace_bytes = rows * TERMS_BYTES;
  add("backward_rows_" + word, ceil_div(rows, BACKWARD_ROWS_WARPS), 32 * BACKWARD_ROWS_WARPS, 0);
  if (chosen->shared_bytes > device.shared_per_block)
    return too_little_shared_memory(description.name, chosen->shared_bytes, device);
  for (auto tile = chosen; tile != tiles.end() && tile->head_dim == chosen->head_dim; ++tile) {
    const int64_t per_head = ceil_div(tile->owns_keys ? call.nk : call.nq, tile->rows);
    const int64_t of_all = call.varlen && per_head > 0 ? per_head + call.batch
                                                       : per_head * (call.varlen ? 1 : call.batch);
    add("attention_bwd_" + word + "_" + tile->name,
        of_all * (tile->owns_keys ? call.heads_kv : call.heads_q), tile->threads,
        tile->shared_bytes);
  }
  if (problem.dsinks) add("backward_sinks_" + word, call.heads_q, BACKWARD_SINKS_THREADS, 0);
  if (most_ctas > GRID_LIMIT) return grid_too_large(most_ctas);
  return plan;
}

}  // namespace archflash::core
