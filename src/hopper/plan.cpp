// hopper: Problem + Device -> LaunchPlan, or the reasons why not. Pure host code.
#include "common/planning/plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/planning/core_set.h"
#include "common/planning/kv_cache.h"
#include "common/planning/launch.h"
#include "common/planning/makespan.h"
#include "common/planning/masks.h"
#include "common/planning/order.h"
#include "common/planning/split_keys.h"
#include "common/planning/tensor_maps.h"
#include "common/planning/tiles.h"
#include "common/planning/workspace.h"
#include "common/problem.h"
#include "hopper/cache_maps.h"
#include "hopper/cache_params.h"
#include "hopper/config.cuh"
#include "hopper/dense_config.cuh"
#include "hopper/dense_params.h"
#include "hopper/masked_config.cuh"
#include "hopper/masked_params.h"
#include "hopper/params.h"
#include "hopper/plan_mla.h"

namespace archflash::hopper {

const Description& describe() {
  static const Description description{
      .name = "hopper",
      .summary =
          "fp8 (e4m3), fp16 and bf16 attention by TMA and wgmma in warpgroups of two roles, for "
          "H100, H200 and GH200 (9.0)",
      .home_device = "H200",
      .dtypes = {DType::F16, DType::BF16, DType::E4M3},
      .head_dims = core::HEAD_DIMS_WITH_FP8,
      .features = {"causal",
                   "q_offset",
                   "window",
                   "softcap",
                   "sinks",
                   "gqa",
                   "cu_seqlens",
                   "strides",
                   "lse",
                   "num_splits",
                   "descales",
                   "gradients",
                   "qv",
                   "attention_chunk",
                   "rotary_interleaved",
                   "attn_mask",
                   "key_ranges",
                   "alibi_slopes",
                   "block_mask",
                   "dropout_p",
                   "kv_cache_prefill",
                   "fp8_cache_prefill"},
      .needs_capability = 90,  // wgmma
      .only_forced_on_majors = {9},
      .masks_faster_on = 90,
      // 1.3 to 1.9 times as fast as ampere, whose kernels were measured on an H200 and those of
      // hopper on an H100 (docs/masks.md).
      .dropout_faster_on = 90,
      .dropout_rows = 128,
      .dropout_head_dim = 64,
  };
  return description;
}

namespace {

struct Tile : core::Tile {
  int q_stages;
  int barriers;
  int producer_registers, consumer_registers;  // of a thread; 0: the same for all
  bool in_turns;
  int row_step;
  int v_columns_of_cta;
  int grouped_slabs;  // of K and V, if they lie in GroupedTiles, else 0
  bool dense;         // its kernel reads a summary of attn_mask
  // Whether a kernel for 8 bits can turn V, whether it takes V that was turned before, and the box
  // in which TMA brings the V that it turns.
  bool turns_v, takes_turned_v;
  core::Box raw_v_box;
  // For the model of fastest(): the scores that an SM computes in a time, relative to the first
  // tile of the table for the same head dimensions, and the time that a tile's start and end take
  // beyond core::TILE_KEYS, in keys. No speed: the rules of `serves` choose among the table's
  // tiles.
  double speed = 0;
  int start_keys = 0;
};

template <class C>
constexpr Tile tile(const char* name, core::ServesFrom serves, const char* reason) {
  core::Tile common = core::tile<C>(name, serves, reason);
  common.q_box = core::box<typename C::QTile>(C::PACK);
  common.k_box = core::box<typename C::KTile>(C::PACK);
  common.v_box = core::box<typename C::VTile>(C::PACK);
  if (C::SLICES_V) common.head_dim_v = 2 * C::HEAD_DIM_V;
  return {common,
          C::Q_STAGES,
          C::BARRIERS,
          C::MOVES_REGISTERS ? C::PRODUCER_REGISTERS : 0,
          C::MOVES_REGISTERS ? C::CONSUMER_REGISTERS : 0,
          C::IN_TURNS,
          C::TILE_STEP,
          C::HEAD_DIM_V,
          C::PAGES ? C::KTile::SLABS : 0,
          requires { typename C::MaskTile; },
          C::TURNS_V,
          C::TAKES_TURNED_V,
          core::box<typename C::RawVTile>(C::PACK)};
}

template <class C>
constexpr Tile rated(const char* name, double speed, int start_keys, const char* reason) {
  Tile rated = tile<C>(name, {}, reason);
  rated.speed = speed, rated.start_keys = start_keys;
  return rated;
}

// Measured on an H200 (NOTES.md).
constexpr const char* FOUR_64 = "4 warpgroups of 64 rows in turns, 64 keys at a time";
constexpr const char* THREE_128 = "3 warpgroups of 64 rows in turns, 128 keys at a time";
constexpr const char* THREE_96 = "3 warpgroups of 64 rows in turns, 96 keys at a time";
constexpr const char* THREE_80 = "3 warpgroups of 64 rows in turns, 80 keys at a time";
constexpr const char* TWO_80 = "2 warpgroups of 64 rows in turns, 80 keys at a time";
constexpr const char* TWO_128 =
    "2 warpgroups of 64 rows in turns, 128 keys at a time: fills the GPU more evenly";
constexpr const char* PAIR = "few tiles: two CTAs of 64 rows on an SM";
constexpr Tile TILES[] = {
    rated<D64Large<DType::F16>>("d64_large", 1, 0, FOUR_64),
    rated<D64Medium<DType::F16>>("d64_medium", 1.06, 32, THREE_128),
    rated<D64Few<DType::F16>>("d64_few", 0.72, 0, PAIR),
    rated<D96Large<DType::F16>>("d96_large", 1, 0, THREE_96),
    rated<D96Medium<DType::F16>>("d96_medium", 0.88, 32, TWO_128),
    rated<D96Few<DType::F16>>("d96_few", 0.72, 64, PAIR),
    rated<D128Large<DType::F16>>("d128_large", 1, 0, THREE_80),
    rated<D128Medium<DType::F16>>("d128_medium", 0.95, 64, TWO_128),
    rated<D128Few<DType::F16>>("d128_few", 0.76, 64, PAIR),
    rated<D192Large<DType::F16>>("d192_large", 1, 0, THREE_80),
    rated<D192Medium<DType::F16>>("d192_medium", 0.9, 96, TWO_128),
    rated<D192Few<DType::F16>>("d192_few", 0.76, 64, PAIR),
    rated<D256Large<DType::F16>>("d256_large", 1, 0, TWO_80),
    rated<D256Few<DType::F16>>("d256_few", 0.75, 0, "few tiles: 64 rows make twice as many"),
};

constexpr const char* WITH_MASKS = "masks as data: blocks of keys that no row sees are skipped";
constexpr Tile MASKED_TILES[] = {
    tile<D64Masked<DType::F16>>("d64_masked", {}, WITH_MASKS),
    tile<D128Masked<DType::F16>>("d128_masked", {}, WITH_MASKS),
    tile<D256Masked<DType::F16>>("d256_masked", {}, WITH_MASKS),
};

constexpr const char* WITH_DROPOUT =
    "dropout: the random bits of a block are drawn while its scores are computed";
constexpr Tile DROPOUT_TILES[] = {
    tile<D64Dropout<DType::F16>>("d64_dropout", {}, WITH_DROPOUT),
    tile<D128Dropout<DType::F16>>("d128_dropout", {}, WITH_DROPOUT),
};

constexpr const char* WITH_CACHE = "a KV cache: lengths and page tables are read on the device";
constexpr const char* WITH_CACHE_FEW = "a KV cache and few tiles: 64 rows make more of them";
constexpr const char* WITH_PAGES = "pages of a KV cache: one copy brings all columns of their rows";
constexpr core::ServesFrom MANY = {.min_tiles_per_sm = 0.75, .min_uneven_tiles_per_sm = 1.25};
constexpr core::ServesFrom MANY_256 = {.min_tiles_per_sm = 0.5, .min_uneven_tiles_per_sm = 1};
// hopper::tile, because an argument of namespace core would bring in core::tile.
constexpr Tile CACHE_TILES[] = {
    hopper::tile<D64Cache<DType::F16>>("d64_cache", MANY, WITH_CACHE),
    tile<D64FewCache<DType::F16>>("d64_few_cache", {}, WITH_CACHE_FEW),
    hopper::tile<D128Cache<DType::F16>>("d128_cache", MANY, WITH_CACHE),
    tile<D128FewCache<DType::F16>>("d128_few_cache", {}, WITH_CACHE_FEW),
    hopper::tile<D256Cache<DType::F16>>("d256_cache", MANY_256, WITH_CACHE),
    tile<D256FewCache<DType::F16>>("d256_few_cache", {}, WITH_CACHE_FEW),
};
// For pages whose rows a tensor map has in groups (page_groups): `Tile128` serves head dimensions
// up to 128.
template <class Tile128>
constexpr auto pages_tiles(const char* name, const char* reason) {
  return std::array{
      hopper::tile<D64Cache<DType::F16>>("d64_cache", MANY, WITH_CACHE),
      hopper::tile<D64FewCache<DType::F16>>("d64_few_cache", {}, WITH_CACHE_FEW),
      hopper::tile<Tile128>(name, MANY, reason),
      hopper::tile<D128FewCache<DType::F16>>("d128_few_cache", {}, WITH_CACHE_FEW),
      hopper::tile<D256PagesCache<DType::F16>>("d256_pages_cache", MANY_256, WITH_PAGES),
      hopper::tile<D256FewCache<DType::F16>>("d256_few_cache", {}, WITH_CACHE_FEW),
  };
}
constexpr int64_t PAGE_ROWS = 64;
constexpr auto PAGES_TILES = pages_tiles<D128PagesCache<DType::F16>>(
    "d128_pages_cache", "pages of a multiple of 64 rows: two copies for a block of 128 keys");
constexpr auto SMALL_PAGES_TILES =
    pages_tiles<D128SmallPagesCache<DType::F16>>("d128_small_pages_cache", WITH_PAGES);

// For a dense attn_mask or ranges (reads_summary). Few row tiles are left to the tiles above.
constexpr const char* DENSE = "a dense attn_mask or ranges, summarized first, or ALiBi's slopes";
constexpr Tile DENSE_TILES[] = {
    tile<D64Dense<DType::F16>>("d64_dense", {.min_tiles_per_sm = 0.75}, DENSE),
    MASKED_TILES[0],
    tile<D128Dense<DType::F16>>("d128_dense", {.min_tiles_per_sm = 0.75}, DENSE),
    MASKED_TILES[1],
    MASKED_TILES[2],
};

constexpr const char* FOUR_128 = "4 warpgroups of 64 rows in turns, 128 keys at a time";
constexpr const char* TWO_192 = "2 warpgroups of 64 rows in turns, 192 keys at a time";
constexpr const char* SMALL =
    "2 warpgroups of 64 rows in turns, 128 keys at a time: more tiles or fewer masked keys than in "
    "larger ones";
constexpr Tile FP8_TILES[] = {
    rated<Fp8D64<DType::E4M3>>("d64", 1, 0, FOUR_128),
    rated<Fp8D64Small<DType::E4M3>>("d64_small", 0.65, 0, SMALL),
    rated<Fp8D128<DType::E4M3>>("d128", 1, 0, THREE_128),
    rated<Fp8D128Small<DType::E4M3>>("d128_small", 0.77, 0, SMALL),
    rated<Fp8D192<DType::E4M3>>("d192", 1, 0, THREE_128),
    rated<Fp8D256<DType::E4M3>>("d256", 1, 0, TWO_192),
    rated<Fp8D256Small<DType::E4M3>>("d256_small", 0.94, 0, SMALL),
};
// For descales of k or v by blocks of 64 keys.
constexpr Tile FP8_BLOCK_TILES[] = {
    tile<Fp8D64Blocks<DType::E4M3>>("d64_blocks", {}, "64 keys at a time share their descales"),
    tile<Fp8D128Blocks<DType::E4M3>>("d128_blocks", {}, "64 keys at a time share their descales"),
    tile<Fp8D192Blocks<DType::E4M3>>("d192_blocks", {}, "64 keys at a time share their descales"),
    tile<Fp8D256Blocks<DType::E4M3>>(
        "d256_blocks", {},
        "64 keys at a time share their descales, two CTAs the columns of V; its speed is "
        "unmeasured"),
};

// With more rounds of tiles than these a model says little: they come out even.
constexpr int64_t MOST_ROUNDS_TO_MODEL = 16;

// What the model of makespans reads of a plan for one head of one sequence, one of mean length.
LaunchPlan one_head(const Problem& problem, const Tile& tile) {
  LaunchPlan head;
  head.problem = problem;
  head.problem.batch = head.problem.heads_q = head.problem.heads_kv = 1;
  if (problem.varlen) {
    head.problem.varlen = false;
    head.problem.nq /= problem.batch, head.problem.nk /= problem.batch;
  }
  head.tile.block_q = tile.block_q, head.tile.block_k = tile.block_k;
  head.tile.row_step = tile.row_step;
  head.tile.splits = head.tile.v_slices = 1;
  return head;
}

// How long a call takes with a tile, by the model of makespans: keys, times the rows that an SM
// passes with the first tile of the table meanwhile. Packed sequences count as having the mean
// length, and as filling half of their last tile.
double time_of(const Problem& problem, const Device& device, const Tile& tile) {
  // A CTA that has an SM for itself, where there is room for two, is faster than beside another
  // one: in so much of the time (docs/lab/hopper.md).
  constexpr double ALONE = 0.65;
  const int64_t heads = problem.batch * problem.heads_q;
  const LaunchPlan head = one_head(problem, tile);
  std::vector<core::Run> runs;
  double sum = 0;
  for (const core::TileTime& one : core::tile_times(head, {})) {
    runs.push_back({one.time + tile.start_keys, heads});
    sum += runs.back().time;
  }
  const auto rows = static_cast<int64_t>(runs.size());
  const int64_t workers = core::workers_of(tile, device);
  double time = rows * heads > MOST_ROUNDS_TO_MODEL * workers
                    ? sum * static_cast<double>(heads) / static_cast<double>(workers)
                    : core::queue_time(runs, workers);
  if (problem.varlen && rows > 0) {
    const double places = static_cast<double>(head.problem.nq) / tile.block_q + 0.5;
    time *= places / static_cast<double>(rows);
  }
  const int64_t resident = core::resident_ctas(tile, device);
  if (resident > 1) {
    // How many of the SMs have a second CTA. Equal tiles end together: one such SM is the last.
    const double second =
        std::clamp(static_cast<double>(rows * heads - device.sm_count) / device.sm_count, 0.0, 1.0);
    const double beside = second > 0 && core::equal_tiles(problem) ? 1 : second;
    time *= ALONE + (1 - ALONE) * beside;
  }
  return time * tile.block_q * static_cast<double>(resident) / tile.speed;
}

// The tile of a table with which a call is expected to be done first; null: the device has too
// little shared memory for all of them.
const Tile* fastest(std::span<const Tile> tiles, const Problem& problem, const Device& device) {
  const Tile* best = nullptr;
  double time = 0;
  for (const Tile& tile : tiles) {
    if (!core::takes_head_dims(tile, problem)) continue;
    if (best != nullptr && tile.head_dim != best->head_dim) break;  // for larger heads
    if (tile.shared_bytes > device.shared_per_block) continue;
    const double of_tile = time_of(problem, device, tile);
    if (best == nullptr || of_tile < time) best = &tile, time = of_tile;
  }
  return best;
}

// The blocks of the summary of attn_mask, or else of key_ranges, which has size 1 along dimensions
// of stride 0.
struct SummaryBlocks {
  int64_t batches, heads, row_blocks, key_blocks;

