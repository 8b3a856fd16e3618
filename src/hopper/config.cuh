// The tiles of each hopper kernel: compile-time numbers only, which the kernel and plan.cpp (plain
// C++) read.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/slab_tile.cuh"
#include "common/image_dtype.h"
#include "hopper/cache/grouped_tile.cuh"

namespace archflash::hopper {

// A row tile, as the producer hands it to the consumers: device::Work and the share of it.
constexpr int TILE_MESSAGE_BYTES = 32;

// The registers of a consumer thread when the producer's warpgroup keeps `producer_registers` of
// the `launch_registers` that each thread starts with, and the consumers share out the rest.
constexpr int consumer_registers(int launch_registers, int consumer_warpgroups,
                                 int producer_registers) {
  const int rest = launch_registers * (consumer_warpgroups + 1) - producer_registers;
  const int share = rest / consumer_warpgroups / 8 * 8;  // setmaxnreg takes multiples of 8
  return share < 240 ? share : 240;
}

// What the kernels differ in. A CTA owns one row tile at a time, 64 query rows of a head for each
// of its consumer warpgroups, and goes over the tile's keys, block_k at a time.
struct Variant {
  int head_dim;        // the largest d
  int warpgroups = 1;  // consumers
  int block_k;
  int stages;           // blocks of K in its ring, and blocks of V in its ring
  int q_stages = 1;     // 2: the next tile's Q comes during this one
  int ctas_per_sm = 1;  // the registers must suffice for so many
  // Columns of V that a CTA multiplies: the largest dv, or with slices_v half of it; 0: head_dim.
  int head_dim_v = 0;
  // The warpgroups issue their products in turns, so that one multiplies while others compute their
  // softmax.
  bool in_turns = false;
  // The keys of a tile may be split over several CTAs, and a tile may have rows of several heads.
  bool can_split = false;
  // The columns of V may be shared out over two CTAs, which both compute the tile's scores.
  bool slices_v = false;
  // A warpgroup multiplies P V of a block while it computes the exponentials of the next one.
  // Elsewhere O += P V is finished before the next scores begin: then the scores never need
  // registers at the same time as P or the part, so that a block can have more keys and O more
  // columns.
  bool overlaps = true;
  // K and V are rows of a KV cache, whose lengths and page table are on the device.
  bool cache = false;
  // These rows lie in pages and have whole slabs of columns: then one copy brings all columns of a
  // box.
  bool pages = false;
  // Packed sequences of mixed lengths: those of few rows have tiles of packed heads
  // (mixed_params.h).
  bool mixed = false;
  // Each of several warpgroups may have rows of several heads that share a head of K (GroupHeads).
  bool packs = false;
  // The other warps of the producer's warpgroup clear rows of V that do not count, so that it need
  // not wait for V.
  bool clears_beside = false;
  // Output rows pass through the ring of V, and Q goes back early: where Q has one stage.
  bool stores_through_v = false;
  // A warpgroup that sees only so many keys of its first block multiplies these alone; 0: all.
  int tail_keys = 0;
  bool drops = false;       // dropout
  bool writes_f32 = false;  // fp32 outputs of 16-bit inputs
};

// The numbers of one kernel.
template <DType DTYPE_, Variant VARIANT_>
struct Config {
  static constexpr Variant VARIANT = VARIANT_;
  static constexpr DType DTYPE = DTYPE_;
  static constexpr bool FP8 = is_fp8(DTYPE);
  // Elements of Q, K and V in 16 bits, the unit in which tiles count columns.
  static constexpr int PACK = FP8 ? 2 : 1;
  static constexpr int HEAD_DIM = VARIANT.head_dim;
  static constexpr int HEAD_DIM_V = VARIANT.head_dim_v == 0 ? HEAD_DIM : VARIANT.head_dim_v;
  static constexpr int WARPGROUPS = VARIANT.warpgroups;
  static constexpr int WARPS = 4 * WARPGROUPS;  // of consumers
  static constexpr int WARP_ROWS = 16;
  static constexpr int M_TILES = 1;  // of 16 rows in a warp
  static constexpr int GROUP_ROWS = 64;
  static constexpr int BLOCK_Q = GROUP_ROWS * WARPGROUPS;
  static constexpr int BLOCK_K = VARIANT.block_k;
  static constexpr int STEP_KEYS = BLOCK_K;
  // With 8-bit inputs wgmma keeps about 13 bits of a sum. Each product loses up to 2^-12 of it, so
  // the products of PART_KEYS keys are summed on their own and then added to the outputs.
  static constexpr int PART_KEYS = 256;
  static constexpr bool SUMS_IN_PARTS = FP8;
  static constexpr bool TAKES_DESCALES_BY_BLOCK = FP8 && BLOCK_K <= SCALE_ROWS;
  static constexpr int STAGES = VARIANT.stages;
  static constexpr int Q_STAGES = VARIANT.q_stages;
  static constexpr int CTAS_PER_SM = VARIANT.ctas_per_sm;
  static constexpr bool IN_TURNS = VARIANT.in_turns;
  static constexpr bool CAN_SPLIT = VARIANT.can_split;
  static constexpr bool SLICES_V = VARIANT.slices_v;
  static constexpr bool OVERLAPS = VARIANT.overlaps;
  static constexpr bool CACHE = VARIANT.cache, PAGES = VARIANT.pages;
  static constexpr bool MIXED = VARIANT.mixed;
  static constexpr bool DROPS = VARIANT.drops;
  static constexpr bool WRITES_F32 = VARIANT.writes_f32;
  // Tiles of one head are moved towards the end of their sequence by a multiple of so many rows
  // (device::row_tile_from_end); 0: they begin with it. A warpgroup then has 64 rows of one tile or
  // none, and blocks of SCALE_ROWS rows of Q that share a descale stay whole.
  static constexpr int TILE_STEP = CAN_SPLIT ? 0 : GROUP_ROWS;
  // Whether output rows pass through the ring of V, so that the next tile's V comes when they have
  // left it, but K and Q before.
  static constexpr bool STORES_THROUGH_V = VARIANT.stores_through_v;
  // Whether Q goes back before the last P V of a tile has ended, so that the next one comes
  // meanwhile: where Q has one stage, and with 8 bits, whose output rows do not pass through its
  // part. From registers 256 columns of 16 bits leave too slowly.
  static constexpr bool RELEASES_Q_EARLY =
      FP8 || STORES_THROUGH_V || (Q_STAGES == 1 && !CAN_SPLIT && !CACHE && HEAD_DIM_V <= 128);
  // Whether that is as soon as the last scores are there, so that the next tile waits less for its
  // Q. In the kernel of 128 keys that spills registers, and with 16 bits it gains nothing.
  static constexpr bool RELEASES_Q_BEHIND_SCORES = FP8 && Q_STAGES == 1 && BLOCK_K > 128;
  // Whether the producer finds out which blocks each warpgroup sees and where its rows lie.
  // Elsewhere the consumers do that between two tiles, and the producer needs fewer registers.
  // Kernels with masks as data have messages of their own. With dropout the outputs are scaled once
  // more before they are written: TileEnd has no such factor.
  static constexpr bool PREPARES_TILES =
      (Q_STAGES == 2 || STORES_THROUGH_V) && !CAN_SPLIT && !CACHE && !DROPS && (!FP8 || !OVERLAPS);
  // Whether a warpgroup that sees only the first half of its first block of keys computes the
  // scores and P of that half alone. With other head dimensions, and with three warpgroups that
  // overlap, ptxas has too few registers and lets every product wait (its warning C7511).
  static constexpr bool HALVES = PREPARES_TILES && !FP8 && (WARPGROUPS == 2 || !OVERLAPS) &&
                                 BLOCK_K == 2 * GROUP_ROWS && HEAD_DIM == 128 &&
                                 VARIANT.tail_keys == 0;
  static constexpr int TAIL_KEYS = VARIANT.tail_keys;
  // Two warpgroups then change places with each tile: else one of them would always have the rows
  // that see half of that block.
  static constexpr bool CHANGES_PLACES = HALVES && WARPGROUPS == 2;
  // Whether the last tiles can be cut into parts of fewer rows (Params::part_rows).
  static constexpr bool CUTS_TILES =
      PREPARES_TILES && Q_STAGES == 2 && !(FP8 && WARPGROUPS == 4) && !VARIANT.packs;
  // Whether output rows go from Q's part of shared memory to global memory by TMA.
  static constexpr bool STORES_BY_TMA = PREPARES_TILES && Q_STAGES == 2 && !FP8 && !WRITES_F32;
  // Whether the other warps of the producer's warpgroup can transpose 8-bit V, a block at a time,
  // and whether a kernel that can takes V that hopper_transpose_v has transposed before, too: where
  // the producer has the registers for both. Kernels that cannot take only V that was transposed
  // before.
  static constexpr bool TRANSPOSES_V = FP8 && !OVERLAPS && BLOCK_K == 128;
  static constexpr bool TAKES_TRANSPOSED_V = WARPGROUPS < 4;
  static constexpr int TRANSPOSING_WARPS = 3;
  static constexpr int RAW_STAGES = TRANSPOSES_V ? 2 : 0;  // blocks of V to transpose
  // Copies of the step with masks in a kernel's code: one for the first and the last block of keys
  // alike, or one for each. With more than 128 keys at a time a single copy spills a register.
  static constexpr int MASKED_STEPS = BLOCK_K > 128 ? 2 : 1;
  static constexpr int PRODUCERS = PAGES ? 2 : 1;  // warps that start copies: V may have its own
  // Tiles of few keys, where a producer that waits for V to clear rows that do not count would be
  // the last to be done: the consumers clear them.
  static constexpr bool SHORT = STORES_BY_TMA && WARPGROUPS == 1;
  // Whether a kernel before may have listed the tiles of packed sequences (PackedTiles).
  static constexpr bool TAKES_LISTS = !FP8 && !CAN_SPLIT && !CACHE && !DROPS;
  // Whether a tile may have rows of several heads that share a head of K: as PackedHeads, or each
  // warpgroup as GroupHeads.
  static constexpr bool CAN_PACK = CAN_SPLIT;
  static constexpr bool PACKS = SHORT || VARIANT.packs;
  static constexpr bool CLEARS_BESIDE = VARIANT.clears_beside;
  // Named barriers: 1 and more for Turns, and with PACKS as many for the warps of a warpgroup. With
  // STORES_THROUGH_V one for all consumers.
  static constexpr int GROUP_BARRIER = 1 + WARPGROUPS, CLEARING_BARRIER = 1 + 2 * WARPGROUPS;
  static constexpr int CONSUMERS_BARRIER = 1 + WARPGROUPS;
  // The columns of V that a product takes. With 8 bits and without OVERLAPS all of them are
  // multiplied so many at a time, so that a part of the sums needs few registers.
  static constexpr int PASS_COLUMNS = FP8 && !OVERLAPS ? 64 : HEAD_DIM_V;
  // So many of these parts at the same time: with two, one is added to the outputs while the next
  // one is multiplied. Three warpgroups have no registers for that.
  static constexpr int PARTS = !OVERLAPS && WARPGROUPS <= 2 ? 2 : 1;

