// The parameter of hopper's backward kernels, but that of the sinks.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/listed_round.h"
#include "common/dropout_params.h"
#include "common/dropped_heads.h"
#include "common/mask_params.h"
#include "common/masked_backward_params.h"
#include "common/tensor_map.h"

namespace archflash::hopper {

struct BackwardKernelParams {
  BackwardParams backward;
  // The sums of dQ before its scale, to which all CTAs add: of each round of each head of q, a
  // part of 64 rows and 64 columns after the other; of a part, the 16 rows of a warp after another;
  // of these, 16 bytes of each lane side by side, as the accumulators of wgmma have them. Rows and
  // columns that no dQ has are left out, as SumsPart (backward_dq.cuh) says.
  float* dq_sums_gmem;
  int64_t cleared_bytes;  // of the sums, or in turns of these, which the first launch clears
  // In turns, behind which tile of keys the next one may add to each sum; null: no turns.
  int32_t* turns_gmem;
  float uncap;            // from a score, as a logarithm to base 2, to its tanh
  int32_t rounds;         // of a head, without cu_seqlens
  int32_t sums_of_round;  // of dQ: one, two, or one for each chain of tiles
  // The heads of k, of all sequences, that are gone over together: the first tiles of all of them,
  // then the second ones, and so on.
  int32_t group_heads;
  // In turns: of the first heads, whole groups, the tiles come from the last one to the first, and
  // go over rounds upwards.
  int32_t upward_heads;
  // How many tiles of a head come one after another before those of the next head.
  int32_t tiles_in_a_row;
  // With cu_seqlens, where a group is of one sequence: as many heads as have packed_rows rows of
  // queries or packed_tiles tiles of keys, in groups of equal size. Above 0: a group's tiles go
  // upwards if behind it comes upward_work times the work of its longest tile (backward_order.cuh
  // has how that is counted).
  int32_t packed_rows;
  int32_t packed_tiles;
  int32_t upward_work;
  // With cu_seqlens, above 1: so many sequences, at most 32, are gone over together, the first
  // tiles of all of their heads, then the second ones, and so on.
  int32_t packed_sequences;
  int32_t sums_rows;  // that a round has in the sums: no more than dQ needs where it is one round
  // How many CTAs share out the query rows of a tile of keys: share_rows each, of whole rounds.
  // With more than one, dk and dv are shares in the workspace, whose heads are those of K times the
  // shares, and a launch behind the main one adds them up (SharedGradientsParams).
  int32_t shares;
  int32_t share_rows;
  // The tiles of all heads and shares. Where there are more than CTAs, these take one after another
  // by a counter, which the first launch clears.
  int32_t tiles;
  int32_t* taken_gmem;
  // Tiles from number first_in_parts on have `parts` CTAs each, one after another, which share out
  // the query rows, share_rows each, and merge dK and dV (backward_parts.cuh): what the other ones
  // have, and counters of their warps, which the first launch clears. 0: all tiles have one CTA.
  int32_t first_in_parts, parts;
  float* parts_gmem;
  int32_t* parts_done_gmem;
  int64_t parts_done_bytes;
  // In turns, where tiles of a chain that run together start apart, 2^turn_steps_shift rounds of
  // all heads one before the next: how many of them there are; 0: tiles do not start apart.
  int32_t turn_tiles, turn_steps_shift;
  // In kernels for few query rows (rows_bwd.cuh), `shares` CTAs share out the keys of each head of
  // all sequences from this one on, share_rows keys each, and dq_sums_gmem has their parts of dQ:
  // (heads, shares, nq, d). The heads before have a CTA each.
  int32_t first_shared_head;
  TensorMap q_map, k_map, v_map, dout_map;
};

// The parameter of kernels for calls with dropout.
struct DroppingBackwardParams {
  BackwardKernelParams call;  // its scale has the factor of the weights that are kept
  DropoutParams dropout;
  float kept_share;  // 1 / dropout.scale
  DroppedHeads dropped_heads;
};

// The parameter of kernels that write dQ in 16 bits when the last CTA has its turn.
struct EndingBackwardParams {
  BackwardKernelParams call;
  TensorMap dq_map;
};

// The parameter of kernels for tables of blocks, which list the rounds that see their keys: each
// CTA in its own part of the workspace.
struct ListingBackwardParams {
  BackwardKernelParams call;
  MaskParams masks;  // block_mask alone
  device::ListedRound* rounds_gmem;
  int32_t rounds_of_cta;  // that it has room for
  int32_t tile_blocks;    // blocks of keys of a tile
  // The tiles of each head of k in the order in which they are taken, which the first launch finds;
  // null: from the first keys on.
  int32_t* order_gmem;
};
// The most tiles of a head that are ordered.
constexpr int MOST_ORDERED_TILES = 1024;

// Threads of a consumer warpgroup, and of a CTA that prepares a block of attn_mask.
constexpr int DENSE_THREADS = 128;

// dS of each head, which main kernels keep for the launch behind them that adds it up to the
// gradient of attn_mask: blocks of MASK_BLOCK rows and keys, (batch * heads of q, row_blocks,
// key_blocks), of whole rounds and tiles.
struct KeptScoresParams {
  void* gmem;             // MASK_BLOCK * MASK_BLOCK elements of 16 bits of each block
  uint8_t* is_kept_gmem;  // 1 for each block that a CTA has written, else 0; null: all are written
  int64_t is_kept_bytes;
  int32_t row_blocks, key_blocks;
};

// The parameter of kernels to which TMA brings the elements of an attn_mask.
struct AddingBackwardParams {
  BackwardKernelParams call;
  int32_t mask_batch, mask_head;  // 0 where the mask is the same for all of them, else 1
  KeptScoresParams kept;          // in kernels that keep dS
  TensorMap mask_map;
};

// The parameter of kernels for a dense attn_mask, and of the one before them, which makes of it
// what they read, in the workspace: for blocks of MASK_BLOCK rows and keys, (batch, heads, row
// blocks, key blocks), where a dimension along which the mask is broadcast has size 1.
struct DenseBackwardParams {
  BackwardKernelParams call;
  MaskParams masks;  // attn_mask; blocks_gmem has the state of each block
  device::ListedRound* rounds_gmem;
  uint32_t* seen_gmem;  // DENSE_THREADS words of each block
  void* added_gmem;     // what is added: MASK_BLOCK * MASK_BLOCK elements of each block
  MaskGradientParams dmask;
  KeptScoresParams kept;  // in kernels that keep dS
  int32_t rounds_of_cta;
  int32_t mask_heads, row_blocks, key_blocks;
};

}  // namespace archflash::hopper
