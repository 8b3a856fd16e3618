#include "ampere/plan_bounded.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ampere/bounded_config.cuh"
#include "ampere/plan_dense.h"
#include "common/mma_sync/bounded_params.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/order.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"

namespace archflash::ampere {
namespace {

using core::tile;
using mma_sync::BoundedParams;
using mma_sync::KeyShares;

constexpr int64_t GRID_SIDE_LIMIT = 65535;  // CUDA: CTAs along y and z
constexpr int64_t MOST_ROWS = 1 << 28;      // of queries and keys, whose sums fit 32 bits

// Whether these kernels know all that a call asks for. They have no machine code for GPUs from 10.0
// on (shares.cu, packed.cu).
bool is_bounded(const Problem& problem, const Device& device) {
  constexpr int64_t STRIDE_LIMIT = UINT32_MAX;
  const auto fits = [&](const Strides& x) { return 0 <= x.row && x.row <= STRIDE_LIMIT; };
  const bool plain = problem.window_left == UNBOUNDED && problem.sinks == 0 &&
                     problem.num_splits <= 1 && !problem.batch_invariant &&
                     !core::writes_f32(problem) && !problem.q_offset_tensor &&
                     !core::attention_params(problem).transform_scores;
  return plain && device.major <= 9 && problem.nq > 0 && problem.nk > 0 && problem.nq < MOST_ROWS &&
         problem.nk < MOST_ROWS && problem.batch <= GRID_SIDE_LIMIT &&
         problem.heads_q <= GRID_SIDE_LIMIT && fits(problem.q) && fits(problem.k) &&
         fits(problem.v);
}

// A kernel whose CTAs may share out keys, and what they take, in nanoseconds of an H200
// (docs/lab/ampere.md): the start and end of a CTA, and a key where the CTA has an SM alone and
// where as many as fit share it.
struct BoundedTile : core::Tile {
  double start, key, crowded_key;
};

template <class C>
constexpr BoundedTile bounded_tile(const char* name, double start, double key, double crowded_key,
                                   const char* reason) {
  return {{tile<C>(name, {}, reason)}, start, key, crowded_key};
}
constexpr const char* SHARED = "few row tiles: CTAs share out the keys of each";
constexpr const char* SHARED_BY_THREE = "the same, three CTAs per SM";
constexpr const char* SHARED_BY_GROUPS =
    "as many row tiles as SMs: two warps share out the keys of 16 rows";
constexpr const char* TRIANGLE = "causal and many row tiles: a short start and end of each";
constexpr const char* OF_OTHERS = "a kernel of another file, which is compared with these";
constexpr BoundedTile BOUNDED_TILES[] = {
    bounded_tile<D32Shares>("d32_shares", 1800, 8.3, 11.2, SHARED),
    bounded_tile<D32Medium>("d32_medium", 2500, 11, 16, OF_OTHERS),
    bounded_tile<D64Shares>("d64_shares", 2500, 9.6, 17, SHARED),
    bounded_tile<D64SharesThree>("d64_shares_three", 2000, 10.9, 23.5, SHARED_BY_THREE),
    bounded_tile<D64Causal>("d64_causal", 4500, 15, 21.5, TRIANGLE),
    bounded_tile<D96Shares>("d96_shares", 1700, 17, 24.7, SHARED),
    bounded_tile<D96Causal>("d96_causal", 2500, 24.5, 40, TRIANGLE),
    bounded_tile<D128Shares>("d128_shares", 2500, 18.2, 26.9, SHARED),
    bounded_tile<D128SharesGroups>("d128_shares_groups", 2400, 15.5, 15.5, SHARED_BY_GROUPS),
    bounded_tile<D128Causal>("d128_causal", 5000, 27, 41, TRIANGLE),
    bounded_tile<D160Shares>("d160_shares", 2400, 24, 38.4, SHARED),
    bounded_tile<D256Shares>("d256_shares", 2700, 41.4, 60.2, SHARED),
    // For GPUs on which a CTA of 64 rows has an SM to itself, as CTAs of these tiles have.
    bounded_tile<D256Medium>("d256_medium", 3500, 60.2, 60.2, OF_OTHERS),
    bounded_tile<D256Small>("d256_small", 3500, 60.2, 60.2, OF_OTHERS),
};
// What sharing out keys costs: a second launch, and in it each share of a row and megabyte of
// shares.
constexpr double COMBINE = 1500, COMBINE_SHARE = 100, COMBINE_MEGABYTE = 200;

// The keys that the rows of a call see, in one share; keys = 0: some row sees none.
KeyShares one_share(const Problem& problem) {
  const int64_t nq = problem.nq, nk = problem.nk;
  const int64_t right = std::clamp(problem.window_right, -nq, nk);
  const int64_t offset = problem.q_offset_default ? nk - nq : std::clamp(problem.q_offset, -nq, nk);
  const int64_t shift =
      problem.window_right == UNBOUNDED ? nk : std::min(std::max(offset + right, -nq), nk);
  KeyShares all{};
  all.nq = static_cast<int32_t>(nq), all.shift = static_cast<int32_t>(shift);
  all.nk = static_cast<int32_t>(std::min(nk, nq + shift));
  all.keys = shift < 0 ? 0 : all.nk;
  return all;
}

// The CTAs of a head, one after another, with the keys of their blocks as times.
std::vector<core::Run> ctas_of(const KeyShares& shares, const core::Tile& tile) {
  std::vector<core::Run> runs;
  const auto tiles = static_cast<int>(core::ceil_div(shares.nq, tile.block_q));
  for (int share = 0; share * shares.keys < shares.nk; ++share) {
    const int begin = share * shares.keys;
    for (int of = tiles - 1; of >= shares.first_tile(share, tile.block_q); --of) {
      const int keys = std::min(shares.end(of, tile.block_q) - begin, shares.keys);
      const double time = static_cast<double>(core::ceil_div(keys, tile.block_k) * tile.block_k);
      if (runs.empty() || runs.back().time != time) runs.push_back({time, 0});
      ++runs.back().count;
    }
  }
  return runs;
}

int64_t count_of(const std::vector<core::Run>& runs) {
  int64_t count = 0;
  for (const core::Run& run : runs) count += run.count;
  return count;
}

// The number of rows that several CTAs compute, of a head.
void find_combined(KeyShares& shares, const core::Tile& tile) {
  int of = 0;
  while (of * tile.block_q < shares.nq && shares.end(of, tile.block_q) <= shares.keys) ++of;
  shares.first_combined = std::min(of * tile.block_q, shares.nq);
}

constexpr int64_t MOST_ROUNDS = 3;  // of CTAs, where those of 64 rows take the place of others

struct Choice {
  const BoundedTile* tile = nullptr;
  KeyShares shares{};
  int64_t ctas = 0;  // of a head
  double time = 0;
  // The times of the first kernels with 64 and with 128 rows, if each tile has one CTA. Kernels for
  // calls in which every query sees every key take as long.
  double of_64 = 0, of_128 = 0;
};

// The kernel and the shares with which all CTAs are expected to be done first.
Choice choose_shares(const Problem& problem, const Device& device) {
  constexpr double MEGABYTE = 1e6;
  const std::span<const BoundedTile> tiles = BOUNDED_TILES;
  const auto smallest = std::ranges::find_if(tiles, [&](const core::Tile& of) {
    return core::takes_head_dims(of, problem) && of.shared_bytes <= device.shared_per_block;
  });
  const int64_t heads = problem.batch * problem.heads_q;
  const KeyShares all = one_share(problem);
  Choice best;
  for (auto of = smallest; of != tiles.end() && of->head_dim == smallest->head_dim; ++of) {
    // Where two CTAs of 128 rows do not fit an SM, those of another kernel do.
    const bool shares_keys = of->rows_per_warp == 16 && of->reason != OF_OTHERS;
    const int64_t resident = shares_keys ? core::resident_ctas(*of, device) : of->ctas_per_sm;
    if (shares_keys && of->shared_bytes > device.shared_per_block) continue;
    // Kernels of one CTA for an SM are for GPUs that have no room for two of 64 rows.
    if (!shares_keys && resident == 1 &&
        (core::resident_ctas(*smallest, device) > 1 || of->shared_bytes > device.shared_per_block))
      continue;
    const int64_t blocks = core::ceil_div(all.nk, of->block_k);
    const int64_t most = shares_keys && problem.num_splits != 1 ? blocks : 1;
    for (int64_t count = 1, before = 0; count <= most; ++count) {
      KeyShares shares = all;
      shares.keys = static_cast<int32_t>(core::ceil_div(blocks, count) * of->block_k);
      if (shares.keys == before) continue;
      before = shares.keys;
      std::vector<core::Run> runs = ctas_of(shares, *of);
      const int64_t ctas = count_of(runs);
      if (count > 1 && ctas * heads > MOST_ROUNDS * device.sm_count * resident) break;
      find_combined(shares, *of);
      const int64_t at_once =
          std::min(resident, core::ceil_div(ctas * heads, int64_t{device.sm_count}));
      const double crowd =
          resident > 1 ? static_cast<double>(at_once - 1) / static_cast<double>(resident - 1) : 0;
      const double key = of->key + crowd * (of->crowded_key - of->key);
      double megabytes = 0;  // of shares
      for (core::Run& run : runs) {
        run.time = of->start + run.time * key, run.count *= heads;
        megabytes += static_cast<double>(run.count * of->block_q * problem.dv * 4) / MEGABYTE;
      }
      double time = core::queue_time(runs, device.sm_count * at_once);
      if (shares.first_combined < shares.nq) {
        time +=
            COMBINE + static_cast<double>(count) * COMBINE_SHARE + megabytes * 2 * COMBINE_MEGABYTE;
      }
      if (best.tile == nullptr || time < best.time)
        best.tile = &*of, best.shares = shares, best.ctas = ctas, best.time = time;
      double& alone = shares_keys ? best.of_64 : best.of_128;
      if (count == 1 && alone == 0) alone = time;
    }
  }
  return best;
}

LaunchPlan launch_of(const Problem& problem, const Device& device, const core::Tile& tile,
                     const KeyShares& shares, const std::string& image,
                     const std::array<int64_t, 3>& grid, const TileOrder& order) {
  BoundedParams params;
  core::init_params(problem, params);
  params.attention.order = order;
  params.partials.rows = problem.batch * problem.heads_q * problem.nq;
  params.shares = shares;
  LaunchPlan plan =
      core::one_launch("ampere", problem, device, tile, grid[0] * grid[1] * grid[2], params);
  Launch& launch = plan.launches[0];
  launch.grid = grid;
  launch.image = image + core::dtype_word(problem.dtype);
  launch.uses_pdl = true;
  return plan;
}

// Adds the launch that combines shares, and the workspace.
void combine(LaunchPlan& plan, const Problem& problem, const KeyShares& shares) {
  const int64_t count = core::ceil_div(shares.nk, shares.keys);
  plan.tile.splits = count;
  plan.tile.share_keys = shares.keys;
  const int64_t rows = count * problem.batch * problem.heads_q * problem.nq;
  core::Workspace workspace;
  const int64_t ends_start = workspace.add(rows * static_cast<int64_t>(sizeof(PartialEnd)));
  const int64_t rows_start = workspace.add(rows * problem.dv * static_cast<int64_t>(sizeof(float)));
  plan.workspace_bytes = workspace.bytes();
  Launch& first = plan.launches[0];
  constexpr size_t PARTIALS = offsetof(BoundedParams, partials);
  add_pointer(first, Operand::Workspace, PARTIALS + offsetof(Partials, ends_gmem), ends_start);
  add_pointer(first, Operand::Workspace, PARTIALS + offsetof(Partials, rows_gmem), rows_start);
  Launch second = first;
  second.kernel = "ampere_combine_shares_" + std::string(core::dtype_word(problem.dtype));
  second.grid = {core::ceil_div(shares.nq - shares.first_combined, COMBINE_WARPS), problem.heads_q,
                 problem.batch};
  second.block = {32 * COMBINE_WARPS, 1, 1};
  second.shared_bytes = 0;
  plan.launches.push_back(std::move(second));
}

constexpr const char* PACKED = "packed sequences of few rows, whose tiles the grid names";
constexpr const char* PACKED_LARGE = "packed sequences, whose tiles the grid names";
constexpr core::Tile PACKED_TILES[] = {
    tile<D32PackedLarge>("d32_packed_large", {.min_ctas_per_sm = 2}, PACKED_LARGE),
    tile<D32Packed>("d32_packed", {}, PACKED),
    tile<D64PackedLarge>("d64_packed_large", {.min_ctas_per_sm = 2}, PACKED_LARGE),
    tile<D64Packed>("d64_packed", {}, PACKED),
    tile<D80PackedLarge>("d80_packed_large", {.min_ctas_per_sm = 2}, PACKED_LARGE),
    tile<D80Packed>("d80_packed", {}, PACKED),
    tile<D96PackedLarge>("d96_packed_large", {.min_ctas_per_sm = 2}, PACKED_LARGE),
    tile<D96Packed>("d96_packed", {}, PACKED),
    tile<D128PackedLarge>("d128_packed_large", {.min_ctas_per_sm = 2}, PACKED_LARGE),
    tile<D128Packed>("d128_packed", {}, PACKED),
};

// The kernel for packed sequences; null if none serves the call. Tiles of 64 rows are for short
// sequences, longer ones where causal tiles of 128 would skip less. Measured on an H200
// (docs/lab/ampere.md).
const core::Tile* choose_packed(const Problem& problem, const Device& device) {
  constexpr int64_t FEW_ROWS = 120, FEW_CAUSAL_ROWS = 400, FEW_ROWS_OF_128 = 100;
  const std::span<const core::Tile> tiles = PACKED_TILES;
  const auto smallest = std::ranges::find_if(
      tiles, [&](const core::Tile& of) { return core::takes_head_dims(of, problem); });
  if (smallest == tiles.end()) return nullptr;
  const int64_t few = smallest->head_dim > D96Packed::HEAD_DIM ? FEW_ROWS_OF_128
                      : core::is_triangle(problem)             ? FEW_CAUSAL_ROWS
                                                               : FEW_ROWS;
  const int64_t rows = core::rows_per_sequence(problem);
  for (auto of = smallest; of != tiles.end() && of->head_dim == smallest->head_dim; ++of) {
    const bool large = of->serves.min_ctas_per_sm > 1;
    // Where an SM has room for fewer CTAs of 64 rows than their registers allow, the kernels for
    // all calls are as fast with long sequences, and beside one CTA with any that fill their tiles.
    const int64_t resident = core::resident_ctas(*of, device);
    const bool small = rows <= (resident > 1 ? few : of->block_q);
    if (of->shared_bytes <= device.shared_per_block && core::serves(*of, problem, device) &&
        (large ? rows > few : small || resident == of->ctas_per_sm))
      return &*of;
  }
  return nullptr;
}

// Whether kernels for few rows pack heads that share a head of K into a tile.
bool packs_heads(const Problem& problem) {
  core::Tile tile = BOUNDED_TILES[0];
  core::pack_heads(problem, tile);
  return tile.packed_heads > 1;
}

}  // namespace

std::optional<LaunchPlan> plan_shares(const Problem& problem, const Device& device,
                                      const TileChoice* dense) {
  if (problem.varlen || !is_bounded(problem, device)) return std::nullopt;
  constexpr int D_OF_OWN = 192, DV_OF_OWN = 128;  // head dimensions with kernels of their own
  const bool own =
      problem.d > D160Shares::HEAD_DIM && problem.d <= D_OF_OWN && problem.dv <= DV_OF_OWN;
  if (own || one_share(problem).keys == 0) return std::nullopt;
  if (packs_heads(problem)) return std::nullopt;
  const Choice choice = choose_shares(problem, device);
  const core::Tile* tile = choice.tile;
  if (tile == nullptr) return std::nullopt;
  const KeyShares& shares = choice.shares;
  const bool combines = shares.first_combined < shares.nq;
  const bool grouped = tile->rows_per_warp * tile->warps > tile->block_q;
  // At the largest head dimensions longer steps are faster than shares, and d192_dense takes less
  // time than the kernel for 256 columns.
  constexpr double OF_192 = 0.5;
  const bool wide = tile->head_dim == D256Shares::HEAD_DIM;
  if (dense != nullptr && wide &&
      (dense->head_dim == tile->head_dim || !combines || choice.time > OF_192 * choice.of_64))
    return std::nullopt;
  constexpr int64_t FEW_KEYS = 224;  // for which dense kernels are others
  if (dense != nullptr && !combines &&
      (dense->name == "d128_dense_medium" || (grouped && problem.nk <= FEW_KEYS)))
    return std::nullopt;
  if (dense != nullptr && !grouped && !wide) {
    constexpr double MARGIN = 0.93;
    const int64_t ctas = choice.ctas * problem.batch * problem.heads_q;
    const bool few = dense->block_q == D64Shares::BLOCK_Q;
    // Where those kernels have 64 rows, these gain by shares alone, and at the smallest head
    // dimensions nothing.
    constexpr int SMALLEST = D32Shares::HEAD_DIM;
    const int64_t workers = core::workers_of(*tile, device);
    const bool takes_place =
        few        ? combines && tile->head_dim > SMALLEST
        : combines ? true
                   : problem.nk > FEW_KEYS || tile->head_dim == SMALLEST || ctas <= workers;
    if (!takes_place || ctas > MOST_ROUNDS * workers ||
        choice.time > MARGIN * (few ? choice.of_64 : choice.of_128))
      return std::nullopt;
  }
  if (tile->reason == OF_OTHERS) return std::nullopt;
  // d64_short has three CTAs on an SM where these have one, and four where these have two.
  const bool few_keys = problem.nk <= D64Short::BLOCK_K;
  const bool overflow =
      device.shared_per_sm <= KB_164 &&
      choice.ctas * problem.batch * problem.heads_q > core::workers_of(*tile, device);
  if (few_keys && !combines && tile->head_dim == D64Short::HEAD_DIM &&
      (core::resident_ctas(*tile, device) == 1 || overflow))
    return std::nullopt;
  const bool fits_fully = core::resident_ctas(*tile, device) == tile->ctas_per_sm;
  if (!combines && wide && fits_fully) return std::nullopt;  // d256_large
  // Where one of their CTAs has an SM, those of 128 rows are for few of them.
  constexpr int64_t FEW_ROUNDS = 2;
  if (tile->rows_per_warp > 16 && !fits_fully &&
      choice.ctas * problem.batch * problem.heads_q > FEW_ROUNDS * device.sm_count)
    return std::nullopt;
  const int64_t heads = problem.batch * problem.heads_q;
  TileOrder order{.heads_per_group = static_cast<int32_t>(heads)};
  if (!combines) order = core::choose_order(problem, device, *tile);
  const int64_t group = order.heads_per_group;
  const std::array<int64_t, 3> grid{group, choice.ctas, core::ceil_div(heads, group)};
  if (grid[1] > GRID_SIDE_LIMIT || grid[2] > GRID_SIDE_LIMIT) return std::nullopt;
  LaunchPlan plan = launch_of(problem, device, *tile, shares, "ampere/shares_", grid, order);
  plan.tile.ctas = choice.ctas * heads;
  if (combines) combine(plan, problem, shares);
  return plan;
}

std::optional<LaunchPlan> plan_packed(const Problem& problem, const Device& device) {
  if (!problem.varlen || !is_bounded(problem, device) || problem.kv_cache) return std::nullopt;
  if (problem.max_seqlen_q == UNKNOWN || !problem.q_offset_default) return std::nullopt;
  const core::Tile* tile = choose_packed(problem, device);
  if (tile == nullptr || packs_heads(problem)) return std::nullopt;
  KeyShares bound{};
  bound.shift = static_cast<int32_t>(std::clamp(problem.window_right, -problem.nk, problem.nq));
  const int64_t longest = std::min(problem.max_seqlen_q, problem.nq);  // which is a hint
  const int64_t places = core::ceil_div(longest, tile->block_q);
  // Where most sequences are far shorter than the longest one, most of these CTAs would have
  // nothing to do.
  constexpr int64_t MOST_PLACES = 3;  // for each tile
  if (places == 0 || places * problem.batch > MOST_PLACES * core::row_tiles(problem, tile->block_q))
    return std::nullopt;
  return launch_of(problem, device, *tile, bound, "ampere/packed_",
                   {places, problem.heads_q, problem.batch},
                   {.heads_per_group = static_cast<int32_t>(problem.heads_q)});
}

}  // namespace archflash::ampere
