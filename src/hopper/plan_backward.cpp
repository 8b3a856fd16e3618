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
#include "common/planning/list_backward.h"
#include "common/planning/masks.h"
#include "common/planning/order.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "hopper/backward/backward_config.cuh"
#include "hopper/backward/backward_params.h"
#include "hopper/lists/list_bwd_config.cuh"
#include "hopper/plan/plan_backward_masks.h"
#include "hopper/plan/plan_backward_order.h"
#include "hopper/plan/plan_backward_parts.h"
#include "hopper/plan/plan_backward_rows.h"
#include "hopper/plan/plan_backward_tiles.h"
#include "hopper/plan/plan_backward_turns.h"

namespace archflash::hopper {

const Description& describe();

namespace {

// A tile whose kernel for parts is another one, with the same sums of dQ.
template <class C>
constexpr BackwardTile tile_with_parts(const char* name, const char* with_parts,
                                       const char* with_softcap = nullptr,
                                       const char* with_dropout = nullptr) {
  BackwardTile tile = backward_tile<C>(name, with_softcap, with_dropout);
  tile.with_parts = with_parts;
  return tile;
}

// The tiles of the smallest head dimensions come first. With "exact" in its name one has sums of dQ
// that leave out rows and columns.
constexpr BackwardTile TILES[] = {
    backward_tile<BackwardD32>("d32", nullptr, nullptr),
    tile_with_parts<BackwardD64<>>("d64", "d64_parts", "d64_softcap", "d64_dropout"),
    tile_with_parts<BackwardD64Exact>("d64_exact", "d64_parts"),
    backward_tile<BackwardD96>("d96", nullptr, nullptr),
    tile_with_parts<BackwardD128<>>("d128", "d128_parts", "d128_softcap", "d128_dropout"),
    tile_with_parts<BackwardD128Exact>("d128_exact", "d128_parts"),
    backward_tile<BackwardD192>("d192", nullptr, nullptr),
    backward_tile<BackwardD256>("d256", nullptr, nullptr),
};

// The tiles for few keys, whose kernels are in an image of their own. By rules they have one chain.
template <class C>
constexpr BackwardTile short_tile(const char* name) {
  BackwardTile tile = backward_tile<C>(name, nullptr, nullptr);
  tile.reads_many_chains = false;
  return tile;
}
constexpr BackwardTile SHORT_TILES[] = {
    short_tile<BackwardD32Short>("d32_short"),
    short_tile<BackwardD64Short>("d64_short"),
};

// The tiles where a head has one of them, whose kernels are in that image, too: where those for few
// keys serve a call, and elsewhere.
constexpr BackwardTile SHORT_ONE_TILES[] = {
    backward_tile<BackwardD32ShortOne>("d32_short_one", nullptr, nullptr),
    backward_tile<BackwardD64ShortOne>("d64_short_one", nullptr, nullptr),
};
constexpr BackwardTile ONE_TILES[] = {
    backward_tile<BackwardD32One>("d32_one", nullptr, nullptr),
    backward_tile<BackwardD64One>("d64_one", nullptr, nullptr),
    backward_tile<BackwardD96One>("d96_one", nullptr, nullptr),
    backward_tile<BackwardD128One>("d128_one", nullptr, nullptr),
};

// The tiles that take turns and of which the last one writes dQ, whose kernels are in that image,
// too.
constexpr BackwardTile TURNS_TILES[] = {
    backward_tile<BackwardD64Turns>("d64_turns", nullptr, nullptr),
    backward_tile<BackwardD96Turns>("d96_turns", nullptr, nullptr),
    backward_tile<BackwardD128Turns>("d128_turns", nullptr, nullptr),
};
// Under a causal mask, at more than 96 columns: its CTAs take one tile each.
constexpr BackwardTile CAUSAL_TURNS_TILE =
    backward_tile<BackwardD128CausalTurns>("d128_causal_turns", nullptr, nullptr);

// A tile whose CTAs stay, in that image, too, with the sums of dQ of the tile that it is named
// after; and the name of its main kernel.
constexpr BackwardTile STAYING_TILE = backward_tile<BackwardD128Stays>("d128", nullptr, nullptr);
constexpr const char* STAYING_NAME = "d128_stays";

// Makes the CTAs of the main launch take the tiles one after another where there are more of them
// than SMs, by a counter which the first launch clears. Packed calls have a CTA for each tile,
// because to find a tile of theirs takes more registers than the warp has that would do it; so does
// a share of one, where K comes to where V was.
void take_tiles(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile,
                const Device& device, int64_t shares) {
  using P = BackwardKernelParams;
  Launch* const main = main_launch(plan);
  if (main == nullptr) return;
  const int64_t tiles = main->grid[0];
  plan.tile.tiles = tiles;
  const int64_t ctas = int64_t{tile.ctas_per_sm} * device.sm_count;
  // Above 128 columns few tiles of each CTA were slower.
  constexpr int64_t FEW = 2;
  const int64_t fewest = tile.head_dim > 128 ? FEW * ctas : ctas + 1;
  if (!tile.stays || problem.call.varlen || tiles < fewest) return;
  if (tile.swaps_keys && shares > 1) return;
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t counter = workspace.add(2 * sizeof(int32_t));
  plan.workspace_bytes = workspace.bytes();
  for (Launch* launch : {&plan.launches.front(), main})
    add_pointer(*launch, Operand::Workspace, offsetof(P, taken_gmem), counter);
  const auto count = static_cast<int32_t>(tiles);
  std::memcpy(main->params.data() + offsetof(P, tiles), &count, sizeof count);
  main->grid[0] = ctas;
}

// Whether TMA can write dQ.
bool writes_by_tma(const BackwardProblem& problem) {
  constexpr int64_t STRIDE_LIMIT = int64_t{1} << 40;  // in bytes
  const Problem& call = problem.call;
  const BackwardTensor& dq = problem.dq;
  const auto takes = [&](int64_t size, int64_t stride) {
    return size == 1 || (stride > 0 && stride * dtype_bytes(dq.dtype) < STRIDE_LIMIT);
  };
  return dq.dtype == call.dtype && !problem.accumulate && takes(call.batch, dq.strides.batch) &&
         takes(call.heads_q, dq.strides.head) && takes(call.nq, dq.strides.row);
}

// Whether a head's keys are one such tile, of which each row sees some: then its CTAs have all of
// dQ.
bool is_one_tile(const BackwardProblem& problem, const BackwardTile& tile) {
  const Problem& call = problem.call;
  return call.d <= tile.head_dim && call.dv <= tile.head_dim_v && call.nk <= tile.rows &&
         is_plain_or_causal(call) && writes_by_tma(problem);
}

// Rows up to which there are tiles of their own, and those of packed sequences, whose CTAs do not
// stay; more are unmeasured.
constexpr int64_t SHORT_ROWS = 512, SHORT_PACKED_ROWS = 400;

// Whether tiles take turns of which the last one writes dQ, so that no launch comes behind. That
// was measured faster where many heads have two tiles of keys (docs/lab/hopper.md): of few heads,
// or of more tiles, most would wait for the one before. Where there are many times as many rows as
// keys, fewer heads are enough above 64 columns. Up to 32 columns it is unmeasured.
bool ends_in_turns(const BackwardProblem& problem, const BackwardTile& tile, const Device& device) {
  const Problem& call = problem.call;
  const int64_t heads = call.batch * call.heads_kv, columns = std::max(call.d, call.dv);
  const bool few_rows = call.nq <= SHORT_ROWS && heads >= device.sm_count;
  // If few CTAs take a second tile, all wait for these.
  const bool few_take_two = 2 * heads > device.sm_count && 10 * heads < 7 * device.sm_count;
  const bool many_rows =
      is_plain(call) && has_many_rows(call) && heads >= 64 && !few_take_two && columns > 64;
  // Up to 64 columns the other kernels leave out what half of the second tile has no keys for.
  const bool fills_second = is_plain(call) && has_many_rows(call) && !few_take_two &&
                            columns <= 64 && 2 * call.nk > 3 * tile.rows;
  return is_plain_or_causal(call) && columns > 32 && call.heads_q == call.heads_kv &&
         call.nk > tile.rows && call.nk <= 2 * tile.rows &&
         (few_rows || many_rows || fills_second) && writes_by_tma(problem) &&
         (fills_second || share_out(call, tile, device).all() == 1);
}

// Whether the tile whose CTAs stay serves a deterministic call of so many tiles that these take
// several: the model of turns then says whether it is faster.
bool may_stay(const Problem& call, const Device& device) {
  constexpr int64_t MOST_ROWS = 768;
  const int64_t columns = std::max(call.d, call.dv);
  const int64_t rows = call.nq * (call.heads_q / call.heads_kv);
  const int64_t tiles = call.batch * call.heads_kv * core::ceil_div(call.nk, STAYING_TILE.rows);
  return is_plain(call) && columns > 64 && columns <= STAYING_TILE.head_dim && rows <= MOST_ROWS &&
         tiles > device.sm_count;
}

// Whether CTAs stay at more than 96 columns, and with fewer rows and in turns, where such tiles
// wait less, at more than 64. That was measured faster where many keys have few rows
// (docs/lab/hopper.md): a tile's start and end are a good part of its time.
//
// other: the tile of a call whose CTAs do not.
bool stays(const BackwardProblem& problem, const BackwardTile& other, const Device& device) {
  constexpr int64_t MANY_KEYS = 1024, MORE_KEYS = 512, MANY_WAVES = 5, MORE_WAVES = 3,
                    FEW_WAVES = 2;
  constexpr int64_t FEW_ROWS = 192, MORE_ROWS = 256, MOST_ROWS = 768, FEW_HEADS = 32;
  const Problem& call = problem.call;
  const BackwardTile& tile = STAYING_TILE;
  const int64_t columns = std::max(call.d, call.dv);
  const int64_t rows = call.nq * (call.heads_q / call.heads_kv);
  const int64_t tiles = call.batch * call.heads_kv * core::ceil_div(call.nk, tile.rows);
  const bool fills = tiles >= (rows <= MORE_ROWS ? MORE_WAVES : MANY_WAVES) * device.sm_count;
  // More rows only where all warpgroups have keys of the last tile: the other kernel leaves out
  // those without.
  const int64_t last_keys = call.nk % tile.rows;
  const bool takes_more_rows =
      !problem.deterministic && rows <= MOST_ROWS && tiles > device.sm_count &&
      (last_keys == 0 || 2 * last_keys > tile.rows) &&
      (tiles >= FEW_WAVES * device.sm_count || saves_more_than_parts(problem, other, device));
  const bool is_wide =
      columns > 96 && call.nk >= MORE_KEYS && ((rows <= SHORT_ROWS && fills) || takes_more_rows);
  // The sums of several chains of few heads stay in L2.
  const bool waits_less = problem.deterministic && rows <= SHORT_ROWS &&
                          call.batch * call.heads_kv <= FEW_HEADS && tiles > device.sm_count;
  const bool is_narrow = columns > 64 && columns <= 96 && call.nk >= MANY_KEYS &&
                         (waits_less || (rows <= FEW_ROWS && fills));
  return is_plain(call) && (is_wide || is_narrow) && call.d <= tile.head_dim &&
         call.dv <= tile.head_dim_v;
}

// The tile for more columns than a call has that is faster in parts than `tile`, which has none, or
// null.
const BackwardTile* faster_in_parts(const BackwardProblem& problem, const BackwardTile& tile,
                                    const Device& device) {
  if (tile.head_dim != 96) return nullptr;
  for (const BackwardTile& wider : TILES) {
    const bool is_exact = wider.head_dim == 128 && wider.sums_step < wider.head_dim;
    if (is_exact && is_faster_in_parts(problem, tile, wider, device)) return &wider;
  }
  return nullptr;
}

// Whether the tiles for few keys need no chains in turns.
bool has_one_sum(const BackwardProblem& problem, const Device& device) {
  for (const BackwardTile& tile : SHORT_TILES) {
    if (problem.call.d <= tile.head_dim && problem.call.dv <= tile.head_dim_v)
      return core::sums_of_round(problem, tile, device) == 1;
  }
  return false;
}

// The tile with the smallest sums of dQ among the smallest ones that serve a call. If there is
// none, the largest tile of all, which refuses the call.
const BackwardTile& tile_for(const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  // Tiles of 64 rows and keys, where they leave out a sixth or more of what rounds of 128 rows and
  // tiles of 128 keys compute, of many keys of few heads a ninth (docs/lab/hopper.md). More rows
  // are unmeasured. With more keys than KEYS_IN_TURNS the tiles that take turns make chains, which
  // the other tiles have a kernel for.
  constexpr int64_t KEYS_IN_TURNS = 512, MANY_KEYS = 1024, MOST_TILES = 8;
  const bool few_tiles =
      call.batch * call.heads_kv * core::ceil_div(call.nk, 64) <= MOST_TILES * device.sm_count;
  const int64_t part = call.nk >= MANY_KEYS && few_tiles ? 9 : 6;
  const auto computed = [&](int64_t step) {
    return core::ceil_div(call.nq, step) * core::ceil_div(call.nk, step) * step * step;
  };
  const bool computes_less =
      call.varlen ? is_packed_short(call, SHORT_PACKED_ROWS)
                  : call.nq <= SHORT_ROWS && part * computed(64) <= (part - 1) * computed(128) &&
                        (!problem.deterministic || call.nk <= KEYS_IN_TURNS ||
                         has_one_sum(problem, device));
  // Tiles of 64 rows and keys compute less of what a narrow window hides.
  const auto of_window = [&](int64_t step) {
    return (1 + core::ceil_div(call.window_left, step) + core::ceil_div(call.window_right, step)) *
           step;
  };
  const bool leaves_out_window = !call.varlen && call.window_left != UNBOUNDED &&
                                 call.window_right != UNBOUNDED && call.window_left >= 0 &&
                                 call.window_right >= 0 && !problem.deterministic &&
                                 3 * of_window(64) <= 2 * of_window(128);
  const bool is_short =
      (computes_less || leaves_out_window) && call.softcap == 0 && call.dropout_p == 0;
  for (const BackwardTile& tile : SHORT_ONE_TILES) {
    if (is_short && is_one_tile(problem, tile)) return tile;
  }
  for (const BackwardTile& tile : SHORT_TILES) {
    if (is_short && call.d <= tile.head_dim && call.dv <= tile.head_dim_v) return tile;
  }
  for (const BackwardTile& tile : ONE_TILES) {
    if (is_one_tile(problem, tile)) return tile;
  }
  for (const BackwardTile& tile : TURNS_TILES) {
    if (call.d > tile.head_dim || call.dv > tile.head_dim_v) continue;
    if (ends_in_turns(problem, tile, device))
      return tile.head_dim == 128 && is_windowed(call) ? CAUSAL_TURNS_TILE : tile;
    break;
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
  if (best == nullptr) return TILES[std::size(TILES) - 1];
  if (stays(problem, *best, device)) return STAYING_TILE;
  if (const BackwardTile* in_parts = faster_in_parts(problem, *best, device)) return *in_parts;
  return *best;
}

// The tile for a call. Of deterministic ones the model of turns chooses among those that serve the
// call, in turns and without.
const BackwardTile& choose_tile(const BackwardProblem& problem, const Device& device) {
  const BackwardTile* best = &tile_for(problem, device);
  if (!is_modelled(problem, *best)) return *best;
  BackwardProblem unordered = problem;
  unordered.deterministic = false;
  const auto time_with = [&](const BackwardTile& tile) {
    const Shares shares = share_out_in_turns(problem, tile, device);
    return find_ways(problem, tile, shares, device, true).time;
  };
  double best_time = 0;
  for (const BackwardTile* other : {&tile_for(unordered, device), &STAYING_TILE}) {
    if (other == best || !is_modelled(problem, *other)) continue;
    if (other == &STAYING_TILE && !may_stay(problem.call, device)) continue;
    if (best_time == 0) best_time = time_with(*best);
    const double time = time_with(*other);
    if (time < 0.98 * best_time) best = other, best_time = time;
  }
  return *best;
}

// Where fewer rows share a list, the kernels of another folder waste none.
constexpr int FEWEST_ROWS_OF_LIST = 65;
constexpr core::ListTile LIST_TILES[] = {
    core::list_tile<D64Lists>("d64_lists", 375, FEWEST_ROWS_OF_LIST, "d64_kept_lists"),
    core::list_tile<D128Lists>("d128_lists", 580, FEWEST_ROWS_OF_LIST, "d128_kept_lists"),
    core::list_tile<D192Lists>("d192_lists", 785, FEWEST_ROWS_OF_LIST, "d192_kept_lists"),
};

// Makes more CTAs write dQ, one for each step of a thread, where those of one for each round leave
// room on the SMs. Several sums of a round have a kernel of their own.
void share_out_dq(LaunchPlan& plan, const BackwardTile& tile, int64_t sums, const Device& device) {
  constexpr int64_t CTAS_PER_SM = 2048 / BACKWARD_DQ_THREADS, FLOATS_OF_STEP = 16;
  const int64_t steps =
      core::ceil_div(tile.round_rows * tile.head_dim, FLOATS_OF_STEP * BACKWARD_DQ_THREADS);
  for (Launch& launch : plan.launches) {
    if (!launch.kernel.starts_with("hopper_backward_dq_")) continue;
    if (sums > 1) launch.kernel += "_chains";
    if (launch.grid[0] * steps <= CTAS_PER_SM * device.sm_count) launch.grid[1] = steps;
  }
}

// Turns the main launch of `plan` into that of a kernel that writes dQ by TMA.
void add_dq_map(LaunchPlan& plan, const BackwardProblem& problem, const BackwardTile& tile) {
  Launch* const main = main_launch(plan);
  if (main == nullptr) return;
  EndingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main->params.data(), sizeof params.call);
  main->params = core::bytes(params);
  main->tensor_maps.push_back(
      core::dq_map(problem, offsetof(EndingBackwardParams, dq_map), tile.dq_box));
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
  if (call.key_indices > 0)
    return core::plan_list_backward(describe(), LIST_TILES, problem, device);
  // Without rows there is no mask to read.
  const bool masks = call.nq > 0;
  const bool adds = masks && adds_elements(problem);
  const bool table = (masks || call.block_mask) && lists_rounds(problem);
  const RowsTile* const rows = rows_tile_for(problem, device);
  if (rows != nullptr && !(leaves_rows_empty(problem, *rows) &&
                           wastes_rows(call, *rows, tile_for(problem, device), device)))
    return plan_rows(problem, *rows, device);
  const BackwardTile& tile =
      adds || table ? table_tile_for(problem).tile : choose_tile(problem, device);
  Reasons reasons = core::refuse_rounds(problem, "hopper");
  if (call.softcap != 0 && tile.with_softcap == nullptr && !table) {
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
  if (&tile == &STAYING_TILE) main_tile.name = STAYING_NAME;
  if (adds || table) main_tile.name = table_tile_for(problem).main_name;
  BackwardProblem plain = problem;  // add_dropout() and add_table() add what is left out here
  plain.call.dropout_p = 0, plain.call.block_mask = 0, plain.call.mask = 0;
  PlanResult result = core::plan_backward(describe(), {&main_tile, 1}, plain, device);
  if (const auto* more = std::get_if<Reasons>(&result))
    reasons.insert(reasons.end(), more->begin(), more->end());
  if (!reasons.empty()) return reasons;
  if (std::get<LaunchPlan>(result).launches.empty()) return result;  // there is no head
  Shares shares = table ? Shares{1, whole_rows(call, tile), call.heads_q / call.heads_kv}
                  : asked.deterministic ? share_out_in_turns(problem, tile, device)
                                        : share_out(call, tile, device);
  if (tile.writes_dq) {
    problem.deterministic = false;  // each row of dQ is written once
  } else {
    problem.deterministic |= tile.ends_dq || (!table && &tile != &STAYING_TILE &&
                                              turns_are_faster(call, tile, shares, device));
  }
  BackwardProblem in_turns = problem;
  if (table) in_turns.deterministic = false;  // lists of rounds have turns of their own
  Ways ways = find_ways(in_turns, tile, shares, device, asked.deterministic);
  Parts parts;
  if (!table && !adds && !drops && call.softcap == 0)
    parts = find_parts(problem, tile, shares, problem.deterministic, ways.turns, device);
  if (parts.parts > 0 && shares.rows.shares > 1) {
    shares.rows = whole_rows(call, tile);
    ways = find_ways(in_turns, tile, shares, device, asked.deterministic);
  }
  if (parts.sums > 0) ways.turns = {parts.sums};
  const core::RowShares& split = shares.rows;
  KeyTileOrder& order = ways.order;
  Turns& turns = ways.turns;
  // Fewer tiles of a head at a time wait for one another, for more that is read from memory.
  if (table && problem.deterministic) order.group_heads *= 2;
  if (table && problem.deterministic)
    turns = find_turns_of_lists(problem, tile, int64_t{tile.ctas_per_sm} * device.sm_count);
  result = core::complete_rounds<BackwardKernelParams>(
      std::get<LaunchPlan>(std::move(result)), problem, tile, "hopper",
      [&](BackwardKernelParams& params) {
        params.group_heads = static_cast<int32_t>(order.group_heads);
        params.upward_heads = static_cast<int32_t>(order.upward_heads);
        params.tiles_in_a_row = static_cast<int32_t>(order.tiles_in_a_row);
        params.packed_rows = static_cast<int32_t>(order.packed_rows);
        params.packed_tiles = static_cast<int32_t>(order.packed_tiles);
        params.upward_work = static_cast<int32_t>(order.upward_work);
        params.packed_sequences = static_cast<int32_t>(order.packed_sequences);
        params.turn_tiles = static_cast<int32_t>(turns.tiles);
        params.turn_steps_shift = static_cast<int32_t>(turns.steps_shift);
        params.shares = static_cast<int32_t>(split.shares);
        params.share_rows = static_cast<int32_t>(parts.parts > 0 ? parts.rows : split.rows);
        params.first_in_parts = static_cast<int32_t>(parts.first);
        params.parts = static_cast<int32_t>(parts.parts);
        params.backward.scale *= core::dropout_params(call).scale;  // 1 without dropout
        params.backward.head_shares = static_cast<int32_t>(shares.heads);
        params.backward.attention.heads_per_kv = static_cast<int32_t>(shares.heads_of_share);
      },
      turns.sums);
  if (auto* plan = std::get_if<LaunchPlan>(&result)) {
    if (shares.all() > 1) {
      core::add_shares(*plan, problem, "hopper", shares.all());
      main_launch(*plan)->grid[0] *= shares.all();
    }
    add_parts(*plan, tile, parts);
    take_tiles(*plan, problem, tile, device, shares.all());
    share_out_dq(*plan, tile, turns.sums, device);
    if (table) add_table(*plan, problem, tile, device);
    if (adds) add_elements(*plan, problem, tile);
    if (drops) add_dropout(*plan, problem);
    if (tile.ends_dq) add_dq_map(*plan, problem, tile);
    for (Launch& launch : plan->launches) {
      if (launch.kernel.ends_with("_short") || launch.kernel.ends_with("_short_chains") ||
          launch.kernel.ends_with("_one") || launch.kernel.ends_with("_turns") ||
          launch.kernel.ends_with("_stays"))
        launch.image = std::string("hopper/bwd_short_") + core::dtype_word(call.dtype);
      // It waits where it has to. This also takes less of the host.
      launch.uses_pdl = !launch.tensor_maps.empty() ||
                        launch.kernel.starts_with("hopper_backward_rows_") ||
                        launch.kernel.starts_with("hopper_prepare_mask_") ||
                        launch.kernel.starts_with("hopper_sum_mask_gradients_") ||
                        launch.kernel.starts_with("hopper_copy_mask_") ||
                        launch.kernel.starts_with("hopper_backward_dq_");
    }
  }
  return result;
}

}  // namespace archflash::hopper
