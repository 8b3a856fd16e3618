// blackwell_dc: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/planning/plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/params.h"
#include "common/planning/core_set.h"
#include "common/planning/launch.h"
#include "common/planning/split_keys.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "common/problem.h"

namespace archflash::blackwell_dc {

const Description& describe() {
  static const Description description{
      .name = "blackwell_dc",
      .summary =
          "fp8 (e4m3), fp16 and bf16 attention by tcgen05 and tensor memory in 16 warps of roles, "
          "for B200, B300, GB200 and GB300 (10.0, 10.3)",
      .home_device = "B200",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3},
      .head_dims = core::HEAD_DIMS_WITH_FP8,
      .features = {"causal", "q_offset", "window", "softcap", "sinks", "gqa", "cu_seqlens",
                   "strides", "lse", "num_splits", "descales"},
      .needs_capability = 100,  // tcgen05
  };
  return description;
}

namespace {

struct Tile : core::Tile {
  int tiles_per_cta;  // of 128 rows
  int barriers;
  int polynomial_pairs;  // of 16 exponentials
  Registers registers;   // of a thread of each role
};

template <class C>
constexpr Tile tile(const char* name) {
  const auto box = []<class T>(const T&, int pack) {
    return core::Box{T::SLAB * pack, T::BOX_ROWS, T::SWIZZLE};
  };
  const core::Tile common{.name = name,
                          .reason = "",
                          .head_dim = C::HEAD_DIM,
                          .head_dim_v = C::HEAD_DIM_V,
                          .block_q = C::BLOCK_Q,
                          .block_k = C::BLOCK_K,
                          .threads = C::THREADS,
                          .warps = C::TILES * C::SOFTMAX_WARPS,
                          .rows_per_warp = C::TILE_ROWS / C::SOFTMAX_WARPS,
                          .k_stages = C::K_STAGES,
                          .v_stages = C::V_STAGES,
                          .cluster = C::CTAS,
                          .ctas_per_sm = 1,
                          .shared_bytes = C::SHARED_BYTES,
                          // A tile of 8-bit elements counts two of them as one column.
                          .q_box = box(typename C::QTile(), C::PACK),
                          .k_box = box(typename C::KTile(), C::PACK),
                          .v_box = box(typename C::VTile(), C::PACK),
                          .out_box = box(typename C::OTile(), 1)};
  return {common, C::TILES, C::BARRIERS, C::SWITCHES.polynomial_pairs, C::REGISTERS};
}

// One for each head dimension, the smallest first.
constexpr Tile TILES[] = {tile<D64<DType::F16>>("d64"), tile<D96<DType::F16>>("d96"),
                          tile<D128<DType::F16>>("d128"), tile<D192<DType::F16>>("d192"),
                          tile<D256<DType::F16>>("d256")};

// For pairs of CTAs: each has the head dimensions of one of TILES, and serves where pairs_pay().
constexpr Tile PAIRS[] = {tile<D128Pair<DType::F16>>("d128_pair"),
                          tile<D192Pair<DType::F16>>("d192_pair")};

// For few query rows: one tile of 128 rows, whose keys may be split over CTAs.
constexpr Tile FEW_TILES[] = {
    tile<D64Few<DType::F16>>("d64_few"), tile<D96Few<DType::F16>>("d96_few"),
    tile<D128Few<DType::F16>>("d128_few"), tile<D192Few<DType::F16>>("d192_few"),
    tile<D256<DType::F16>>("d256")};

constexpr Tile FP8_TILES[] = {tile<Fp8D64<DType::E4M3>>("d64"), tile<Fp8D128<DType::E4M3>>("d128"),
                              tile<Fp8D192<DType::E4M3>>("d192"),
                              tile<Fp8D256<DType::E4M3>>("d256")};

const Tile& smallest(std::span<const Tile> tiles, const Problem& problem) {
  for (const Tile& tile : tiles) {
    if (core::takes_head_dims(tile, problem)) return tile;
  }
  return tiles.back();  // core::why_not() refuses larger ones
}

// Keys that the middle row of a sequence sees, where all have the mean length and an offset that
// only the device knows is the default.
int64_t keys_of_a_row(const Problem& problem) {
  const int64_t rows = core::rows_per_sequence(problem);
  const int64_t keys = problem.varlen ? problem.nk / problem.batch : problem.nk;
  const bool known = !problem.q_offset_default && !problem.q_offset_tensor;
  // Beyond the keys is beyond the keys: no sum overflows.
  const auto near = [&](int64_t x) { return std::clamp(x, -rows - keys, rows + keys); };
  const int64_t place = rows / 2 + (known ? near(problem.q_offset) : keys - rows);
  const auto shifted = [&](int64_t by) { return std::clamp<int64_t>(place + by, 0, keys); };
  return shifted(near(problem.window_right)) - shifted(-near(problem.window_left));
}

// Whether pairs of CTAs are expected to be faster than CTAs alone: unmeasured, from a model
// (NOTES.md). For a block of 128 keys at d 128 a CTA of a pair reads 128 KB of shared memory in
// products, not 192, and brings 32 KB of K and V from L2, not 64. But at either edge, that of the
// rows and that of the keys they see, a tile has up to 256 more that it does not need, and there
// are half as many tiles to share out. So: where those 256 are at most 1/16, and the tiles of two
// CTAs take no more rounds and fill the GPU.
bool pairs_pay(const Problem& problem, const Device& device, const Tile& alone, const Tile& pair) {
  constexpr int64_t LONG = 16 * 256;
  if (core::rows_per_sequence(problem) < LONG || keys_of_a_row(problem) < LONG) return false;
  const int64_t pairs = device.sm_count / 2;
  const int64_t tiles = core::tiles_of(problem, pair);
  return pairs > 0 && tiles >= pairs &&
         core::ceil_div(tiles, pairs) <=
             core::ceil_div(core::tiles_of(problem, alone), device.sm_count);
}

// The kernel that serves all rows of a head with all their keys.
const Tile& alone_or_pair(const Problem& problem, const Device& device) {
  const Tile& alone = smallest(TILES, problem);
  for (const Tile& pair : PAIRS) {
    const bool same_dims = pair.head_dim == alone.head_dim && pair.head_dim_v == alone.head_dim_v;
    if (same_dims && pairs_pay(problem, device, alone, pair)) return pair;
  }
  return alone;
}

struct Choice {
  const Tile& tile;
  int64_t splits;
};

// One tile of 128 rows where a head has no more of them, or where its keys are split: asked for, or
// expected to be faster.
Choice choose(const Problem& problem, const Device& device) {
  if (is_fp8(problem.dtype)) return {smallest(FP8_TILES, problem), 1};
  const Tile& few = smallest(FEW_TILES, problem);
  const int64_t longest = problem.max_seqlen_q == UNKNOWN ? problem.nq : problem.max_seqlen_q;
  const Tile& unsplit = longest <= few.block_q ? few : alone_or_pair(problem, device);
  const int64_t sms = std::max(device.sm_count, 1);
  const int64_t rounds = core::ceil_div(core::tiles_of(problem, unsplit) * unsplit.cluster, sms);
  const int64_t keys = core::visited_keys(problem, unsplit.block_q, unsplit.block_k);
  int64_t time = rounds * keys * unsplit.tiles_per_cta;
  // What the model leaves out, the workspace's bytes and what two tiles in flight gain, is taken to
  // be a quarter.
  if (unsplit.tiles_per_cta > few.tiles_per_cta) time -= time / 4;
  const int64_t splits = core::choose_splits(problem, device, few.block_q, few.block_k, time);
  return {splits > 1 ? few : unsplit, splits};
}

}  // namespace

