// ampere: BackwardProblem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "ampere/backward_config.cuh"
#include "ampere/list_bwd_config.cuh"
#include "ampere/plain_config.cuh"
#include "common/planning/backward.h"
#include "common/planning/backward_shares.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/list_backward.h"
#include "common/planning/masks.h"
#include "common/planning/order.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::ampere {

const Description& describe();

namespace {

using core::backward_tile;

// NOTES.md has their speeds. The last sets of each head dimension fit 99 KB.
constexpr core::BackwardTile TILES[] = {
    backward_tile<D32<DType::F16>>("d32"),
    backward_tile<D64Wide<DType::F16>>("d64_wide", 2.5),
    backward_tile<D64<DType::F16>>("d64"),
    backward_tile<D96<DType::F16>>("d96", 6),
    backward_tile<D128Wide<DType::F16>>("d128_wide", 4.5),
    backward_tile<D128<DType::F16>>("d128"),
    backward_tile<D192Keys<DType::F16>>("d192_keys"),
    backward_tile<D192Queries<DType::F16>>("d192_queries"),
    backward_tile<D192Wide<DType::F16>>("d192_wide"),
    backward_tile<D160<DType::F16>>("d160"),
    backward_tile<D256Wide<DType::F16>>("d256_wide"),
    backward_tile<D256Values<DType::F16>>("d256_values"),
    backward_tile<D256Keys<DType::F16>>("d256_keys"),
    backward_tile<D256Queries<DType::F16>>("d256_queries"),
};

// Adding to dK and dV bounds those of few rows (NOTES.md).
constexpr core::ListTile LIST_TILES[] = {
    core::list_tile<D64Lists<DType::F16>>("d64_lists", 46),
    core::list_tile<D64FewLists<DType::F16>>("d64_few_lists", 37),
    core::list_tile<D128LargeLists<DType::F16>>("d128_large_lists", 105),
    core::list_tile<D128Lists<DType::F16>>("d128_lists", 65),
    core::list_tile<D128FewLists<DType::F16>>("d128_few_lists", 50),
    core::list_tile<D192LargeLists<DType::F16>>("d192_large_lists", 20),
    core::list_tile<D192Lists<DType::F16>>("d192_lists", 11),
    core::list_tile<D192FewLists<DType::F16>>("d192_few_lists", 8),
    core::list_tile<D256Lists<DType::F16>>("d256_lists", 17),
    core::list_tile<D256FewLists<DType::F16>>("d256_few_lists", 13),
};

constexpr size_t BEHIND_D64_WIDE = 2;
static_assert(std::string_view(TILES[BEHIND_D64_WIDE].name) == "d64");

constexpr core::BackwardTile MASKED_TILES[] = {
    backward_tile<D64Masked<DType::F16>>("d64_masked"),
    backward_tile<D128Masked<DType::F16>>("d128_masked"),
    backward_tile<D256ValuesMasked<DType::F16>>("d256_values_masked"),
    backward_tile<D256KeysMasked<DType::F16>>("d256_keys_masked"),
    backward_tile<D256QueriesMasked<DType::F16>>("d256_queries_masked"),
};

// With dropout and without masks as data, a softcap and the like. MASKED_TILES take what these do
// not, and head dimensions above 128 where an SM has less than 227 KB.
constexpr core::BackwardTile DROPOUT_TILES[] = {
    backward_tile<BackwardD64Dropout<DType::F16>>("d64_dropout"),
    backward_tile<BackwardD128WideDropout<DType::F16>>("d128_wide_dropout", 8),
    backward_tile<BackwardD128Dropout<DType::F16>>("d128_dropout"),
    backward_tile<BackwardD256WideDropout<DType::F16>>("d256_wide_dropout"),
};

// The kernels that need more shared memory than 8.x and 12.x have.
const std::string WIDE_IMAGE = "ampere/bwd_wide_";
const std::string PLAIN_IMAGE = "ampere/bwd_plain_";

// Whether `d64`, two CTAs on an SM that take 32 queries at a time, is faster than `d64_wide` with
// 128: where it computes an eighth fewer rows, and its CTAs come in full rounds or in many.
// Measured on an H200 (docs/lab/ampere.md).
bool small_blocks_pay(const Problem& call, const Device& device) {
  constexpr int64_t CTAS_PER_SM = 2, MANY_ROUNDS = 5;
  using Wide = D64Wide<DType::F16>;
  using Small = D64<DType::F16>;
  static_assert(Wide::ROWS == Small::ROWS);
  if (call.varlen || std::max(call.d, call.dv) <= D32<DType::F16>::HEAD_DIM) return false;
  const int64_t wide_rows = core::ceil_div(call.nq, Wide::BLOCK) * Wide::BLOCK;
  const int64_t small_rows = core::ceil_div(call.nq, Small::BLOCK) * Small::BLOCK;
  if (8 * wide_rows < 9 * small_rows) return false;
  if (!core::equal_tiles(call)) return true;
  const int64_t tiles = call.batch * call.heads_kv * core::ceil_div(call.nk, Small::ROWS);
  const int64_t workers = CTAS_PER_SM * device.sm_count, rounds = core::ceil_div(tiles, workers);
  return rounds > MANY_ROUNDS || 10 * tiles >= 9 * rounds * workers;
}

// The kernels of bwd_plain.cu, for GPUs of 9.0 with their shared memory.
constexpr core::BackwardTile PLAIN_TILES[] = {
    backward_tile<D32Plain<DType::F16>>("d32"),
    backward_tile<D64WidePlain<DType::F16>>("d64_wide"),
    backward_tile<D64Plain<DType::F16>>("d64"),
    backward_tile<D96Plain<DType::F16>>("d96"),
    backward_tile<D128WidePlain<DType::F16>>("d128_wide"),
    backward_tile<D192WidePlain<DType::F16>>("d192_wide"),
    backward_tile<D256WidePlain<DType::F16>>("d256_wide"),
};

// The kernels of bwd_plain.cu whose CTAs add to dQ in any order instead of taking turns.
constexpr core::BackwardTile BULK_TILES[] = {
    backward_tile<D64WideBulk<DType::F16>>("d64_wide"),
    backward_tile<D128WideBulk<DType::F16>>("d128_wide"),
};

// The tiles of kernels for heads whose keys are one tile, which need no sums of dQ.
template <class C>
constexpr core::BackwardTile only_tile(const char* name) {
  core::BackwardTile of = backward_tile<C>(name);
  of.dq_block = 0;
  return of;
}
constexpr core::BackwardTile ONLY_TILES[] = {
    only_tile<D32Only<DType::F16>>("d32"),
    only_tile<D64WideOnly<DType::F16>>("d64_wide"),
    only_tile<D96Only<DType::F16>>("d96"),
    only_tile<D128WideOnly<DType::F16>>("d128_wide"),
};

// The tiles of kernels for packed sequences; and those of kernels whose CTAs take no turns, where
// TMA adds to the sums of dQ.
constexpr core::BackwardTile PACKED_TILES[] = {
    backward_tile<D64WidePacked<DType::F16>>("d64_wide"),
    backward_tile<D96Packed<DType::F16>>("d96"),
    backward_tile<D128WidePacked<DType::F16>>("d128_wide"),
};
constexpr core::BackwardTile PACKED_BULK_TILES[] = {
    backward_tile<D64WidePackedBulk<DType::F16>>("d64_wide"),
    backward_tile<D128WidePackedBulk<DType::F16>>("d128_wide"),
};
constexpr core::BackwardTile PACKED_ONLY_TILES[] = {
    only_tile<D64WidePackedOnly<DType::F16>>("d64_wide"),
    only_tile<D96PackedOnly<DType::F16>>("d96"),
    only_tile<D128WidePackedOnly<DType::F16>>("d128_wide"),
};

// On 10.x, which has the memory too, PyTorch's kernels come first: they are not built for it.
bool has_plain_kernels(const Device& device) { return device.major == 9; }

// How the tiles of a call are cut, in the order of their CTAs.
using Runs = std::vector<mma_sync::TileRun>;

// What the parts of tiles take in all, in the query rows that a tile passes meanwhile: they are
// written in fp32, and read and added up. Measured on an H200 (docs/lab/ampere.md).
constexpr int64_t parts_time(const core::BackwardTile& tile) {
  return std::min(3 * tile.head_dim / 2, 96);
}
constexpr int64_t MOST_PARTS = mma_sync::CutTiles::MOST_PARTS;
constexpr int64_t MOST_ROUNDS_OF_PARTS = 2;  // which keeps what they leave small

// CTAs that run at the same time.
int64_t workers_of(const core::BackwardTile& tile, const Device& device) {
  constexpr int64_t MOST_CTAS = 2;  // on an SM: ptxas is told to allow no more
  const int64_t room = device.shared_per_sm / tile.shared_bytes;
  return device.sm_count * std::clamp<int64_t>(room, 1, MOST_CTAS);
}

// Where all tiles take the same time: the `last` ones, which are left for the last round of CTAs.
Runs cut_last_tiles(const Problem& call, const core::BackwardTile& tile, int64_t tiles,
                    int64_t workers) {
  constexpr int64_t START = 256;  // what a CTA's start and end take, in query rows
  const int64_t last = tiles % workers;
  if (last == 0) return {};
  const int64_t blocks = core::ceil_div(call.nq, tile.dq_block);
  const int64_t block_rows = tile.dq_block * (call.heads_q / call.heads_kv);
  const auto time_of = [&](int64_t parts) {
    const int64_t rows = START + core::ceil_div(blocks, parts) * block_rows;
    return core::ceil_div(last * parts, workers) * rows + (parts > 1 ? parts_time(tile) : 0);
  };
  int64_t best = 1;
  const int64_t most = std::min({blocks, MOST_PARTS, MOST_ROUNDS_OF_PARTS * workers / last});
  for (int64_t parts = 2; parts <= most; ++parts)
    if (time_of(parts) < time_of(best)) best = parts;
  if (best == 1) return {};
  Runs runs;
  if (tiles > last) runs.push_back({static_cast<int32_t>(tiles - last), 1});
  runs.push_back({static_cast<int32_t>(last), static_cast<int32_t>(best)});
  return runs;
}

// The time of a causal call whose tiles are not cut, in query rows, if `shares` CTAs share out the
// query heads of each.
double uncut_time(const Problem& call, const core::BackwardTile& tile, int64_t workers,
                  int64_t shares) {
  const core::RowShares whole{1, core::ceil_div(call.nq, tile.dq_block) * tile.dq_block};
  std::vector<core::Run> runs = core::runs_of_keys(call, tile.rows, tile.dq_block, whole,
                                                   call.heads_q / call.heads_kv / shares);
  for (core::Run& run : runs) run.count = call.batch * call.heads_kv * shares;
  const double behind = shares > 1 ? core::time_of_shares(call, tile.head_dim, shares) : 0;
  return core::queue_time(runs, workers) + behind;
}

// Under a causal mask: each tile has so many parts that none has more than a certain number of
// blocks. The tiles of all heads come from the longest to the shortest.
Runs cut_causal_tiles(const Problem& call, const core::BackwardTile& tile, int64_t workers,
                      double uncut) {
  const int64_t heads = call.batch * call.heads_kv, group = call.heads_q / call.heads_kv;
  const core::RowShares whole{1, core::ceil_div(call.nq, tile.dq_block) * tile.dq_block};
  const std::vector<core::Run> times =
      core::runs_of_keys(call, tile.rows, tile.dq_block, whole, group);
  const double start = core::runs_of_keys(call, tile.rows, tile.dq_block, {1, 0}, 1)[0].time;
  const auto blocks_of = [&](const core::Run& run) {
    return static_cast<int64_t>(run.time - start) / (tile.dq_block * group);
  };
  Runs best;
  double best_time = uncut;
  const int64_t longest = blocks_of(times.front());
  for (int64_t most = 2; most <= std::min(longest, MOST_PARTS); ++most) {
    const int64_t quota = core::ceil_div(longest, most);
    Runs runs;
    std::vector<core::Run> ctas;
    int64_t count = 0;
    for (const core::Run& run : times) {
      const int64_t blocks = blocks_of(run);
      const int64_t parts = std::max<int64_t>(core::ceil_div(blocks, quota), 1);
      const int64_t rows = core::ceil_div(blocks, parts) * tile.dq_block * group;
      ctas.push_back({start + static_cast<double>(rows), heads * parts});
      count += heads * parts;
      if (runs.empty() || runs.back().parts != parts)
        runs.push_back({0, static_cast<int32_t>(parts)});
      runs.back().tiles += static_cast<int32_t>(heads);
    }
    if (count > MOST_ROUNDS_OF_PARTS * workers) break;
    const double time = core::queue_time(ctas, workers) + parts_time(tile);
    if (time < best_time) best = std::move(runs), best_time = time;
  }
  return best;
}

// Whether the tiles of a call are those of a causal mask, from the longest to the shortest.
bool shrinking_tiles(const Problem& call) { return !call.varlen && core::is_triangle(call); }

// How the tiles of a call are cut where that is faster; else nothing. Only where their rounds are
// so few that CTAs still end together.
Runs cut_tiles(const BackwardProblem& problem, const core::BackwardTile& tile, const Launch& main,
               const Device& device) {
  constexpr int64_t MOST_ROUNDS = 4;
  const Problem& call = problem.call;
  const int64_t tiles = main.grid[0], workers = workers_of(tile, device);
  // Blocks of 32 queries leave parts too little (docs/lab/ampere.md).
  if (tiles >= MOST_ROUNDS * device.sm_count || tile.dq_block < 64) return {};
  if (core::equal_tiles(call)) return cut_last_tiles(call, tile, tiles, workers);
  BackwardParams params;
  std::memcpy(static_cast<void*>(&params), main.params.data(), sizeof params);
  const bool one_group = params.attention.order.heads_per_group >= call.batch * call.heads_kv;
  if (!shrinking_tiles(call) || problem.deterministic || !one_group) return {};
  const int64_t shares = core::share_heads(call, tile, device);
  return cut_causal_tiles(call, tile, workers, uncut_time(call, tile, workers, shares));
}

constexpr int TURNS = offsetof(BackwardParams, dq_sums) + offsetof(DqSums, turns_gmem);

// Makes CTAs share out tiles: `main` and the launch behind it, which adds up their parts.
void share_out(LaunchPlan& plan, const BackwardProblem& problem, const core::BackwardTile& tile,
               const Device& device, const Runs& runs, mma_sync::CuttingBackwardParams& params,
               Launch& main, Launch& last) {
  const Problem& call = problem.call;
  const int64_t heads = call.batch * call.heads_kv, tiles = main.grid[0];
  // In turns, parts that are short wait for the tiles of the round before at each of their blocks:
  // the last one of a head that runs then is late by a block for each other one. Measured on an
  // H200 (docs/lab/ampere.md).
  const int64_t late = std::min(core::ceil_div(workers_of(tile, device), heads), tiles / heads) - 1;
  const int64_t blocks = core::ceil_div(call.nq, tile.dq_block) * (call.heads_q / call.heads_kv);
  const bool waits = !core::equal_tiles(call) || blocks < 2 * late * runs.back().parts;
  if (!problem.deterministic && waits) {
    for (Launch& launch : plan.launches)
      std::erase_if(launch.pointers, [](const PointerSlot& of) { return of.offset == TURNS; });
  }
  std::ranges::copy(runs, params.cut.runs);
  params.cut.rows = tile.rows, params.cut.columns = call.d + call.dv;
  int64_t ctas = 0, cut = 0, parts = 0;
  for (const mma_sync::TileRun& run : runs) {
    ctas += int64_t{run.tiles} * run.parts;
    if (run.parts > 1) cut += run.tiles, parts += int64_t{run.tiles} * run.parts;
  }
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t part_floats = int64_t{params.cut.rows} * params.cut.columns;
  const int64_t start = workspace.add(parts * part_floats * int64_t{sizeof(float)});
  plan.workspace_bytes = workspace.bytes();
  main.grid[0] = ctas;
  last.grid[0] += core::ceil_div(cut * part_floats, 8 * BACKWARD_DQ_THREADS);
  last.kernel += "_parts", last.image = PLAIN_IMAGE + core::dtype_word(call.dtype);
  last.params = core::bytes(params);  // it finds tiles as the main launch does
  constexpr size_t PARTS =
      offsetof(mma_sync::CuttingBackwardParams, cut) + offsetof(mma_sync::CutTiles, parts_gmem);
  for (Launch* launch : {&main, &last}) add_pointer(*launch, Operand::Workspace, PARTS, start);
}

// Makes a plan launch the kernel of PLAIN_TILES or BULK_TILES in the place of its main one, and
// says whether CTAs share out tiles.
bool make_plain(LaunchPlan& plan, const BackwardProblem& problem, const Device& device) {
  constexpr int64_t GRID_SIDE_LIMIT = 65535;  // CUDA: CTAs along y and z
  const Problem& call = problem.call;
  const std::string word = core::dtype_word(call.dtype);
  const auto launch_of = [&](const std::string& start) {
    return std::ranges::find_if(plan.launches,
                                [&](const Launch& of) { return of.kernel.starts_with(start); });
  };
  auto main = launch_of("ampere_attention_bwd_");
  const auto none = plan.launches.end();
  if (!has_plain_kernels(device) || call.varlen || call.nq == 0 || main == none) return false;
  const auto tile_of = [&](std::span<const core::BackwardTile> tiles) {
    return std::ranges::find_if(tiles, [&](const core::BackwardTile& of) {
      return main->kernel == "ampere_attention_bwd_" + word + "_" + of.name;
    });
  };
  const std::span<const core::BackwardTile> plain = PLAIN_TILES, in_bulk = BULK_TILES;
  const auto tile = tile_of(plain), bulk = tile_of(in_bulk);
  if (tile == plain.end()) return false;
  mma_sync::CuttingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main->params.data(), sizeof params.call);
  const AttentionParams& attention = params.call.attention;
  if (attention.transform_scores) return false;
  // Its main kernel writes dQ: there is no launch for that.
  const bool only = launch_of("ampere_backward_dq_") == none;
  main->image = only ? "ampere/bwd_only_" + word : PLAIN_IMAGE + word;

