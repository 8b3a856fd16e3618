// hopper: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/device/visible_keys.cuh"
#include "common/planning/backward_rounds.h"
#include "common/planning/masks.h"
#include "common/planning/order.h"
#include "common/planning/workspace.h"
#include "hopper/backward_config.cuh"
#include "hopper/backward_params.h"

namespace archflash::hopper {

const Description& describe();

namespace {

struct BackwardTile : core::RoundsTile {
  // The names of the kernels for calls with a softcap and with dropout; null: there is none.
  const char* with_softcap;
  const char* with_dropout;
  bool stays;  // its CTAs can take one tile of keys after another
};

template <class C>
constexpr BackwardTile backward_tile(const char* name, const char* with_softcap,
                                     const char* with_dropout) {
  return {core::rounds_tile<C>(name), with_softcap, with_dropout, C::STAYS};
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

// How the query rows of a tile of keys are shared out: CTAs, and rows of each, in whole rounds.
struct RowShares {
  int64_t shares, rows;
};

// The CTAs that go over the tiles of a head of K, in the time of which rows they pass.
std::vector<core::Run> runs_of_head(const Problem& call, const BackwardTile& tile,
                                    const RowShares& split) {
  // What a tile's start and end take, as query rows that it could pass meanwhile (NOTES.md).
  constexpr double TILE_ROWS = 256;
  constexpr int64_t NO_SIDE = int64_t{1} << 62;  // what visible_keys() takes for an open window
  const device::VisibleKeys keys = device::visible_keys(
      static_cast<int>(call.nq), static_cast<int>(call.nk), call.q_offset,
      std::min(call.window_left, NO_SIDE), std::min(call.window_right, NO_SIDE));
  const device::VisibleKeys rows{-keys.last_shift, -keys.first_shift, static_cast<int>(call.nq)};
  std::vector<core::Run> runs;
  for (int64_t key = 0; key < call.nk; key += tile.rows) {
    const int64_t last_key = std::min(key + tile.rows, call.nk) - 1;
    const int64_t first = rows.first(static_cast<int>(key)) / tile.round_rows * tile.round_rows;
    const int64_t end = core::ceil_div(rows.last(static_cast<int>(last_key)) + 1, tile.round_rows) *
                        tile.round_rows;
    for (int64_t share = 0; share < split.shares; ++share) {
      const int64_t seen =
          std::min(end, (share + 1) * split.rows) - std::max(first, share * split.rows);
      const auto time =
          static_cast<double>(std::max<int64_t>(seen, 0) * (call.heads_q / call.heads_kv));
      runs.push_back({TILE_ROWS + time, 1});
    }
  }
  return runs;
}

// Shares out the query rows of each tile of keys where the tiles are so few, or the longest of them
// take so long, that SMs would be idle. Each share writes dK and dV in fp32 for a launch behind to
// add up.
RowShares share_out(const Problem& call, const BackwardTile& tile, const Device& device) {
  // The time of the launch behind, in rows; and the bytes that the GPU writes and reads again while
  // its tiles pass a row, for each column of a tile. Measured on an H200 (NOTES.md).
  constexpr double LAUNCH_ROWS = 128, BYTES_OF_ROW = 1024;
  constexpr int64_t MOST_WAVES = 4;  // of CTAs, with which all SMs are busy
  constexpr int64_t FLOAT = sizeof(float);
  const RowShares whole{1, core::ceil_div(call.nq, tile.round_rows) * tile.round_rows};
  const int64_t heads = call.batch * call.heads_kv;
  const int64_t ctas = heads * core::ceil_div(call.nk, tile.rows);
  const int64_t most_ctas = MOST_WAVES * device.sm_count;
  if (call.varlen || ctas == 0 || ctas >= most_ctas) return whole;
  // They take no more memory than other backward passes do: a part of the sums of dQ, and
  // gradients in 16 bits of each query head.
  const int64_t share_bytes = heads * call.nk * (call.d + call.dv) * FLOAT;
  int64_t most_bytes = call.batch * call.heads_q * call.nq * call.d * FLOAT / 4;
  if (call.heads_q != call.heads_kv)
    most_bytes += share_bytes * (call.heads_q / call.heads_kv) / (FLOAT / dtype_bytes(call.dtype));
  RowShares best = whole;
  double best_time = 0;
  for (int64_t shares = 1; shares * tile.round_rows < whole.rows + tile.round_rows; ++shares) {
    if (shares > 1 && (shares * share_bytes > most_bytes || shares * ctas > most_ctas)) break;
    const int64_t rounds = core::ceil_div(whole.rows / tile.round_rows, shares);
    const RowShares split{shares, rounds * tile.round_rows};
    if ((shares - 1) * split.rows >= whole.rows) continue;  // a share would be empty
    std::vector<core::Run> runs = runs_of_head(call, tile, split);
    for (core::Run& run : runs) run.count = heads;
    double time = core::queue_time(runs, device.sm_count);
    if (shares > 1) {
      time += LAUNCH_ROWS +
              static_cast<double>(2 * shares * share_bytes) / (BYTES_OF_ROW * tile.head_dim);
    }
    if (shares == 1 || time < best_time) best = split, best_time = time;
  }
  return best;
}

// The main launch; null: there is no key.
Launch* main_launch(LaunchPlan& plan) {
  for (Launch& launch : plan.launches) {
    if (launch.kernel.starts_with("hopper_attention_bwd_")) return &launch;
  }
  return nullptr;
}

// Makes the main launch of `plan` write shares of dK and dV, and adds the launch that adds them up.
void add_shares(LaunchPlan& plan, const BackwardProblem& problem, int64_t shares) {
  using P = BackwardKernelParams;
  using Sums = SharedGradientsParams;
  const Problem& call = problem.call;
  const std::string word = core::dtype_word(call.dtype);
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  Sums sums;
  std::memset(static_cast<void*>(&sums), 0, sizeof sums);  // equal plans are equal bytes
  Launch last = plan.launches.front();
  last.kernel = "hopper_backward_shares_" + word;
  last.pointers.clear();
  Launch* const main = main_launch(plan);
  P params;
  std::memcpy(static_cast<void*>(&params), main->params.data(), sizeof params);
  const auto share = [&](GradientParams& gradient, Operand operand, int64_t columns, size_t offset,
                         size_t shares_offset) {
    const int64_t head = call.nk * columns;
    const int64_t start =
        workspace.add(call.batch * call.heads_kv * shares * head * int64_t{sizeof(float)});
    gradient = {nullptr, call.heads_kv * shares * head, head, columns, DType::F32, 0};
    for (PointerSlot& slot : main->pointers) {
      if (slot.operand == operand) slot.operand = Operand::Workspace, slot.addend = start;
    }
    last.pointers.push_back({operand, static_cast<int32_t>(offset), 0});
    last.pointers.push_back({Operand::Workspace, static_cast<int32_t>(shares_offset), start});
  };
  sums.dk = params.backward.dk, sums.dv = params.backward.dv;
  share(params.backward.dk, Operand::DK, call.d,
        offsetof(Sums, dk) + offsetof(GradientParams, gmem), offsetof(Sums, dk_shares_gmem));
  share(params.backward.dv, Operand::DV, call.dv,
        offsetof(Sums, dv) + offsetof(GradientParams, gmem), offsetof(Sums, dv_shares_gmem));
  std::memcpy(main->params.data(), static_cast<const void*>(&params), sizeof params);
  main->grid[0] *= shares;
  sums.shares = static_cast<int32_t>(shares);
  sums.heads_kv = static_cast<int32_t>(call.heads_kv);
  sums.nk = static_cast<int32_t>(call.nk);
  sums.d_chunks = static_cast<int32_t>(call.d / 8);
  sums.chunks = static_cast<int32_t>((call.d + call.dv) / 8);
  sums.all_chunks = call.batch * call.heads_kv * call.nk * sums.chunks;
  last.params = core::bytes(sums);
  last.grid = {core::ceil_div(sums.all_chunks, BACKWARD_DQ_THREADS), 1, 1};
  last.block = {BACKWARD_DQ_THREADS, 1, 1};
  plan.launches.insert(plan.launches.begin() + (main - plan.launches.data()) + 1, std::move(last));
  plan.workspace_bytes = workspace.bytes();
}

// Makes the CTAs of the main launch take the tiles one after another where there are more of them
// than SMs, by a counter which the first launch clears. Packed calls have a CTA for each tile,
// because to find a tile of theirs takes more registers than the warp has that would do it.
void take_tiles(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile,
                const Device& device) {
  using P = BackwardKernelParams;
  Launch* const main = main_launch(plan);
  if (main == nullptr) return;
  const int64_t tiles = main->grid[0];
  plan.tile.tiles = tiles;
  if (!tile.stays || problem.call.varlen || tiles <= device.sm_count) return;
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t counter = workspace.add(sizeof(int32_t));
  plan.workspace_bytes = workspace.bytes();
  for (Launch* launch : {&plan.launches.front(), main})
    launch->pointers.push_back({Operand::Workspace, offsetof(P, taken_gmem), counter});
  const auto count = static_cast<int32_t>(tiles);
  std::memcpy(main->params.data() + offsetof(P, tiles), &count, sizeof count);
  main->grid[0] = device.sm_count;
}

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

// A causal mask, a window, or both.
bool is_windowed(const Problem& call) {
  return call.window_left != UNBOUNDED || call.window_right != UNBOUNDED;
}
// A causal mask without a window.
bool is_triangle(const Problem& call) {
  return call.window_left == UNBOUNDED && call.window_right != UNBOUNDED;
}

// Whether CTAs take turns though nobody asks for it. Then the first one to add to a sum of dQ
// writes it, and no launch has to clear it. Measured on an H200 (NOTES.md) that was faster for many
// heads with few keys, and where rows are shared out, when more CTAs add to the same sums.
bool turns_are_faster(const Problem& call, const BackwardTile& tile, const RowShares& split,
                      const Device& device) {
  constexpr int64_t FEW_KEYS = 640, FEW_KEYS_CAUSAL = 1280, MANY_WAVES = 4;
  const bool triangle = is_triangle(call);
  if (split.shares > 1) return true;
  if (call.varlen || tile.head_dim > 128 || call.heads_q != call.heads_kv) return false;
  if (is_windowed(call) && !triangle) return false;
  if (call.nk > (triangle ? FEW_KEYS_CAUSAL : FEW_KEYS) || 2 * call.nq < call.nk) return false;
  return call.batch * call.heads_kv * core::ceil_div(call.nk, tile.rows) >=
         MANY_WAVES * device.sm_count;
}

// Groups have those heads whose Q, dO and sums of dQ stay in L2, measured on an H200 (NOTES.md). In
// turns more of them, because the tiles of a head that are computed at the same time wait for one
// another; under a mask up to 128 columns all, which was faster there.
//
// Without a mask the groups are smaller, where that does not make more than TILES_AT_A_TIME tiles
// of a head be computed at the same time, or in turns more than half as many as it has rounds.
//
// In turns under a causal mask a tile of keys has fewer rounds than the one before. From the last
// tile to the first, over rounds upwards, each comes to a round just behind the one that it waits
// for. The last group goes the other way, from the longest tile to the shortest, so that all CTAs
// end together. These groups are smaller, because tiles of a head that run at the same time are at
// far apart rounds. Where query heads share a head of K they are so far apart that each tile reads
// Q and dO from memory again: so these calls go the first way, with tiles in a row.
KeyTileOrder order_tiles(const BackwardProblem& problem, const BackwardTile& tile,
                         const RowShares& split, const Device& device) {
  constexpr int64_t BYTES = int64_t{32} << 20;
  const Problem& call = problem.call;
  // A share counts as a head.
  const int64_t heads_kv = (call.varlen ? 1 : call.batch) * call.heads_kv;
  const int64_t all = std::max<int64_t>(heads_kv * split.shares, 1);
  const int64_t rows = std::min(call.nq, split.rows);
  const int64_t heads_per_kv = call.heads_q / call.heads_kv;
  const int64_t row_bytes = heads_per_kv * ((call.d + call.dv) * dtype_bytes(call.dtype) +
                                            int64_t{sizeof(float)} * tile.head_dim);
  const int64_t head_bytes = std::max<int64_t>(rows * row_bytes, 1);
  const int64_t tiles = std::max<int64_t>(core::ceil_div(call.nk, tile.rows), 1);
  const bool triangle = is_triangle(call);
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
  if (call.varlen && tile.head_dim <= 128) return order;  // as fast, and found sooner
  if (!is_windowed(call) && tile.head_dim <= 128) {
    constexpr int64_t TILES_AT_A_TIME = 16, MOST_AT_A_TIME = 64;
    const auto at_a_time = [&](int64_t most) {
      return core::ceil_div(device.sm_count, std::min(tiles, most));
    };
    int64_t heads = std::clamp(at_a_time(TILES_AT_A_TIME), BYTES / 2 / head_bytes,
                               std::max(BYTES / head_bytes, int64_t{1}));
    heads = std::max(heads, at_a_time(MOST_AT_A_TIME));
    if (problem.deterministic) {
      const int64_t rounds = core::ceil_div(rows, tile.round_rows) * heads_per_kv;
      heads = std::max(heads, 2 * device.sm_count / std::max<int64_t>(rounds, 1));
    }
    order.group_heads = core::ceil_div(all, std::max<int64_t>(all / heads, 1));
    return order;
  }
  if (problem.deterministic && tile.head_dim <= 128) return order;
  const int64_t times = problem.deterministic ? 2 : 1;
  order.packed_rows = times * BYTES / row_bytes;
  order.packed_tiles = times * device.sm_count;
  if (call.varlen) return order;
  // Their tiles fill the GPU.
  const int64_t heads = std::max(BYTES / head_bytes, core::ceil_div(device.sm_count, tiles));
  // A smaller last group would start with its longest tiles when all others are done.
  order.group_heads = core::even_size(all, std::min(times * heads, all));
  return order;
}

// The tile with the smallest sums of dQ among the smallest ones that serve a call. If there is
// none, the largest tile of all, which refuses the call.
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

PlanResult plan_backward(const BackwardProblem& asked, const Device& device) {
  BackwardProblem problem = asked;
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
  if (std::get<LaunchPlan>(result).launches.empty()) return result;  // there is no head
  const RowShares split = share_out(call, tile, device);
  problem.deterministic |= turns_are_faster(call, tile, split, device);
  const KeyTileOrder order = order_tiles(problem, tile, split, device);
  result = core::complete_rounds<BackwardKernelParams>(
      std::get<LaunchPlan>(std::move(result)), problem, tile, device, "hopper",
      [&](BackwardKernelParams& params) {
        params.group_heads = static_cast<int32_t>(order.group_heads);
        params.upward_heads = static_cast<int32_t>(order.upward_heads);
        params.tiles_in_a_row = static_cast<int32_t>(order.tiles_in_a_row);
        params.packed_rows = static_cast<int32_t>(order.packed_rows);
        params.packed_tiles = static_cast<int32_t>(order.packed_tiles);
        params.upward_work = static_cast<int32_t>(order.upward_work);
        params.shares = static_cast<int32_t>(split.shares);
        params.share_rows = static_cast<int32_t>(split.rows);
        params.backward.scale *= core::dropout_params(call).scale;  // 1 without dropout
      },
      split.shares);
  if (auto* plan = std::get_if<LaunchPlan>(&result)) {
    if (split.shares > 1) add_shares(*plan, problem, split.shares);
    take_tiles(*plan, problem, tile, device);
    if (drops) add_dropout(*plan, problem);
    for (Launch& launch : plan->launches)
      launch.uses_pdl = !launch.tensor_maps.empty();  // it waits where it has to
  }
  return result;
}

}  // namespace archflash::hopper
