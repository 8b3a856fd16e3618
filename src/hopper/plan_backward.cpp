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

#include "common/planning/backward_rounds.h"
#include "common/planning/backward_shares.h"
#include "common/planning/masks.h"
#include "common/planning/order.h"
#include "common/planning/workspace.h"
#include "hopper/backward_config.cuh"
#include "hopper/backward_params.h"
#include "hopper/chains_config.cuh"

namespace archflash::hopper {

const Description& describe();

namespace {

struct BackwardTile : core::RoundsTile {
  // The names of the kernels for calls with a softcap and with dropout; null: there is none.
  const char* with_softcap;
  const char* with_dropout;
  bool stays;  // its CTAs can take one tile of keys after another
  int ctas_per_sm;
  int64_t dq_ctas;  // of a round, of the kernel that writes dQ of many chains; 0: there is none
};

template <class C>
constexpr BackwardTile backward_tile(const char* name, const char* with_softcap,
                                     const char* with_dropout) {
  BackwardTile tile{
      core::rounds_tile<C>(name), with_softcap, with_dropout, C::STAYS, C::CTAS_PER_SM,
      DQ_CTAS_OF_ROUND<C>};
  tile.reads_many_chains = true;
  return tile;
}

// The tiles of the smallest head dimensions come first. With "exact" in its name one has sums of dQ
// that leave out rows and columns.
constexpr BackwardTile TILES[] = {
    backward_tile<BackwardD32<DType::F16>>("d32", nullptr, nullptr),
    backward_tile<BackwardD64<DType::F16>>("d64", "d64_softcap", "d64_dropout"),
    backward_tile<BackwardD64Exact<DType::F16>>("d64_exact", nullptr, nullptr),
    backward_tile<BackwardD96<DType::F16>>("d96", nullptr, nullptr),
    backward_tile<BackwardD128<DType::F16>>("d128", "d128_softcap", "d128_dropout"),
    backward_tile<BackwardD128Exact<DType::F16>>("d128_exact", nullptr, nullptr),
    backward_tile<BackwardD192<DType::F16>>("d192", nullptr, nullptr),
    backward_tile<BackwardD256<DType::F16>>("d256", nullptr, nullptr),
};

// The tiles for few keys, whose kernels are in an image of their own, without one for many chains.
template <class C>
constexpr BackwardTile short_tile(const char* name) {
  BackwardTile tile = backward_tile<C>(name, nullptr, nullptr);
  tile.dq_ctas = 0;
  tile.reads_many_chains = false;
  return tile;
}
constexpr BackwardTile SHORT_TILES[] = {
    short_tile<BackwardD32Short<DType::F16>>("d32_short"),
    short_tile<BackwardD64Short<DType::F16>>("d64_short"),
};

// The tiles where a head has one of them, whose kernels are in that image, too.
constexpr BackwardTile ONE_TILES[] = {
    backward_tile<BackwardD32One<DType::F16>>("d32_one", nullptr, nullptr),
    backward_tile<BackwardD64One<DType::F16>>("d64_one", nullptr, nullptr),
    backward_tile<BackwardD96One<DType::F16>>("d96_one", nullptr, nullptr),
};

// For block_mask: the names of the main kernels, behind those of the tiles whose sums of dQ they
// have.
struct TableTile {
  BackwardTile tile;
  const char* main_name;
};
constexpr TableTile TABLE_TILES[] = {
    {backward_tile<BackwardD64Table<DType::F16>>("d64_short", nullptr, nullptr), "d64_table"},
    {backward_tile<BackwardD128Table<DType::F16>>("d128", nullptr, nullptr), "d128_table"},
};

// One share has all query rows of a tile of keys.
core::RowShares whole_rows(const Problem& call, const BackwardTile& tile) {
  return {1, core::ceil_div(call.nq, tile.round_rows) * tile.round_rows};
}

// Shares out the query rows of each tile of keys, in whole rounds.
core::RowShares share_out(const Problem& call, const BackwardTile& tile, const Device& device) {
  constexpr int64_t MOST_WAVES = 4;  // of CTAs, with which all SMs are busy
  constexpr int64_t FLOAT = sizeof(float);
  const int64_t share_bytes = core::share_bytes(call);
  const core::RowShares whole = whole_rows(call, tile);
  const int64_t heads = call.batch * call.heads_kv;
  const int64_t ctas = heads * core::ceil_div(call.nk, tile.rows);
  const int64_t most_ctas = MOST_WAVES * device.sm_count;
  if (call.varlen || ctas == 0 || ctas >= most_ctas) return whole;
  // They take no more memory than a part of the sums of dQ, and the gradients of each query head.
  int64_t most_bytes = call.batch * call.heads_q * call.nq * call.d * FLOAT / 4;
  if (call.heads_q != call.heads_kv) most_bytes += share_bytes * (call.heads_q / call.heads_kv);
  core::RowShares best = whole;
  double best_time = 0;
  for (int64_t shares = 1; shares * tile.round_rows < whole.rows + tile.round_rows; ++shares) {
    if (shares > 1 && (shares * share_bytes > most_bytes || shares * ctas > most_ctas)) break;
    const int64_t rounds = core::ceil_div(whole.rows / tile.round_rows, shares);
    const core::RowShares split{shares, rounds * tile.round_rows};
    if ((shares - 1) * split.rows >= whole.rows) continue;  // a share would be empty
    std::vector<core::Run> runs =
        core::runs_of_keys(call, tile.rows, tile.round_rows, split, call.heads_q / call.heads_kv);
    for (core::Run& run : runs) run.count = heads;
    double time = core::queue_time(runs, device.sm_count);
    if (shares > 1) time += core::time_of_shares(call, tile.head_dim, shares);
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
  const int64_t ctas = int64_t{tile.ctas_per_sm} * device.sm_count;
  if (!tile.stays || problem.call.varlen || tiles <= ctas) return;
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t counter = workspace.add(sizeof(int32_t));
  plan.workspace_bytes = workspace.bytes();
  for (Launch* launch : {&plan.launches.front(), main})
    add_pointer(*launch, Operand::Workspace, offsetof(P, taken_gmem), counter);
  const auto count = static_cast<int32_t>(tiles);
  std::memcpy(main->params.data() + offsetof(P, tiles), &count, sizeof count);
  main->grid[0] = ctas;
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

// Whether a causal mask hides so little that tiles of keys are best ordered as without one: where
// keys are many more than rows.
bool sees_nearly_all(const Problem& call) {
  return is_triangle(call) && !call.varlen && call.nk >= 4 * call.nq;
}

// Whether CTAs take turns though nobody asks for it. Then the first one to add to a sum of dQ
// writes it, and no launch has to clear it. Measured on an H200 (docs/lab/hopper.md) that was
// faster for many heads with few keys, and where many rows are shared out, when more CTAs add to
// the same sums; CTAs with shares of few rows wait for one another.
bool turns_are_faster(const Problem& call, const BackwardTile& tile, const core::RowShares& split,
                      const Device& device) {
  constexpr int64_t FEW_KEYS = 640, FEW_KEYS_CAUSAL = 1280, MANY_ROWS = 2048;
  const bool triangle = is_triangle(call);
  if (split.shares > 1) return call.nq >= MANY_ROWS;
  if (call.varlen || tile.head_dim > 128 || call.heads_q != call.heads_kv) return false;
  if (is_windowed(call) && !triangle) return false;
  if (call.nk > (triangle ? FEW_KEYS_CAUSAL : FEW_KEYS) || 2 * call.nq < call.nk) return false;
  const int64_t tiles = core::ceil_div(call.nk, tile.rows);
  // A tile that is alone waits for none, and of up to three tiles of 128 columns the one before has
  // mostly ended.
  const bool waits_little =
      tiles == 1 || (tile.head_dim == 128 && tiles <= 3 && call.nq >= call.nk);
  const int64_t many_waves = waits_little ? 2 : 4;
  return call.batch * call.heads_kv * tiles >= many_waves * device.sm_count;
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
                         const core::RowShares& split, const Device& device) {
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
  const bool plain = !is_windowed(call) || (problem.deterministic && sees_nearly_all(call));
  KeyTileOrder order{all};
  // What the CTAs read and add to while one of them comes to where the one before began.
  const int64_t reach = int64_t{device.sm_count} * tile.rows * row_bytes;
  // A tile that goes upwards waits for the one behind it, which in chains adds to other sums.
  const bool in_chains = core::sums_of_round(problem, tile, device, split.shares) > 2;
  const bool goes_upwards =
      !in_chains && (heads_per_kv == 1 || (!call.varlen && reach <= int64_t{36} << 20));
  if (problem.deterministic && triangle && !plain && goes_upwards) {
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
  if (triangle && !plain)
    order.tiles_in_a_row = tiles_in_a_row(heads_per_kv, problem.deterministic);
  if (call.varlen && tile.head_dim <= 128) return order;  // as fast, and found sooner
  if (plain && tile.head_dim <= 128) {
    constexpr int64_t TILES_AT_A_TIME = 16, MOST_AT_A_TIME = 64;
    // With room for one tile of keys smaller groups were 2 to 4% faster.
    const bool small = tile.head_dim == 96;
    const auto at_a_time = [&](int64_t most) {
      return core::ceil_div(device.sm_count, std::min(tiles, most));
    };
    int64_t heads = std::clamp(at_a_time(TILES_AT_A_TIME), BYTES / (small ? 4 : 2) / head_bytes,
                               std::max(BYTES / head_bytes, int64_t{1}));
    heads = std::max(heads, at_a_time(MOST_AT_A_TIME));
    if (problem.deterministic && !small) {
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

// Whether a head's keys are one such tile, which all its rows see: then its CTA has all of dQ. With
// more than one round of rows the warps that write it hold up the others (docs/lab/hopper.md).
bool is_one_tile(const Problem& call, const BackwardTile& tile) {
  const bool all_rows_see =
      !is_windowed(call) || (is_triangle(call) && call.q_offset_default && call.nk >= call.nq);
  return call.nk > 0 && call.nk <= tile.rows && call.nq <= tile.round_rows &&
         call.heads_q == call.heads_kv && all_rows_see && !call.varlen && call.softcap == 0 &&
         call.dropout_p == 0;
}

// The tile with the smallest sums of dQ among the smallest ones that serve a call. If there is
// none, the largest tile of all, which refuses the call.
const BackwardTile& tile_for(const BackwardProblem& problem) {
  const Problem& call = problem.call;
  // Tiles of 64 rows and keys, where they leave out a sixth or more of what rounds of 128 rows and
  // tiles of 128 keys compute (docs/lab/hopper.md). More rows are unmeasured. With more keys than
  // KEYS_IN_TURNS the tiles that take turns make chains, which the other tiles have a kernel for.
  constexpr int64_t SHORT_ROWS = 512, KEYS_IN_TURNS = 512;
  const auto computed = [&](int64_t step) {
    return core::ceil_div(call.nq, step) * core::ceil_div(call.nk, step) * step * step;
  };
  const bool is_short = call.nq <= SHORT_ROWS && 6 * computed(64) <= 5 * computed(128) &&
                        (!problem.deterministic || call.nk <= KEYS_IN_TURNS) && !call.varlen &&
                        call.softcap == 0 && call.dropout_p == 0;
  for (const BackwardTile& tile : SHORT_TILES) {
    if (is_short && call.d <= tile.head_dim && call.dv <= tile.head_dim_v) return tile;
  }
  for (const BackwardTile& tile : ONE_TILES) {
    if (call.d <= tile.head_dim && call.dv <= tile.head_dim_v && is_one_tile(call, tile))
      return tile;
  }
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

const TableTile& table_tile_for(const Problem& call) {
  return TABLE_TILES[std::max(call.d, call.dv) <= TABLE_TILES[0].tile.head_dim ? 0 : 1];
}

void refuse_table(const BackwardProblem& problem, Reasons& reasons) {
  const Problem& call = problem.call;
  const auto add = [&](const std::string& given) {
    reasons.push_back("gradients of block_mask with " + given +
                      ": hopper computes those of head dimensions up to 128 without; leave the "
                      "implementation out" +
                      core::USE_TORCH);
  };
  if (std::max(call.d, call.dv) > 128) add("head dimensions above 128");
  if (call.softcap != 0) add("a softcap");
  if (call.dropout_p != 0) add("dropout_p");
  if (problem.deterministic) add("deterministic gradients");
  if (call.heads_q > call.heads_kv * device::ListedRound::MOST_HEADS)
    add("more than " + std::to_string(device::ListedRound::MOST_HEADS) + " heads for each of k");
  if (core::ceil_div(call.nq, MASK_BLOCK) > device::ListedRound::MOST_BLOCKS) add("so many rows");
}

// From so many chains on several CTAs write dQ of a round. With three or four that was 5 to 20%
// slower (docs/lab/hopper.md).
constexpr int64_t MANY_CHAINS = 6;

void write_dq_of_chains(LaunchPlan& plan, const BackwardTile& tile) {
  for (Launch& launch : plan.launches) {
    if (!launch.kernel.starts_with("hopper_backward_dq_")) continue;
    launch.kernel += "_chains";
    launch.grid[0] *= tile.dq_ctas;
  }
}

// Turns the main launch of `plan` into that of a kernel for tables of blocks, whose CTAs list their
// rounds in the workspace.
void add_table(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile) {
  Launch* const main = main_launch(plan);
  if (main == nullptr) return;
  const Problem& call = problem.call;
  ListingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main->params.data(), sizeof params.call);
  params.masks = core::mask_params(call);
  const int64_t rounds =
      core::ceil_div(call.nq, tile.round_rows) * (call.heads_q / call.heads_kv) + 1;
  params.rounds_of_cta = static_cast<int32_t>(rounds);
  main->params = core::bytes(params);
  main->image = std::string("hopper/bwd_table_") + core::dtype_word(call.dtype);
  add_pointers(*main, core::mask_pointers(call, offsetof(ListingBackwardParams, masks)));
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t lists =
      workspace.add(main->grid[0] * rounds * int64_t{sizeof(device::ListedRound)});
  plan.workspace_bytes = workspace.bytes();
  add_pointer(*main, Operand::Workspace, offsetof(ListingBackwardParams, rounds_gmem), lists);
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
    add_pointers(launch, core::dropout_pointers(call, offsetof(DroppingBackwardParams, dropout)));
  }
}

}  // namespace

PlanResult plan_backward(const BackwardProblem& asked, const Device& device) {
  BackwardProblem problem = asked;
  const Problem& call = problem.call;
  const bool table = call.block_mask;
  const BackwardTile& tile = table ? table_tile_for(call).tile : tile_for(problem);
  Reasons reasons = core::refuse_rounds(problem, "hopper");
  if (call.softcap != 0 && tile.with_softcap == nullptr) {
    reasons.push_back(
        std::string("softcap with gradients of head dimensions above 128: hopper computes those "
                    "without; drop softcap") +
        core::USE_TORCH);
  }
  if (table) refuse_table(problem, reasons);
  const bool drops = call.dropout_p != 0 && !table;
  if (drops && (call.softcap != 0 || tile.with_dropout == nullptr)) {
    reasons.push_back(std::string("gradients of dropout_p with ") +
                      (call.softcap != 0 ? "a softcap" : "head dimensions above 128") +
                      ": hopper takes either alone; leave the implementation out" +
                      core::USE_TORCH);
  }
  core::BackwardTile main_tile = tile;
  if (call.softcap != 0 && tile.with_softcap != nullptr) main_tile.name = tile.with_softcap;
  if (drops && tile.with_dropout != nullptr) main_tile.name = tile.with_dropout;
  if (table) main_tile.name = table_tile_for(call).main_name;
  BackwardProblem plain = problem;  // add_dropout() and add_table() add what is left out here
  plain.call.dropout_p = 0, plain.call.block_mask = 0;
  PlanResult result = core::plan_backward(describe(), {&main_tile, 1}, plain, device);
  if (const auto* more = std::get_if<Reasons>(&result))
    reasons.insert(reasons.end(), more->begin(), more->end());
  if (!reasons.empty()) return reasons;
  if (std::get<LaunchPlan>(result).launches.empty()) return result;  // there is no head
  const core::RowShares split = table ? whole_rows(call, tile) : share_out(call, tile, device);
  if (tile.writes_dq) {
    problem.deterministic = false;  // each row of dQ is written once
  } else {
    problem.deterministic |= !table && turns_are_faster(call, tile, split, device);
  }
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
    if (split.shares > 1) {
      core::add_shares(*plan, problem, "hopper", split.shares);
      main_launch(*plan)->grid[0] *= split.shares;
    }
    take_tiles(*plan, problem, tile, device);
    if (tile.dq_ctas > 0 && core::sums_of_round(problem, tile, device, split.shares) >= MANY_CHAINS)
      write_dq_of_chains(*plan, tile);
    if (table) add_table(*plan, problem, tile);
    if (drops) add_dropout(*plan, problem);
    for (Launch& launch : plan->launches) {
      if (launch.kernel.ends_with("_short") || launch.kernel.ends_with("_one"))
        launch.image = std::string("hopper/bwd_short_") + core::dtype_word(call.dtype);
      // It waits where it has to. This also takes less of the host.
      launch.uses_pdl = !launch.tensor_maps.empty() ||
                        launch.kernel.starts_with("hopper_backward_rows_") ||
                        launch.kernel.starts_with("hopper_backward_dq_");
    }
  }
  return result;
}

}  // namespace archflash::hopper
