#include "ampere/plan_dense.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>

#include "ampere/dense_config.cuh"
#include "common/mma_sync/params.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/mma_sync.h"
#include "common/planning/tiles.h"

namespace archflash::ampere {
namespace {

using core::tile;

// For calls without masks, softcap and sinks.
constexpr const char* SEES_ALL = "every query sees every key: a short start and end of each tile";
constexpr core::ServesFrom DENSE_MANY = {.min_ctas_per_sm = 2, .min_tiles_per_sm = 1};
// With at most a tile of 128 rows for each SM, twice as many of 64 run at once. Where they are
// still fewer than SMs, the keys of long sequences are split instead.
constexpr core::ServesFrom DENSE_FEW = {
    .min_ctas_per_sm = 2, .min_tiles_per_sm = 0.75, .min_keys = 225};
constexpr core::ServesFrom DENSE_FEWER = {
    .min_ctas_per_sm = 2, .min_tiles_per_sm = 0.4, .min_keys = 225, .max_keys = 1024};
constexpr core::ServesFrom DENSE_FEW_KEYS = {
    .min_ctas_per_sm = 2, .min_tiles_per_sm = 0.1, .max_keys = 224};
constexpr core::ServesFrom DENSE_SHORT_OF_100_KB = {
    .min_ctas_per_sm = 2, .min_tiles_per_sm = 0.5, .max_keys = 224, .max_shared_per_sm = KB_100};
constexpr core::ServesFrom DENSE_WIDE = {.min_ctas_per_sm = 2, .min_tiles_per_sm = 0.75};
// With less shared memory (docs/lab/ampere.md): one buffer, where tiles are more than SMs.
constexpr core::ServesFrom DENSE_SMALL = {
    .min_ctas_per_sm = 2, .min_tiles_per_sm = 1, .max_shared_per_sm = KB_100};
constexpr core::ServesFrom DENSE_ONE_CTA = {.min_tiles_per_sm = 0.5, .max_shared_per_sm = KB_100};
constexpr const char* SEES_ALL_SMALL = "the same with one buffer: two CTAs per SM";
constexpr const char* FEW_SEE_ALL = "the same with 64 rows, which make twice as many tiles";
constexpr core::Tile DENSE_TILES[] = {
    tile<D32Dense>("d32_dense", {.min_ctas_per_sm = 3, .min_tiles_per_sm = 6}, SEES_ALL),
    tile<D32DenseMedium>("d32_dense_medium", DENSE_MANY, SEES_ALL),
    tile<D32DenseFew>("d32_dense_few", DENSE_FEW, FEW_SEE_ALL),
    tile<D32DenseFew>("d32_dense_few", DENSE_FEWER, FEW_SEE_ALL),
    tile<D32DenseFew>("d32_dense_few",
                      {.min_tiles_per_sm = 0.75, .min_keys = 225, .max_shared_per_sm = KB_100},
                      FEW_SEE_ALL),
    tile<D64DenseSmall>("d64_dense_small",
                        {.min_ctas_per_sm = 2,
                         .min_tiles_per_sm = 0.5,
                         .min_keys = 65,
                         .max_shared_per_sm = KB_100},
                        SEES_ALL_SMALL),
    tile<D64DenseShort>("d64_dense_short",
                        {.min_ctas_per_sm = 2, .min_tiles_per_sm = 0.75, .max_keys = 224},
                        SEES_ALL),
    tile<D64DenseShort>("d64_dense_short", DENSE_SHORT_OF_100_KB, SEES_ALL),
    tile<D64Dense>("d64_dense", DENSE_MANY, SEES_ALL),
    tile<D64DenseFew>("d64_dense_few", DENSE_FEW, FEW_SEE_ALL),
    tile<D64DenseFew>("d64_dense_few", DENSE_FEWER, FEW_SEE_ALL),
    tile<D64DenseFew>("d64_dense_few", DENSE_FEW_KEYS, FEW_SEE_ALL),
    tile<D80Dense>("d80_dense", DENSE_MANY, SEES_ALL),
    tile<D80DenseSmall>("d80_dense_small", DENSE_SMALL, SEES_ALL_SMALL),
    tile<D80Dense>("d80_dense", DENSE_ONE_CTA, SEES_ALL),
    tile<D80DenseFew>("d80_dense_few", DENSE_FEW, FEW_SEE_ALL),
    tile<D80DenseFew>("d80_dense_few", DENSE_FEWER, FEW_SEE_ALL),
    tile<D80DenseFew>("d80_dense_few", DENSE_FEW_KEYS, FEW_SEE_ALL),
    tile<D96Dense>("d96_dense", DENSE_MANY, SEES_ALL),
    tile<D96DenseSmall>("d96_dense_small", DENSE_SMALL, SEES_ALL_SMALL),
    tile<D96Dense>("d96_dense", DENSE_ONE_CTA, SEES_ALL),
    tile<D96DenseFew>("d96_dense_few", DENSE_FEW, FEW_SEE_ALL),
    tile<D96DenseFew>("d96_dense_few", DENSE_FEWER, FEW_SEE_ALL),
    tile<D96DenseFew>("d96_dense_few", DENSE_FEW_KEYS, FEW_SEE_ALL),
    tile<D128Dense>("d128_dense", DENSE_MANY, SEES_ALL),
    tile<D128DenseMedium>("d128_dense_medium", DENSE_MANY, SEES_ALL_SMALL),
    tile<D128DenseSmall>("d128_dense_small", DENSE_SMALL, SEES_ALL_SMALL),
    tile<D128Dense>("d128_dense", DENSE_ONE_CTA, SEES_ALL),
    tile<D128DenseFew>("d128_dense_few", DENSE_FEW, FEW_SEE_ALL),
    tile<D128DenseFew>("d128_dense_few", DENSE_FEWER, FEW_SEE_ALL),
    tile<D128DenseFew>("d128_dense_few", DENSE_FEW_KEYS, FEW_SEE_ALL),
    tile<D160Dense>("d160_dense", {.min_tiles_per_sm = 0.1, .max_keys = 1024}, SEES_ALL),
    tile<D160Dense>("d160_dense", {.min_tiles_per_sm = 1}, SEES_ALL),
    tile<D192Dense>("d192_dense", {.min_tiles_per_sm = 0.1, .max_keys = 1024}, SEES_ALL),
    tile<D192Dense>("d192_dense", {.min_tiles_per_sm = 0.75}, SEES_ALL),
    tile<D256Dense>("d256_dense", DENSE_WIDE, SEES_ALL),
    tile<D256DenseMedium>("d256_dense_medium",
                          {.min_tiles_per_sm = 0.25, .max_shared_per_sm = KB_164},
                          "the same with 128 rows: one CTA per SM"),
    tile<D256Dense>("d256_dense",
                    {.min_tiles_per_sm = 0.75, .min_keys = 225, .max_shared_per_sm = KB_100},
                    SEES_ALL),
};

// Whether a kernel is in dense_small.cu.
bool is_for_8x(const core::Tile& tile) {
  const std::string_view name = tile.name;
  return name.ends_with("_dense_small") || (tile.head_dim > 32 && name.ends_with("_dense_medium"));
}

// How often all SMs take as many tiles as they have room for.
int64_t rounds_of(const Problem& problem, const Device& device, const core::Tile& tile) {
  return core::ceil_div(core::tiles_of(problem, tile), core::workers_of(tile, device));
}

// The tile with which a call is done sooner than with `tile`, whose last round leaves more SMs
// idle; null if there is none. `next` is the one behind it that serves the call, `smallest` the
// first one for its head dimensions. Measured on an H200 (docs/lab/ampere.md).
const core::Tile* sooner(const Problem& problem, const Device& device, const core::Tile& tile,
                         const core::Tile* next, const core::Tile& smallest) {
  constexpr int64_t FEW_KEYS = 96;  // of which `d64_dense` computes more than there are
  const std::string_view name = tile.name;
  const auto rounds = [&](const core::Tile& of) { return rounds_of(problem, device, of); };
  // A CTA takes three quarters of the time where two share an SM and not three.
  if (name == "d64_dense_short" && next != nullptr && problem.nk > FEW_KEYS &&
      4 * rounds(tile) > 3 * rounds(*next))
    return next;
  // Tiles of 64 rows take five eighths of the time of 128, and a CTA with two buffers, which has an
  // SM to itself, 10 of the 17 parts of the time of two with one.
  if (name == "d256_dense_medium" && 8 * rounds(smallest) < 13 * rounds(tile)) return &smallest;
  if (name == "d128_dense_small" && next != nullptr && 10 * rounds(*next) < 17 * rounds(tile))
    return next;
  return nullptr;
}

// Whether dense_fwd knows all that a call asks for, and dense.cu has code for the GPU.
bool is_dense(const Problem& problem, const Device& device) {
  constexpr int64_t GRID_SIDE_LIMIT = 65535;  // CUDA: CTAs along y and z
  constexpr int64_t STRIDE_LIMIT = UINT32_MAX;
  const auto fits = [&](const Strides& x) { return 0 <= x.row && x.row <= STRIDE_LIMIT; };
  const bool plain = core::equal_tiles(problem) && problem.sinks == 0 && problem.num_splits <= 1 &&
                     !problem.batch_invariant && !core::writes_f32(problem);
  const bool fitting = problem.nk > 0 && problem.heads_q <= GRID_SIDE_LIMIT &&
                       problem.batch <= GRID_SIDE_LIMIT && fits(problem.q) && fits(problem.k) &&
                       fits(problem.v);
  return plain && fitting && device.major <= 9;
}

// One launch of a tile, whose grid says what a CTA computes; nothing where scores have a rule.
template <class Params>
std::optional<LaunchPlan> launch_dense(const Problem& problem, const Device& device,
                                       const core::Tile& tile, Params& params) {
  if (params.attention.transform_scores) return std::nullopt;
  params.attention.order.heads_per_group = 1;
  const int64_t row_tiles = core::ceil_div(problem.nq, tile.block_q);
  const int64_t ctas = core::tiles_of(problem, tile);
  LaunchPlan plan = core::one_launch("ampere", problem, device, tile, ctas, params);
  Launch& launch = plan.launches[0];
  launch.grid = {row_tiles, problem.heads_q, problem.batch};
  launch.image = std::string(is_for_8x(tile) ? "ampere/dense_small_" : "ampere/dense_") +
                 core::dtype_word(problem.dtype);
  launch.uses_pdl = true;
  return plan;
}

constexpr core::Tile DENSE_DROPOUT =
    tile<D64DenseDropout>("d64_dense_dropout", {}, "dropout, and every query sees every key");
constexpr core::Tile DENSE_FEW_DROPOUT =
    tile<D64DenseFewDropout>("d64_dense_few_dropout", {}, FEW_SEE_ALL);

}  // namespace

std::optional<LaunchPlan> plan_dense_dropout(const Problem& problem, const Device& device) {
  constexpr int64_t MANY_KEYS = 1024;  // of fewer tiles than SMs they are shared out
  if (!is_dense(problem, device) || !core::takes_head_dims(DENSE_DROPOUT, problem))
    return std::nullopt;
  if (problem.nk > MANY_KEYS && core::tiles_of(problem, DENSE_FEW_DROPOUT) < device.sm_count)
    return std::nullopt;
  // Tiles of 64 rows, of which three share an SM, take four fifths of the time of 128.
  const int64_t few = rounds_of(problem, device, DENSE_FEW_DROPOUT);
  const int64_t many = rounds_of(problem, device, DENSE_DROPOUT);
  const bool three = core::workers_of(DENSE_FEW_DROPOUT, device) >= 3 * device.sm_count;
  const core::Tile& tile = three && 4 * few <= 5 * many ? DENSE_FEW_DROPOUT : DENSE_DROPOUT;
  mma_sync::DroppingParams params;
  core::init_params(problem, params);
  params.dropout = core::dropout_params(problem);
  auto plan = launch_dense(problem, device, tile, params);
  if (plan) {
    add_pointers(plan->launches[0],
                 core::dropout_pointers(problem, offsetof(mma_sync::DroppingParams, dropout)));
  }
  return plan;
}

std::optional<LaunchPlan> plan_dense(const Problem& problem, const Device& device) {
  if (!is_dense(problem, device)) return std::nullopt;
  using Own = D192Large;  // for (192, 128): 32 rows for each warp
  if (problem.d > D160Dense::HEAD_DIM && problem.d <= Own::HEAD_DIM &&
      problem.dv <= Own::HEAD_DIM_V) {
    return std::nullopt;
  }
  const auto smallest = std::ranges::find_if(DENSE_TILES, [&](const core::Tile& of) {
    return core::takes_head_dims(of, problem) && of.shared_bytes <= device.shared_per_block;
  });
  const bool few =
      smallest != std::end(DENSE_TILES) && core::tiles_of(problem, *smallest) <= device.sm_count;
  const auto serves = [&](const core::Tile& of) {
    return of.head_dim == smallest->head_dim && (few || of.block_q >= smallest->block_q) &&
           of.shared_bytes <= device.shared_per_block && core::serves(of, problem, device);
  };
  auto tile = std::find_if(smallest, std::end(DENSE_TILES), serves);
  if (tile == std::end(DENSE_TILES)) return std::nullopt;
  const auto next = std::find_if(tile + 1, std::end(DENSE_TILES), serves);
  if (const core::Tile* of = sooner(problem, device, *tile,
                                    next == std::end(DENSE_TILES) ? nullptr : &*next, *smallest))
    tile = of;
  mma_sync::ManyRowsParams params;
  core::init_params(problem, params);
  return launch_dense(problem, device, *tile, params);
}

}  // namespace archflash::ampere