  // Whether masks and descales spend instructions to keep few registers: those of the tiles that
  // spill without it. Others are slower with it, or spill.
  static constexpr bool SPARES_REGISTERS = FP8 && (WARPGROUPS == 4 || BLOCK_K > 128);

  static constexpr int WARPGROUP = 128;  // threads
  static constexpr int CONSUMER_THREADS = WARPGROUP * WARPGROUPS;
  static constexpr int THREADS = CONSUMER_THREADS + WARPGROUP;
  // Every thread starts with LAUNCH_REGISTERS, as __launch_bounds__ demands. Where that is not
  // enough for a consumer, the producer's warpgroup then keeps PRODUCER_REGISTERS and the consumers
  // share out the rest (setmaxnreg).
  static constexpr int SM_REGISTERS = 65536;
  static constexpr int LAUNCH_REGISTERS = SM_REGISTERS / CTAS_PER_SM / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS =
      (TRANSPOSES_V && WARPGROUPS <= 3) || VARIANT.clears_beside || STORES_THROUGH_V ? 40
      : WARPGROUPS >= 3 || CACHE                                                     ? 32
                                                                                     : 24;
  static constexpr int CONSUMER_REGISTERS =
      consumer_registers(LAUNCH_REGISTERS, WARPGROUPS, PRODUCER_REGISTERS);
  static constexpr bool MOVES_REGISTERS = LAUNCH_REGISTERS < CONSUMER_REGISTERS;