  const int64_t tiles = main->grid[0], heads_kv = call.heads_q / attention.heads_per_kv;
  const int64_t heads = call.batch * heads_kv;
  const bool shared = launch_of("ampere_backward_shares_") != none;
  const Runs runs = shared ? Runs{} : cut_tiles(problem, *tile, *main, device);
  if (!runs.empty()) {
    if (only) {
      Launch adds = plan.launches.front();
      adds.kernel = "ampere_backward_dq_" + word;
      adds.grid = {0, 1, 1}, adds.block = {BACKWARD_DQ_THREADS, 1, 1};
      plan.launches.push_back(std::move(adds));
      main = launch_of("ampere_attention_bwd_");
    }
    const auto last = launch_of("ampere_backward_dq_");
    share_out(plan, problem, *tile, device, runs, params, *main, *last);
  } else if (attention.order.heads_per_group >= heads && call.batch <= GRID_SIDE_LIMIT &&
             tiles / heads <= GRID_SIDE_LIMIT) {
    main->grid = {heads_kv, call.batch, tiles / heads};
  } else {
    params.cut.runs[0] = {static_cast<int32_t>(tiles), 1};
  }
  main->params = core::bytes(params);
  const bool in_turns =
      std::ranges::any_of(main->pointers, [](const PointerSlot& of) { return of.offset == TURNS; });
  const bool adds_in_bulk = bulk != in_bulk.end() && !in_turns && !only;
  main->shared_bytes = adds_in_bulk ? bulk->shared_bytes : tile->shared_bytes;
  main->kernel += only ? "_only" : adds_in_bulk ? "_bulk" : "_plain";
  return !runs.empty();
}

