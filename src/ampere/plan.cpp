// ampere: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/planning/plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "ampere/config.cuh"
#include "ampere/plan_approximate.h"
#include "ampere/plan_bounded.h"
#include "ampere/plan_dense.h"
#include "ampere/plan_latent.h"
#include "ampere/wide_config.cuh"
#include "common/mma_sync/params.h"
#include "common/planning/core_set.h"
#include "common/planning/kv_cache.h"
#include "common/planning/launch.h"
#include "common/planning/masks.h"
#include "common/planning/mma_sync.h"
#include "common/planning/split_keys.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::ampere {

const Description& describe() {
  static const Description description{
      .name = "ampere",
      .summary =
          "fp16 and bf16 attention on mma.sync tensor cores, any GPU from compute capability "
          "8.0 on",
      .home_device = "A100",
      .dtypes = {DType::F16, DType::BF16},
      .head_dims = core::WIDE_HEAD_DIMS,
      .largest_head_dim = D512::HEAD_DIM,
      .features =
          {"causal",       "q_offset",        "window",      "softcap",    "sinks",
           "gqa",          "cu_seqlens",      "strides",     "lse",        "num_splits",
           "out_dtype",    "batch_invariant", "kv_cache",    "fp8_cache",  "rotary_interleaved",
           "qv",           "attention_chunk", "gradients",   "attn_mask",  "key_ranges",
           "alibi_slopes", "block_mask",      "cache_masks", "dropout_p",  "int8",
           "int8_pv",      "fp16_accumulate", "key_indices", "packed_rows"},
      .needs_capability = 80,  // cp.async, bf16 products
      .proved_by_any_gpu = true,
  };
  return description;
}

