// The tables of hopper's tiles, and which of them a call chooses from. Pure host code.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

#include "common/device/packed_heads.cuh"
#include "common/planning/core_set.h"
#include "common/planning/masks.h"
#include "hopper/config.cuh"
#include "hopper/forward/heads_config.cuh"
#include "hopper/forward/more_config.cuh"
#include "hopper/forward/short_config.cuh"
#include "hopper/forward/tail_config.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/table_config.cuh"
#include "hopper/plan/cache_maps.h"
#include "hopper/plan/plan_parts.h"
#include "hopper/plan/plan_tiles.h"

namespace archflash::hopper {
namespace {

template <class C>
constexpr KernelTile tile(const char* name, core::ServesFrom serves, const char* reason) {
  KernelTile tile{core::tile<C>(name, serves, reason)};
  tile.q_box = core::box<typename C::QTile>(C::PACK);
  tile.k_box = core::box<typename C::KTile>(C::PACK);
  tile.v_box = core::box<typename C::VTile>(C::PACK);
  tile.raw_v_box = core::box<typename C::RawVTile>(C::PACK);
  tile.columns = C::whole_slabs(C::HEAD_DIM), tile.columns_v = C::whole_slabs(C::HEAD_DIM_V);
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
  if constexpr (requires { C::SHORT; }) tile.is_short = C::SHORT;
  if constexpr (requires { C::TAIL_KEYS; }) tile.tail_keys = C::TAIL_KEYS;
  tile.takes_lists = C::TAKES_LISTS;
  if (C::STORES_BY_TMA) tile.out_box = {C::QTile::SLAB, C::WARP_ROWS, C::QTile::SWIZZLE};
  if constexpr (requires { C::PACKS; }) tile.packs = C::PACKS;
  if constexpr (requires { C::CLEARS_BESIDE; }) tile.clears_beside = C::CLEARS_BESIDE;
  if (tile.packs) tile.q_box.rows = C::GROUP_ROWS;  // a warpgroup's
  tile.mixed = C::MIXED;
  tile.dense = requires { typename C::MaskTile; };
  if constexpr (requires { C::COPIES_OWN; }) tile.copies_own = C::COPIES_OWN;
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

// Measured on an H200 (docs/lab/hopper.md).
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
constexpr const char* FOUR_ALONE_80 =
    "4 warpgroups of 64 rows, 80 keys at a time, one after another: fills the pauses between tiles";
constexpr const char* TWO_96 = "2 warpgroups of 64 rows in turns, 96 keys at a time";
constexpr const char* FEW_64 = "few tiles: 64 rows make twice as many";
constexpr const char* PAIR = "few tiles: two CTAs of 64 rows on an SM";
constexpr const char* SHORT = "short sequences: four CTAs of 64 rows stay on an SM";
constexpr const char* SHORT_96 = "short packed sequences: three CTAs of 64 rows stay on an SM";
constexpr const char* SHORT_128 = "short packed sequences: two CTAs of 64 rows stay on an SM";
constexpr const char* HEADS =
    "packed sequences: each warpgroup has rows of all heads that share a head of K";
constexpr const char* TAIL = "the few keys behind the last whole block are multiplied alone";
constexpr const char* SHORT_256 =
    "short packed sequences: 64 rows, whose Q comes while the tile before is computed";
// Measured on an H200 (docs/lab/hopper.md).
constexpr KernelTile with_packed(KernelTile tile, PackedTimes times, PackedTimes odd = {}) {
  tile.packed = times, tile.odd_packed = odd;
  return tile;
}
constexpr KernelTile with_odd_speed(KernelTile tile, double speed) {
  tile.odd_speed = speed;
  return tile;
}
constexpr KernelTile with_uneven_speed(KernelTile tile, double speed) {
  tile.uneven_speed = speed;
  return tile;
}
constexpr KernelTile shared_by_groups(KernelTile tile, double share) {
  tile.shared_by_groups = share;
  return tile;
}
constexpr double OF_LARGE = 0.4, OF_MEDIUM = 0.2, OF_TURNS = 0.3;  // up to 64 columns
constexpr KernelTile TILES[] = {
    with_packed(shared_by_groups(rated<D64Large>("d64_large", 1, 0, FOUR_64), OF_LARGE),
                {1900, 17}),
    with_packed(shared_by_groups(rated<D64Medium>("d64_medium", 1.08, 40, THREE_128), OF_MEDIUM),
                {2170, 11.1}),
    with_packed(shared_by_groups(rated<D64Turns>("d64_turns", 1.08, 40, FOUR_ALONE), OF_TURNS),
                {2100, 15.4}),
    with_odd_speed(rated<D64Few>("d64_few", 0.74, 30, PAIR), 0.61),
    with_uneven_speed(
        with_odd_speed(with_packed(rated<D64Short>("d64_short", 1.15, 70, SHORT, "short"),
                                   {630, 4.2}, {630, 8.5}),
                       0.85),
        1.12),
    with_packed(rated<D96Large>("d96_large", 1, 0, THREE_96), {3500, 13.6}, {4300, 15}),
    with_odd_speed(
        with_packed(rated<D96Medium>("d96_medium", 0.88, 32, TWO_128), {3100, 9.4}, {4000, 9.6}),
        0.71),
    with_odd_speed(with_packed(rated<D96Turns>("d96_turns", 0.88, -90, FOUR_ALONE_64, "fwd_more"),
                               {3300, 21.3}, {4400, 20.4}),
                   0.96),
    with_odd_speed(rated<D96Few>("d96_few", 0.72, 64, PAIR), 0.54),
    with_packed(rated<D80Large>("d80_large", 1.03, 0, THREE_96, "fwd_more"), {3400, 14.4},
                {4200, 15.3}),
    with_odd_speed(with_packed(rated<D80Turns>("d80_turns", 1.03, -90, FOUR_ALONE_80, "fwd_more"),
                               {3500, 18.6}, {4600, 17.1}),
                   1.06),
    with_packed(rated<D80Heads>("d80_heads", 1, 0, HEADS, "heads"), {2700, 21}, {3200, 22}),
    with_packed(rated<D96Heads>("d96_heads", 1, 0, HEADS, "heads"), {3700, 21}, {4400, 22.5}),
    with_packed(rated<D96Short>("d96_short", 0.93, 110, SHORT_96, "short"), {1000, 7.8},
                {1000, 14.4}),
    with_packed(rated<D128Large>("d128_large", 1, 0, THREE_80), {3200, 16.3}),
    with_packed(rated<D128Medium>("d128_medium", 0.95, 64, TWO_128), {2800, 11.4}),
    with_uneven_speed(
        with_packed(rated<D128Turns>("d128_turns", 0.945, -90, THREE_ALONE), {3100, 15.1}), 0.959),
    rated<D128Few>("d128_few", 0.76, 64, PAIR),
    with_packed(rated<D128Heads>("d128_heads", 1, 0, HEADS, "heads"), {3300, 14.2}),
    with_packed(rated<D128Short>("d128_short", 1.12, 110, SHORT_128, "short"), {1300, 7.9},
                {900, 12.9}),
    with_packed(rated<D192Large>("d192_large", 1, 0, THREE_80), {3400, 24.1}),
    with_packed(rated<D192Medium>("d192_medium", 0.965, 32, TWO_128), {3300, 13.6}),
    rated<D192Few>("d192_few", 0.76, 64, PAIR),
    with_packed(rated<D192Heads>("d192_heads", 1, 0, HEADS, "heads"), {2500, 27.6}),
    with_packed(rated<D192Square>("d192_square", 1, 0, TWO_96, "fwd_more"), {4900, 17}),
    rated<D192SquareFew>("d192_square_few", 0.55, 64, FEW_64, "fwd_more"),
    with_packed(rated<D192SquareHeads>("d192_square_heads", 1, 0, HEADS, "heads"), {2600, 19.2}),
    with_packed(rated<D256Large>("d256_large", 1, 0, TWO_80), {4900, 21.9}),
    rated<D256Few>("d256_few", 0.75, 0, FEW_64),
    with_packed(rated<D256Heads>("d256_heads", 1, 0, HEADS, "heads"), {3100, 28.5}),
    with_packed(rated<D256Short>("d256_short", 0.5, 110, SHORT_256, "short"), {2400, 20.5}),
    with_odd_speed(rated<D64ShortTail>("d64_short_tail", 1.15, 70, TAIL, "tail"), 0.85),
    shared_by_groups(rated<D64MediumTail>("d64_medium_tail", 1.08, 40, TAIL, "tail"), OF_MEDIUM),
    shared_by_groups(rated<D64TurnsTail>("d64_turns_tail", 1.08, 40, TAIL, "tail"), OF_TURNS),
    with_odd_speed(rated<D80TurnsTail>("d80_turns_tail", 1.03, -90, TAIL, "tail"), 1.06),
    rated<D128LargeTail>("d128_large_tail", 0.96, 0, TAIL, "tail"),
};

constexpr const char* F32_OUT = "fp32 outputs, written from registers";
constexpr KernelTile F32_OUT_TILES[] = {
    rated<D64F32Out>("d64_f32_out", 1, 0, F32_OUT),
    rated<D128F32Out>("d128_f32_out", 1, 0, F32_OUT),
};

constexpr const char* WITH_MASKS = "masks as data: blocks of keys that no row sees are skipped";
// A key takes 25 ns, since masks are looked at beside products, so that short shares pay: 4 to 64
// shares of 10 calls (H200, 2026-11-30).
template <class C>
constexpr KernelTile masked_tile(const char* name) {
  KernelTile masked = tile<C>(name, {}, WITH_MASKS);
  masked.split_costs = {.start = 220,
                        .combine = 120,
                        .combine_share = 3,
                        .fewest_keys = 64,
                        .unsplit_start = 220,
                        .rows_per_key = 200,
                        .combined_per_key = 30};
  return masked;
}
constexpr KernelTile MASKED_TILES[] = {
    masked_tile<D64Masked>("d64_masked"),
    masked_tile<D128Masked>("d128_masked"),
    masked_tile<D256Masked>("d256_masked"),
};

constexpr const char* WITH_DROPOUT =
    "dropout: the random bits of a block are drawn while its scores are computed";
constexpr KernelTile DROPOUT_TILES[] = {
    tile<D64Dropout>("d64_dropout", {}, WITH_DROPOUT),
    tile<D128Dropout>("d128_dropout", {}, WITH_DROPOUT),
};

constexpr const char* WITH_CACHE = "a KV cache: lengths and page tables are read on the device";
constexpr const char* WITH_CACHE_FEW = "a KV cache and few tiles: 64 rows make more of them";
constexpr const char* WITH_PAGES = "pages of a KV cache: one copy brings all columns of their rows";
constexpr core::ServesFrom MANY = {.min_tiles_per_sm = 0.75, .min_uneven_tiles_per_sm = 1.25};
constexpr core::ServesFrom MANY_256 = {.min_tiles_per_sm = 0.5, .min_uneven_tiles_per_sm = 1};
// hopper::tile, because an argument of namespace core would bring in core::tile.
constexpr KernelTile CACHE_TILES[] = {
    hopper::tile<D64Cache>("d64_cache", MANY, WITH_CACHE),
    tile<D64FewCache>("d64_few_cache", {}, WITH_CACHE_FEW),
    hopper::tile<D128Cache>("d128_cache", MANY, WITH_CACHE),
    tile<D128FewCache>("d128_few_cache", {}, WITH_CACHE_FEW),
    hopper::tile<D256Cache>("d256_cache", MANY_256, WITH_CACHE),
    tile<D256FewCache>("d256_few_cache", {}, WITH_CACHE_FEW),
};
// For pages whose rows a tensor map has in groups (page_groups): `Tile128` serves head dimensions
// up to 128.
template <class Tile128>
constexpr auto pages_tiles(const char* name, const char* reason) {
  return std::array{
      hopper::tile<D64Cache>("d64_cache", MANY, WITH_CACHE),
      hopper::tile<D64FewCache>("d64_few_cache", {}, WITH_CACHE_FEW),
      hopper::tile<Tile128>(name, MANY, reason),
      hopper::tile<D128FewCache>("d128_few_cache", {}, WITH_CACHE_FEW),
      hopper::tile<D256PagesCache>("d256_pages_cache", MANY_256, WITH_PAGES),
      hopper::tile<D256FewCache>("d256_few_cache", {}, WITH_CACHE_FEW),
  };
}
constexpr int64_t PAGE_ROWS = 64;
constexpr auto PAGES_TILES = pages_tiles<D128PagesCache>(
    "d128_pages_cache", "pages of a multiple of 64 rows: two copies for a block of 128 keys");
constexpr auto SMALL_PAGES_TILES =
    pages_tiles<D128SmallPagesCache>("d128_small_pages_cache", WITH_PAGES);

constexpr const char* MIXED =
    "packed sequences of mixed lengths: those of few rows beside those of many";
constexpr KernelTile MIXED_TILES[] = {
    hopper::tile<D64Mixed>("d64_mixed", {}, MIXED),
    tile<D128Mixed>("d128_mixed", {}, MIXED),
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
      device::pack_heads(D128Mixed::GROUP_ROWS, static_cast<int>(ratio));
  if (packed.count != ratio) return false;
  const int64_t longest = problem.max_seqlen_q == UNKNOWN ? problem.nq : problem.max_seqlen_q;
  const bool others_decode = problem.nq - longest <= DECODED_ROWS * (problem.batch - 1);
  return longest >= MANY_ROWS || (longest > DECODED_ROWS && others_decode);
}

// For a dense attn_mask (reads_summary). With up to 64 columns three CTAs of 64 rows on an SM were
// slower only where many tiles pass many keys (docs/lab/hopper.md). Fewer row tiles an SM than
// LEAST, and fewer rows than half a tile, are left to the tiles that read the mask in place.
constexpr const char* DENSE = "a dense attn_mask or ranges, summarized first, or ALiBi's slopes";
constexpr const char* DENSE_SHORT = "a dense attn_mask: three CTAs of 64 rows stay on an SM";
template <double LEAST>
constexpr KernelTile DENSE_TILES[] = {
    tile<D64Dense>("d64_dense", {.min_tiles_per_sm = 4, .min_keys = 512}, DENSE),
    tile<D64DenseShort>("d64_dense_short", {.min_tiles_per_sm = 0.001}, DENSE_SHORT),
    MASKED_TILES[0],
    tile<D128Dense>("d128_dense", {.min_tiles_per_sm = LEAST}, DENSE),
    MASKED_TILES[1],
    tile<D256Dense>("d256_dense", {.min_tiles_per_sm = LEAST}, DENSE),
    MASKED_TILES[2],
};
// For one of 16 bits that is added, of which no summary is made (adds_alone).
constexpr const char* ADDED =
    "an attn_mask of each head, added alone: 4 warpgroups of 64 rows in turns, 64 keys at a time";
constexpr const char* ADDED_SHORT =
    "an attn_mask of each head, added alone: three CTAs of 64 rows stay on an SM";
constexpr KernelTile in_full_rounds(KernelTile tile) {
  tile.in_full_rounds = true;
  return tile;
}
constexpr KernelTile ADDED_TILES[] = {
    in_full_rounds(tile<D64Added>("d64_added", {.min_tiles_per_sm = 0.001}, ADDED)),
    tile<D64AddedShort>("d64_added_short", {.min_tiles_per_sm = 0.001}, ADDED_SHORT),
    MASKED_TILES[0],
    tile<D128Dense>("d128_dense", {.min_tiles_per_sm = 0.01}, DENSE),
    MASKED_TILES[1],
    tile<D256Dense>("d256_dense", {.min_tiles_per_sm = 0.01}, DENSE),
    MASKED_TILES[2],
};
// For one whose elements the warps copy (copies_own).
constexpr const char* WINDOWS =
    "an attn_mask of each head and sequence that TMA cannot read: each warp copies its elements";
constexpr KernelTile WINDOWS_TILES[] = {
    tile<D64Windows>("d64_windows", {.min_tiles_per_sm = 0.001}, WINDOWS),
    MASKED_TILES[0],
    tile<D96Windows>("d96_windows", {.min_tiles_per_sm = 0.001}, WINDOWS),
};
constexpr int64_t MOST_WINDOW_KEYS = 1024;  // of more a few row tiles may be split
// For an added one of 16 bits that heads share, up to 64 columns.
constexpr const char* ADDED_SHARED =
    "an added attn_mask, summarized first: 4 warpgroups of 64 rows in turns, 64 keys at a time";
constexpr KernelTile SHARED_TILES[] = {
    in_full_rounds(tile<D64Shared>("d64_shared", {.min_tiles_per_sm = 0.001}, ADDED_SHARED)),
    DENSE_TILES<0.01>[0],
    DENSE_TILES<0.01>[1],
    MASKED_TILES[0],
};
// For an added attn_mask of 32 bits.
constexpr const char* WIDE = "the same for elements of 32 bits";
constexpr core::ServesFrom WIDE_FROM = {.min_tiles_per_sm = 0.001};
constexpr KernelTile WIDE_TILES[] = {
    hopper::tile<D64Wide>("d64_wide", WIDE_FROM, WIDE),   MASKED_TILES[0],
    hopper::tile<D128Wide>("d128_wide", WIDE_FROM, WIDE), MASKED_TILES[1],
    hopper::tile<D256Wide>("d256_wide", WIDE_FROM, WIDE), MASKED_TILES[2],
};
// For ranges or slopes.
constexpr KernelTile RANGES_TILES[] = {
    tile<D64Dense>("d64_dense", {.min_tiles_per_sm = 0.75}, DENSE),
    MASKED_TILES[0],
    tile<D128Dense>("d128_dense", {.min_tiles_per_sm = 0.75}, DENSE),
    MASKED_TILES[1],
    MASKED_TILES[2],
};

// For block_mask alone (reads_table). Fewer tiles are computed as fast by two CTAs on an SM.
template <class Tile64, class Tile128>
constexpr auto table_tiles(const char* name64, const char* name128, const char* reason) {
  constexpr core::ServesFrom SERVES = {.min_tiles_per_sm = 2};
  return std::array{
      hopper::tile<Tile64>(name64, SERVES, reason),
      MASKED_TILES[0],
      hopper::tile<Tile128>(name128, SERVES, reason),
      MASKED_TILES[1],
      MASKED_TILES[2],
  };
}
constexpr auto TABLE_TILES = table_tiles<D64Table, D128Table>(
    "d64_table", "d128_table",
    "block_mask alone: warpgroups with tiles of their own, so that others multiply where one "
    "waits");
// With an attn_mask of which all rows are the same.
constexpr auto TABLE_KEYS_TILES = table_tiles<D64TableKeys, D128TableKeys>(
    "d64_table_keys", "d128_table_keys",
    "block_mask and an attn_mask of keys: warpgroups with tiles of their own");

constexpr const char* FOUR_128 = "4 warpgroups of 64 rows in turns, 128 keys at a time";
constexpr const char* TWO_192 = "2 warpgroups of 64 rows in turns, 192 keys at a time";
constexpr const char* SMALL =
    "2 warpgroups of 64 rows in turns, 128 keys at a time: more tiles or fewer masked keys than in "
    "larger ones";
constexpr KernelTile FP8_TILES[] = {
    rated<Fp8D64>("d64", 1, 0, FOUR_128),
    rated<Fp8D64Small>("d64_small", 0.65, 0, SMALL),
    rated<Fp8D128>("d128", 1, 0, THREE_128),
    rated<Fp8D128Small>("d128_small", 0.77, 0, SMALL),
    rated<Fp8D192>("d192", 1, 0, THREE_128),
    rated<Fp8D256>("d256", 1, 0, TWO_192),
    rated<Fp8D256Small>("d256_small", 0.94, 0, SMALL),
};
// For descales of k or v by blocks of 64 keys.
constexpr KernelTile FP8_BLOCK_TILES[] = {
    tile<Fp8D64Blocks>("d64_blocks", {}, "64 keys at a time share their descales"),
    tile<Fp8D128Blocks>("d128_blocks", {}, "64 keys at a time share their descales"),
    tile<Fp8D192Blocks>("d192_blocks", {}, "64 keys at a time share their descales"),
    tile<Fp8D256Blocks>(
        "d256_blocks", {},
        "64 keys at a time share their descales, two CTAs the columns of V; its speed is "
        "unmeasured"),
};

}  // namespace

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
  if (!is_fp8(problem.dtype) && reads_summary(problem)) {
    if (problem.mask == 0) return RANGES_TILES;
    if (problem.mask > 1 && core::added_dtype(problem) == DType::F32) return WIDE_TILES;
    const int64_t columns = std::max(problem.d, problem.dv);
    const bool splits = problem.num_splits > 0 || problem.batch_invariant;
    if (copies_own(problem) && columns <= 96 && problem.nk <= MOST_WINDOW_KEYS && !splits)
      return WINDOWS_TILES;
    if (adds_alone(problem)) return ADDED_TILES;
    if (problem.mask > 1 && columns <= 64 && !core::attention_params(problem).transform_scores)
      return SHARED_TILES;
    return problem.mask > 1 ? DENSE_TILES<0.01> : DENSE_TILES<0.05>;
  }
  if (!is_fp8(problem.dtype) && reads_table(problem))
    return problem.mask == 0 ? std::span<const KernelTile>(TABLE_TILES) : TABLE_KEYS_TILES;
  if (!is_fp8(problem.dtype) && is_masked(problem)) return MASKED_TILES;
  if (!is_fp8(problem.dtype)) return TILES;
  const Descales descales = core::descales(problem);
  if (descales.k.block != 0 || descales.v.block != 0) return FP8_BLOCK_TILES;
  return FP8_TILES;
}

}  // namespace archflash::hopper
