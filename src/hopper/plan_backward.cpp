// hopper: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <variant>

#include "common/planning/backward.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/order.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "hopper/backward_config.cuh"
#include "hopper/backward_params.h"

namespace archflash::hopper {

const Description& describe();

namespace {

using P = BackwardKernelParams;

// What is planned of a tile here, beyond core::BackwardTile.
struct BackwardTile : core::BackwardTile {
  // The rows of a round of queries, and the bytes of its sums of dQ.
  int64_t round_rows, round_bytes;
  core::Box keys_box, queries_box;
  const char* with_softcap;  // the name of the kernel for calls with one; null: there is none
};

template <class C>
constexpr BackwardTile backward_tile(const char* name, const char* with_softcap) {
  const core::BackwardTile common{.name = name,
                                  .head_dim = C::HEAD_DIM,
                                  .head_dim_v = C::HEAD_DIM_V,
                                  .gradients = DQ | DK | DV,
                                  .rows = C::ROWS,
                                  .threads = C::THREADS,
                                  .shared_bytes = C::SHARED_BYTES,
                                  .dq_block = 0,  // its sums are not those of DqSums
                                  .faster_in_turns = false};
  return {common,
          C::ROUND,
          int64_t{sizeof(float)} * C::ROUND_SUMS,
          core::box<typename C::KTile>(1),
          core::box<typename C::QTile>(1),
          with_softcap};
}

constexpr BackwardTile TILES[] = {
    backward_tile<BackwardD64<DType::F16>>("d64", "d64_softcap"),
    backward_tile<BackwardD128<DType::F16>>("d128", "d128_softcap"),
    backward_tile<BackwardD256<DType::F16>>("d256", nullptr),
};

Reasons why_not(const BackwardProblem& problem) {
  const Problem& call = problem.call;
  Reasons reasons;
  core::add_tma_reasons(call, "hopper", false, reasons);
  if (problem.dout.strides.row == 0 && call.nq > 1) {
    reasons.push_back(
        std::string("dout repeats one row (a row stride of 0): hopper copies by tensor maps, which "
                    "have no such stride; make dout contiguous") +
        core::USE_TORCH);
  }
  if (is_fp8(call.dtype)) {
    reasons.push_back(std::string("gradients of ") + dtype_name(call.dtype) +
                      " inputs: hopper computes those of float16 and bfloat16" + core::USE_TORCH);
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

// Rounds of queries of all heads; those of packed sequences as math::varlen_tile_start() counts.
int64_t rounds_of(const Problem& call, int64_t rows) {
  const int64_t rounds = core::ceil_div(call.nq, rows);
  if (!call.varlen) return call.batch * call.heads_q * rounds;
  return rounds == 0 ? 0 : (rounds + call.batch) * call.heads_q;
}

// Without a softcap a score becomes a logarithm to base 2 by one factor, whatever its sign.
float exponent_scale(const AttentionParams& attention) {
  const bool folds = attention.transform_scores && attention.softcap == 0;
  return folds ? attention.exp2_scale * attention.tanh_scale : attention.exp2_scale;
}

// How many heads of k are gone over together: those whose Q, dO and sums of dQ stay in L2, measured
// on an H200 (NOTES.md). In turns more of them, because the tiles of a head that are computed at
// the same time wait for one another; up to 128 columns all, which was faster there, as it was
// where every tile of 128 columns has the same work.
int64_t group_heads(const BackwardProblem& problem, const BackwardTile& tile,
                    const Device& device) {
  constexpr int64_t BYTES = int64_t{32} << 20;
  const Problem& call = problem.call;
  const int64_t all = std::max<int64_t>(call.batch * call.heads_kv, 1);
  if (call.varlen) return all;  // tile_index() takes packed tiles as they come
  if (problem.deterministic && tile.head_dim <= 128) return all;
  if (tile.head_dim == 128 && core::equal_tiles(call)) return all;
  const int64_t row_bytes =
      (call.d + call.dv) * dtype_bytes(call.dtype) + int64_t{sizeof(float)} * tile.head_dim;
  const int64_t head_bytes =
      std::max<int64_t>(call.heads_q / call.heads_kv * call.nq * row_bytes, 1);
  // Their tiles fill the GPU.
  const int64_t tiles = std::max<int64_t>(core::ceil_div(call.nk, tile.rows), 1);
  const int64_t heads = std::max(BYTES / head_bytes, core::ceil_div(device.sm_count, tiles));
  // A smaller last group would start with its longest tiles when all others are done.
  return core::even_size(all, std::min(problem.deterministic ? 2 * heads : heads, all));
}

// The smallest tile for the head dimensions, or the largest of all, which refuses them.
const BackwardTile& tile_for(const Problem& call) {
  for (const BackwardTile& tile : TILES)
    if (call.d <= tile.head_dim && call.dv <= tile.head_dim_v) return tile;
  return TILES[std::size(TILES) - 1];
}

}  // namespace

PlanResult plan_backward(const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  const BackwardTile& tile = tile_for(call);
  Reasons reasons = why_not(problem);
  if (call.softcap != 0 && tile.with_softcap == nullptr) {
    reasons.push_back(
        std::string("softcap with gradients of head dimensions above 128: hopper computes those "
                    "without; drop softcap") +
        core::USE_TORCH);
  }
  core::BackwardTile main_tile = tile;
  if (call.softcap != 0 && tile.with_softcap != nullptr) main_tile.name = tile.with_softcap;
  PlanResult result = core::plan_backward(describe(), {&main_tile, 1}, problem, device);
  if (const auto* more = std::get_if<Reasons>(&result))
    reasons.insert(reasons.end(), more->begin(), more->end());
  if (!reasons.empty()) return reasons;
  auto& plan = std::get<LaunchPlan>(result);

  // The sums of dQ come behind the terms, and the turns behind them. The first launch clears both,
  // a last one writes dQ.
  const int64_t rounds = rounds_of(call, tile.round_rows);
  if (rounds > core::GRID_LIMIT) return core::grid_too_large(rounds);
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t sums_start = workspace.add(rounds * tile.round_bytes);
  // The first launch clears 16 bytes at a time.
  const int64_t turns_bytes = core::ceil_div(rounds * int64_t{sizeof(int32_t)}, 16) * 16;
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
    params.rounds = static_cast<int32_t>(core::ceil_div(call.nq, tile.round_rows));
    params.group_heads = static_cast<int32_t>(group_heads(problem, tile, device));
    launch.params = core::bytes(params);
    launch.pointers.push_back(
        {Operand::Workspace, static_cast<int32_t>(offsetof(P, dq_sums_gmem)), sums_start});
    if (!problem.deterministic) return;
    launch.pointers.push_back(
        {Operand::Workspace, static_cast<int32_t>(offsetof(P, turns_gmem)), turns_start});
  };
  for (Launch& launch : plan.launches) {
    if (launch.kernel == "hopper_backward_sinks_" + word) continue;
    complete(launch);
    // Without queries the main kernel copies nothing.
    if (rounds == 0 || launch.kernel == "hopper_backward_rows_" + word) continue;
    launch.starts_early = true;  // it waits for the launch before where it has to
    launch.tensor_maps = {
        core::tensor_map(call, Operand::Q, offsetof(P, q_map), tile.queries_box),
        core::tensor_map(call, Operand::K, offsetof(P, k_map), tile.keys_box),
        core::tensor_map(call, Operand::V, offsetof(P, v_map), tile.keys_box),
        dout_map(problem, tile.queries_box),
    };
  }
  if (rounds > 0) {
    Launch last = plan.launches.front();
    last.kernel = "hopper_backward_dq_" + word + "_" + tile.name;
    last.grid = {rounds, 1, 1};
    last.block = {BACKWARD_DQ_THREADS, 1, 1};
    plan.launches.insert(plan.launches.end() - (problem.dsinks ? 1 : 0), std::move(last));
  }
  return plan;
}

}  // namespace archflash::hopper
