// hopper: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <variant>

#include "common/planning/backward_rounds.h"
#include "common/planning/masks.h"
#include "common/planning/order.h"
#include "hopper/backward_config.cuh"
#include "hopper/backward_params.h"

namespace archflash::hopper {

const Description& describe();

namespace {

struct BackwardTile : core::RoundsTile {
  // The names of the kernels for calls with a softcap and with dropout; null: there is none.
  const char* with_softcap;
  const char* with_dropout;
};

template <class C>
constexpr BackwardTile backward_tile(const char* name, const char* with_softcap,
                                     const char* with_dropout) {
  return {core::rounds_tile<C>(name), with_softcap, with_dropout};
}

// The tiles of the smallest head dimensions come first. With "exact" in its name one has sums of dQ
// that leave out rows and columns.
constexpr BackwardTile TILES[] = {
    backward_tile<BackwardD64<DType::F16>>("d64", "d64_softcap", "d64_dropout"),
    backward_tile<BackwardD64Exact<DType::F16>>("d64_exact", nullptr, nullptr),
    backward_tile<BackwardD96<DType::F16>>("d96", nullptr, nullptr),
    backward_tile<BackwardD128<DType::F16>>("d128", "d128_softcap", "d128_dropout"),
    backward_tile<BackwardD128Exact<DType::F16>>("d128_exact", nullptr, nullptr),
    backward_tile<BackwardD192<DType::F16>>("d192", nullptr, nullptr),
    backward_tile<BackwardD256<DType::F16>>("d256", nullptr, nullptr),
};

// The order in which the tiles of keys of all heads come: see BackwardKernelParams.
struct KeyTileOrder {
  int64_t group_heads;
  int64_t upward_heads = 0;
  int64_t tiles_in_a_row = 1;
  int64_t packed_rows = INT32_MAX;
  int64_t packed_tiles = 0;
  int64_t upward_work = 0;
};

// Under a causal mask a tile is shorter than the one before, by one or two steps for each query
// head that shares its head of K, and the tiles that follow begin as far apart, each where another
// one has ended. Two of a head in a row begin together, and read the same at the same time. Without
// turns tiles begin with rounds that are a few steps apart, which is enough for up to four heads.
// Measured on an H100 and an H200 (NOTES.md).
int64_t tiles_in_a_row(int64_t heads_per_kv, bool deterministic) {
  return heads_per_kv > (deterministic ? 2 : 4) ? 2 : 1;
}

// Groups have those heads whose Q, dO and sums of dQ stay in L2, measured on an H200 (NOTES.md). In
// turns more of them, because the tiles of a head that are computed at the same time wait for one
// another; up to 128 columns all, which was faster there, as it was where every tile of 128 columns
// has the same work.
//
// In turns under a causal mask a tile of keys has fewer rounds than the one before. From the last
// tile to the first, over rounds upwards, each comes to a round just behind the one that it waits
// for. The last group goes the other way, from the longest tile to the shortest, so that all CTAs
// end together. These groups are smaller, because tiles of a head that run at the same time are at
// far apart rounds. Where query heads share a head of K they are so far apart that each tile reads
// Q and dO from memory again: so these calls go the first way, with tiles in a row.
KeyTileOrder order_tiles(const BackwardProblem& problem, const BackwardTile& tile,
                         const Device& device) {
  constexpr int64_t BYTES = int64_t{32} << 20;
  const Problem& call = problem.call;
  const int64_t all = std::max<int64_t>((call.varlen ? 1 : call.batch) * call.heads_kv, 1);
  const int64_t heads_per_kv = call.heads_q / call.heads_kv;
  const int64_t row_bytes = heads_per_kv * ((call.d + call.dv) * dtype_bytes(call.dtype) +
                                            int64_t{sizeof(float)} * tile.head_dim);
  const int64_t head_bytes = std::max<int64_t>(call.nq * row_bytes, 1);
  const int64_t tiles = std::max<int64_t>(core::ceil_div(call.nk, tile.rows), 1);
  const bool masked = call.window_left != UNBOUNDED || call.window_right != UNBOUNDED;
  const bool triangle = call.window_left == UNBOUNDED && masked;
  KeyTileOrder order{all};
  if (problem.deterministic && triangle && heads_per_kv == 1) {
    order.packed_rows = BYTES / 2 / row_bytes;
    order.packed_tiles = device.sm_count;
    // By a model of the schedule anything from a quarter to a half of the SMs is as good.
    order.upward_work = 3 * device.sm_count / 8;
    if (call.varlen) return order;
    const int64_t heads = std::max({BYTES / 2 / head_bytes, device.sm_count / tiles, int64_t{1}});
    order.group_heads = core::even_size(all, std::min(heads, all));
    order.upward_heads = (core::ceil_div(all, order.group_heads) - 1) * order.group_heads;
    return order;
  }
  if (triangle) order.tiles_in_a_row = tiles_in_a_row(heads_per_kv, problem.deterministic);
  if (problem.deterministic && tile.head_dim <= 128) return order;
  if (tile.head_dim == 128 && !masked) return order;
  const int64_t times = problem.deterministic ? 2 : 1;
  if (call.varlen && tile.head_dim <= 128) return order;  // as fast, and found sooner
  order.packed_rows = times * BYTES / row_bytes;
  order.packed_tiles = times * device.sm_count;
  if (call.varlen) return order;
  // Their tiles fill the GPU.
  const int64_t heads = std::max(BYTES / head_bytes, core::ceil_div(device.sm_count, tiles));
  // A smaller last group would start with its longest tiles when all others are done.
  order.group_heads = core::even_size(all, std::min(times * heads, all));
  return order;
}

// Of the smallest tiles that serve a call the one with the smallest sums of dQ; if there is none
// the largest tile, which refuses the call.
const BackwardTile& tile_for(const Problem& call) {
  const BackwardTile* best = nullptr;
  for (const BackwardTile& tile : TILES) {
    if (call.d > tile.head_dim || call.dv > tile.head_dim_v) continue;
    if (call.softcap != 0 && tile.with_softcap == nullptr) continue;
    if (call.dropout_p != 0 && tile.with_dropout == nullptr) continue;
    if (best == nullptr) {
      best = &tile;
    } else if (tile.head_dim == best->head_dim &&
               core::sums_bytes_of_round(call, tile) < core::sums_bytes_of_round(call, *best)) {
      best = &tile;
    }
  }
  return best != nullptr ? *best : TILES[std::size(TILES) - 1];
}

// Turns the main launch of `plan` into that of a kernel with dropout.
void add_dropout(LaunchPlan& plan, const BackwardProblem& problem) {
  const Problem& call = problem.call;
  DroppingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  params.dropout = core::dropout_params(call);
  params.kept_share = 1 / params.dropout.scale;
  params.dropped_heads = core::dropped_heads(problem);
  for (Launch& launch : plan.launches) {
    if (!launch.kernel.ends_with("_dropout")) continue;
    std::memcpy(static_cast<void*>(&params.call), launch.params.data(), sizeof params.call);
    launch.params = core::bytes(params);
    launch.image = std::string("hopper/dropout_") + core::dtype_word(call.dtype);
    for (const PointerSlot& slot :
         core::dropout_pointers(call, offsetof(DroppingBackwardParams, dropout)))
      launch.pointers.push_back(slot);
  }
}

}  // namespace

PlanResult plan_backward(const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  const BackwardTile& tile = tile_for(call);
  Reasons reasons = core::refuse_rounds(problem, "hopper");
  if (call.softcap != 0 && tile.with_softcap == nullptr) {
    reasons.push_back(
        std::string("softcap with gradients of head dimensions above 128: hopper computes those "
                    "without; drop softcap") +
        core::USE_TORCH);
  }
  const bool drops = call.dropout_p != 0;
  if (drops && (call.softcap != 0 || tile.with_dropout == nullptr)) {
    reasons.push_back(std::string("gradients of dropout_p with ") +
                      (call.softcap != 0 ? "a softcap" : "head dimensions above 128") +
                      ": hopper takes either alone; leave the implementation out" +
                      core::USE_TORCH);
  }
  core::BackwardTile main_tile = tile;
  if (call.softcap != 0 && tile.with_softcap != nullptr) main_tile.name = tile.with_softcap;
  if (drops && tile.with_dropout != nullptr) main_tile.name = tile.with_dropout;
  BackwardProblem undropped = problem;  // add_dropout() adds what is dropped to its plan
  undropped.call.dropout_p = 0;
  PlanResult result = core::plan_backward(describe(), {&main_tile, 1}, undropped, device);
  if (const auto* more = std::get_if<Reasons>(&result))
    reasons.insert(reasons.end(), more->begin(), more->end());
  if (!reasons.empty()) return reasons;
  const KeyTileOrder order = order_tiles(problem, tile, device);
  result = core::complete_rounds<BackwardKernelParams>(
      std::get<LaunchPlan>(std::move(result)), problem, tile, device, "hopper",
      [&](BackwardKernelParams& params) {
        params.group_heads = static_cast<int32_t>(order.group_heads);
        params.upward_heads = static_cast<int32_t>(order.upward_heads);
        params.tiles_in_a_row = static_cast<int32_t>(order.tiles_in_a_row);
        params.packed_rows = static_cast<int32_t>(order.packed_rows);
        params.packed_tiles = static_cast<int32_t>(order.packed_tiles);
        params.upward_work = static_cast<int32_t>(order.upward_work);
        params.backward.scale *= core::dropout_params(call).scale;  // 1 without dropout
      });
  if (auto* plan = std::get_if<LaunchPlan>(&result)) {
    if (drops) add_dropout(*plan, problem);
    for (Launch& launch : plan->launches)
      launch.uses_pdl = !launch.tensor_maps.empty();  // it waits where it has to
  }
  return result;
}

}  // namespace archflash::hopper
