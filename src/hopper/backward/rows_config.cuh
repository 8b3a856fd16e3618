// The tiles of the backward kernels for few query rows (rows_bwd.cuh): compile-time numbers only,
// which the kernels and their plan (plain C++) read.
#pragma once

#include "common/device/slab_tile.cuh"
#include "common/image_dtype.h"

namespace archflash::hopper {

// What these kernels differ in.
struct RowsBackwardVariant {
  int head_dim;    // the largest d and dv
  int row_tiles;   // of 128 query rows
  int row_stages;  // heads whose Q and dO are in shared memory
  int key_stages;  // blocks of K and V in their ring
  // The registers suffice for S of the next block beside P and dP of this one. If not, P takes the
  // place of S.
  bool s_ahead = true;
  // It serves packed sequences, whose loader takes more registers.
  bool packed = true;
  // The registers suffice for the warp's rows of Q and dO. If not, products read them in shared
  // memory.
  bool keeps_rows = false;
  // It serves calls with a dense attn_mask (rows_masks.cuh), of whose elements a lane keeps so many
  // words for each pair: two for fp32.
  int mask_words = 0;
  // One: a tile has 64 rows, and several CTAs stay on an SM, so that the others multiply while one
  // waits.
  int warpgroups = 2;
  int ctas_per_sm = 1;
};

// The numbers of one kernel. A CTA has all query rows of a head, TILE_ROWS in each of ROW_TILES
// tiles and 64 of these for each consumer warpgroup, and goes over blocks of BLOCK keys.
template <DType DTYPE_, RowsBackwardVariant VARIANT>
struct RowsBackwardConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = VARIANT.head_dim;
  static constexpr int HEAD_DIM_V = HEAD_DIM;
  static constexpr int WARPGROUP = 128;                  // threads
  static constexpr int WARPGROUPS = VARIANT.warpgroups;  // consumers
  static constexpr int WARPS = 4 * WARPGROUPS;
  static constexpr int GROUP_ROWS = 64;
  static constexpr int WARP_ROWS = 16;
  static constexpr int TILE_ROWS = GROUP_ROWS * WARPGROUPS;
  static constexpr int KEY_WARPS = TILE_ROWS / WARP_ROWS;  // that write the columns of P and dS
  static constexpr int ROW_TILES = VARIANT.row_tiles;
  static constexpr int MOST_ROWS = ROW_TILES * TILE_ROWS;
  static constexpr int BLOCK = 64;
  static constexpr bool S_AHEAD = VARIANT.s_ahead;
  static constexpr bool KEEPS_ROWS = VARIANT.keeps_rows;
  static_assert(!KEEPS_ROWS || ROW_TILES == 1);
  static constexpr int MASK_WORDS = VARIANT.mask_words;
  static constexpr bool MASKED = MASK_WORDS > 0;
  // The registers suffice for sums of dS.
  static constexpr bool SUMS_ELEMENTS = MASKED && WARPGROUPS == 1 && HEAD_DIM == 32;
  static constexpr bool SOFTCAP = false, READS_MASK = false;
  static constexpr bool HANDS_KEYS_BACK = true;  // before gradients are written
  static constexpr bool HANDS_VALUES_BACK = false;
  static constexpr bool COUNTS_BLOCKS = false;
  static constexpr int ROW_STAGES = VARIANT.row_stages;
  static constexpr int KEY_STAGES = VARIANT.key_stages;
  static constexpr int WEIGHT_STAGES = 2;  // of P and dS

  static constexpr int CONSUMER_THREADS = WARPGROUP * WARPGROUPS;
  static constexpr int THREADS = CONSUMER_THREADS + WARPGROUP;
  static constexpr int CTAS_PER_SM = VARIANT.ctas_per_sm;
  static constexpr bool PACKED = VARIANT.packed;
  static constexpr int LAUNCH_REGISTERS = 65536 / CTAS_PER_SM / THREADS / 8 * 8;
  static constexpr int CONSUMER_REGISTERS = WARPGROUPS == 1              ? 232
                                            : !PACKED || HEAD_DIM == 128 ? 240
                                            : HEAD_DIM == 96             ? 224
                                                                         : 232;
  static constexpr int PRODUCER_REGISTERS =
      (WARPGROUPS + 1) * LAUNCH_REGISTERS - WARPGROUPS * CONSUMER_REGISTERS;

  // Tiles in shared memory: the query rows of Q and dO, a block of K and V, and P or dS of a block,
  // in which a key has a row.
  using QTile = device::SlabTile<HEAD_DIM, TILE_ROWS>;
  using KTile = device::SlabTile<HEAD_DIM, BLOCK>;
  using DsTile = device::SlabTile<TILE_ROWS, BLOCK>;

  static constexpr int ROW_BYTES = ROW_TILES * QTile::BYTES;