// Whether a call asks for nothing that the kernels of bwd_plain.cu and those beside it lack, and
// its head dimensions are those of `tiles`.
bool is_plain(const Problem& call, const Device& device,
              std::span<const core::BackwardTile> tiles) {
  const core::BackwardTile& largest = tiles.back();
  return has_plain_kernels(device) && !takes_masked_kernels(call) && call.dropout_p == 0 &&
         !core::attention_params(call).transform_scores && call.d <= largest.head_dim &&
         call.dv <= largest.head_dim_v;
}

// The plan of packed sequences for the kernels of bwd_packed.cu. Nothing where they do not take the
// call, or where most sequences are far shorter than the longest one, so that most CTAs would have
// nothing to do.
std::optional<PlanResult> plan_packed(const BackwardProblem& problem, const Device& device) {
  constexpr int64_t GRID_SIDE_LIMIT = 65535;  // CUDA: CTAs along y and z
  constexpr int64_t MOST_PLACES = 3;          // for each tile
  const Problem& call = problem.call;
  constexpr int ROWS = D64WidePacked<DType::F16>::ROWS;
  static_assert(D96Packed<DType::F16>::ROWS == ROWS && D128WidePacked<DType::F16>::ROWS == ROWS);
  if (!call.varlen || !is_plain(call, device, PACKED_TILES) || call.nk == 0 || call.batch == 0)
    return std::nullopt;
  if (call.max_seqlen_q == UNKNOWN || std::max(call.d, call.dv) <= D32<DType::F16>::HEAD_DIM)
    return std::nullopt;
  const int64_t places = core::ceil_div(call.max_seqlen_k, ROWS);
  if (places <= 0 || places > GRID_SIDE_LIMIT || call.batch > GRID_SIDE_LIMIT ||
      places * call.batch > MOST_PLACES * (core::ceil_div(call.nk, ROWS) + call.batch))
    return std::nullopt;
  // With so many heads the first CTAs of all come before the second ones, and none waits long. TMA
  // adds to the sums of long sequences as fast, where it does.
  constexpr int64_t LONG_SEQUENCE = 400;
  const bool only = places == 1;
  const bool waits_less = call.batch * call.heads_kv >= device.sm_count;
  const bool by_tma = std::max(call.d, call.dv) <= D64Wide<DType::F16>::HEAD_DIM &&
                      core::rows_per_sequence(call) >= LONG_SEQUENCE;
  BackwardProblem of = problem;
  of.deterministic |= waits_less && !by_tma;
  const std::span<const core::BackwardTile> tiles =
      only ? std::span<const core::BackwardTile>(PACKED_ONLY_TILES) : PACKED_TILES;
  PlanResult result = core::plan_backward(describe(), tiles, of, device, {}, true);
  auto* plan = std::get_if<LaunchPlan>(&result);
  if (plan == nullptr) return result;
  const std::string word = core::dtype_word(call.dtype), start = "ampere_attention_bwd_" + word;
  const auto main = std::ranges::find_if(
      plan->launches, [&](const Launch& x) { return x.kernel.starts_with(start); });
  if (main == plan->launches.end()) return result;
  mma_sync::CuttingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(static_cast<void*>(&params.call), main->params.data(), sizeof params.call);
  main->params = core::bytes(params);
  main->grid = {call.heads_q / params.call.attention.heads_per_kv, call.batch, places};
  main->image = "ampere/bwd_packed_" + word;
  const auto bulk = std::ranges::find_if(PACKED_BULK_TILES, [&](const core::BackwardTile& x) {
    return main->kernel == start + "_" + x.name;
  });
  const bool adds_in_bulk = !only && !of.deterministic && bulk != std::end(PACKED_BULK_TILES);
  if (adds_in_bulk) main->shared_bytes = bulk->shared_bytes;
  main->kernel += only ? "_packed_only" : adds_in_bulk ? "_packed_bulk" : "_packed";
  return result;
}