  explicit SummaryBlocks(const Problem& problem)
      : batches(strides(problem).batch == 0 ? 1 : problem.batch),
        heads(strides(problem).head == 0 ? 1 : problem.heads_q),
        row_blocks(core::ceil_div(problem.nq, MASK_BLOCK)),
        key_blocks(core::ceil_div(problem.nk, MASK_BLOCK)) {}

  int64_t count() const { return batches * heads * row_blocks * key_blocks; }
  int64_t bits_bytes() const { return count() * SUMMARY_WORDS * 4; }

  static const Strides& strides(const Problem& problem) {
    return problem.mask != 0 ? problem.mask_strides : problem.range_strides;
  }
};

// Whether each element of an added attn_mask is read for one head only: then it needs no summary.
bool heads_have_masks(const Problem& problem) {
  return problem.mask > 1 && (problem.mask_strides.head != 0 || problem.heads_q == 1);
}

// Whether the kernels that read a summary can serve a call: attn_mask, key_ranges or alibi_slopes,
// which need none, are the only mask as data, and a tensor map describes the elements of attn_mask
// if they are added.
bool reads_summary(const Problem& problem) {
  constexpr int64_t MOST_SUMMARY_BYTES = int64_t{1} << 30;
  constexpr int64_t UNIT = 8;  // elements of 16 bits in the 16 bytes that TMA's strides count
  constexpr int64_t LARGEST_STRIDE = int64_t{1} << 38;
  const int given =
      (problem.mask != 0) + (problem.key_ranges != 0) + (problem.alibi_slopes ? 1 : 0);
  if (given != 1 || problem.block_mask) return false;
  if (problem.alibi_slopes) return !problem.varlen;
  const SummaryBlocks blocks(problem);
  const int64_t bytes = problem.mask != 0 ? blocks.bits_bytes() : blocks.count();
  if (blocks.count() == 0) return false;
  if (bytes > MOST_SUMMARY_BYTES && !heads_have_masks(problem)) return false;
  if (problem.mask <= 1) return true;
  if (dtype_bytes(static_cast<DType>(problem.mask - 2)) != 2) return false;
  const Strides& strides = problem.mask_strides;
  const bool in_units = strides.batch % UNIT == 0 && strides.head % UNIT == 0 &&
                        strides.row % UNIT == 0 && problem.mask_align % (2 * UNIT) == 0;
  const int64_t largest = std::max({strides.batch, strides.head, strides.row});
  return in_units && strides.row != 0 && problem.mask_key == 1 && largest < LARGEST_STRIDE;
}

std::span<const Tile> tiles_for(const Problem& problem) {
  if (problem.kv_cache) {
    const bool grouped = page_groups(problem, Operand::K) && page_groups(problem, Operand::V);
    if (!grouped) return CACHE_TILES;
    if (problem.page_size % PAGE_ROWS == 0) return PAGES_TILES;
    return SMALL_PAGES_TILES;
  }
  if (problem.dropout_p != 0) return DROPOUT_TILES;
  if (!is_fp8(problem.dtype) && reads_summary(problem)) return DENSE_TILES;
  if (!is_fp8(problem.dtype) && is_masked(problem)) return MASKED_TILES;
  if (!is_fp8(problem.dtype)) return TILES;
  const Descales descales = core::descales(problem);
  if (descales.k.block != 0 || descales.v.block != 0) return FP8_BLOCK_TILES;
  return FP8_TILES;
}

// Which heads' row tiles follow one another, measured on an H200 (NOTES.md): about as many as the
// GPU computes at the same time, with at most 16 MB of K and V, which then come from L2. Where
// tiles of unequal length are few, all heads are one group: the longest tiles come first.
int32_t heads_per_group(const Problem& problem, const Device& device, const Tile& tile) {
  constexpr int64_t MOST_BYTES = int64_t{16} << 20;
  constexpr int64_t FEW_TILES_PER_SM = 6;
  const int64_t ratio = problem.heads_q / problem.heads_kv;
  const int64_t kv_heads = problem.batch * problem.heads_kv;
  const int64_t tiles = core::tiles_of(problem, tile);
  int64_t size = kv_heads;
  if (core::equal_tiles(problem) || tiles > FEW_TILES_PER_SM * device.sm_count) {
    const int64_t fitting = MOST_BYTES / std::max<int64_t>(core::kv_head_bytes(problem), 1);
    const int64_t at_once = core::workers_of(tile, device);
    const int64_t wave = core::ceil_div(at_once * kv_heads, std::max<int64_t>(tiles, 1));
    size = std::clamp<int64_t>(std::min(fitting, wave), 1, kv_heads);
  }
  // A remnant of heads would start with its longest tiles when all others are done.
  const int64_t even = core::equal_tiles(problem)
                           ? core::ceil_div(kv_heads, core::ceil_div(kv_heads, size))
                           : core::even_size(kv_heads, size);
  return static_cast<int32_t>(even * ratio);
}

// Whether the CTAs count the tiles that they have taken, so that the one that is done first takes
// the next one. Else they take them in rounds, of which every second one is handed out in reverse
// order. Zeroing the counter takes about 2 us, in which a CTA multiplies a tile with about
// COUNTER_KEYS keys.
bool counts_tiles(LaunchPlan plan, const Problem& problem, const Device& device) {
  constexpr double COUNTER_KEYS = 128;
  const int64_t tiles = plan.tile.tiles * plan.tile.v_slices, ctas = plan.tile.ctas;
  const bool unknown_lengths =
      (problem.kv_cache && problem.batch > 1) || problem.block_mask || problem.key_ranges != 0;
  if (tiles > ctas && unknown_lengths) return true;
  if (tiles <= ctas || core::equal_tiles(problem)) return false;
  if (problem.varlen || tiles > MOST_ROUNDS_TO_MODEL * ctas) return tiles > 2 * ctas;
  plan.problem = problem;
  plan.device = device;
  std::vector<double> times;
  for (const core::TileTime& tile : core::tile_times(plan, {})) times.push_back(tile.time);
  const auto time = [&](core::Walk walk) { return core::makespan(times, ctas, walk).time; };
  return time(core::Walk::Queue) + COUNTER_KEYS < time(core::Walk::Rounds);
}

// Keys of a column of 8-bit V in the workspace. Packed sequences start at the tiles of
// math::varlen_tile_start().
int64_t v_columns(const Problem& problem) {
  const int64_t blocks = core::ceil_div(problem.nk, V_COLUMN_KEYS);
  return (problem.varlen ? blocks + problem.batch : blocks) * V_COLUMN_KEYS;
}

int64_t transpose_ctas(const Problem& problem) {
  const int64_t batch = problem.varlen ? 1 : problem.batch;
  return v_columns(problem) / V_COLUMN_KEYS * batch * problem.heads_kv;
}

// Whether the CTAs of a kernel turn 8-bit V themselves. That takes no launch of its own, but V is
// turned as often as tiles see it: measured to be faster as long as few rows see a key (NOTES.md).
bool turns_v(const Problem& problem, const Tile& tile) {
  constexpr double MOST_ROWS = 3072;  // of all heads that read the same V
  if (!tile.turns_v || !tile.takes_turned_v) return tile.turns_v;
  const LaunchPlan head = one_head(problem, tile);
  double keys = 0;  // that the tiles of a head visit
  for (const core::TileTime& one : core::tile_times(head, {})) keys += one.time - core::TILE_KEYS;
  const auto ratio = static_cast<double>(problem.heads_q / problem.heads_kv);
  const int64_t columns = core::ceil_div(head.problem.nk, V_COLUMN_KEYS) * V_COLUMN_KEYS;
  return keys * tile.block_q * ratio <= MOST_ROWS * static_cast<double>(columns);
}

// Puts the launch that turns V before that of `plan`, which starts early and then reads V from the
// workspace.
void transpose_v(LaunchPlan& plan, const Problem& problem, const Tile& tile,
                 core::Workspace& workspace) {
  const int64_t batch = problem.varlen ? 1 : problem.batch;
  const int64_t columns = v_columns(problem);
  const int64_t head_bytes = problem.dv * columns;
  const int64_t start = workspace.add(batch * problem.heads_kv * head_bytes);
  Launch& last = plan.launches[0];
  for (TensorMapSpec& map : last.tensor_maps) {
    if (map.operand != Operand::V) continue;
    map.operand = Operand::Workspace;
    map.addend = start;
    map.dims = {columns, problem.dv, problem.heads_kv, batch};
    map.strides = {columns, head_bytes, problem.heads_kv * head_bytes};
    map.box = {tile.v_box.columns, tile.v_box.rows, 1, 1};
  }
  Launch first;
  first.kernel = "hopper_transpose_v";
  first.image = last.image;
  first.grid = {transpose_ctas(problem), 1, 1};
  first.block = {TRANSPOSE_THREADS, 1, 1};
  first.params = last.params;
  last.starts_early = true;
  first.pointers = last.pointers;
  first.pointers.push_back(
      {Operand::Workspace, static_cast<int32_t>(offsetof(Params, v_columns_gmem)), start});
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

// How many of the last tiles of a call with block_mask are ordered by their work: those of two
// rounds. Under a causal mask or a window the tiles' positions say more of it than the table.
int64_t ordered_tiles(const LaunchPlan& plan, const Problem& problem, const Tile& tile) {
  constexpr int64_t ROUNDS = 2;
  const int64_t tiles = plan.tile.tiles, ctas = plan.tile.ctas;
  if (!problem.block_mask || tiles <= ctas || !core::equal_tiles(problem) || problem.varlen ||
      core::packed_heads(tile).count > 1)
    return 0;
  return std::min({tiles, ROUNDS * ctas, int64_t{MOST_ORDERED}});
}

// Puts the launch that orders `ordered` tiles before that of `plan`. It zeroes the counter of
// tiles.
void order_tiles(LaunchPlan& plan, const Problem& problem, int64_t ordered) {
  Launch& last = plan.launches[0];
  MaskedParams params;
  std::memcpy(static_cast<void*>(&params), last.params.data(), sizeof params);
  params.ordered = static_cast<int32_t>(ordered);
  last.params = core::bytes(params);
  core::Workspace workspace;
  const auto add = [&](size_t offset, int64_t bytes) {
    const auto slot = static_cast<int32_t>(offset);
    last.pointers.push_back({Operand::Workspace, slot, workspace.add(bytes)});
  };
  add(offsetof(MaskedParams, call) + offsetof(Params, taken_gmem), sizeof(*Params::taken_gmem));
  add(offsetof(MaskedParams, order_gmem), ordered * sizeof(*MaskedParams::order_gmem));
  plan.workspace_bytes = workspace.bytes();

  Launch first;
  first.kernel = std::string("hopper_order_tiles_") + core::dtype_word(problem.dtype);
  first.image = last.image;
  first.grid = {core::ceil_div(ordered, int64_t{ORDER_TILES}), 1, 1};
  first.block = {ORDER_THREADS, 1, 1};
  first.params = last.params;
  first.pointers = last.pointers;
  last.starts_early = true;
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

// Turns the launch of `plan` into that of a kernel of another image, which is told more than the
// call: the member MORE of AllParams is `more`, and `pointers` are filled in at the launch.
template <class AllParams, auto MORE, class More, class Pointers>
void tell_more(LaunchPlan& plan, const std::string& image, const More& more,
               const Pointers& pointers) {
  Launch& launch = plan.launches[0];
  AllParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(&params.call, launch.params.data(), sizeof params.call);
  params.*MORE = more;
  launch.params = core::bytes(params);
  launch.image = image;
  for (const PointerSlot& slot : pointers) launch.pointers.push_back(slot);
}

// Turns the launch of `plan` into that of a kernel that takes masks as data.
void add_masks(LaunchPlan& plan, const Problem& problem) {
  tell_more<MaskedParams, &MaskedParams::masks>(
      plan, std::string("hopper/masked_") + core::dtype_word(problem.dtype),
      core::mask_params(problem), core::mask_pointers(problem, offsetof(MaskedParams, masks)));
}

// Turns the launch of `plan` into that of a kernel that drops weights.
void add_dropout(LaunchPlan& plan, const Problem& problem) {
  tell_more<DroppingParams, &DroppingParams::dropout>(
      plan, std::string("hopper/dropout_") + core::dtype_word(problem.dtype),
      core::dropout_params(problem),
      core::dropout_pointers(problem, offsetof(DroppingParams, dropout)));
}

std::string refuse_with_dropout(const std::string& given) {
  return "dropout_p with " + given + ": hopper takes either alone; leave the implementation out" +
         core::USE_TORCH;
}

// Why DROPOUT_TILES cannot serve a call with dropout.
void refuse_dropout(const Problem& problem, Reasons& reasons) {
  const auto add = [&](const std::string& given) { reasons.push_back(refuse_with_dropout(given)); };
  if (is_fp8(problem.dtype)) add(std::string(dtype_name(problem.dtype)) + " inputs");
  if (std::max(problem.d, problem.dv) > 128) add("head dimensions above 128");
  if (is_masked(problem)) add("masks as data");
  if (problem.num_splits > 1) add("num_splits " + std::to_string(problem.num_splits));
}

// An 8-bit cache is converted before it is read (convert_cache.cuh).
bool converts_cache(const Problem& problem) {
  return problem.kv_cache && is_fp8(problem.kv_dtype) && !is_fp8(problem.dtype);
}

// The copies of K and of V in the workspace, one behind the other.
struct ConvertedCache {
  int64_t k_row, v_row;  // elements of all heads
  int64_t rows;
  int64_t k_bytes, v_bytes;

  explicit ConvertedCache(const Problem& problem)
      : k_row(problem.heads_kv * problem.d),
        v_row(problem.heads_kv * problem.dv),
        rows(problem.batch * problem.nk),
        k_bytes(rows * k_row * dtype_bytes(problem.dtype)),
        v_bytes(rows * v_row * dtype_bytes(problem.dtype)) {}
};

// The call as the attention kernel serves it: the copy of an 8-bit cache is a contiguous cache of
// q's dtype.
Problem as_kernels_read_it(const Problem& given) {
  Problem problem = given;
  if (!converts_cache(given)) return problem;
  const ConvertedCache copies(given);
  problem.kv_dtype = given.dtype;
  problem.page_size = 0;
  problem.cache_batch = given.batch;
  problem.cache_batch_idx = false;
  problem.k = {.batch = given.nk * copies.k_row, .head = given.d, .row = copies.k_row};
  problem.v = {.batch = given.nk * copies.v_row, .head = given.dv, .row = copies.v_row};
  return problem;
}

// Why a cache is not converted: lengths are on the device, so there must be room for all rows that
// the sequences may have.
void refuse_conversion(const Problem& given, Reasons& reasons) {
  constexpr int64_t MOST_BYTES = int64_t{2} << 30;
  if (!converts_cache(given)) return;
  const ConvertedCache copies(given);
  const int64_t bytes = copies.k_bytes + copies.v_bytes;
  if (bytes <= MOST_BYTES) return;
  reasons.push_back(std::string("a cache of dtype ") + dtype_name(given.kv_dtype) + " and up to " +
                    std::to_string(given.nk) + " keys in each of " + std::to_string(given.batch) +
                    " sequences: hopper converts it into a workspace for all of them, " +
                    std::to_string(bytes >> 20) + " MiB of at most " +
                    std::to_string(MOST_BYTES >> 20) + "; leave the implementation out" +
                    core::USE_TORCH);
}

// Lets a plan convert the cache first: its launches read the copies. few_rows:
// CacheParams::few_rows.
void convert_cache(LaunchPlan& plan, const Problem& given, int32_t few_rows) {
  if (given.nk == 0) return;
  const ConvertedCache copies(given);
  core::Workspace workspace;
  workspace.add(plan.workspace_bytes);
  const int64_t k_start = workspace.add(copies.k_bytes), v_start = workspace.add(copies.v_bytes);
  plan.workspace_bytes = workspace.bytes();
  const auto redirect = [&](auto& slot) {
    if (slot.operand != Operand::K && slot.operand != Operand::V) return;
    slot.addend += slot.operand == Operand::K ? k_start : v_start;
    slot.operand = Operand::Workspace;
  };
  for (Launch& launch : plan.launches) {
    std::ranges::for_each(launch.pointers, redirect);
    std::ranges::for_each(launch.tensor_maps, redirect);
  }

  ConvertParams params;
  core::init_params(given, params);
  params.cache = core::kv_cache(given);
  params.cache_dtype = given.kv_dtype;
  params.attention_chunk = core::chunk_of(given);
  params.few_rows = few_rows;
  params.row_blocks = static_cast<int32_t>(core::ceil_div(given.nk, int64_t{CONVERTED_ROWS}));
  const std::string word = core::dtype_word(given.dtype);
  Launch first;
  first.kernel = "hopper_convert_cache_" + word;
  first.image = "hopper/cache_" + word;
  first.grid = {2 * given.batch * params.row_blocks, 1, 1};
  first.block = {32 * CONVERT_WARPS, 1, 1};
  first.params = core::bytes(params);
  for (const PointerSlot& slot : core::pointers(given)) {
    if (slot.operand == Operand::K || slot.operand == Operand::V ||
        slot.operand == Operand::CuSeqlensQ)
      first.pointers.push_back(slot);
  }
  for (const PointerSlot& slot : core::kv_cache_pointers(given, offsetof(ConvertParams, cache)))
    first.pointers.push_back(slot);
  const auto add = [&](size_t field, int64_t start) {
    first.pointers.push_back({Operand::Workspace, static_cast<int32_t>(field), start});
  };
  add(offsetof(ConvertParams, k_gmem), k_start);
  add(offsetof(ConvertParams, v_gmem), v_start);
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

// Why the kernels of CACHE_TILES cannot or should not serve a call with a cache.
// `given`: the call as it was made, see as_kernels_read_it().
void refuse_cached_call(const Problem& problem, const Problem& given, Reasons& reasons) {
  // Rows of q that share a head of K, as many as tiles of powers of two would have. So few are
  // faster on the decoding kernels of ampere, measured on an H200 (NOTES.md).
  const uint64_t most_decoded = converts_cache(given) ? 128 : problem.page_size > 0 ? 16 : 32;
  const auto add = [&](const std::string& text) { reasons.push_back(text + core::USE_TORCH); };
  const int64_t rows = problem.varlen ? problem.max_seqlen_q : problem.nq;
  const auto power_of_two = [](int64_t x) { return std::bit_ceil(static_cast<uint64_t>(x)); };
  const int64_t heads = problem.heads_q / std::max<int64_t>(problem.heads_kv, 1);
  if (rows != UNKNOWN && power_of_two(rows) * power_of_two(heads) <= most_decoded) {
    add(std::to_string(rows) + " query row" + (rows == 1 ? "" : "s") + " of " +
        std::to_string(heads) + " heads for a head of a KV cache: hopper takes more than " +
        std::to_string(most_decoded) + " such rows; leave the implementation out");
  }
  if (is_fp8(problem.dtype))
    add(std::string("a KV cache with q of dtype ") + dtype_name(problem.dtype) +
        ": hopper reads caches of float16 and bfloat16; convert q, k and v");
  if (problem.page_size % FEWEST_BOX_ROWS != 0) {
    add("rows of a cache in pages of " + std::to_string(problem.page_size) +
        ": hopper copies pages of a multiple of " + std::to_string(FEWEST_BOX_ROWS) +
        " rows; choose another page size");
  }
  refuse_cache(problem, "rows of a cache", reasons);
}

// Makes the plan of a call without a cache one that reads a cache. `given`: the call as it was
// made, see as_kernels_read_it().
void read_cache(LaunchPlan& plan, const Problem& problem, const Problem& given,
                const Device& device, const Tile& tile) {
  CacheParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  Launch& launch = plan.launches[0];
  std::memcpy(&params.call, launch.params.data(), sizeof params.call);
  params.cache = core::kv_cache(problem);
  params.attention_chunk = core::chunk_of(problem);
  params.slopes = core::alibi_slopes(problem);
  if (problem.alibi_slopes) {
    core::always_transform_scores(problem, params.call.attention);
    constexpr size_t SLOPES = offsetof(CacheParams, slopes) + offsetof(AlibiSlopes, gmem);
    launch.pointers.push_back({Operand::AlibiSlopes, static_cast<int32_t>(SLOPES), 0});
  }
  if (converts_cache(given)) {
    AttentionParams& attention = params.call.attention;
    // For descales that leave no normal scale of the exponents.
    if (!attention.transform_scores) attention.tanh_scale = static_cast<float>(given.scale);
    params.call.descales = core::descales(given);
  }
  params.box_rows = cache_box_rows(problem, tile.block_k);
  if (tile.grouped_slabs > 0) {
    params.k_page_groups = page_groups(problem, Operand::K).value();
    params.v_page_groups = page_groups(problem, Operand::V).value();
  }
  // A combining kernel writes all rows.
  std::optional<mma_sync::FewRowsPlan> few;
  if (plan.launches.size() == 1) few = mma_sync::plan_few_rows_apart(given, device);
  if (few) params.few_rows = static_cast<int32_t>(few->rows);
  launch.image = std::string("hopper/cache_") + core::dtype_word(problem.dtype);
  launch.params = core::bytes(params);
  for (const PointerSlot& slot : core::kv_cache_pointers(problem, offsetof(CacheParams, cache)))
    launch.pointers.push_back(slot);
  if (problem.nk == 0) {  // an empty cache is never read
    std::erase_if(launch.tensor_maps,
                  [](const TensorMapSpec& map) { return map.operand != Operand::Q; });
  }
  for (TensorMapSpec& map : launch.tensor_maps) {
    if (map.operand == Operand::Q) continue;
    if (tile.grouped_slabs > 0) {
      map = grouped_map(problem, map.operand, map.offset, tile.grouped_slabs, params.box_rows);
      continue;
    }
    map = cache_map(problem, map.operand, map.offset,
                    map.operand == Operand::K ? tile.k_box : tile.v_box, params.box_rows);
  }
  if (converts_cache(given)) convert_cache(plan, given, params.few_rows);
  if (few) mma_sync::add_few_rows(plan, std::move(*few));
}

// Turns the launch of `plan` into that of a kernel that reads a summary of a mask, and puts the
// launch that makes the summary before it. That one zeroes the counter of tiles, too.
void add_summary(LaunchPlan& plan, const Problem& problem) {
  const SummaryBlocks blocks(problem);
  Launch& last = plan.launches[0];
  DenseParams params;
  std::memset(static_cast<void*>(&params), 0, sizeof params);  // equal plans are equal bytes
  std::memcpy(&params.call, last.params.data(), sizeof params.call);
  params.masks = core::mask_params(problem);
  params.mask_batches = static_cast<int32_t>(blocks.batches);
  params.mask_heads = static_cast<int32_t>(blocks.heads);
  params.row_blocks = static_cast<int32_t>(blocks.row_blocks);
  params.key_blocks = static_cast<int32_t>(blocks.key_blocks);
  last.params = core::bytes(params);
  last.image = std::string("hopper/masked_") + core::dtype_word(problem.dtype);
  for (const PointerSlot& slot : core::mask_pointers(problem, offsetof(DenseParams, masks)))
    last.pointers.push_back(slot);
  core::Workspace workspace;
  const auto add = [&](size_t offset, int64_t bytes) {
    const auto slot = static_cast<int32_t>(offset);
    last.pointers.push_back({Operand::Workspace, slot, workspace.add(bytes)});
  };
  add(offsetof(DenseParams, call) + offsetof(Params, taken_gmem), sizeof(*Params::taken_gmem));
  if (problem.mask > 1) {
    const Strides& strides = problem.mask_strides;
    const int64_t sizes[] = {problem.nq, blocks.heads, blocks.batches};
    const int64_t steps[] = {strides.row, strides.head, strides.batch};
    constexpr int64_t UNIT_BYTES = 16;  // a stride along which nothing moves
    TensorMapSpec elements{};
    elements.operand = Operand::Mask;
    elements.offset = offsetof(DenseParams, mask_map);
    elements.dtype = problem.dtype;
    elements.swizzle = Swizzle::B128;
    elements.dims = {problem.nk};
    for (int i = 0; i < 3; ++i) {
      elements.dims.push_back(sizes[i]);
      elements.strides.push_back(steps[i] == 0 ? UNIT_BYTES : steps[i] * 2);
    }
    elements.box = {MASK_BLOCK, plan.tile.block_q, 1, 1};
    last.tensor_maps.push_back(elements);
  }
  if (problem.alibi_slopes || heads_have_masks(problem)) {  // nothing to summarize
    plan.workspace_bytes = workspace.bytes();
    plan.zeroed_bytes = sizeof(*Params::taken_gmem);
    return;
  }
  add(offsetof(DenseParams, states_gmem), blocks.count());
  if (problem.mask != 0) {
    add(offsetof(DenseParams, bits_gmem), blocks.bits_bytes());
  } else {
    const int64_t row_blocks = blocks.count() / blocks.key_blocks;
    add(offsetof(DenseParams, seen_keys_gmem), row_blocks * static_cast<int64_t>(sizeof(SeenKeys)));
  }
  plan.workspace_bytes = workspace.bytes();

  Launch first;
  first.kernel =
      std::string(problem.mask != 0 ? "hopper_summarize_mask_" : "hopper_summarize_ranges_") +
      core::dtype_word(problem.dtype);
  first.image = last.image;
  first.grid = {problem.mask != 0 ? blocks.count() : blocks.count() / blocks.key_blocks, 1, 1};
  first.block = {SUMMARY_THREADS, 1, 1};
  first.params = last.params;
  first.pointers = last.pointers;
  // The bits of attn_mask are read as memory that nothing writes while the kernel runs.
  last.starts_early = problem.mask == 0;
  plan.launches.insert(plan.launches.begin(), std::move(first));
}

}  // namespace

PlanResult plan(const Problem& given, const Device& device) {
  Reasons why_not = core::why_not(given, describe());
  const Problem problem = as_kernels_read_it(given);
  if (has_latent_cache(problem)) {
    if (is_masked(problem)) {
      why_not.push_back(
          std::string("masks as data with a latent cache: hopper takes them without a "
                      "cache only; drop them") +
          core::USE_TORCH);
    }
    if (!why_not.empty()) return why_not;
    return plan_latent_cache(problem, device);
  }
  core::add_tma_reasons(problem, "hopper", false, why_not);
  refuse_conversion(given, why_not);
  if (problem.kv_cache) refuse_cached_call(problem, given, why_not);
  if (problem.dropout_p != 0) refuse_dropout(problem, why_not);
  if (is_fp8(problem.dtype))
    core::refuse_splits(problem, "hopper", dtype_name(problem.dtype), why_not);
  if (is_fp8(problem.dtype) && v_columns(problem) > INT32_MAX) {
    why_not.push_back(
        "V of " + std::to_string(problem.nk) + " keys in " + std::to_string(problem.batch) +
        " sequences with " + dtype_name(problem.dtype) + ": hopper turns V into columns of up to " +
        std::to_string(INT32_MAX) + " keys, in which each sequence is filled up to a multiple of " +
        std::to_string(V_COLUMN_KEYS) + "; split the batch" + core::USE_TORCH);
  }
  if (is_fp8(problem.dtype) && is_masked(problem)) {
    why_not.push_back(std::string("masks as data with ") + dtype_name(problem.dtype) +
                      " inputs: hopper takes them with float16 and bfloat16; convert q, k and v" +
                      core::USE_TORCH);
  }
  if (!why_not.empty()) return why_not;
  const std::span<const Tile> table = tiles_for(problem);
  const Tile* best = table[0].speed > 0 ? fastest(table, problem, device) : nullptr;
  const auto choice = best != nullptr
                          ? core::choose_splits_of("hopper", best, table, problem, device)
                          : core::choose_with_splits("hopper", table, problem, device);
  if (const auto* reasons = std::get_if<Reasons>(&choice)) return *reasons;
  const auto& [tile, splits, share_keys] = std::get<core::SplitChoice<Tile>>(choice);
  const int64_t v_slices = std::max<int64_t>(core::ceil_div(problem.dv, tile.v_columns_of_cta), 1);
  const int64_t tiles = core::tiles_of(problem, tile) * splits * v_slices;
  const bool turned_before = is_fp8(problem.dtype) && !turns_v(problem, tile);
  const int64_t largest = std::max(tiles, turned_before ? transpose_ctas(problem) : 0);
  if (largest > core::GRID_LIMIT) return core::grid_too_large(largest);

  Params params;
  core::init_params(problem, params);
  if (problem.dropout_p != 0 && params.attention.transform_scores)
    return Reasons{refuse_with_dropout("a softcap, or a scale of 0 or less or near it")};
  params.attention.order.heads_per_group = heads_per_group(problem, device, tile);
  params.tiles = static_cast<int32_t>(tiles);
  params.partials.splits = 1;
  if (tile.can_split) params.packed_heads = core::packed_heads(tile);
  params.v_slices = static_cast<int32_t>(v_slices);
  if (turned_before) params.v_columns = static_cast<int32_t>(v_columns(problem));
  // A CTA that goes on to the next tile loads its keys while the last one is computed and written.
  // Where several share an SM they do that for one another, but with masks as data the search for
  // the first block of a tile comes on top of it.
  const int resident = core::resident_ctas(tile, device);
  const bool masked = is_masked(problem) && !problem.kv_cache;
  const bool stays = resident == 1 || (masked && splits == 1);
  const int64_t ctas =
      stays ? std::min<int64_t>(tiles, static_cast<int64_t>(resident) * device.sm_count) : tiles;
  Tile loaded = tile;
  if (is_fp8(problem.dtype) && !turned_before) loaded.v_box = tile.raw_v_box;
  LaunchPlan plan = core::one_launch("hopper", problem, device, loaded, ctas, params);
  plan.tile.v_slices = v_slices;
  plan.tile.row_step = tile.row_step;
  if (splits > 1) {
    core::split_keys(plan, problem, splits, share_keys, offsetof(Params, partials),
                     std::string("hopper_combine_") + core::dtype_word(problem.dtype));
  }
  // The combining kernel is in the image of the kernels without masks, which the plan names first.
  if (tile.dense) {
    plan.tile.summarizes_masks = true;
    add_summary(plan, problem);
    return plan;
  }
  if (masked) {
    add_masks(plan, problem);
    if (const int64_t ordered = ordered_tiles(plan, problem, tile); ordered > 0) {
      order_tiles(plan, problem, ordered);
      return plan;
    }
  }
  core::Workspace workspace;
  if (splits == 1 && stays && counts_tiles(plan, problem, device)) {
    plan.zeroed_bytes = sizeof(*params.taken_gmem);
    plan.launches[0].pointers.push_back({Operand::Workspace,
                                         static_cast<int32_t>(offsetof(Params, taken_gmem)),
                                         workspace.add(plan.zeroed_bytes)});
  }
  if (turned_before && problem.nk > 0) transpose_v(plan, problem, tile, workspace);
  if (problem.dropout_p != 0) add_dropout(plan, problem);
  if (splits == 1) plan.workspace_bytes = workspace.bytes();
  if (problem.kv_cache) {
    read_cache(plan, problem, given, device, tile);
    const std::string word = core::dtype_word(problem.dtype);
    const std::string append = "hopper_append_" + word + (converts_cache(given) ? "_fp8" : "");
    const Reasons reasons = core::add_append(plan, given, "hopper/cache_" + word, append);
    if (!reasons.empty()) return reasons;
  }
  return plan;
}

Notes notes(const LaunchPlan& plan) {
  const Tile* tile = core::taken(tiles_for(as_kernels_read_it(plan.problem)), plan);
  if (tile == nullptr) return {};  // none, or that of plan_mla.cpp
  const auto str = [](int x) { return std::to_string(x); };
  Notes lines = {
      {"warps", str(tile->warps) + " of " + str(tile->rows_per_warp) + " rows, 1 producer" +
                    (tile->in_turns ? "; warpgroups multiply in turns" : "")},
      {"registers", tile->consumer_registers == 0
                        ? "the same for all warps"
                        : str(tile->consumer_registers) + " for each consumer thread, " +
                              str(tile->producer_registers) +
                              " for each of the producer's warpgroup (setmaxnreg)"},
      {"stages", str(tile->q_stages) + " of Q, " + str(tile->k_stages) + " of K and of V, " +
                     str(tile->barriers) + " barriers"},
  };
  const auto few = std::ranges::find_if(plan.launches, [](const Launch& launch) {
    return launch.kernel.ends_with("_decode") || launch.kernel.ends_with("_cache_fp8");
  });
  if (few != plan.launches.end()) {
    lines.emplace_back("few rows",
                       "sequences of few rows have a launch of their own, " + few->kernel);
  }
  if (converts_cache(plan.problem)) {
    const ConvertedCache copies(plan.problem);
    lines.emplace_back("cache", std::string("K and V become ") + dtype_name(plan.problem.dtype) +
                                    " before the attention kernel reads them, in a workspace of " +
                                    str(static_cast<int>((copies.k_bytes + copies.v_bytes) >> 20)) +
                                    " MiB for all rows that the sequences may have");
  }
  return lines;
}

}  // namespace archflash::hopper