namespace {

using core::tile;

constexpr const char* FEW_ROWS = "few query rows: keys split over CTAs, or heads packed";

// Where an SM has room for one CTA of the kernels for few tiles, their 64 rows make more tiles than
// SMs. Measured on an H200 with so much shared memory (docs/lab/ampere.md).
constexpr core::ServesFrom FEW_OF_100_KB = {
    .min_tiles_per_sm = 0.5, .min_uneven_tiles_per_sm = 0.75, .max_shared_per_sm = KB_100};
constexpr const char* ONE_CTA_OF_64_ROWS =
    "99 KB: two CTAs of 128 rows per SM in place of one with 64";

// Measured on an H200 (docs/lab/ampere.md), those for GPUs with 163 and 99 KB of shared memory too:
// what such GPUs make of them is unmeasured.
constexpr core::Tile TILES[] = {
    // The next three are left out where they do not serve a call: tiles_of().
    tile<D32Large>("d32_large", {.min_tiles_per_sm = 6, .min_keys = 81},
                   "head dimensions up to 32 and many rows: three CTAs per SM"),
    tile<D32Medium>("d32_medium", {.min_tiles_per_sm = 1, .min_keys = 81},
                    "head dimensions up to 32: two CTAs per SM, 128 keys at a time"),
    tile<D32Few>("d32_few", {.min_tiles_per_sm = 0.75, .min_keys = 81},
                 "head dimensions up to 32: 64 rows make twice as many tiles"),
    tile<D64Short>("d64_short", {.min_keys = 65, .max_keys = D64Short::BLOCK_K},
                   "few keys: all of them at a time, and more CTAs per SM"),
    tile<D64Large>(
        "d64_large",
        {.min_ctas_per_sm = 2, .min_tiles_per_sm = 1, .min_uneven_tiles_per_sm = 2, .min_keys = 65},
        "two CTAs per SM with 128 keys and two buffers from 163 KB on"),
    tile<D64Medium>("d64_medium", {.min_tiles_per_sm = 1, .min_uneven_tiles_per_sm = 2},
                    "99 KB, or up to 64 keys: two CTAs per SM with 64 at a time"),
    tile<D64Medium>("d64_medium", FEW_OF_100_KB, ONE_CTA_OF_64_ROWS),
    tile<D64Short>(
        "d64_short", {.max_keys = D64Short::BLOCK_K, .max_shared_per_sm = KB_164},
        "up to 163 KB and few keys: all of them at a time, and three or four CTAs per SM"),
    tile<D64Groups>("d64_groups", {},
                    "few CTAs or short sequences: 64 rows make twice as many, and two "
                    "warps share out the keys of 16 rows"),
    tile<D64Few>("d64_few", {}, FEW_ROWS),
    tile<D96Large>("d96_large",
                   {.min_ctas_per_sm = 2, .min_tiles_per_sm = 1, .min_uneven_tiles_per_sm = 1.2},
                   "two CTAs per SM with two buffers from 163 KB on"),
    tile<D96Medium>("d96_medium", {.min_tiles_per_sm = 1, .min_uneven_tiles_per_sm = 1.2},
                    "99 KB: two CTAs per SM with one buffer"),
    tile<D96Medium>("d96_medium", FEW_OF_100_KB, ONE_CTA_OF_64_ROWS),
    tile<D96Few>("d96_few", {}, "few CTAs or short sequences: 64 rows make twice as many"),
    tile<D128Large>("d128_large", {.min_ctas_per_sm = 2, .min_tiles_per_sm = 1},
                    "two CTAs per SM with two buffers in 227 KB"),
    tile<D128Medium>("d128_medium", {.min_ctas_per_sm = 2, .min_tiles_per_sm = 1},
                     "two CTAs per SM with one buffer in 163 KB"),
    tile<D128Small>("d128_small", {.min_tiles_per_sm = 1}, "two CTAs per SM with 32 keys in 99 KB"),
    tile<D128Groups>("d128_groups", {.min_tiles_per_sm = 0.75, .min_keys = 2048},
                     "as many tiles as SMs: two warps share out the keys of 32 rows"),
    tile<D128Few>("d128_few", {}, "few CTAs or short sequences: 64 rows make twice as many"),
    tile<D192Large>("d192_large", {.min_ctas_per_sm = 2}, "two CTAs per SM with 64 keys in 227 KB"),
    tile<D192Medium>("d192_medium", {}, "32 keys: two CTAs per SM in 163 KB, one in 99 KB"),
    tile<D192Few>("d192_few", {}, FEW_ROWS),
    tile<D256Large>("d256_large", {.min_ctas_per_sm = 2}, "two CTAs of 64 rows per SM in 227 KB"),
    tile<D256Medium>("d256_medium", {}, "one CTA per SM: 8 warps share 64 keys in 163 KB"),
    tile<D256Small>("d256_small", {}, "one CTA per SM: 8 warps share 32 keys in 99 KB"),
    tile<D256Few>("d256_few", {}, FEW_ROWS),
};

// Tiles of fwd_small.cu: of TILES those that no GPU of 9.0 or 10.0 takes, which larger ones fit.
constexpr std::string_view SMALL[] = {"d96_medium",  "d128_medium", "d128_small",
                                      "d192_medium", "d256_medium", "d256_small"};

// The kernels of TILES with the split costs of causal calls that are not packed. The costs fit what
// an H200 took for calls of few heads, D 96 to 256. At D=64 two warps that share out a block's keys
// are faster than most splits (docs/lab/ampere.md).
constexpr auto CAUSAL_TILES = [] {
  auto tiles = std::to_array(TILES);
  for (core::Tile& of : tiles) {
    if (of.can_split && of.head_dim > D64Few::HEAD_DIM)
      of.split_costs = {.start = 320, .combine = 128, .fewest_keys = 128, .by_mean = true};
  }
  return tiles;
}();

// The table for a call without masks as data and without a cache. Calls of few rows, and those
// whose keys are split, have no kernel of their own for head dimensions up to 32.
std::span<const core::Tile> tiles_of(const Problem& problem, const Device& device) {
  constexpr size_t OF_32 = 3;
  const bool causal = !problem.varlen && core::is_triangle(problem);
  const std::span<const core::Tile> equal(TILES), shrinking(CAUSAL_TILES);
  const std::span<const core::Tile> all = causal ? shrinking : equal;
  const core::Tile& last = all[OF_32 - 1];
  const bool served = core::takes_head_dims(last, problem) && core::serves(last, problem, device) &&
                      problem.num_splits <= 1 && !problem.batch_invariant;
  return served ? all : all.subspan(OF_32);
}

// For causal calls of few tiles: the longest ones take as long as all.
constexpr core::Tile FEW_CAUSAL_TILES[] = {
    tile<D128GroupsFew>("d128_groups_few", {},
                        "few tiles of unequal length: 64 rows, and two warps share out "
                        "the keys of 16 of them"),
};

// Whether FEW_CAUSAL_TILES serve a call. Measured on an H200 (docs/lab/ampere.md): with fewer tiles
// their keys are split instead, with more or longer ones those of 128 rows are as fast.
bool few_causal_tiles(const Problem& problem, const Device& device) {
  constexpr double FEWEST = 0.5, MOST = 2.25;  // tiles for each SM
  constexpr int64_t FEWEST_ROWS = 128, FEWEST_KEYS = 225, MOST_KEYS = 4095;
  const core::Tile& tile = FEW_CAUSAL_TILES[0];
  const auto tiles = static_cast<double>(core::tiles_of(problem, tile));
  return core::is_triangle(problem) && !problem.varlen && !problem.batch_invariant &&
         problem.num_splits <= 1 && std::max(problem.d, problem.dv) > D96Few::HEAD_DIM &&
         core::takes_head_dims(tile, problem) && tile.shared_bytes <= device.shared_per_block &&
         problem.nq >= FEWEST_ROWS && problem.nk >= FEWEST_KEYS && problem.nk <= MOST_KEYS &&
         tiles > FEWEST * device.sm_count && tiles <= MOST * device.sm_count;
}

constexpr const char* WITH_CACHE = "lengths and page tables are read on the device";
constexpr core::Tile CACHE_TILES[] = {
    tile<D64Cache>("d64_cache", {}, WITH_CACHE),   tile<D96Cache>("d96_cache", {}, WITH_CACHE),
    tile<D128Cache>("d128_cache", {}, WITH_CACHE), tile<D192Cache>("d192_cache", {}, WITH_CACHE),
    tile<D256Cache>("d256_cache", {}, WITH_CACHE),
};
constexpr const char* CACHE_WITH_MASKS = "masks as data, whose rows are those of a cache";
constexpr core::Tile MASKED_CACHE_TILES[] = {
    tile<D64MaskedCache>("d64_cache_masked", {}, CACHE_WITH_MASKS),
    tile<D128MaskedCache>("d128_cache_masked", {}, CACHE_WITH_MASKS),
    tile<D256MaskedCache>("d256_cache_masked", {}, CACHE_WITH_MASKS),
};
// A row of the tables of decoding kernels, which serve calls without a cache too. Their costs were
// measured on an H200 (docs/lab/ampere.md).
template <class C>
constexpr core::Tile decode_tile(const char* name, const char* reason) {
  core::Tile decodes = tile<C>(name, {}, reason);
  // Two CTAs on an SM read as fast as memory is. A third one reads while another starts or ends,
  // but keys shared out over all three were slower than over two.
  decodes.ctas_per_sm = 2;
  decodes.split_costs = {.start = 256, .combine = 128, .combine_share = 6, .fewest_keys = 64};
  return decodes;
}
constexpr const char* DECODES = "few rows: each warp copies and multiplies keys of its own";
constexpr core::Tile DECODE_TILES[] = {
    decode_tile<D64Decode>("d64_decode", DECODES),
    decode_tile<D128Decode>("d128_decode", DECODES),
    decode_tile<D256Decode>("d256_decode", DECODES),
};
// The tile of a decoding kernel with PLAIN in its Config, whose CTAs start sooner than others.
// Costs are in keys, of which those of 256 columns take twice the time.
template <class C>
constexpr core::Tile plain_decode_tile(const char* name, const char* reason) {
  core::Tile decodes = decode_tile<C>(name, reason);
  if (C::HEAD_DIM > 128) {
    decodes.split_costs = {.start = 128, .combine = 64, .combine_share = 4, .fewest_keys = 64};
  } else {
    decodes.split_costs = {.start = 192, .combine = 96, .combine_share = 6, .fewest_keys = 64};
  }
  return decodes;
}
constexpr const char* DECODES_PLAIN = "few rows without a cache: the grid says what a CTA computes";
constexpr core::Tile PLAIN_DECODE_TILES[] = {
    plain_decode_tile<D64PlainDecode>("d64_decode_plain", DECODES_PLAIN),
    plain_decode_tile<D128PlainDecode>("d128_decode_plain", DECODES_PLAIN),
    plain_decode_tile<D256PlainDecode>("d256_decode_plain", DECODES_PLAIN),
};
constexpr const char* DECODES_MASKED = "few rows of attn_mask: its elements come with the keys";
constexpr core::Tile MASKED_DECODE_TILES[] = {
    plain_decode_tile<D64MaskedDecode>("d64_decode_masked", DECODES_MASKED),
    plain_decode_tile<D128MaskedDecode>("d128_decode_masked", DECODES_MASKED),
    plain_decode_tile<D256MaskedDecode>("d256_decode_masked", DECODES_MASKED),
};
// The tile of such a decoding kernel whose shares of the keys are a cluster.
template <class C>
constexpr core::Tile joined_tile(const char* name) {
  return plain_decode_tile<C>(name, "few rows: shares of the keys are a cluster, and join there");
}
constexpr core::Tile JOINED_TILES[] = {
    joined_tile<D64JoinedDecode>("d64_decode_joined"),
    joined_tile<D128JoinedDecode>("d128_decode_joined"),
    joined_tile<D256JoinedDecode>("d256_decode_joined"),
};
constexpr core::Tile JOINED_MASKED_TILES[] = {
    joined_tile<D64JoinedMasked>("d64_decode_joined_masked"),
    joined_tile<D128JoinedMasked>("d128_decode_joined_masked"),
    joined_tile<D256JoinedMasked>("d256_decode_joined_masked"),
};
constexpr const char* WITH_FP8_CACHE = "8-bit K and V become fp16 in registers";
constexpr core::Tile FP8_CACHE_TILES[] = {
    decode_tile<D64CacheFp8>("d64_cache_fp8", WITH_FP8_CACHE),
    decode_tile<D128CacheFp8>("d128_cache_fp8", WITH_FP8_CACHE),
    decode_tile<D256CacheFp8>("d256_cache_fp8", WITH_FP8_CACHE),
};

// Whether the rows of q that share a head of K and V fit a tile of DECODE_TILES. With
// batch_invariant the kernel must not depend on how many rows there are.
bool decodes(const Problem& problem) {
  const int64_t rows = problem.varlen ? problem.max_seqlen_q : problem.nq;
  if (problem.batch_invariant || rows == UNKNOWN || core::writes_f32(problem)) return false;
  const auto power_of_two = [](int64_t x) { return std::bit_ceil(static_cast<uint64_t>(x)); };
  const uint64_t tile_rows = power_of_two(rows) * power_of_two(problem.heads_q / problem.heads_kv);
  // Their warps share out keys: of so few, most have none (docs/lab/ampere.md).
  const int64_t few_keys = rows > 1 ? 80 : 16;
  if (!problem.kv_cache && !problem.varlen && problem.nk <= few_keys) return false;
  return tile_rows <= static_cast<uint64_t>(DECODE_TILES[0].block_q);
}

// The plan of a call for kernels with PLAIN in their Config, whose grid is (sequences, tiles of a
// sequence, shares of the keys). Nothing where that is more than a grid can have. joined: the tiles
// of those whose shares are a cluster, which serve it where they are faster.
std::optional<PlanResult> plan_plain_decode(std::span<const core::Tile> tiles,
                                            std::span<const core::Tile> joined,
                                            const Problem& problem, const Device& device) {
  constexpr int64_t GRID_SIDE_LIMIT = 65535;  // CUDA: CTAs along y and z
  PlanResult result = mma_sync::plan_with_cache("ampere", tiles, problem, device);
  auto* plan = std::get_if<LaunchPlan>(&result);
  if (plan == nullptr) return result;
  bool joins = false;
  if (device.major == 9 && problem.nk > 0) {
    const auto tile = std::ranges::find_if(
        joined, [&](const core::Tile& of) { return core::takes_head_dims(of, problem); });
    core::Tile packed = *tile;
    core::pack_heads(problem, packed);
    const int64_t shares = core::choose_joined(problem, device, packed, plan->tile.splits);
    if (shares > 1) {
      Problem split = problem;
      split.num_splits = shares;
      result = mma_sync::plan_with_cache("ampere", joined, split, device);
      plan = std::get_if<LaunchPlan>(&result);
      if (plan == nullptr) return result;
      plan->problem = problem;
      joins = true;
    }
  }
  const int64_t shares = std::max<int64_t>(plan->tile.splits, 1);
  const int64_t tiles_of_sequence = problem.heads_q / plan->tile.packed_heads;
  if (tiles_of_sequence > GRID_SIDE_LIMIT || shares > GRID_SIDE_LIMIT) return std::nullopt;
  if (problem.nq > 0 && problem.batch > 0 && tiles_of_sequence > 0)
    plan->launches[0].grid = {problem.batch, tiles_of_sequence, shares};
  if (joins) plan->launches[0].cluster = {1, 1, static_cast<int32_t>(shares)};
  return result;
}

// The table for a call with a cache.
std::span<const core::Tile> cache_tiles(const Problem& problem) {
  if (is_fp8(problem.kv_dtype)) return FP8_CACHE_TILES;
  if (has_cache_masks(problem)) return MASKED_CACHE_TILES;
  // The others know no slopes.
  if (decodes(problem) || problem.alibi_slopes) return DECODE_TILES;
  return CACHE_TILES;
}

constexpr const char* WITH_MASKS = "masks as data: blocks of keys that no row sees are skipped";
// Looking at masks takes a block of keys longer than its products, so that short shares pay.
template <class C>
constexpr core::Tile masked_tile(const char* name) {
  core::Tile masked = tile<C>(name, {}, WITH_MASKS);
  masked.split_costs = {
      .start = 64, .combine = 96, .combine_share = 2, .fewest_keys = 64, .rows_per_key = 128};
  return masked;
}
constexpr core::Tile MASKED_TILES[] = {
    masked_tile<D64Masked>("d64_masked"),
    masked_tile<D128Masked>("d128_masked"),
    masked_tile<D256Masked>("d256_masked"),
};

// Calls of fewer rows with dropout take MASKED_TILES, as those with masks as data do.
constexpr const char* WITH_DROPOUT = "dropout alone and many rows: the kernel without masks";
constexpr core::ServesFrom MANY_ROWS = {.min_tiles_per_sm = 0.5};
constexpr core::ServesFrom MANY_ROWS_163_KB = {.min_ctas_per_sm = 2, .min_tiles_per_sm = 0.5};
constexpr core::Tile DROPOUT_TILES[] = {
    tile<D64LargeDropout>("d64_large_dropout", MANY_ROWS_163_KB, WITH_DROPOUT),
    tile<D64MediumDropout>("d64_medium_dropout", MANY_ROWS, WITH_DROPOUT),
    tile<D96Dropout>("d96_dropout", MANY_ROWS, WITH_DROPOUT),
    tile<D128Dropout>("d128_dropout", MANY_ROWS, WITH_DROPOUT),
    tile<D256Dropout>("d256_dropout", MANY_ROWS, WITH_DROPOUT),
};

// A row of the table for head dimensions above 256.
template <class C>
constexpr core::Tile wide_tile(const char* name, const char* reason) {
  core::Tile wide = tile<C>(name, {}, reason);
  wide.split_costs = {.start = 256, .combine = 256, .combine_share = 6, .fewest_keys = 128};
  return wide;
}
constexpr const char* WIDE = "two warps share 16 rows, whose outputs one has no registers for";
constexpr const char* WIDE_LARGE = "the same with 64 keys at a time, from 163 KB on";
constexpr core::Tile WIDE_TILES[] = {
    wide_tile<D384Large>("d384_large", WIDE_LARGE),
    wide_tile<D384>("d384", WIDE),
    wide_tile<D512Large>("d512_large", WIDE_LARGE),
    wide_tile<D512>("d512", WIDE),
};
constexpr core::Tile WIDE_MASKED_TILES[] = {
    wide_tile<D512Masked>("d512_masked", WITH_MASKS),
};

// The plan of a call with a head dimension above 256, with a cache or without one. Its kernels are
// in the images "ampere/wide_<dtype>" and "ampere/wide_masked_<dtype>", but for the combining
// kernel, which is that of latent caches.
PlanResult plan_wide(const Problem& problem, const Device& device) {
  if (problem.kv_cache && is_masked(problem)) {
    std::string given;
    for (const auto& [name, is_given] : core::masks_of(problem))
      if (is_given) given += given.empty() ? name : std::string(" and ") + name;
    return Reasons{given + " with a KV cache and head dimensions " + std::to_string(problem.d) +
                   " and " + std::to_string(problem.dv) +
                   ": ampere takes masks as data with head dimensions up to 256 there; drop " +
                   given + core::USE_TORCH};
  }
  if (core::writes_f32(problem)) {
    return Reasons{std::string("out_dtype float32 with head dimensions ") +
                   std::to_string(problem.d) + " and " + std::to_string(problem.dv) +
                   ": ampere writes it with head dimensions up to 256; leave out_dtype out" +
                   core::USE_TORCH};
  }
  const bool masked = takes_masked_kernels(problem);
  PlanResult result = masked && !problem.kv_cache
                          ? mma_sync::plan_masked("ampere", WIDE_MASKED_TILES, problem, device)
                          : mma_sync::plan_with_cache("ampere", WIDE_TILES, problem, device);
  auto* plan = std::get_if<LaunchPlan>(&result);
  if (plan == nullptr) return result;
  const std::string word = core::dtype_word(problem.dtype);
  for (Launch& launch : plan->launches) {
    if (launch.kernel == "ampere_combine_" + word) {
      launch.kernel += "_mla";
      launch.image = "ampere/mla_" + word;
    } else if (launch.kernel.starts_with("ampere_attention_fwd_")) {
      launch.image = (masked ? "ampere/wide_masked_" : "ampere/wide_") + word;
    }
  }
  return result;
}

}  // namespace