// Launches start early where their image has PTX for 9.0: these kernels wait for what comes before
// them. A main kernel without one of rows before it would not.
void start_early(LaunchPlan& plan, const Problem& call) {
  const std::string prefix =
      std::string("ampere_attention_bwd_") + core::dtype_word(call.dtype) + "_";
  for (size_t i = 0; i < plan.launches.size(); ++i) {
    Launch& launch = plan.launches[i];
    const bool is_main =
        i > 0 && std::ranges::any_of(TILES, [&](const core::BackwardTile& of) {
          return of.dq_block > 0 && launch.kernel.starts_with(prefix + of.name) &&
                 (launch.kernel == prefix + of.name || launch.kernel.ends_with("_plain") ||
                  launch.kernel.ends_with("_bulk") || launch.kernel.ends_with("_only") ||
                  launch.kernel.ends_with("_packed"));
        });
    launch.uses_pdl = is_main || launch.kernel.starts_with("ampere_backward_rows_") ||
                      launch.kernel.starts_with("ampere_backward_dq_");
  }
}

// The plan of a call with dropout for DROPOUT_TILES: that of the call without it, whose main kernel
// is told what is dropped. Nothing where they do not take it.
std::optional<LaunchPlan> plan_dropout(const BackwardProblem& problem, const Device& device) {
  BackwardProblem undropped = problem;
  undropped.call.dropout_p = 0;
  PlanResult result = core::plan_backward(describe(), DROPOUT_TILES, undropped, device, {}, true);
  auto* plan = std::get_if<LaunchPlan>(&result);
  if (plan == nullptr) return std::nullopt;
  mma_sync::DroppingBackwardParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  params.dropout = core::dropout_params(problem.call);
  params.dropped_heads = core::dropped_heads(problem);
  constexpr int DROPOUT = offsetof(mma_sync::DroppingBackwardParams, dropout);
  for (Launch& launch : plan->launches) {
    if (!launch.kernel.ends_with("_dropout")) continue;
    std::memcpy(static_cast<void*>(&params.call), launch.params.data(), sizeof params.call);
    if (params.call.attention.transform_scores) return std::nullopt;
    launch.params = core::bytes(params);
    launch.image = (launch.kernel.ends_with("_wide_dropout") ? WIDE_IMAGE : "ampere/bwd_dropout_") +
                   core::dtype_word(problem.call.dtype);
    add_pointers(launch, core::dropout_pointers(problem.call, DROPOUT));
  }
  return std::move(*plan);
}

}  // namespace

