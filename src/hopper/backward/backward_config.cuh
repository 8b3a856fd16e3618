// The tiles of each backward kernel of hopper: compile-time numbers only, which the kernel and
// plan_backward.cpp (plain C++) read.
#pragma once

#include "common/device/slab_tile.cuh"
#include "common/image_dtype.h"

namespace archflash::hopper {

// What the kernels of BackwardConfig differ in.
struct BackwardVariant {
  int head_dim;               // the largest d and dv
  int blocks_of_round;        // dQ is computed once for a round of blocks
  int q_stages, dout_stages;  // blocks of Q and of dO in their rings
  // The registers suffice for S of the next block beside P and dP of this one. If not, P takes the
  // place of S, and dS and dQ that of dP.
  bool s_ahead = false;
  // Scores have a softcap. In kernels for all calls the branches for it cost 2 to 9% of the speed
  // of calls without one.
  bool softcap = false;
  // The sums of dQ have its own rows and columns, where others have those of whole tiles.
  bool exact = false;
  bool drops = false;  // dropout
  int consumer_registers = 240;
  // Tiles of keys that a CTA knows. With two CTAs stay and take one tile after another.
  int tile_stages = 1;
  // Tiles whose K and V are in shared memory. With two those of the next tile come while this one
  // is computed, else while the gradients of this one are written.
  int key_stages = 1;
  // The CTAs go over the rounds that see any of their keys by block_mask (backward_lists.cuh).
  bool lists_rounds = false;
  // That table is made of attn_mask, whose elements change the scores (backward_dense.cuh).
  bool reads_mask = false;
  bool mask_gradient = false;   // the gradient of attn_mask is wanted, too
  bool keeps_gradient = false;  // of each head, for a launch that adds these up in order
  // TMA brings the elements of an attn_mask that is added, in 16 bits (backward_added.cuh).
  bool adds_mask = false;
  // Consumer warpgroups, with 64 keys each. With one there is room for two CTAs on an SM.
  int warpgroups = 2;
  // With ends_dq: all keys of a head are in one tile, so that there are no sums of dQ.
  bool writes_dq = false;
  // CTAs take turns. Each goes on with the sums of dQ of the one before, and the last one writes
  // dQ.
  bool ends_dq = false;
  // CTAs stay, and K of the next tile comes to where V is, whose last product ends half a step
  // before that of K; V comes to where K is. For calls without cu_seqlens and shared heads whose
  // rows see all keys, or whose heads have one tile: few registers are left to find the next one.
  bool swaps_keys = false;
  // Parts of tiles are merged (backward_parts.cuh). At 64 and 128 columns the code for it cost 1 to
  // 2% of the speed of calls without parts; at 96 registers would be spilled.
  bool merges_parts = false;
};

// The numbers of one kernel. A CTA owns ROWS keys of a head, 64 for each consumer warpgroup, and
// goes over blocks of BLOCK query rows.
template <DType DTYPE_, BackwardVariant VARIANT>
struct BackwardConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = VARIANT.head_dim;
  static constexpr int HEAD_DIM_V = HEAD_DIM;
  static constexpr int WARPGROUP = 128;                  // threads
  static constexpr int WARPGROUPS = VARIANT.warpgroups;  // consumers
  static constexpr int WARPS = 4 * WARPGROUPS;
  static constexpr int GROUP_ROWS = 64;
  static constexpr int WARP_ROWS = 16;
  static constexpr int ROWS = GROUP_ROWS * WARPGROUPS;
  static constexpr int KEY_WARPS = ROWS / WARP_ROWS;
  static constexpr int BLOCK = 64;
  static constexpr bool USES_PDL = true;  // before the terms of the rows are written
  static constexpr int BLOCKS_OF_ROUND = VARIANT.blocks_of_round;
  static constexpr int ROUND = BLOCK * BLOCKS_OF_ROUND;
  // Where no row is in the second block of a round, it is left out.
  static constexpr bool SINGLE_BLOCKS =
      BLOCKS_OF_ROUND == 2 && !VARIANT.softcap && !VARIANT.drops && !VARIANT.lists_rounds &&
      !VARIANT.adds_mask && (!VARIANT.ends_dq || VARIANT.writes_dq);
  static constexpr int Q_STAGES = VARIANT.q_stages;
  static constexpr int DOUT_STAGES = VARIANT.dout_stages;
  static constexpr int DS_STAGES = BLOCKS_OF_ROUND == 1 ? 3 : 2;  // rounds
  static constexpr bool S_AHEAD = VARIANT.s_ahead;
  static constexpr bool SOFTCAP = VARIANT.softcap;
  static constexpr bool DROPS = VARIANT.drops;
  static constexpr bool LISTS_ROUNDS = VARIANT.lists_rounds;
  static constexpr bool READS_MASK = VARIANT.reads_mask;
  static constexpr bool MASK_GRADIENT = VARIANT.mask_gradient;
  static constexpr bool KEEPS_GRADIENT = VARIANT.keeps_gradient;
  static_assert(!READS_MASK || LISTS_ROUNDS);
  static constexpr bool ADDS_MASK = VARIANT.adds_mask;
  static constexpr int MASK_STAGES = ADDS_MASK ? 2 : 0;  // blocks of elements
  static_assert(!ADDS_MASK || S_AHEAD, "elements are read where P is computed ahead");
  static constexpr bool WRITES_DQ = VARIANT.writes_dq;
  static constexpr bool ENDS_DQ = VARIANT.ends_dq;
  static constexpr int TILE_STAGES = VARIANT.tile_stages;
  static constexpr int TILE_WARPS = WARPS + 3;  // those of the terms and of dQ, too
  static constexpr bool STAYS = TILE_STAGES > 1;
  static constexpr int KEY_STAGES = VARIANT.key_stages;
  static constexpr bool HANDS_KEYS_BACK = KEY_STAGES < TILE_STAGES;
  static constexpr bool HANDS_VALUES_BACK = false;
  static constexpr bool COUNTS_BLOCKS = false;
  static constexpr bool SWAPS_KEYS = VARIANT.swaps_keys;
  static_assert(KEY_STAGES == TILE_STAGES || (KEY_STAGES == 1 && TILE_STAGES == 2));