PlanResult plan(const Problem& problem, const Device& device) {
  Reasons reasons = core::why_not(problem, describe());
  if (!reasons.empty()) return reasons;
  if (problem.approximate != 0) return plan_approximate(problem, device);
  if (problem.key_indices > 0) return plan_lists(problem, device);
  if (problem.qv_align > 0) return plan_with_qv(problem, device);
  if (std::max(problem.d, problem.dv) > 256) return plan_wide(problem, device);
  if (problem.kv_cache) {
    const std::span<const core::Tile> tiles = cache_tiles(problem), none, few(DECODE_TILES);
    const bool few_rows_apart = tiles.data() == CACHE_TILES;
    return mma_sync::plan_with_cache("ampere", tiles, problem, device, few_rows_apart ? few : none);
  }
  if (problem.dropout_p != 0 && !is_masked(problem)) {
    if (auto dense = plan_dense_dropout(problem, device)) return *std::move(dense);
    auto result = mma_sync::plan_dropout("ampere", DROPOUT_TILES, problem, device);
    if (result) return *std::move(result);
  }
  if (has_attn_mask_alone(problem) && !problem.varlen && decodes(problem)) {
    if (auto plan = plan_plain_decode(MASKED_DECODE_TILES, JOINED_MASKED_TILES, problem, device))
      return *std::move(plan);
  }
  if (takes_masked_kernels(problem))
    return mma_sync::plan_masked("ampere", MASKED_TILES, problem, device);
  if (decodes(problem)) {
    if (!problem.varlen) {
      if (auto plan = plan_plain_decode(PLAIN_DECODE_TILES, JOINED_TILES, problem, device))
        return *std::move(plan);
    }
    return mma_sync::plan_with_cache("ampere", DECODE_TILES, problem, device);
  }
  if (auto packed = plan_packed(problem, device)) return *std::move(packed);
  auto dense = plan_dense(problem, device);
  if (auto shares = plan_shares(problem, device, dense ? &dense->tile : nullptr))
    return *std::move(shares);
  if (dense) return *std::move(dense);
  const auto tiles = few_causal_tiles(problem, device)
                         ? std::span<const core::Tile>(FEW_CAUSAL_TILES)
                         : tiles_of(problem, device);
  PlanResult result = mma_sync::plan_16_bits("ampere", tiles, problem, device);
  if (auto* plan = std::get_if<LaunchPlan>(&result);
      plan != nullptr && std::ranges::find(SMALL, plan->tile.name) != std::end(SMALL)) {
    plan->launches[0].image = std::string("ampere/fwd_small_") + core::dtype_word(problem.dtype);
  }
  return result;
}

// Lends the decoding kernels to the calls of other folders.
std::optional<mma_sync::FewRowsPlan> plan_few_rows(const Problem& problem, const Device& device) {
  const std::span<const core::Tile> fp8(FP8_CACHE_TILES), tiles(DECODE_TILES);
  return mma_sync::plan_few_rows("ampere", is_fp8(problem.kv_dtype) ? fp8 : tiles, problem, device);
}

Notes notes(const LaunchPlan& plan) {
  if (plan.problem.approximate != 0) return {core::approximate_note(plan.problem)};
  for (const Launch& launch : plan.launches) {
    if (launch.kernel.ends_with("_decode") && !plan.tile.name.ends_with("_decode"))
      return {{"few rows", "sequences of few rows have a launch of their own, " + launch.kernel}};
  }
  if (!mma_sync::shares_by_length(plan)) return {};
  return {{"splits", "up to " + std::to_string(plan.tile.splits) +
                         " shares of the keys of each tile, by the lengths of the sequences; a "
                         "second kernel combines them"},
          {"balance", "by the lengths, which are on the device"}};
}

}  // namespace archflash::ampere