PlanResult plan(const Problem& problem, const Device& device) {
  Reasons reasons = core::why_not(problem, describe());
  if (is_fp8(problem.dtype) && problem.num_splits > 1) {
    reasons.push_back("num_splits " + std::to_string(problem.num_splits) + " with " +
                      dtype_name(problem.dtype) +
                      " inputs: blackwell_dc splits the keys of 16-bit inputs only; leave "
                      "num_splits out or pass 1" +
                      core::USE_TORCH);
  }
  core::add_tma_reasons(problem, "blackwell_dc", true, reasons);
  if (!reasons.empty()) return reasons;
  const int64_t most_tiles = core::tiles_of(problem, smallest(FEW_TILES, problem));
  if (most_tiles > core::GRID_LIMIT) return core::grid_too_large(most_tiles);
  const auto [tile, splits] = choose(problem, device);
  if (tile.shared_bytes > device.shared_per_block)
    return core::too_little_shared_memory("blackwell_dc", tile.shared_bytes, device);
  const int64_t tiles = core::tiles_of(problem, tile) * splits;
  const int64_t largest = std::max(tiles, splits > 1 ? core::combine_ctas(problem) : 0);
  if (largest > core::GRID_LIMIT) return core::grid_too_large(largest);

  Params params;
  core::init_params(problem, params);
  params.attention.heads_per_group = core::heads_per_group(problem, device, core::Groups::Even);
  params.tiles = static_cast<int32_t>(tiles);
  params.partials.splits = 1;
  // One CTA per SM, all of whose tensor memory it takes, goes on to the next tile: that one's
  // products start while the last one's output is written. Or one pair of CTAs for two SMs.
  const int64_t ctas = tile.cluster * std::min<int64_t>(tiles, device.sm_count / tile.cluster);
  LaunchPlan plan = core::one_launch("blackwell_dc", problem, device, tile, ctas, params);
  if (tile.cluster == 2) plan.launches[0].image = "blackwell_dc/fwd_pair";
  if (splits > 1) {
    core::split_keys(plan, problem, splits, offsetof(Params, partials),
                     std::string("blackwell_dc_combine_") + core::dtype_word(problem.dtype));
  }
  return plan;
}

Notes notes(const LaunchPlan& plan) {
  const Tile* tile = nullptr;
  if (is_fp8(plan.problem.dtype)) {
    tile = core::taken<Tile>(FP8_TILES, plan);
  } else {
    using Tiles = std::span<const Tile>;
    for (Tiles tiles : {Tiles(TILES), Tiles(PAIRS), Tiles(FEW_TILES)}) {
      if (tile == nullptr) tile = core::taken(tiles, plan);
    }
  }
  if (tile == nullptr) return {};
  const auto str = [](int x) { return std::to_string(x); };
  const bool pair = tile->cluster == 2;
  const std::string halves = pair ? ", half a block each" : "";
  const std::string stages =
      tile->v_stages == 0
          ? str(tile->k_stages) + " that K and V share" + halves
          : str(tile->k_stages) + " of K, " + str(tile->v_stages) + " of V" + halves;
  return {
      {"products",
       pair ? "2 CTAs: 256 rows each, 128 of either CTA (cta_group::2)" : "1 CTA: 128 rows each"},
      {"warps", str(tile->warps) + " softmax, 4 correction, 1 each for products, loads and stores"},
      {"registers", str(tile->registers.softmax) + " softmax, " + str(tile->registers.correction) +
                        " correction, " + str(tile->registers.other) + " others (setmaxnreg)"},
      {"stages", stages + ", " + str(tile->barriers) + " barriers"},
      {"exponentials", str(tile->polynomial_pairs) + " of 16 by polynomial"},
  };
}

}  // namespace archflash::blackwell_dc