  // A warpgroup whose keys are behind the end computes its part of dQ alone.
  static constexpr bool LEAVES_OUT_KEYS = WARPGROUPS == 2 && !VARIANT.softcap && !VARIANT.drops &&
                                          !VARIANT.lists_rounds && !VARIANT.adds_mask &&
                                          !VARIANT.ends_dq && !VARIANT.swaps_keys;
  static constexpr bool MERGES_PARTS = VARIANT.merges_parts;
  // Query heads are shared out in parts of which the last one may be smaller.
  static constexpr bool UNEVEN_SHARES = LEAVES_OUT_KEYS;
  static constexpr int CONSUMER_THREADS = WARPGROUP * WARPGROUPS;
  static constexpr int THREADS = CONSUMER_THREADS + WARPGROUP;
  static constexpr int CTAS_PER_SM = WARPGROUPS == 1 ? 2 : 1;
  // Registers of a thread. Those of a CTA are shared out anew when its roles begin.
  static constexpr int CONSUMER_REGISTERS = VARIANT.consumer_registers;
  static constexpr int START_REGISTERS = 64 * 1024 / (CTAS_PER_SM * THREADS) / 8 * 8;
  static constexpr int PRODUCER_REGISTERS =
      (WARPGROUPS + 1) * START_REGISTERS - WARPGROUPS * CONSUMER_REGISTERS;