  // Tiles in shared memory. wgmma takes 8-bit V only with the keys of a column side by side, so the
  // rows of its tile are the columns of V (transpose_block() or transpose_v.cuh). Tiles have whole
  // slabs of columns: those behind HEAD_DIM are copied as zeros, and no product reads them.
  static constexpr int whole_slabs(int columns) { return (columns + 31) / 32 * 32; }
  using QTile = device::SlabTile<whole_slabs(HEAD_DIM / PACK), BLOCK_Q>;
  template <int COLUMNS, int ROWS>
  using RowsTile =
      std::conditional_t<PAGES, GroupedTile<COLUMNS, ROWS>, device::SlabTile<COLUMNS, ROWS>>;
  using KTile = RowsTile<whole_slabs(HEAD_DIM / PACK), BLOCK_K>;
  using VTile = std::conditional_t<FP8, device::SlabTile<BLOCK_K / PACK, HEAD_DIM_V>,
                                   RowsTile<whole_slabs(HEAD_DIM_V), BLOCK_K>>;

  // V as it lies in memory, for TRANSPOSES_V.
  using RawVTile = device::SlabTile<whole_slabs(HEAD_DIM_V / PACK), BLOCK_K>;

  // Shared memory, in bytes: ring of Q | ring of K | ring of V | ring of V to transpose |
  // barriers | messages about tiles, the last one for a producer of V | with PREPARES_TILES about
  // the blocks of the tile in each stage of Q | which rows of each block to transpose count, or
  // with CLEARS_BESIDE of a block. With 16-bit inputs the output rows of a tile pass through the
  // part of its Q, unless Q is released early.
  static constexpr int Q_SMEM = 0;
  static constexpr int K_SMEM = Q_SMEM + Q_STAGES * QTile::BYTES;
  static constexpr int V_SMEM = K_SMEM + STAGES * KTile::BYTES;
  static constexpr int RAW_SMEM = V_SMEM + STAGES * VTile::BYTES;
  static constexpr int BARRIER_SMEM = RAW_SMEM + RAW_STAGES * RawVTile::BYTES;
  // Full and empty: each stage of Q, of K and of V, the message for a producer of V, each block to
  // transpose. One more: the bytes of a ragged block of V.
  static constexpr int BARRIERS = 2 * Q_STAGES + 4 * STAGES + 1 + 2 * (PRODUCERS - 1) +
                                  2 * RAW_STAGES + CLEARS_BESIDE + STORES_THROUGH_V;
  static constexpr int MESSAGE_SMEM = BARRIER_SMEM + (8 * BARRIERS + 15) / 16 * 16;
  static constexpr int BLOCKS_SMEM = MESSAGE_SMEM + (Q_STAGES + PRODUCERS - 1) * TILE_MESSAGE_BYTES;
  static constexpr int BLOCKS_BYTES = 16 * (2 + WARPGROUPS);  // of a BlocksMessage
  static constexpr int RAW_MESSAGE_SMEM =
      BLOCKS_SMEM + (PREPARES_TILES ? Q_STAGES * BLOCKS_BYTES : 0);
  static constexpr int CLEAR_MESSAGE_SMEM = RAW_MESSAGE_SMEM + 8 * RAW_STAGES;
  static constexpr int SHARED_BYTES = CLEAR_MESSAGE_SMEM + (CLEARS_BESIDE ? 16 : 0);