PlanResult plan_backward(const BackwardProblem& problem, const Device& device) {
  const Problem& call = problem.call;
  if (call.key_indices > 0)
    return core::plan_list_backward(describe(), LIST_TILES, problem, device);
  if (call.dropout_p != 0 && !is_masked(call)) {
    if (auto plan = plan_dropout(problem, device)) return *std::move(plan);
  }
  const core::MaskedBackwardTiles masked{.tiles = MASKED_TILES, .base_2 = true};
  if (auto packed = plan_packed(problem, device)) {
    if (auto* plan = std::get_if<LaunchPlan>(&*packed)) start_early(*plan, call);
    return *std::move(packed);
  }
  std::span<const core::BackwardTile> tiles = TILES;
  if (!call.varlen && 0 < call.nk && call.nk <= ONLY_TILES[0].rows &&
      is_plain(call, device, ONLY_TILES)) {
    tiles = ONLY_TILES;
  } else if (small_blocks_pay(call, device)) {
    tiles = tiles.subspan(BEHIND_D64_WIDE);
  }
  // CTAs share out blocks of queries where that is faster than sharing out heads.
  const bool blocks_first = has_plain_kernels(device) && shrinking_tiles(call) &&
                            !problem.deterministic && call.heads_q != call.heads_kv;
  PlanResult result =
      core::plan_backward(describe(), tiles, problem, device, masked, !blocks_first);
  auto* plan = std::get_if<LaunchPlan>(&result);
  if (plan != nullptr && !make_plain(*plan, problem, device) && blocks_first) {
    result = core::plan_backward(describe(), tiles, problem, device, masked, true);
    plan = std::get_if<LaunchPlan>(&result);
    if (plan != nullptr) make_plain(*plan, problem, device);
  }
  if (plan != nullptr) {
    start_early(*plan, call);
    for (Launch& launch : plan->launches) {
      if (launch.kernel.ends_with("_wide")) {
        launch.image = WIDE_IMAGE + core::dtype_word(call.dtype);
      } else if (launch.kernel.ends_with("_d96")) {
        launch.image = "ampere/bwd_d96_" + std::string(core::dtype_word(call.dtype));
      }
    }
  }
  return result;
}

}  // namespace archflash::ampere