  // The warpgroups share out dQ of a round. Each computes a part of 64 rows: its share of the rows
  // if the round has as many, else of the columns. A warp has 16 rows of it.
  static constexpr int PART_ROWS = 64;
  static constexpr bool SHARES_ROWS = ROUND == WARPGROUPS * PART_ROWS;
  static constexpr int PART_COLUMNS = SHARES_ROWS ? HEAD_DIM : HEAD_DIM / WARPGROUPS;
  static constexpr int WARP_SUMS = WARP_ROWS * PART_COLUMNS;
  static constexpr int ROUND_SUMS = WARPS * WARP_SUMS;
  static_assert(ROUND_SUMS == ROUND * HEAD_DIM, "the parts are all of a round's dQ");
  // The sums in the workspace have multiples of it as columns. Kernels that leave none out add a
  // round's sums by one copy of each warp, which is faster where there are as many.
  static constexpr int SUMS_STEP = VARIANT.exact ? 8 : HEAD_DIM;
  static_assert(!DROPS || !SOFTCAP, "the sign of P says whether it is dropped");
  static_assert(!DROPS || (ROWS % 32 == 0 && BLOCK % 16 == 0),
                "the elements of a lane are of the same groups of random bits in every block");

  // Tiles in shared memory. K and V of the CTA's keys; Q and dO of a block; dS of a round, whose
  // rows are queries.
  using KTile = device::SlabTile<HEAD_DIM, ROWS>;
  using VTile = KTile;
  using QTile = device::SlabTile<HEAD_DIM, BLOCK>;
  using DoutTile = QTile;
  using DsTile = device::SlabTile<ROWS, ROUND>;
  using MaskTile = device::SlabTile<ROWS, BLOCK>;
  // A warp's rows of dQ in 16 bits, which lie where its sums of the part lay.
  using DqTile = device::SlabTile<PART_COLUMNS, WARP_ROWS>;