  static_assert(BLOCK_K % (16 * PACK) == 0, "wgmma sums P V over 16 or 32 keys");
  static_assert(FP8 || (HEAD_DIM_V <= HEAD_DIM && QTile::SLAB == VTile::SLAB),
                "output rows pass through Q's part of shared memory, in Q's layout");
  static_assert(HEAD_DIM_V % PASS_COLUMNS == 0);
  static_assert(OVERLAPS || !FP8 || (BLOCK_K <= PART_KEYS && !TAKES_DESCALES_BY_BLOCK),
                "a part is one block");
  static_assert(STAGES >= 2, "the K of the next block comes before the V of this one is read");
  static_assert(!SLICES_V || (FP8 && !CAN_SPLIT), "a tile is shared out in one way");
  static_assert(!CAN_PACK || WARPGROUPS == 1, "the packed heads of a tile share its 64 rows");
  static_assert(!IN_TURNS || WARPGROUPS >= 2, "a warpgroup hands the turn to another one");
  static_assert(!CACHE || !FP8, "not built: 8-bit caches");
  static_assert(!PAGES || CACHE, "pages are those of a cache");
  static_assert(!MIXED || (PAGES && !CAN_SPLIT), "written for pages");
  static_assert(!DROPS || (OVERLAPS && !FP8 && !CACHE), "not built: dropout with these");
  static_assert(!DROPS || (!CAN_PACK && TILE_STEP % 16 == 0),
                "both rows of a lane are of one group of random bits: device::Dropout");
  static_assert(!WRITES_F32 || (PREPARES_TILES && !FP8), "not built: fp32 outputs with these");
  static_assert(!STORES_BY_TMA || Q_STAGES == 2, "a tile hands back the stage of the one before");
  static_assert(!PACKS || STORES_BY_TMA, "written for these");
  static_assert(TAIL_KEYS == 0 || (PREPARES_TILES && TAIL_KEYS < BLOCK_K), "written for these");
  static_assert(!STORES_THROUGH_V || (!FP8 && !CACHE && !CAN_SPLIT && !DROPS && !CLEARS_BESIDE &&
                                      Q_STAGES == 1 && STAGES * BLOCK_K >= BLOCK_Q),
                "written for these");
  static_assert(!CLEARS_BESIDE || (PACKS && !SHORT), "written for these");
  static_assert(GROUP_ROWS % SCALE_ROWS == 0, "rows that share a descale are of one tile");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

constexpr Variant in_turns(Variant variant) {
  variant.in_turns = true;
  return variant;
}
constexpr Variant no_overlap(Variant variant) {
  variant.overlaps = false;
  return in_turns(variant);
}
constexpr Variant few(Variant variant) {
  variant.can_split = true;
  return variant;
}
constexpr Variant with_dropout(Variant variant) {
  variant.drops = true;
  return variant;
}
constexpr Variant with_f32_outputs(Variant variant) {
  variant.writes_f32 = true;
  return variant;
}
constexpr Variant through_v(Variant variant) {
  variant.stores_through_v = true;
  return in_turns(variant);
}
constexpr Variant with_cache(Variant variant) {
  variant.cache = true;
  variant.stores_through_v = false;
  return variant;
}
constexpr Variant with_pages(Variant variant) {
  variant.pages = true;
  return with_cache(variant);
}
constexpr Variant of_mixed_lengths(Variant variant) {
  variant.mixed = true;
  return with_pages(variant);
}

// Large, Medium and Turns serve calls of many row tiles, Few those of few rows; its kernels can
// split the keys of a tile. Turns do not overlap inside a warpgroup, which costs long calls some
// speed, but the others multiply while one starts or ends a tile. Dropout takes two warpgroups:
// three have no registers for the masks of what is kept. Kernels of their own write fp32 outputs:
// as a branch in the others that cost calls of 16 bits 1% (docs/lab/hopper.md).
// clang-format off
using D64Large   = Config<DTYPE, in_turns({.head_dim = 64,  .warpgroups = 4, .block_k = 64,  .stages = 3, .q_stages = 2})>;
using D64Medium  = Config<DTYPE, in_turns({.head_dim = 64,  .warpgroups = 3, .block_k = 128, .stages = 3, .q_stages = 2})>;
using D64Turns   = Config<DTYPE, no_overlap({.head_dim = 64,  .warpgroups = 4, .block_k = 96, .stages = 3, .q_stages = 2})>;
using D64Few     = Config<DTYPE, few({.head_dim = 64,  .block_k = 128, .stages = 3, .ctas_per_sm = 2})>;
using D96Large   = Config<DTYPE, in_turns({.head_dim = 96,  .warpgroups = 3, .block_k = 96,  .stages = 2, .q_stages = 2})>;
using D96Medium  = Config<DTYPE, in_turns({.head_dim = 96,  .warpgroups = 2, .block_k = 128, .stages = 3, .q_stages = 2})>;
using D96Few     = Config<DTYPE, few({.head_dim = 96,  .block_k = 64,  .stages = 3, .ctas_per_sm = 2})>;
using D128Large  = Config<DTYPE, in_turns({.head_dim = 128, .warpgroups = 3, .block_k = 80,  .stages = 3, .q_stages = 2})>;
using D128Medium = Config<DTYPE, in_turns({.head_dim = 128, .warpgroups = 2, .block_k = 128, .stages = 2, .q_stages = 2})>;
using D128Turns  = Config<DTYPE, no_overlap({.head_dim = 128, .warpgroups = 3, .block_k = 128, .stages = 2, .q_stages = 2})>;
using D128Few    = Config<DTYPE, few({.head_dim = 128, .block_k = 64,  .stages = 3, .ctas_per_sm = 2})>;
using D192Large  = Config<DTYPE, in_turns({.head_dim = 192, .warpgroups = 3, .block_k = 80,  .stages = 2, .head_dim_v = 128})>;
using D192Medium = Config<DTYPE, in_turns({.head_dim = 192, .warpgroups = 2, .block_k = 128, .stages = 2, .head_dim_v = 128})>;
using D192Few    = Config<DTYPE, few({.head_dim = 192, .block_k = 64,  .stages = 2, .ctas_per_sm = 2, .head_dim_v = 128})>;
using D256Large  = Config<DTYPE, through_v({.head_dim = 256, .warpgroups = 2, .block_k = 80,  .stages = 2})>;
using D256Few    = Config<DTYPE, few({.head_dim = 256, .block_k = 64,  .stages = 2})>;

using D64F32Out   = Config<DTYPE, with_f32_outputs(D64Large::VARIANT)>;
using D128F32Out  = Config<DTYPE, with_f32_outputs(D128Large::VARIANT)>;

using D64Dropout  = Config<DTYPE, with_dropout(in_turns({.head_dim = 64, .warpgroups = 2, .block_k = 128, .stages = 3, .q_stages = 2}))>;
using D128Dropout = Config<DTYPE, with_dropout(D128Medium::VARIANT)>;

using D64Cache            = Config<DTYPE, with_cache(D64Medium::VARIANT)>;
using D64FewCache         = Config<DTYPE, with_cache(D64Few::VARIANT)>;
using D128Cache           = Config<DTYPE, with_cache(D128Large::VARIANT)>;
using D128PagesCache      = Config<DTYPE, with_pages(D128Medium::VARIANT)>;
using D128SmallPagesCache = Config<DTYPE, with_pages(D128Large::VARIANT)>;
using D128FewCache        = Config<DTYPE, with_cache(D128Few::VARIANT)>;
using D256Cache           = Config<DTYPE, with_cache(D256Large::VARIANT)>;
using D256PagesCache      = Config<DTYPE, with_pages(D256Large::VARIANT)>;
using D256FewCache        = Config<DTYPE, with_cache(D256Few::VARIANT)>;

using D64Mixed  = Config<DTYPE, of_mixed_lengths(D64Medium::VARIANT)>;
using D128Mixed = Config<DTYPE, of_mixed_lengths(D128Large::VARIANT)>;
// clang-format on

// --- 8-bit inputs ---

// Those with SCALE_ROWS keys at a time serve calls in which each block of so many keys has a
// descale of its own, the small ones calls that larger tiles or blocks share out badly. With
// OVERLAPS the registers suffice for sums in parts of 128 columns of V: more are computed by two
// CTAs.
constexpr int V_COLUMN_KEYS = 128;       // keys of V that a CTA of transpose_v() takes
constexpr int TRANSPOSED_COLUMNS = 128;  // and columns
constexpr int TRANSPOSE_THREADS = 128;

// clang-format off
using Fp8D64        = Config<DType::E4M3, no_overlap({.head_dim = 64,  .warpgroups = 4, .block_k = 128, .stages = 3, .q_stages = 2})>;
using Fp8D64Small   = Config<DType::E4M3, no_overlap({.head_dim = 64,  .warpgroups = 2, .block_k = 128, .stages = 3, .q_stages = 2})>;
using Fp8D64Blocks  = Config<DType::E4M3, Variant{.head_dim = 64,  .warpgroups = 3, .block_k = 64,  .stages = 4, .q_stages = 2}>;
using Fp8D128       = Config<DType::E4M3, no_overlap({.head_dim = 128, .warpgroups = 3, .block_k = 128, .stages = 3, .q_stages = 2})>;
using Fp8D128Small  = Config<DType::E4M3, no_overlap({.head_dim = 128, .warpgroups = 2, .block_k = 128, .stages = 3, .q_stages = 2})>;
using Fp8D128Blocks = Config<DType::E4M3, in_turns({.head_dim = 128, .warpgroups = 2, .block_k = 64,  .stages = 4, .q_stages = 2})>;
using Fp8D192       = Config<DType::E4M3, no_overlap({.head_dim = 192, .warpgroups = 3, .block_k = 128, .stages = 3, .q_stages = 2, .head_dim_v = 128})>;
using Fp8D192Blocks = Config<DType::E4M3, in_turns({.head_dim = 192, .warpgroups = 2, .block_k = 64,  .stages = 3, .q_stages = 2, .head_dim_v = 128})>;
using Fp8D256       = Config<DType::E4M3, no_overlap({.head_dim = 256, .warpgroups = 2, .block_k = 192, .stages = 2})>;
using Fp8D256Small  = Config<DType::E4M3, no_overlap({.head_dim = 256, .warpgroups = 2, .block_k = 128, .stages = 2})>;
using Fp8D256Blocks = Config<DType::E4M3, in_turns({.head_dim = 256, .warpgroups = 2, .block_k = 64,  .stages = 3, .q_stages = 2, .head_dim_v = 128, .slices_v = true})>;
// clang-format on

}  // namespace archflash::hopper
