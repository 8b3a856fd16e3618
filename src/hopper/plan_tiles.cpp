// Which of hopper's tiles serves a call. Pure host code.
#include "hopper/plan_tiles.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>

#include "common/device/packed_heads.cuh"
#include "common/device/row_tiles.h"
#include "common/planning/core_set.h"
#include "common/planning/makespan.h"
#include "common/planning/masks.h"
#include "common/planning/order.h"
#include "hopper/cache_maps.h"
#include "hopper/config.cuh"
#include "hopper/masked_config.cuh"
#include "hopper/more_config.cuh"
#include "hopper/plan_parts.h"
#include "hopper/short_config.cuh"
#include "hopper/table_config.cuh"

namespace archflash::hopper {
namespace {

template <class C>
constexpr KernelTile tile(const char* name, core::ServesFrom serves, const char* reason) {
  KernelTile tile{core::tile<C>(name, serves, reason)};
  tile.q_box = core::box<typename C::QTile>(C::PACK);
  tile.k_box = core::box<typename C::KTile>(C::PACK);
  tile.v_box = core::box<typename C::VTile>(C::PACK);
  tile.raw_v_box = core::box<typename C::RawVTile>(C::PACK);
  if (C::SLICES_V) tile.head_dim_v = 2 * C::HEAD_DIM_V;
  tile.q_stages = C::Q_STAGES;
  tile.barriers = C::BARRIERS;
  if (C::MOVES_REGISTERS) tile.producer_registers = C::PRODUCER_REGISTERS;
  if (C::MOVES_REGISTERS) tile.consumer_registers = C::CONSUMER_REGISTERS;
  tile.in_turns = C::IN_TURNS;
  tile.row_step = C::TILE_STEP;
  tile.v_columns_of_cta = C::HEAD_DIM_V;
  if (C::PAGES) tile.grouped_slabs = C::KTile::SLABS;
  tile.cuts_tiles = C::CUTS_TILES;
  if (C::STORES_BY_TMA) tile.out_box = {C::QTile::SLAB, C::WARP_ROWS, C::QTile::SWIZZLE};
  tile.mixed = C::MIXED;
  tile.dense = requires { typename C::MaskTile; };
  if constexpr (requires { C::STREAMS; }) tile.streams = C::STREAMS;
  if constexpr (requires { C::V_STAGES; }) tile.v_stages = C::V_STAGES;
  tile.transposes_v = C::TRANSPOSES_V;
  tile.takes_transposed_v = C::TAKES_TRANSPOSED_V;
  return tile;
}

template <class C>
constexpr KernelTile rated(const char* name, double speed, int start_keys, const char* reason,
                           const char* image = nullptr) {
  KernelTile rated = tile<C>(name, {}, reason);
  rated.speed = speed, rated.start_keys = start_keys, rated.image = image;
  rated.split_costs.rows_per_key = 64;  // fp32 sums, at the speed of memory
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
constexpr const char* FOUR_ALONE =
    "4 warpgroups of 64 rows, 96 keys at a time, one after another: fills the pauses between tiles";
constexpr const char* THREE_ALONE =
    "3 warpgroups of 64 rows, 128 keys at a time, one after another: fills the pauses between "
    "tiles of few keys";
constexpr const char* FOUR_ALONE_64 =
    "4 warpgroups of 64 rows, 64 keys at a time, one after another: fills the pauses between tiles";
constexpr const char* TWO_96 = "2 warpgroups of 64 rows in turns, 96 keys at a time";
constexpr const char* FEW_64 = "few tiles: 64 rows make twice as many";
constexpr const char* PAIR = "few tiles: two CTAs of 64 rows on an SM";
constexpr const char* SHORT = "short sequences: four CTAs of 64 rows stay on an SM";
constexpr const char* SHORT_96 = "short packed sequences: three CTAs of 64 rows stay on an SM";
constexpr const char* SHORT_128 = "short packed sequences: two CTAs of 64 rows stay on an SM";
constexpr KernelTile TILES[] = {
    rated<D64Large<DType::F16>>("d64_large", 1, 0, FOUR_64),
    rated<D64Medium<DType::F16>>("d64_medium", 1.06, 32, THREE_128),
    rated<D64Turns<DType::F16>>("d64_turns", 1.065, 40, FOUR_ALONE),
    rated<D64Few<DType::F16>>("d64_few", 0.72, 0, PAIR),
    rated<D64Short<DType::F16>>("d64_short", 1.12, 110, SHORT, "short"),
    rated<D96Large<DType::F16>>("d96_large", 1, 0, THREE_96),
    rated<D96Medium<DType::F16>>("d96_medium", 0.88, 32, TWO_128),
    rated<D96Turns<DType::F16>>("d96_turns", 0.88, -90, FOUR_ALONE_64, "fwd_more"),
    rated<D96Few<DType::F16>>("d96_few", 0.72, 64, PAIR),
    rated<D96Short<DType::F16>>("d96_short", 0.93, 110, SHORT_96, "short"),
    rated<D128Large<DType::F16>>("d128_large", 1, 0, THREE_80),
    rated<D128Medium<DType::F16>>("d128_medium", 0.95, 64, TWO_128),
    rated<D128Turns<DType::F16>>("d128_turns", 0.945, -90, THREE_ALONE),
    rated<D128Few<DType::F16>>("d128_few", 0.76, 64, PAIR),
    rated<D128Short<DType::F16>>("d128_short", 1.12, 110, SHORT_128, "short"),
    rated<D192Large<DType::F16>>("d192_large", 1, 0, THREE_80),
    rated<D192Medium<DType::F16>>("d192_medium", 0.9, 96, TWO_128),
    rated<D192Few<DType::F16>>("d192_few", 0.76, 64, PAIR),
    rated<D192Square<DType::F16>>("d192_square", 1, 0, TWO_96, "fwd_more"),
    rated<D192SquareFew<DType::F16>>("d192_square_few", 0.55, 64, FEW_64, "fwd_more"),
    rated<D256Large<DType::F16>>("d256_large", 1, 0, TWO_80),
    rated<D256Few<DType::F16>>("d256_few", 0.75, 0, FEW_64),
};

constexpr const char* F32_OUT = "fp32 outputs, written from registers";
constexpr KernelTile F32_OUT_TILES[] = {
    rated<D64F32Out<DType::F16>>("d64_f32_out", 1, 0, F32_OUT),
    rated<D128F32Out<DType::F16>>("d128_f32_out", 1, 0, F32_OUT),
};

constexpr const char* WITH_MASKS = "masks as data: blocks of keys that no row sees are skipped";
constexpr KernelTile MASKED_TILES[] = {
    tile<D64Masked<DType::F16>>("d64_masked", {}, WITH_MASKS),
    tile<D128Masked<DType::F16>>("d128_masked", {}, WITH_MASKS),
    tile<D256Masked<DType::F16>>("d256_masked", {}, WITH_MASKS),
};

constexpr const char* WITH_DROPOUT =
    "dropout: the random bits of a block are drawn while its scores are computed";
constexpr KernelTile DROPOUT_TILES[] = {
    tile<D64Dropout<DType::F16>>("d64_dropout", {}, WITH_DROPOUT),
    tile<D128Dropout<DType::F16>>("d128_dropout", {}, WITH_DROPOUT),
};

constexpr const char* WITH_CACHE = "a KV cache: lengths and page tables are read on the device";
constexpr const char* WITH_CACHE_FEW = "a KV cache and few tiles: 64 rows make more of them";
constexpr const char* WITH_PAGES = "pages of a KV cache: one copy brings all columns of their rows";
constexpr core::ServesFrom MANY = {.min_tiles_per_sm = 0.75, .min_uneven_tiles_per_sm = 1.25};
constexpr core::ServesFrom MANY_256 = {.min_tiles_per_sm = 0.5, .min_uneven_tiles_per_sm = 1};
// hopper::tile, because an argument of namespace core would bring in core::tile.
constexpr KernelTile CACHE_TILES[] = {
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

constexpr const char* MIXED =
    "packed sequences of mixed lengths: those of few rows beside those of many";
constexpr KernelTile MIXED_TILES[] = {
    hopper::tile<D64Mixed<DType::F16>>("d64_mixed", {}, MIXED),
    tile<D128Mixed<DType::F16>>("d128_mixed", {}, MIXED),
};

// Whether packed sequences have their tiles found on the device: where one has enough rows to fill
// tiles of many rows, or is a prompt among sequences of which most decode.
bool mixes_lengths(const Problem& problem) {
  constexpr int64_t MANY_ROWS = 129, DECODED_ROWS = 16;
  if (!problem.varlen || problem.batch < 2 || problem.nk == 0 || problem.num_splits != 0)
    return false;
  if (std::max(problem.d, problem.dv) > MIXED_TILES[1].head_dim) return false;
  if (!std::has_single_bit(static_cast<uint64_t>(problem.page_size))) return false;
  const int64_t ratio = problem.heads_q / problem.heads_kv;
  if (ratio > 1 && problem.q.head == 0) return false;  // no tensor map has such heads side by side
  const device::PackedHeads packed =
      device::pack_heads(D128Mixed<DType::F16>::GROUP_ROWS, static_cast<int>(ratio));
  if (packed.count != ratio) return false;
  const int64_t longest = problem.max_seqlen_q == UNKNOWN ? problem.nq : problem.max_seqlen_q;
  const bool others_decode = problem.nq - longest <= DECODED_ROWS * (problem.batch - 1);
  return longest >= MANY_ROWS || (longest > DECODED_ROWS && others_decode);
}

// For a dense attn_mask or ranges (reads_summary). Fewer row tiles an SM than LEAST are left to the
// tiles above, which take several times as long with an attn_mask that is added.
constexpr const char* DENSE = "a dense attn_mask or ranges, summarized first, or ALiBi's slopes";
template <double LEAST>
constexpr KernelTile DENSE_TILES[] = {
    tile<D64Dense<DType::F16>>("d64_dense", {.min_tiles_per_sm = LEAST}, DENSE),
    MASKED_TILES[0],
    tile<D128Dense<DType::F16>>("d128_dense", {.min_tiles_per_sm = LEAST}, DENSE),
    MASKED_TILES[1],
    MASKED_TILES[2],
};

// For block_mask alone (reads_table). Fewer tiles are computed as fast by two CTAs on an SM.
constexpr const char* TABLE =
    "block_mask alone: warpgroups with tiles of their own, so that others multiply where one waits";
constexpr KernelTile TABLE_TILES[] = {
    tile<D64Table<DType::F16>>("d64_table", {.min_tiles_per_sm = 2}, TABLE),
    MASKED_TILES[0],
    tile<D128Table<DType::F16>>("d128_table", {.min_tiles_per_sm = 2}, TABLE),
    MASKED_TILES[1],
    MASKED_TILES[2],
};

constexpr const char* FOUR_128 = "4 warpgroups of 64 rows in turns, 128 keys at a time";
constexpr const char* TWO_192 = "2 warpgroups of 64 rows in turns, 192 keys at a time";
constexpr const char* SMALL =
    "2 warpgroups of 64 rows in turns, 128 keys at a time: more tiles or fewer masked keys than in "
    "larger ones";
constexpr KernelTile FP8_TILES[] = {
    rated<Fp8D64<DType::E4M3>>("d64", 1, 0, FOUR_128),
    rated<Fp8D64Small<DType::E4M3>>("d64_small", 0.65, 0, SMALL),
    rated<Fp8D128<DType::E4M3>>("d128", 1, 0, THREE_128),
    rated<Fp8D128Small<DType::E4M3>>("d128_small", 0.77, 0, SMALL),
    rated<Fp8D192<DType::E4M3>>("d192", 1, 0, THREE_128),
    rated<Fp8D256<DType::E4M3>>("d256", 1, 0, TWO_192),
    rated<Fp8D256Small<DType::E4M3>>("d256_small", 0.94, 0, SMALL),
};
// For descales of k or v by blocks of 64 keys.
constexpr KernelTile FP8_BLOCK_TILES[] = {
    tile<Fp8D64Blocks<DType::E4M3>>("d64_blocks", {}, "64 keys at a time share their descales"),
    tile<Fp8D128Blocks<DType::E4M3>>("d128_blocks", {}, "64 keys at a time share their descales"),
    tile<Fp8D192Blocks<DType::E4M3>>("d192_blocks", {}, "64 keys at a time share their descales"),
    tile<Fp8D256Blocks<DType::E4M3>>(
        "d256_blocks", {},
        "64 keys at a time share their descales, two CTAs the columns of V; its speed is "
        "unmeasured"),
};

// The start_keys of a tile some of whose warpgroups have no rows, at least.
constexpr int START_ALONE = 64;
// Where every head has one such tile and CTAs take many of them, the part of a whole tile's time
// that one takes anyway, and what its share of the rows adds; and the keys that a CTA takes longer
// which begins when another one has ended. By 29 calls of 32 to 160 rows (H200, 2026-11-29).
constexpr double SHORT_SHARE = 0.19, SHORT_SLOPE = 1.03;
constexpr double NEW_CTA = 200;
// The rows and keys of short sequences, which these numbers are for, and the keys that few rows may
// have: 8x20 64x1500 takes 25.2 us with such a tile, 33.2 with the next best that is not split.
constexpr int64_t SHORT_ROWS = 300, SHORT_KEYS = 512, FEW_ROWS = 128, KEYS_OF_FEW_ROWS = 1536;
constexpr int64_t PACKED_ROWS = 64;  // of a tile of kernels that split

// Whether a tile is one of short sequences: several CTAs of its kernel stay on an SM.
bool is_of_short(const KernelTile& tile, const Device& device) {
  return tile.cuts_tiles && core::resident_ctas(tile, device) > 1;
}

// The row tiles of a head. Each of the packed sequences counts as filling half of its last tile.
double tiles_of_head(const Problem& problem, const KernelTile& tile, const HeadModel& head) {
  if (!problem.varlen) return static_cast<double>(head.times.size());
  return static_cast<double>(head.nq) / tile.block_q + 0.5;
}

// How long a call of short sequences takes with such a tile, as time_of() counts it. CTAs that are
// alone on an SM take less than twice the time for their keys, but more than their share.
double time_of_short(const Problem& problem, const Device& device, const KernelTile& tile,
                     const HeadModel& head) {
  constexpr double KEYS_ALONE = 1.7, KEYS_BESIDE = 0.575;
  const double resident = static_cast<double>(core::resident_ctas(tile, device));
  const double rows = static_cast<double>(head.times.size());
  const double of_sm = tiles_of_head(problem, tile, head) *
                       static_cast<double>(problem.batch * problem.heads_q) /
                       static_cast<double>(device.sm_count);
  const double together = std::clamp(std::ceil(of_sm), 1.0, resident);
  const double fixed = core::TILE_KEYS + tile.start_keys;
  double keys = 0;
  for (const double time : head.times) keys += (time - fixed) / rows;
  if (of_sm <= resident) keys = *std::max_element(head.times.begin(), head.times.end()) - fixed;
  const double of_tiles = fixed * together + keys * (KEYS_ALONE + KEYS_BESIDE * together);
  return std::max(of_sm / together, 1.0) * of_tiles * tile.block_q / tile.speed;
}

// With more rounds of tiles than these a model says little: they come out even.
constexpr int64_t MOST_ROUNDS_TO_MODEL = 16;

// How long a call takes with a tile, by the model of makespans: keys, times the rows that an SM
// passes with the first tile of the table meanwhile.
double time_of(const Problem& problem, const Device& device, const KernelTile& tile) {
  // A CTA that has an SM for itself, where there is room for two, is faster than beside another
  // one: in so much of the time (docs/lab/hopper.md).
  constexpr double ALONE = 0.65;
  const int64_t heads = problem.batch * problem.heads_q;
  const HeadModel head(problem, tile);
  std::vector<core::Run> runs;
  double sum = 0;
  const auto rows = static_cast<int64_t>(head.times.size());
  const int64_t workers = core::workers_of(tile, device);
  const int64_t resident = core::resident_ctas(tile, device);
  // Few rows of heads that share a head of K are packed into one tile by the kernels that split.
  const int64_t ratio = problem.heads_q / std::max<int64_t>(problem.heads_kv, 1);
  const bool packs = problem.num_splits != 0 || (ratio > 1 && ratio * head.nq <= PACKED_ROWS);
  const bool is_short = !packs && head.nq <= SHORT_ROWS && !has_far_longer_ones(problem) &&
                        head.nk <= (head.nq <= FEW_ROWS ? KEYS_OF_FEW_ROWS : SHORT_KEYS);
  // Up to 64 columns in all calls, with more columns in packed ones; others are unmeasured.
  const bool measured = problem.varlen || tile.head_dim <= 64;
  if (is_of_short(tile, device) && rows > 0)
    return is_short && measured ? time_of_short(problem, device, tile, head)
                                : std::numeric_limits<double>::infinity();
  const bool begins_anew = is_short && resident > 1 && rows * heads > workers;
  for (double time : head.times) {
    if (head.time_among_others > 0 && heads > workers) time = head.time_among_others;
    runs.push_back({time + (begins_anew ? NEW_CTA : 0), heads});
    sum += runs.back().time;
  }
  double time = rows * heads > MOST_ROUNDS_TO_MODEL * workers
                    ? sum * static_cast<double>(heads) / static_cast<double>(workers)
                    : core::queue_time(runs, workers);
  if (problem.varlen && rows > 0)
    time *= tiles_of_head(problem, tile, head) / static_cast<double>(rows);
  const CutTiles cut = cut_last_round(problem, tile, rows * heads, workers);
  if (cut.rows > 0) {
    const double rounds = static_cast<double>(cut.whole / workers);
    time = std::min(time, (rounds + core::share_of_rows(cut.rows, tile.block_q)) * runs[0].time);
  }
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
const KernelTile* fastest(std::span<const KernelTile> tiles, const Problem& problem,
                          const Device& device) {
  const KernelTile* best = nullptr;
  double time = 0;
  for (const KernelTile& tile : tiles) {
    if (!core::takes_head_dims(tile, problem)) continue;
    const bool as_wide =
        best == nullptr || (tile.head_dim == best->head_dim && tile.head_dim_v == best->head_dim_v);
    if (!as_wide) break;  // for larger heads
    if (tile.shared_bytes > device.shared_per_block) continue;
    const double of_tile = time_of(problem, device, tile);
    if (best == nullptr || of_tile < time) best = &tile, time = of_tile;
  }
  return best;
}

}  // namespace

bool has_far_longer_ones(const Problem& problem) {
  constexpr int64_t FAR_LONGER = 4;  // than the mean; up to 1.8 was measured
  return problem.varlen && problem.max_seqlen_k * problem.batch > FAR_LONGER * problem.nk;
}

HeadModel::HeadModel(const Problem& problem, const KernelTile& tile)
    : nq(problem.nq), nk(problem.nk) {
  if (problem.varlen) nq /= problem.batch, nk /= problem.batch;
  // Only products of its own keys can fill a tile's start and end.
  constexpr double MOST_FILLED = 1.0 / 3;
  const core::RowTileSize size{tile.block_q, tile.block_k, tile.row_step};
  const int64_t rows_of_head = core::ceil_div(nq, tile.block_q);
  double last_keys = 0;
  times.reserve(rows_of_head);
  for (int64_t index = rows_of_head - 1; index >= 0; --index) {
    last_keys = static_cast<double>(core::keys_of_row_tile(problem, size, nq, nk, index));
    const double filled = -MOST_FILLED * last_keys;
    times.push_back(core::TILE_KEYS + last_keys + std::max<double>(tile.start_keys, filled));
  }
  if (problem.varlen || tile.row_step == 0 || times.empty()) return;
  // The first tile may have rows for some of the warpgroups only.
  const device::RowTile first =
      device::row_tile_from_end(static_cast<int>(nq), 0, tile.block_q, tile.row_step);
  const int64_t rows =
      core::ceil_div(first.end_row - first.first_row, tile.row_step) * tile.row_step;
  if (rows >= tile.block_q) return;
  const double keys = last_keys;
  const double start = core::TILE_KEYS + std::max(tile.start_keys, START_ALONE);
  times.back() = start + keys * core::share_of_rows(rows, tile.block_q);
  if (times.size() == 1) {
    const double share = static_cast<double>(rows) / static_cast<double>(tile.block_q);
    time_among_others = (start + keys) * (SHORT_SHARE + SHORT_SLOPE * share);
  }
}

std::span<const KernelTile> tiles_for(const Problem& problem) {
  if (problem.kv_cache) {
    const bool grouped = page_groups(problem, Operand::K) && page_groups(problem, Operand::V);
    if (!grouped) return CACHE_TILES;
    if (mixes_lengths(problem)) return MIXED_TILES;
    if (problem.page_size % PAGE_ROWS == 0) return PAGES_TILES;
    return SMALL_PAGES_TILES;
  }
  if (problem.dropout_p != 0) return DROPOUT_TILES;
  if (core::writes_f32(problem)) return F32_OUT_TILES;
  if (!is_fp8(problem.dtype) && reads_summary(problem))
    return problem.mask > 1 ? DENSE_TILES<0.2> : DENSE_TILES<0.75>;
  if (!is_fp8(problem.dtype) && reads_table(problem)) return TABLE_TILES;
  if (!is_fp8(problem.dtype) && is_masked(problem)) return MASKED_TILES;
  if (!is_fp8(problem.dtype)) return TILES;
  const Descales descales = core::descales(problem);
  if (descales.k.block != 0 || descales.v.block != 0) return FP8_BLOCK_TILES;
  return FP8_TILES;
}

std::variant<core::SplitChoice<KernelTile>, Reasons> choose_tile(const Problem& problem,
                                                                 const Device& device) {
  const std::span<const KernelTile> table = tiles_for(problem);
  const KernelTile* best = table[0].speed > 0 ? fastest(table, problem, device) : nullptr;
  // Whole tiles of rows on all SMs compute no faster in shares, which a second kernel has to
  // combine: 8x20 64x1500 D=64 took 41.4 us with three, 25.2 without.
  constexpr int64_t KEYS_OF_WHOLE_TILES = 4096;
  const bool is_whole = problem.nq >= PACKED_ROWS && problem.nk <= KEYS_OF_WHOLE_TILES;
  // Short packed sequences with packed heads compute no faster in shares, either.
  const bool fills = best != nullptr && problem.batch * problem.heads_q >= device.sm_count &&
                     (problem.varlen ? is_of_short(*best, device) : is_whole);
  if (fills && problem.num_splits == 0 && !problem.batch_invariant)
    return core::SplitChoice<KernelTile>{*best};
  if (best == nullptr) {
    // A CTA for tables of blocks computes several tiles side by side, which the model of splits
    // does not know: it would split the keys of calls that fill the GPU.
    const KernelTile* whole = core::choose("hopper", table, problem, device).tile;
    const bool splits_asked = problem.num_splits > 0 || problem.batch_invariant;
    if (whole != nullptr && whole->streams > 0 && !splits_asked)
      return core::SplitChoice<KernelTile>{*whole};
    return core::choose_with_splits("hopper", table, problem, device);
  }
  // CTAs of the tile for few rows compute more slowly than those of larger tiles.
  const auto time_without = [&](const KernelTile& few) {
    const auto rows = static_cast<double>(few.block_q * core::resident_ctas(few, device));
    return static_cast<int64_t>(time_of(problem, device, *best) * few.speed / rows);
  };
  return core::choose_splits_of<KernelTile>("hopper", best, table, problem, device, time_without);
}

// Which heads' row tiles follow one another, measured on an H200 (NOTES.md): with at most 16 MB of
// K and V, which then come from L2, and about as many as the GPU computes at the same time. Tiles
// of unequal length come from the longest to the shortest, so that larger groups share them out
// more evenly; where they are few, all heads are one group.
int32_t heads_per_group(const Problem& problem, const Device& device, const KernelTile& tile) {
  constexpr int64_t MOST_BYTES = int64_t{16} << 20;
  constexpr int64_t FEW_TILES_PER_SM = 7, UNEQUAL_ROUNDS = 8;
  const int64_t ratio = problem.heads_q / problem.heads_kv;
  const int64_t kv_heads = problem.batch * problem.heads_kv;
  const int64_t tiles = core::tiles_of(problem, tile);
  int64_t size = kv_heads;
  if (core::equal_tiles(problem) || tiles > FEW_TILES_PER_SM * device.sm_count) {
    const int64_t fitting = MOST_BYTES / std::max<int64_t>(core::kv_head_bytes(problem), 1);
    const bool ordered = !core::equal_tiles(problem) && !problem.varlen && !problem.kv_cache;
    const int64_t rounds = ordered ? UNEQUAL_ROUNDS : 1;
    const int64_t at_once = rounds * core::workers_of(tile, device);
    const int64_t wave = core::ceil_div(at_once * kv_heads, std::max<int64_t>(tiles, 1));
    size = std::clamp<int64_t>(std::min(fitting, wave), 1, kv_heads);
  }
  // A remnant of heads would start with its longest tiles when all others are done.
  const int64_t even = core::equal_tiles(problem)
                           ? core::ceil_div(kv_heads, core::ceil_div(kv_heads, size))
                           : core::even_size(kv_heads, size);
  return static_cast<int32_t>(even * ratio);
}

CutTiles cut_last_round(const Problem& problem, const KernelTile& tile, int64_t tiles,
                        int64_t ctas) {
  const bool few_rounds = tiles > ctas && tiles <= MOST_ROUNDS_TO_MODEL * ctas;
  const int64_t left = tiles % ctas;
  if (!tile.cuts_tiles || !core::equal_tiles(problem) || !few_rounds || left == 0) return {};
  for (int64_t rows = tile.row_step; rows < tile.block_q; rows *= 2) {
    if (left * core::ceil_div(tile.block_q, rows) <= ctas) return {tiles - left, rows};
  }
  return {};
}

// Zeroing the counter takes about 2 us, in which a CTA multiplies a tile with about COUNTER_KEYS
// keys.
bool counts_tiles(const LaunchPlan& plan, const Problem& problem, const KernelTile& tile) {
  constexpr double COUNTER_KEYS = 128;
  // Tiles of unequal length take so much more time in fixed rounds than the model says, because the
  // time of each varies. Measured at D=128 (docs/lab/hopper.md).
  constexpr double ROUNDS_VARY = 1.03;
  const int64_t slices = plan.tile.v_slices;
  const int64_t tiles = plan.tile.tiles * slices, ctas = plan.tile.ctas;
  const bool unknown_lengths =
      (problem.kv_cache && problem.batch > 1) || problem.block_mask || problem.key_ranges != 0;
  if (tiles > ctas && unknown_lengths) return true;
  if (tiles <= ctas || plan.tile.part_rows > 0) return false;
  if (core::equal_tiles(problem) && !tile.cuts_tiles) return false;  // not measured
  if (problem.varlen || tiles > MOST_ROUNDS_TO_MODEL * ctas) return tiles > 2 * ctas;
  // The heads of a group take turns: each row tile of all of them, then the next one.
  const HeadModel head(problem, tile);
  const int64_t heads = problem.batch * problem.heads_q / tile.packed_heads;
  const int64_t group = plan.tile.heads_per_group / tile.packed_heads;
  std::vector<double> times;
  for (int64_t first = 0; first < heads; first += group) {
    for (const double time : head.times)
      times.insert(times.end(), std::min(group, heads - first) * slices, time);
  }
  const auto walk_time = [&](core::Walk walk) { return core::makespan(times, ctas, walk).time; };
  const bool varies = tile.head_dim == 128 && !core::equal_tiles(problem);
  return walk_time(core::Walk::Queue) + COUNTER_KEYS <
         (varies ? ROUNDS_VARY : 1) * walk_time(core::Walk::Rounds);
}

}  // namespace archflash::hopper