  // Shared memory, in bytes: K | V | ring of Q | ring of dO | ring of dS | dQ of a round | ring of
  // the mask's elements | terms | barriers | work. The terms of a block, which share the ring of Q,
  // are the LSEs of its rows, then their deltas, then a note.
  static constexpr int K_SMEM = 0;
  static constexpr int V_SMEM = K_SMEM + KEY_STAGES * KTile::BYTES;
  static constexpr int Q_SMEM = V_SMEM + KEY_STAGES * VTile::BYTES;
  static constexpr int DOUT_SMEM = Q_SMEM + Q_STAGES * QTile::BYTES;
  static constexpr int DS_SMEM = DOUT_SMEM + DOUT_STAGES * DoutTile::BYTES;
  static constexpr int DQ_SMEM = DS_SMEM + DS_STAGES * DsTile::BYTES;
  static constexpr int MASK_SMEM = DQ_SMEM + 4 * ROUND_SUMS;
  static constexpr int TERMS_SMEM = MASK_SMEM + MASK_STAGES * MaskTile::BYTES;
  static constexpr int TERMS_BYTES = 2 * 4 * BLOCK + 16;
  static constexpr int BARRIER_SMEM = TERMS_SMEM + Q_STAGES * TERMS_BYTES;
  // Full of K and of V, and where CTAs stay full and empty, of each tile, and one at which K and V
  // are handed back, or one for each of them; full of each stage of dS;
  // full and empty of each stage of Q and of dO; full of each warpgroup's dQ of even and of odd
  // rounds, and empty, and with ENDS_DQ read; full and empty of each stage of the mask's elements;
  // one more: the bytes of a ragged block.
  static constexpr int TILE_BARRIERS =
      (STAYS ? 4 : 2) * TILE_STAGES + (HANDS_KEYS_BACK ? 1 : 0) + SWAPS_KEYS + 1;
  static constexpr int BARRIERS = TILE_BARRIERS + DS_STAGES + 2 * Q_STAGES + 2 * DOUT_STAGES +
                                  3 * WARPGROUPS + ENDS_DQ + 2 * MASK_STAGES;
  static constexpr int WORK_BYTES = 128;  // of device::CtaWork
  static constexpr int WORK_SMEM = (BARRIER_SMEM + 8 * BARRIERS + 15) / 16 * 16;
  static constexpr int DQ_NOTE_SMEM = WORK_SMEM + TILE_STAGES * WORK_BYTES;  // with ENDS_DQ
  static constexpr int SHARED_BYTES = DQ_NOTE_SMEM + (ENDS_DQ ? 16 : 0);
  static_assert(!WRITES_DQ || ENDS_DQ);
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

// What the kernels of WideBackwardConfig differ in.
struct WideBackwardVariant {
  int head_dim, head_dim_v;   // the largest d and dv
  int q_stages, dout_stages;  // blocks of Q and of dO in their rings
  int part_columns;           // of dQ that are computed at once
  // Registers of a thread in the warpgroups that keep dV and dK, and in that which computes dQ.
  int weights_registers, keys_registers, queries_registers;
  bool reads_mask = false;  // as in BackwardVariant, without turns
  bool mask_gradient = false;
  // CTAs stay: K of the next tile comes while this one is computed, and V while dK is written.
  bool stays = false;
};

// The numbers of a kernel for larger head dimensions (wide_bwd.cuh). A CTA owns 64 keys of a head,
// and each of its consumer warpgroups another product, so that one of them keeps dV and another one
// dK of all columns.
template <DType DTYPE_, WideBackwardVariant VARIANT>
struct WideBackwardConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = VARIANT.head_dim;
  static constexpr int HEAD_DIM_V = VARIANT.head_dim_v;
  static constexpr int WARPGROUP = 128;  // threads
  static constexpr int WARPS = 8;        // that read Q, and that read dO: of two warpgroups
  static constexpr int WARPGROUPS = 1;   // that share out the keys
  static constexpr int GROUP_ROWS = 64;
  static constexpr int WARP_ROWS = 16;
  static constexpr int ROWS = 64;
  static constexpr int KEY_WARPS = ROWS / WARP_ROWS;
  static constexpr int BLOCK = 64;
  static constexpr bool USES_PDL = true;  // before the terms of the rows are written
  static constexpr int BLOCKS_OF_ROUND = 1;
  static constexpr int ROUND = BLOCK;
  static constexpr int Q_STAGES = VARIANT.q_stages;
  static constexpr int DOUT_STAGES = VARIANT.dout_stages;
  static constexpr int P_STAGES = 2;
  static constexpr int DS_STAGES = 2;
  static constexpr int TURN_STAGES = 2;   // a warp each
  static constexpr bool SOFTCAP = false;  // it would spill registers
  static constexpr bool DROPS = false;
  static constexpr bool READS_MASK = VARIANT.reads_mask;
  static constexpr bool LISTS_ROUNDS = READS_MASK;
  static constexpr bool MASK_GRADIENT = VARIANT.mask_gradient;
  static constexpr bool ADDS_MASK = false;
  static constexpr bool STAYS = VARIANT.stays;
  static constexpr bool SWAPS_KEYS = false;
  static constexpr bool ENDS_DQ = false;
  static constexpr bool HANDS_KEYS_BACK = false;
  static constexpr bool HANDS_VALUES_BACK = STAYS;
  static constexpr bool MERGES_PARTS = false;
  static constexpr bool UNEVEN_SHARES = true;
  static constexpr bool COUNTS_BLOCKS = STAYS;  // CtaWork says how many blocks came before
  static constexpr int TILE_STAGES = STAYS ? 2 : 1;
  // The consumers, the warp of the terms, and those of the turns.
  static constexpr int TILE_WARPS = 15;
  static constexpr int TILE_BARRIERS = (STAYS ? 4 : 2) * TILE_STAGES + HANDS_VALUES_BACK + 1;

  static constexpr int THREADS = 4 * WARPGROUP;  // weights, keys, queries, producers
  static constexpr int CTAS_PER_SM = 1;
  static constexpr int WEIGHTS_REGISTERS = VARIANT.weights_registers;
  static constexpr int KEYS_REGISTERS = VARIANT.keys_registers;
  static constexpr int QUERIES_REGISTERS = VARIANT.queries_registers;
  // An SM has 512 registers for each thread of a warpgroup.
  static constexpr int PRODUCER_REGISTERS =
      512 - WEIGHTS_REGISTERS - KEYS_REGISTERS - QUERIES_REGISTERS;
  static_assert(PRODUCER_REGISTERS >= 24, "PTX: setmaxnreg gives 24 registers or more");