  // Shared memory, in bytes: Q | dO | ring of K | ring of V | ring of P and dS | terms | barriers |
  // work. The terms of a row are its LSE as a logarithm to base 2, and its delta.
  static constexpr int Q_SMEM = 0;
  static constexpr int DOUT_SMEM = Q_SMEM + ROW_STAGES * ROW_BYTES;
  static constexpr int K_SMEM = DOUT_SMEM + ROW_STAGES * ROW_BYTES;
  static constexpr int V_SMEM = K_SMEM + KEY_STAGES * KTile::BYTES;
  static constexpr int WEIGHTS_SMEM = V_SMEM + KEY_STAGES * KTile::BYTES;
  static constexpr int TERMS_SMEM = WEIGHTS_SMEM + WEIGHT_STAGES * 2 * DsTile::BYTES;
  static constexpr int BARRIER_SMEM = TERMS_SMEM + ROW_STAGES * 8 * MOST_ROWS;
  // Full of the work, of Q and of dO, and empty, of each stage of rows; full of each K and each V,
  // and empty; the bytes of ragged tiles.
  static constexpr int BARRIERS = 4 * ROW_STAGES + 3 * KEY_STAGES + 1;
  static constexpr int WORK_BYTES = 64;  // of RowsWork
  static constexpr int WORK_SMEM = (BARRIER_SMEM + 8 * BARRIERS + 15) / 16 * 16;
  static constexpr int SHARED_BYTES = WORK_SMEM + ROW_STAGES * WORK_BYTES;
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

constexpr RowsBackwardVariant ROWS_BACKWARD_D32 = {
    .head_dim = 32, .row_tiles = 1, .row_stages = 2, .key_stages = 4, .keeps_rows = true};
constexpr RowsBackwardVariant ROWS_BACKWARD_D32_TWO = {
    .head_dim = 32, .row_tiles = 2, .row_stages = 2, .key_stages = 4};
constexpr RowsBackwardVariant ROWS_BACKWARD_D32_FOUR = {
    .head_dim = 32, .row_tiles = 4, .row_stages = 2, .key_stages = 3, .packed = false};
constexpr RowsBackwardVariant ROWS_BACKWARD_D64 = {
    .head_dim = 64, .row_tiles = 1, .row_stages = 2, .key_stages = 3, .keeps_rows = true};
constexpr RowsBackwardVariant ROWS_BACKWARD_D64_TWO = {
    .head_dim = 64, .row_tiles = 2, .row_stages = 1, .key_stages = 3};
constexpr RowsBackwardVariant ROWS_BACKWARD_D64_THREE = {.head_dim = 64,
                                                         .row_tiles = 3,
                                                         .row_stages = 1,
                                                         .key_stages = 3,
                                                         .s_ahead = false,
                                                         .packed = false};
constexpr RowsBackwardVariant ROWS_BACKWARD_D96 = {
    .head_dim = 96, .row_tiles = 1, .row_stages = 2, .key_stages = 2, .s_ahead = false};
constexpr RowsBackwardVariant ROWS_BACKWARD_D128 = {
    .head_dim = 128, .row_tiles = 1, .row_stages = 1, .key_stages = 2, .s_ahead = false};
// No registers are left for P beside S, nor for rows.
constexpr RowsBackwardVariant with_elements(RowsBackwardVariant variant, int mask_words) {
  variant.s_ahead = variant.keeps_rows = variant.packed = false;
  variant.mask_words = mask_words;
  return variant;
}
using RowsBackwardD32 = RowsBackwardConfig<DTYPE, ROWS_BACKWARD_D32>;
using RowsBackwardD32Two = RowsBackwardConfig<DTYPE, ROWS_BACKWARD_D32_TWO>;
using RowsBackwardD32Four = RowsBackwardConfig<DTYPE, ROWS_BACKWARD_D32_FOUR>;
using RowsBackwardD64 = RowsBackwardConfig<DTYPE, ROWS_BACKWARD_D64>;
using RowsBackwardD64Two = RowsBackwardConfig<DTYPE, ROWS_BACKWARD_D64_TWO>;
using RowsBackwardD64Three = RowsBackwardConfig<DTYPE, ROWS_BACKWARD_D64_THREE>;
using RowsBackwardD64Masked = RowsBackwardConfig<DTYPE, with_elements(ROWS_BACKWARD_D64, 2)>;
using RowsBackwardD64TwoMasked = RowsBackwardConfig<DTYPE, with_elements(ROWS_BACKWARD_D64_TWO, 1)>;
constexpr RowsBackwardVariant of_one_warpgroup(RowsBackwardVariant variant, int key_stages) {
  variant.warpgroups = 1, variant.ctas_per_sm = 2;
  variant.key_stages = key_stages;
  return variant;
}
using RowsBackwardD32ShortMasked =
    RowsBackwardConfig<DTYPE, of_one_warpgroup(with_elements(ROWS_BACKWARD_D32, 2), 2)>;
using RowsBackwardD64ShortMasked =
    RowsBackwardConfig<DTYPE, of_one_warpgroup(with_elements(ROWS_BACKWARD_D64, 2), 2)>;
using RowsBackwardD96 = RowsBackwardConfig<DTYPE, ROWS_BACKWARD_D96>;
using RowsBackwardD128 = RowsBackwardConfig<DTYPE, ROWS_BACKWARD_D128>;

}  // namespace archflash::hopper
