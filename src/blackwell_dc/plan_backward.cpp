// blackwell_dc: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

#include "blackwell_dc/backward_config.cuh"
#include "blackwell_dc/backward_params.h"
#include "common/planning/backward.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::blackwell_dc {

const Description& describe();

namespace {

using P = BackwardKernelParams;

// What is planned of a tile here, beyond core::BackwardTile.
struct BackwardTile : core::BackwardTile {
  // The rows of a block of queries, and the bytes of its sums of dQ.
  int64_t block_rows, block_bytes;
  core::Box keys_box, queries_box;
};

template <class C>
constexpr BackwardTile backward_tile(const char* name) {
  const core::BackwardTile common{.name = name,
                                  .head_dim = C::HEAD_DIM,
                                  .head_dim_v = C::HEAD_DIM_V,
                                  .gradients = DQ | DK | DV,
                                  .rows = C::ROWS,
                                  .threads = C::THREADS,
                                  .shared_bytes = C::SHARED_BYTES,
                                  .dq_block = 0,  // its sums are not those of DqSums
                                  .faster_in_turns = false};
  return {common, C::BLOCK, int64_t{sizeof(float)} * C::BLOCK_SUMS, core::box<typename C::KTile>(1),
          core::box<typename C::QTile>(1)};
}

constexpr BackwardTile TILES[] = {
    backward_tile<BackwardD64<DType::F16>>("d64"),
    backward_tile<BackwardD128<DType::F16>>("d128"),
};

Reasons why_not(const BackwardProblem& problem) {
  const Problem& call = problem.call;
  Reasons reasons;
  core::add_tma_reasons(call, "blackwell_dc", false, reasons);
  if (problem.dout.strides.row == 0 && call.nq > 1) {
    reasons.push_back(
        std::string(
            "dout repeats one row (a row stride of 0): blackwell_dc copies by tensor maps, which "
            "have no such stride; make dout contiguous") +
        core::USE_TORCH);
  }
  if (is_fp8(call.dtype)) {
    reasons.push_back(std::string("gradients of ") + dtype_name(call.dtype) +
                      " inputs: blackwell_dc computes those of float16 and bfloat16" +
                      core::USE_TORCH);
  }
  return reasons;
}

// The map of dO: (columns, rows, heads, batch).
TensorMapSpec dout_map(const BackwardProblem& problem, const core::Box& box) {
  Problem call = problem.call;
  call.out = problem.dout.strides;
  call.out_dtype = call.dtype;
  TensorMapSpec map = core::tensor_map(call, Operand::Out, offsetof(P, dout_map), box);
  map.operand = Operand::DOut;
  return map;
}

// Blocks of queries of all heads; those of packed sequences as math::varlen_tile_start() counts.
int64_t blocks_of(const Problem& call, int64_t rows) {
  const int64_t blocks = core::ceil_div(call.nq, rows);
  if (!call.varlen) return call.batch * call.heads_q * blocks;
  return blocks == 0 ? 0 : (blocks + call.batch) * call.heads_q;
}

// Without a softcap a score becomes a logarithm to base 2 by one factor, whatever its sign.
float exponent_scale(const AttentionParams& attention) {
  const bool folds = attention.transform_scores && attention.softcap == 0;
  return folds ? attention.exp2_scale * attention.tanh_scale : attention.exp2_scale;
}

}  // namespace

PlanResult plan_backward(const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  const BackwardTile& tile =
      call.d <= TILES[0].head_dim && call.dv <= TILES[0].head_dim_v ? TILES[0] : TILES[1];
  Reasons reasons = why_not(problem);
  const core::BackwardTile& main_tile = tile;
  PlanResult result = core::plan_backward(describe(), {&main_tile, 1}, problem, device);
  if (const auto* more = std::get_if<Reasons>(&result))
    reasons.insert(reasons.end(), more->begin(), more->end());
  if (!reasons.empty()) return reasons;
  auto& plan = std::get<LaunchPlan>(result);

  // The sums of dQ come behind the terms, and the turns behind them. The first launch clears both,
  // a last one writes dQ.
  const int64_t blocks = blocks_of(call, tile.block_rows);
  if (blocks > core::GRID_LIMIT) return core::grid_too_large(blocks);
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t sums_start = workspace.add(blocks * tile.block_bytes);
  // The first launch clears 16 bytes at a time.
  const int64_t turns_bytes = core::ceil_div(blocks * int64_t{sizeof(int32_t)}, 16) * 16;
  const int64_t turns_start = workspace.add(problem.deterministic ? turns_bytes : 0);
  plan.workspace_bytes = workspace.bytes();
  const std::string word = core::dtype_word(call.dtype);
  const auto complete = [&](Launch& launch) {
    P params;
    std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
    std::memcpy(static_cast<void*>(&params), launch.params.data(), sizeof params.backward);
    AttentionParams& attention = params.backward.attention;
    attention.exp2_scale = exponent_scale(attention);
    params.cleared_bytes = workspace.bytes() - sums_start;
    if (attention.softcap != 0) params.uncap = 1 / (attention.exp2_scale * attention.softcap);
    params.blocks = static_cast<int32_t>(core::ceil_div(call.nq, tile.block_rows));
    launch.params = core::bytes(params);
    launch.pointers.push_back(
        {Operand::Workspace, static_cast<int32_t>(offsetof(P, dq_sums_gmem)), sums_start});
    if (!problem.deterministic) return;
    launch.pointers.push_back(
        {Operand::Workspace, static_cast<int32_t>(offsetof(P, turns_gmem)), turns_start});
  };
  for (Launch& launch : plan.launches) {
    if (launch.kernel == "blackwell_dc_backward_sinks_" + word) continue;
    complete(launch);
    // Without queries the main kernel copies nothing.
    if (blocks == 0 || launch.kernel == "blackwell_dc_backward_rows_" + word) continue;
    launch.tensor_maps = {
        core::tensor_map(call, Operand::Q, offsetof(P, q_map), tile.queries_box),
        core::tensor_map(call, Operand::K, offsetof(P, k_map), tile.keys_box),
        core::tensor_map(call, Operand::V, offsetof(P, v_map), tile.keys_box),
        dout_map(problem, tile.queries_box),
    };
  }
  if (blocks > 0) {
    Launch last = plan.launches.front();
    last.kernel = "blackwell_dc_backward_dq_" + word + "_" + tile.name;
    last.grid = {blocks, 1, 1};
    last.block = {BACKWARD_DQ_THREADS, 1, 1};
    plan.launches.insert(plan.launches.end() - (problem.dsinks ? 1 : 0), std::move(last));
  }
  return plan;
}

}  // namespace archflash::blackwell_dc