  // dQ of a round is computed in parts of so many columns.
  static constexpr int PART_ROWS = 64;
  static constexpr int PART_COLUMNS = VARIANT.part_columns;
  static_assert(HEAD_DIM % PART_COLUMNS == 0);
  static constexpr int WARP_SUMS = WARP_ROWS * PART_COLUMNS;
  static constexpr int ROUND_SUMS = ROUND * HEAD_DIM;
  static constexpr int SUMS_STEP = PART_COLUMNS;
  static constexpr bool SHARES_ROWS = false;

  // Tiles in shared memory, as in BackwardConfig. P lies as its fragments: 16 bytes of each lane
  // side by side.
  using KTile = device::SlabTile<HEAD_DIM, ROWS>;
  using VTile = device::SlabTile<HEAD_DIM_V, ROWS>;
  using QTile = device::SlabTile<HEAD_DIM, BLOCK>;
  using DoutTile = device::SlabTile<HEAD_DIM_V, BLOCK>;
  using DsTile = device::SlabTile<ROWS, ROUND>;
  static constexpr int P_BYTES = 2 * ROWS * BLOCK;

  // Shared memory, in bytes: K | V | ring of Q | ring of dO | ring of dS | ring of P | terms |
  // barriers | work.
  static constexpr int K_SMEM = 0;
  static constexpr int V_SMEM = K_SMEM + TILE_STAGES * KTile::BYTES;
  static constexpr int Q_SMEM = V_SMEM + VTile::BYTES;
  static constexpr int DOUT_SMEM = Q_SMEM + Q_STAGES * QTile::BYTES;
  static constexpr int DS_SMEM = DOUT_SMEM + DOUT_STAGES * DoutTile::BYTES;
  static constexpr int P_SMEM = DS_SMEM + DS_STAGES * DsTile::BYTES;
  static constexpr int TERMS_SMEM = P_SMEM + P_STAGES * P_BYTES;
  static constexpr int TERMS_BYTES = 2 * 4 * BLOCK + 16;
  static constexpr int BARRIER_SMEM = TERMS_SMEM + Q_STAGES * TERMS_BYTES;
  // Tiles have barriers as in BackwardConfig, and one at which V is handed back. Each stage of the
  // four rings has two, full and empty, and so does each stage of turns.
  static constexpr int BARRIERS =
      TILE_BARRIERS + 2 * (Q_STAGES + DOUT_STAGES + P_STAGES + DS_STAGES + TURN_STAGES);
  static constexpr int WORK_BYTES = 128;  // of device::CtaWork
  static constexpr int WORK_SMEM = (BARRIER_SMEM + 8 * BARRIERS + 15) / 16 * 16;
  static constexpr int SHARED_BYTES = WORK_SMEM + TILE_STAGES * WORK_BYTES;
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

constexpr BackwardVariant BACKWARD_D32 = {.head_dim = 32,
                                          .blocks_of_round = 2,
                                          .q_stages = 4,
                                          .dout_stages = 4,
                                          .s_ahead = true,
                                          .consumer_registers = 232,
                                          .tile_stages = 2,
                                          .key_stages = 2};
constexpr BackwardVariant BACKWARD_D64 = {.head_dim = 64,
                                          .blocks_of_round = 2,
                                          .q_stages = 4,
                                          .dout_stages = 4,
                                          .s_ahead = true,
                                          .consumer_registers = 232,
                                          .tile_stages = 2,
                                          .key_stages = 2};
// For few keys: what a tile starts and ends with takes longer than its rows, so that another CTA of
// the SM has to multiply meanwhile.
constexpr BackwardVariant BACKWARD_D32_SHORT = {.head_dim = 32,
                                                .blocks_of_round = 1,
                                                .q_stages = 4,
                                                .dout_stages = 4,
                                                .s_ahead = true,
                                                .consumer_registers = 216,
                                                .tile_stages = 2,
                                                .key_stages = 2,
                                                .warpgroups = 1};
constexpr BackwardVariant BACKWARD_D64_SHORT = {.head_dim = 64,
                                                .blocks_of_round = 1,
                                                .q_stages = 3,
                                                .dout_stages = 2,
                                                .s_ahead = true,
                                                .consumer_registers = 216,
                                                .tile_stages = 2,
                                                .warpgroups = 1};
constexpr BackwardVariant BACKWARD_D96 = {.head_dim = 96,
                                          .blocks_of_round = 2,
                                          .q_stages = 3,
                                          .dout_stages = 2,
                                          .exact = true,
                                          .consumer_registers = 232,
                                          .tile_stages = 2};
constexpr BackwardVariant BACKWARD_D128 = {
    .head_dim = 128, .blocks_of_round = 1, .q_stages = 3, .dout_stages = 2};
constexpr BackwardVariant with_turns(BackwardVariant variant) {
  variant.ends_dq = true;
  variant.exact = false;
  return variant;
}
constexpr BackwardVariant with_one_tile(BackwardVariant variant) {
  variant.writes_dq = true;
  return with_turns(variant);
}
constexpr BackwardVariant with_swapped_keys(BackwardVariant variant) {
  variant.tile_stages = 2;
  variant.swaps_keys = true;
  return variant;
}
constexpr BackwardVariant with_softcap(BackwardVariant variant, bool softcap = true) {
  variant.softcap = softcap;
  return variant;
}
constexpr BackwardVariant with_exact_sums(BackwardVariant variant) {
  variant.exact = true;
  return variant;
}
constexpr BackwardVariant with_parts(BackwardVariant variant) {
  variant.merges_parts = true;
  return variant;
}
// A CTA lists its rounds when it begins, so it takes one tile.
constexpr BackwardVariant with_lists(BackwardVariant variant) {
  variant.lists_rounds = true;
  variant.tile_stages = variant.key_stages = 1;
  return variant;
}
constexpr BackwardVariant with_mask(BackwardVariant variant, bool gradient) {
  variant.reads_mask = true;
  variant.mask_gradient = gradient;
  return with_lists(variant);
}
// There is room for K and V of one tile.
constexpr BackwardVariant with_elements(BackwardVariant variant) {
  variant.adds_mask = true;
  variant.key_stages = 1;
  return variant;
}
constexpr BackwardVariant with_kept_gradient(BackwardVariant variant) {
  variant.keeps_gradient = true;
  return variant;
}
constexpr BackwardVariant with_dropout(BackwardVariant variant) {
  variant.drops = true;
  return variant;
}
using BackwardD32 = BackwardConfig<DTYPE, with_parts(BACKWARD_D32)>;
template <bool SOFTCAP = false>
using BackwardD64 = BackwardConfig<DTYPE, with_softcap(BACKWARD_D64, SOFTCAP)>;
using BackwardD32Short = BackwardConfig<DTYPE, with_parts(BACKWARD_D32_SHORT)>;
using BackwardD64Short = BackwardConfig<DTYPE, with_parts(BACKWARD_D64_SHORT)>;
using BackwardD96 = BackwardConfig<DTYPE, BACKWARD_D96>;
template <bool SOFTCAP = false>
using BackwardD128 = BackwardConfig<DTYPE, with_softcap(BACKWARD_D128, SOFTCAP)>;
using BackwardD64Exact = BackwardConfig<DTYPE, with_exact_sums(BACKWARD_D64)>;
using BackwardD128Exact = BackwardConfig<DTYPE, with_exact_sums(BACKWARD_D128)>;
// They serve calls whose sums of dQ are those of whole tiles, too.
using BackwardD64Parts = BackwardConfig<DTYPE, with_parts(with_exact_sums(BACKWARD_D64))>;
using BackwardD128Parts = BackwardConfig<DTYPE, with_parts(with_exact_sums(BACKWARD_D128))>;
using BackwardD32ShortOne = BackwardConfig<DTYPE, with_one_tile(BACKWARD_D32_SHORT)>;
using BackwardD64ShortOne = BackwardConfig<DTYPE, with_one_tile(BACKWARD_D64_SHORT)>;
using BackwardD32One = BackwardConfig<DTYPE, with_one_tile(BACKWARD_D32)>;
using BackwardD64One = BackwardConfig<DTYPE, with_one_tile(BACKWARD_D64)>;
using BackwardD96One = BackwardConfig<DTYPE, with_one_tile(BACKWARD_D96)>;
using BackwardD128One = BackwardConfig<DTYPE, with_swapped_keys(with_one_tile(BACKWARD_D128))>;
using BackwardD128CausalTurns = BackwardConfig<DTYPE, with_turns(BACKWARD_D128)>;
using BackwardD64Turns = BackwardConfig<DTYPE, with_turns(BACKWARD_D64)>;
using BackwardD96Turns = BackwardConfig<DTYPE, with_turns(BACKWARD_D96)>;
using BackwardD128Turns = BackwardConfig<DTYPE, with_swapped_keys(with_turns(BACKWARD_D128))>;
using BackwardD128Stays = BackwardConfig<DTYPE, with_swapped_keys(BACKWARD_D128)>;
// BackwardD64Table: all blocks of a round are computed where one of them is seen, half of 128 keys
// and queries perhaps for nothing. The tiles for few keys have one block in a round.
using BackwardD64Table = BackwardConfig<DTYPE, with_lists(BACKWARD_D64_SHORT)>;
using BackwardD128Table = BackwardConfig<DTYPE, with_lists(BACKWARD_D128)>;
template <bool GRADIENT = false>
using BackwardD64Dense = BackwardConfig<DTYPE, with_mask(BACKWARD_D64, GRADIENT)>;
using BackwardD64Added = BackwardConfig<DTYPE, with_elements(BACKWARD_D64)>;
template <bool GRADIENT = false>
using BackwardD128Dense = BackwardConfig<DTYPE, with_mask(BACKWARD_D128, GRADIENT)>;
using BackwardD64AddedKept = BackwardConfig<DTYPE, with_kept_gradient(with_elements(BACKWARD_D64))>;
using BackwardD64DenseKept =
    BackwardConfig<DTYPE, with_kept_gradient(with_mask(BACKWARD_D64, false))>;
using BackwardD128DenseKept =
    BackwardConfig<DTYPE, with_kept_gradient(with_mask(BACKWARD_D128, false))>;
using BackwardD64Dropout = BackwardConfig<DTYPE, with_dropout(BACKWARD_D64)>;
using BackwardD128Dropout = BackwardConfig<DTYPE, with_dropout(BACKWARD_D128)>;

constexpr WideBackwardVariant BACKWARD_D192 = {.head_dim = 192,
                                               .head_dim_v = 128,
                                               .q_stages = 3,
                                               .dout_stages = 3,
                                               .part_columns = 192,
                                               .weights_registers = 152,
                                               .keys_registers = 176,
                                               .queries_registers = 152,
                                               .stays = true};
constexpr WideBackwardVariant BACKWARD_D256 = {.head_dim = 256,
                                               .head_dim_v = 256,
                                               .q_stages = 2,
                                               .dout_stages = 2,
                                               .part_columns = 64,
                                               .weights_registers = 208,
                                               .keys_registers = 208,
                                               .queries_registers = 72};
constexpr WideBackwardVariant with_mask(WideBackwardVariant variant, bool gradient) {
  variant.reads_mask = true;
  variant.mask_gradient = gradient;
  variant.queries_registers -= 8;  // they know no turns
  variant.weights_registers += 8;
  return variant;
}
using BackwardD192 = WideBackwardConfig<DTYPE, BACKWARD_D192>;
using BackwardD256 = WideBackwardConfig<DTYPE, BACKWARD_D256>;
template <bool GRADIENT = false>
using BackwardD256Dense = WideBackwardConfig<DTYPE, with_mask(BACKWARD_D256, GRADIENT)>;

}  // namespace archflash::hopper
