// What folders plan alike whose backward pass goes over rounds of query rows and copies by TMA
// (device/backward_rounds.cuh). Pure host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

#include "common/planning/backward.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::core {

struct RoundsTile : BackwardTile {
  int64_t round_rows;  // query rows of a round
  int64_t sums_step;   // its sums of dQ have the columns of dQ in steps of so many
  // The most chains that sums_of_round() makes for many keys. Where reads_many_chains, there may be
  // more, as long as their sums stay in L2.
  int64_t most_chains;
  bool reads_many_chains;  // the last kernel is fast with up to 32 of them
  Box k_box, v_box, q_box, dout_box;
  bool writes_dq = false;  // its main kernel does: there are no sums of dQ
  bool ends_dq = false;    // its main kernel does, from sums of which the last CTA has its turn
  Box dq_box = {};
};

// A row of a folder's table from the kernel's Config.
template <class C>
constexpr RoundsTile rounds_tile(const char* name) {
  const BackwardTile common{.name = name,
                            .head_dim = C::HEAD_DIM,
                            .head_dim_v = C::HEAD_DIM_V,
                            .gradients = DQ | DK | DV,
                            .rows = C::ROWS,
                            .threads = C::THREADS,
                            .shared_bytes = C::SHARED_BYTES,
                            .dq_block = 0,  // its sums are not those of DqSums
                            .turns_from = 0};
  RoundsTile tile{common,
                  C::ROUND,
                  C::SUMS_STEP,
                  C::HEAD_DIM <= 64 ? 6 : 4,
                  false,
                  box<typename C::KTile>(1),
                  box<typename C::VTile>(1),
                  box<typename C::QTile>(1),
                  box<typename C::DoutTile>(1)};
  if constexpr (requires { C::WRITES_DQ; }) tile.writes_dq = C::WRITES_DQ;
  if constexpr (requires { C::ENDS_DQ; }) tile.ends_dq = C::ENDS_DQ;
  return tile;
}

// The rows of a round that the sums of dQ have: all, or where a head has no second round those of
// the warps that have rows of it.
int64_t sums_rows(const Problem& call, const RoundsTile& tile);

// The bytes of the sums of dQ of a round.
int64_t sums_bytes_of_round(const Problem& call, const RoundsTile& tile);

// Why a call cannot be served, beyond the reasons of plan_backward().
Reasons refuse_rounds(const BackwardProblem& problem, const std::string& implementation);

// The map of dO at `offset` of a parameter block: (columns, rows, heads, batch).
TensorMapSpec dout_map(const BackwardProblem& problem, int offset, const Box& box);

// The map of dQ, by which a kernel writes it.
TensorMapSpec dq_map(const BackwardProblem& problem, int offset, const Box& box);

// The rounds of all heads; those of packed sequences as device::varlen_tile_start() counts.
int64_t count_rounds(const Problem& call, int64_t round_rows);

// The exp2_scale of the main kernel: without a softcap a score becomes a logarithm to base 2 by one
// factor, whatever its sign.
float exponent_scale(const AttentionParams& attention);

// How many sums of dQ a round has in turns. Two where the CTAs of a head that start together would
// wait for one another, each for the one before, for a good part of their time: then they begin
// with different rounds. More, one for each chain of tiles, where keys are many more than rows.
// Elsewhere CTAs that are at the same round share what they read from L2.
// shares: CTAs that share out the rows of a tile.
int64_t sums_of_round(const BackwardProblem& problem, const RoundsTile& tile, const Device& device,
                      int64_t shares = 1);

// Completes what plan_backward() has planned for `tile` in a folder whose parameter P begins with
// `backward` and has dq_sums_gmem, cleared_bytes, turns_gmem, uncap, rounds, sums_of_round and the
// maps of Q, K, V and dO. The sums of dQ come behind the terms in the workspace, and the turns
// behind them; the first launch clears the turns, or the sums if there are none, and a last one
// ("<folder>_backward_dq_<dtype>_<tile>") writes dQ, unless the main kernel does. The main launch
// is the one that gets tensor maps, if there is any round. finish(params): fills in what the folder
// has besides. of_round: sums_of_round().
template <class P, class Finish>
PlanResult complete_rounds(LaunchPlan plan, const BackwardProblem& problem, const RoundsTile& tile,
                           const std::string& folder, const Finish& finish, int64_t of_round) {
  const Problem& call = problem.call;
  const int64_t rounds = count_rounds(call, tile.round_rows);
  if (rounds > GRID_LIMIT) return grid_too_large(rounds);
  Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t sums = of_round * rounds;
  const int64_t sums_bytes = tile.writes_dq ? 0 : sums * sums_bytes_of_round(call, tile);
  const int64_t sums_start = workspace.add(sums_bytes);
  // The first launch clears 16 bytes at a time.
  const int64_t turns_bytes = ceil_div(sums * int64_t{sizeof(int32_t)}, 16) * 16;
  const int64_t turns_start = workspace.add(problem.deterministic ? turns_bytes : 0);
  plan.workspace_bytes = workspace.bytes();
  const char* const word = dtype_word(call.dtype);
  const auto is = [&](const Launch& launch, std::string_view name) {
    return std::string_view(launch.kernel).substr(folder.size()).starts_with(name);
  };
  for (Launch& launch : plan.launches) {
    if (is(launch, "_backward_sinks_")) continue;
    P params;
    std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
    std::memcpy(static_cast<void*>(&params), launch.params.data(), sizeof params.backward);
    AttentionParams& attention = params.backward.attention;
    attention.exp2_scale = exponent_scale(attention);
    params.cleared_bytes = problem.deterministic ? turns_bytes : sums_bytes;
    if (attention.rule.softcap != 0.0f)
      params.uncap = 1 / (attention.exp2_scale * attention.rule.softcap);
    params.rounds = static_cast<int32_t>(ceil_div(call.nq, tile.round_rows));
    params.sums_of_round = static_cast<int32_t>(of_round);
    if constexpr (requires { params.sums_rows; })
      params.sums_rows = static_cast<int32_t>(sums_rows(call, tile));
    finish(params);
    launch.params = bytes(params);
    add_pointer(launch, Operand::Workspace, offsetof(P, dq_sums_gmem), sums_start);
    if (problem.deterministic) {
      add_pointer(launch, Operand::Workspace, offsetof(P, turns_gmem), turns_start);
    }
    // Without queries the main kernel copies nothing.
    if (rounds == 0 || is(launch, "_backward_rows_")) continue;
    std::vector<TensorMapSpec>& maps = launch.tensor_maps;
    maps.clear();
    maps.reserve(4);
    maps.push_back(tensor_map(call, Operand::Q, offsetof(P, q_map), tile.q_box));
    maps.push_back(tensor_map(call, Operand::K, offsetof(P, k_map), tile.k_box));
    maps.push_back(tensor_map(call, Operand::V, offsetof(P, v_map), tile.v_box));
    maps.push_back(dout_map(problem, offsetof(P, dout_map), tile.dout_box));
  }
  if (rounds > 0 && !tile.writes_dq && !tile.ends_dq) {
    Launch last = plan.launches.front();
    last.kernel = folder + "_backward_dq_" + word + "_" + tile.name;
    last.grid = {rounds, 1, 1};
    last.block = {BACKWARD_DQ_THREADS, 1, 1};
    plan.launches.insert(plan.launches.end() - (problem.dsinks ? 1 : 0), std::move(last));
  }
  return plan;
}

}  // namespace archflash::core
