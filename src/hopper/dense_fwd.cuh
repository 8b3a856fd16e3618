// Attention forward on TMA, mbarriers and wgmma with a dense attn_mask, bool or added in 16 bits,
// or with key_ranges, or with alibi_slopes, together with the causal mask and the window.
//
// A kernel before this one has read the mask (summarize_mask.cuh). Slopes need none, and elements
// that only one head uses are not read twice: every block is said to have some (UNREAD). The
// summary says of each block of MASK_BLOCK rows and keys whether it changes anything, and which
// scores count, as bits in the order in which wgmma leaves scores. So the kernel is that of
// attention_fwd.cuh for many rows with another walk: the producer skips blocks that no row of the
// tile sees, and tells each warpgroup with each block's K what the next block needs. What is added
// comes by TMA; which scores count is found while the products run.
//
//   state of the block for a warpgroup   what the warpgroup does
//   0                                    waits, and hands the block back
//   SEEN alone                           the same step as in a call without masks; scores that are
//                                        transformed (softcap) take the masked step
//   HIDDEN, RANGED, BEYOND               selects scores by bits, ranges or position
//   ADDED                                adds elements to scores that are not scaled yet: one FMA
//   HUGE                                 adds them to scaled scores, and keeps the sums finite
//   UNREAD                               looks at the elements while the products run: whether they
//                                        are HUGE; then those of -inf hide keys
//   SLOPED                               subtracts the slope times the distance, likewise
//
// Barriers and hazards are those of pipeline.cuh. K and V of a block have the same stage of their
// rings. The message that comes with a block is written before the producer arrives at its k_full,
// and read before a consumer warp arrives at its k_empty. Elements that are added are counted at
// k_full, too; each consumer warp hands them back at mask_empty of their stage when it has read
// them, which may be before or after its products have read K. Their ring moves on only with
// blocks that have some.
#pragma once

#include <cstdint>

#include "common/math/attention_work.cuh"
#include "common/math/lane_masks.cuh"
#include "common/math/masks.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/row_tiles.h"
#include "common/math/slab_load.cuh"
#include "common/math/tile_walk.cuh"
#include "common/math/visible_keys.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/block_messages.cuh"
#include "hopper/clear_outputs.cuh"
#include "hopper/dense_config.cuh"
#include "hopper/dense_params.h"
#include "hopper/summarize_mask.cuh"

namespace archflash::hopper {

template <class C>
__device__ __forceinline__ uint32_t mask_empty(uint32_t shared_smem, int stage) {
  return shared_smem + C::MASK_BARRIER_SMEM + 8 * stage;
}
// The tile of elements in a stage of their ring.
template <class C>
__device__ __forceinline__ uint32_t mask_smem(uint32_t shared_smem, int stage) {
  return shared_smem + C::MASK_SMEM + stage * C::MASK_STEP;
}
// Goes on to the next stage of Q. Elements that are added may need the second one themselves.
template <class C>
__device__ __forceinline__ void advance_q(RingPosition<C::Q_STAGES>& q_ring,
                                          const MaskParams& masks) {
  if (C::SHARES_Q && masks.mask_element == MaskElement::SixteenBits) {
    q_ring.parity ^= 1;
  } else {
    q_ring.advance();
  }
}
// The states in a message are a byte for each warpgroup; 0: its rows see no key.
constexpr uint32_t ADDED_FOR_ANY = 0x01010101 * STATE_ADDED;

// What the producer says of the tile in a stage of Q besides its message, so that the consumers,
// who have no product running between two tiles, need not find it.
struct DenseContext {
  const uint32_t* bits_gmem;   // the summary's words of the tile's first row block
  const int32_t* ranges_gmem;  // of the head's first row
  int64_t q_offset;
  math::VisibleKeys visible;
  float slope;
  TileHead head;
  BlockMessage first;  // of the first block
};
static_assert(sizeof(DenseContext) <= DENSE_CONTEXT_BYTES);

template <class C>
__device__ __forceinline__ DenseContext& dense_context(unsigned char* shared, int stage) {
  return *reinterpret_cast<DenseContext*>(shared + C::CONTEXT_SMEM + stage * DENSE_CONTEXT_BYTES);
}

// --- producer ---

// The first and the last block of keys in which a range of a row of the tile lies; first > last if
// there is none. first_block: the number of the slice's first row block.
template <class C>
__device__ __forceinline__ math::Blocks blocks_in_ranges(const DenseParams& params, int first_block,
                                                         int first_row, int end_row) {
  int first = INT32_MAX, last = -1;
#pragma unroll
  for (int group = 0; group < C::WARPGROUPS; ++group) {
    const int row = first_row + group * C::GROUP_ROWS;
    if (row >= end_row) continue;
    const SeenKeys keys = params.seen_keys_gmem[first_block + row / MASK_BLOCK];
    first = min(first, keys.first), last = max(last, keys.last);
  }
  return {math::block_start<C::BLOCK_K>(first), math::block_start<C::BLOCK_K>(last)};
}

// The keys between the first and the last one in a range of any row of a slice, whose first row
// block has number `first_block`. Called by whole warps, with the same result in all lanes.
__device__ __forceinline__ math::KeyRange keys_in_ranges(const DenseParams& params,
                                                         int first_block) {
  SeenKeys all{INT32_MAX, -1};
#pragma unroll 1
  for (int block = static_cast<int>(threadIdx.x) % 32; block < params.row_blocks; block += 32) {
    const SeenKeys keys = params.seen_keys_gmem[first_block + block];
    all = {min(all.first, keys.first), max(all.last, keys.last)};
  }
  return {__reduce_min_sync(math::FULL_WARP, all.first),
          __reduce_max_sync(math::FULL_WARP, all.last) + 1};
}

// The blocks of keys that a tile sees, from the last one to the first. For a whole warp.
template <class C>
struct StatedBlocks {
  const DenseParams& params;
  const uint8_t* states_gmem;  // of the head's first row block
  math::VisibleKeys visible;
  int first_row, end_row;  // of the tile
  int first;               // the first key of the first block that may be seen
  int top = -1;            // the first key of the block of lane 0; that of lane i is i before it
  uint32_t states = 0;     // of the lane's block
  uint32_t seen = 0;       // a bit for each lane

  struct Block {
    int key;  // the first one; -1: there is no more
    uint32_t states;
  };

  // The last block up to the one at `key` that is seen.
  __device__ __forceinline__ Block up_to(int key) {
    while (key >= first) {
      if (top < 0 || key <= top - 32 * C::BLOCK_K) look_at(key);
      const int lanes = (top - key) / C::BLOCK_K;
      const uint32_t bits = seen >> lanes;
      if (bits != 0) {
        const int lane = lanes + __ffs(static_cast<int>(bits)) - 1;
        return {top - lane * C::BLOCK_K, __shfl_sync(math::FULL_WARP, states, lane)};
      }
      key = top - 32 * C::BLOCK_K;
    }
    return {-1, 0};
  }

 private:
  // Looks at 32 blocks, from the one at `key` backwards.
  __device__ __forceinline__ void look_at(int key) {
    top = key;
    const uint32_t of_unseen = params.bits_gmem != nullptr ? STATE_HIDDEN : STATE_RANGED;
    const bool sloped = params.masks.slopes_gmem != nullptr;
    const int of_lane = key - static_cast<int>(threadIdx.x % 32) * C::BLOCK_K;
    uint32_t of_mask[C::WARPGROUPS][C::SUMMARY_BLOCKS];
    load_states(of_mask, of_lane,
                STATE_SEEN | (sloped ? STATE_SLOPED : STATE_ADDED | STATE_UNREAD));
    states = 0;
#pragma unroll
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      const int row = first_row + group * C::GROUP_ROWS;
      const int last_row = min(row + C::GROUP_ROWS, end_row) - 1, end = of_lane + C::BLOCK_K;
      if (of_lane < first || last_row < row || visible.hides(row, last_row, of_lane, end - 1))
        continue;
      uint32_t state = 0;
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
        const int part_key = of_lane + part * MASK_BLOCK, part_last = part_key + MASK_BLOCK - 1;
        if (visible.hides(row, last_row, part_key, part_last)) {
          state |= STATE_BEYOND;
          continue;
        }
        state |= of_mask[group][part] == 0 ? of_unseen : of_mask[group][part];
        if (visible.masks(row, last_row, part_key, part_last)) state |= STATE_BEYOND;
      }
      if ((state & STATE_SEEN) != 0) states |= state << (8 * group);
    }
    seen = __ballot_sync(math::FULL_WARP, states != 0);
  }

  // What the summary says of the lane's block, `otherwise` without one. All is loaded before any of
  // it is looked at: one load waits as long as all. Blocks that are not there get what others have,
  // which is not looked at. The offsets fit 32 bits: plan.cpp limits the summary's size.
  __device__ __forceinline__ void load_states(uint32_t (&of_mask)[C::WARPGROUPS][C::SUMMARY_BLOCKS],
                                              int of_lane, uint32_t otherwise) const {
    const bool summarized = params.states_gmem != nullptr;
#pragma unroll
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      const int row_block = min(first_row / MASK_BLOCK + group, params.row_blocks - 1);
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
        const int block = min(max(of_lane / MASK_BLOCK + part, 0), params.key_blocks - 1);
        of_mask[group][part] = otherwise;
        if (summarized) of_mask[group][part] = states_gmem[row_block * params.key_blocks + block];
      }
    }
  }
};

template <class C>
__device__ __forceinline__ void produce_dense(const DenseParams& all_params, unsigned char* shared,
                                              uint32_t shared_smem) {
  const Params& params = all_params.call;
  const MaskParams& masks = all_params.masks;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes wait and count
  RingPosition<C::STAGES> k_ring, v_ring;
  RingPosition<C::MASK_STAGES> mask_ring;
  RingPosition<C::Q_STAGES> q_ring;
  uint32_t ragged_parity = 0;

  // All that the kernel before this one has written can be read: the summary, and the counter of
  // tiles.
  ptx::griddepcontrol_wait();
  unsigned next_index = 0;
  for (unsigned index = blockIdx.x; index < static_cast<unsigned>(params.tiles);
       index = next_index) {
    SeekingTile tile{};
    static_cast<math::Work&>(tile) =
        math::find_work(attention, static_cast<int>(index), C::BLOCK_Q, 1);
    const math::RowTile rows =
        math::row_tile_from_end(tile.nq, tile.first_row, C::BLOCK_Q, C::TILE_STEP);
    tile.first_row = rows.first_row;
    tile.end_row = rows.end_row;
    const math::VisibleKeys visible = math::find_visible_keys(attention, tile);
    math::Blocks blocks = find_blocks<C>(params, tile, visible);
    const int batch = tile.batch_head / attention.heads_q;
    const int head = tile.batch_head % attention.heads_q;
    const int kv_head = head / attention.heads_per_kv;
    const int mask_batch = all_params.mask_batches == 1 ? 0 : batch;
    const int mask_head = all_params.mask_heads == 1 ? 0 : head;
    const int slice = mask_batch * all_params.mask_heads + mask_head;
    if (masks.ranges_gmem != nullptr) {
      const math::Blocks ranged = blocks_in_ranges<C>(all_params, slice * all_params.row_blocks,
                                                      tile.first_row, tile.end_row);
      blocks = {max(blocks.first, ranged.first), min(blocks.last, ranged.last)};
    }
    {
      math::KeyRange counted{visible.begin(), visible.end(tile.nq)};
      if (masks.ranges_gmem != nullptr) {
        const math::KeyRange ranged = keys_in_ranges(all_params, slice * all_params.row_blocks);
        counted = {max(counted.begin, ranged.begin), min(counted.end, ranged.end)};
      }
      if (counted.end == tile.nk) counted.end = INT32_MAX;  // behind it TMA reads zeros
      set_counted_keys<C>(shared, counted);
    }

    using Block = typename StatedBlocks<C>::Block;
    const auto load_k = [&](const Block& block, const Block& next) {
      const bool added = (block.states & ADDED_FOR_ANY) != 0;
      // The products of every consumer warp have read the K that the stage held.
      // mutants: needless-with-one-tile (tests/sim/tags.py)
      ptx::mbarrier_wait_parity(barriers.k_empty(k_ring.stage), k_ring.parity ^ 1);
      // Every consumer warp has read the elements that the stage held.
      if (added) {
        ptx::mbarrier_wait_parity(mask_empty<C>(shared_smem, mask_ring.stage),
                                  mask_ring.parity ^ 1);
      }
      if (leader) {
        block_message<C>(shared, k_ring.stage) = {next.key, next.states, next.key < 0};
        const uint32_t full = barriers.k_full(k_ring.stage);
        ptx::mbarrier_arrive_expect_tx(full, C::KTile::BYTES + (added ? C::MaskTile::BYTES : 0));
        math::start_copy<typename C::KTile>(
            shared_smem + C::K_SMEM + k_ring.stage * C::KTile::BYTES, params.k_map, block.key,
            attention.k_head == 0 ? 0 : kv_head, attention.k_batch == 0 ? 0 : batch, full);
        if (added) {
          math::start_copy<typename C::MaskTile>(mask_smem<C>(shared_smem, mask_ring.stage),
                                                 all_params.mask_map, tile.first_row, mask_head,
                                                 mask_batch, full, block.key);
        }
      }
      if (added) mask_ring.advance();
      k_ring.advance();
    };
    const auto load_v = [&](int block) {
      const math::KeyRange& counted = counted_keys<C>(shared);
      const bool ragged = block < counted.begin || block > counted.end - C::BLOCK_K;
      const int offset = C::V_SMEM + v_ring.stage * C::VTile::BYTES;
      // The products of every consumer warp have read the V that the stage held.
      ptx::mbarrier_wait_parity(barriers.v_empty(v_ring.stage), v_ring.parity ^ 1);
      if (leader) {
        math::start_load<typename C::VTile>(
            shared_smem + offset, params.v_map, block, attention.v_head == 0 ? 0 : kv_head,
            attention.v_batch == 0 ? 0 : batch,
            ragged ? barriers.v_ragged() : barriers.v_full(v_ring.stage));
      }
      if (ragged) {
        ptx::mbarrier_wait_parity(barriers.v_ragged(), ragged_parity);  // V has landed
        ragged_parity ^= 1;
        clear_rows<typename C::VTile>(shared + offset, counted.begin - block, counted.end - block);
        if (leader) ptx::mbarrier_arrive(barriers.v_full(v_ring.stage));
      }
      v_ring.advance();
    };

    StatedBlocks<C> seen{all_params,
                         all_params.states_gmem + static_cast<int64_t>(slice) *
                                                      all_params.row_blocks * all_params.key_blocks,
                         visible,
                         tile.first_row,
                         tile.end_row,
                         blocks.first};
    auto block = seen.up_to(blocks.last);
    auto next = seen.up_to(block.key - C::BLOCK_K);
    tile.any_block = block.key >= 0;
    float slope = 0.0f;
    if (masks.slopes_gmem != nullptr)
      slope = masks.slopes_gmem[batch * masks.slopes_batch + head * masks.slopes_head];
    // The first block comes before Q: the rings are free while the previous tile's output still
    // passes through Q's part.
    if (tile.any_block) load_k(block, next);
    // The consumers have read the message, and their output rows have left Q's part.
    // mutants: needless-with-one-tile
    ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
    if (leader) {
      tile_message<C, SeekingTile>(shared, q_ring.stage) = tile;
      const int64_t row_block =
          static_cast<int64_t>(slice) * all_params.row_blocks + tile.first_row / MASK_BLOCK;
      dense_context<C>(shared, q_ring.stage) = {
          .bits_gmem = all_params.bits_gmem + row_block * all_params.key_blocks * SUMMARY_WORDS,
          .ranges_gmem =
              masks.ranges_gmem + mask_batch * masks.ranges_batch + mask_head * masks.ranges_head,
          .q_offset = math::find_q_offset(attention, tile),
          .visible = visible,
          .slope = slope,
          .head = {batch, head},
          .first = {block.key, block.states, false}};
      if (tile.any_block) {
        math::start_load<typename C::QTile>(
            shared_smem + C::Q_SMEM + q_ring.stage * C::QTile::BYTES, params.q_map, tile.first_row,
            attention.q_head == 0 ? 0 : head, attention.q_batch == 0 ? 0 : batch,
            barriers.q_full(q_ring.stage));
      } else {
        ptx::mbarrier_arrive(barriers.q_full(q_ring.stage));  // a tile without keys needs no Q
      }
    }
    advance_q<C>(q_ring, masks);
    // The next tile is taken before the last block is waited for, which hides the time of it.
    if (next.key < 0) next_index = next_tile(params, index);
#pragma unroll 1
    while (block.key >= 0) {
      const int key = block.key;
      block = next;
      if (block.key >= 0) {
        next = seen.up_to(block.key - C::BLOCK_K);
        if (next.key < 0) next_index = next_tile(params, index);
        load_k(block, next);
      }
      load_v(key);
    }
  }
  send_no_tile<C, SeekingTile>(barriers, shared, q_ring, leader);
}

// --- consumers ---

// Selects the scores of a lane whose bits are set; the others become -inf, even if they were NaN.
// seen: a word for each block of the summary.
template <class C>
__device__ __forceinline__ void select_scores(math::Scores<C>& s_rmem,
                                              const uint32_t (&seen)[C::SUMMARY_BLOCKS]) {
  constexpr int GROUPS = MASK_BLOCK / 8;
#pragma unroll
  for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((seen[part] & 1u << (16 * r + 2 * n + i)) == 0)
            s_rmem[0][part * GROUPS + n][2 * r + i] = math::MINUS_INFINITY;
        }
      }
    }
  }
}

// What is kept of the elements that are added to a lane's scores, two in a word: four words for 16
// keys.
template <class C>
using Elements = uint32_t[C::KEEPS_ELEMENTS ? C::BLOCK_K / 16 : 1][4];

// row_smem: where the tile of elements has the row and chunk that this lane addresses for ldmatrix.
// n: a number of 16 keys.
template <class C>
__device__ __forceinline__ void load_elements(uint32_t (&words)[4], uint32_t row_smem, int n) {
  ptx::ldmatrix_x4(words, C::MaskTile::advance(row_smem, 2 * n));
}
// Does what load_elements() does, from the registers where elements are kept.
template <class C>
__device__ __forceinline__ void take_elements(uint32_t (&words)[4], const Elements<C>& kept,
                                              uint32_t row_smem, int n) {
  if constexpr (C::KEEPS_ELEMENTS) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = kept[n][i];
  } else {
    load_elements<C>(words, row_smem, n);
  }
}

// Calls add(s, x) with each score of a lane and the element that is added to it.
template <class C, class Add>
__device__ __forceinline__ void add_elements(math::Scores<C>& s_rmem, const Elements<C>& kept,
                                             uint32_t row_smem, const Add& add) {
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 16; ++n) {
    uint32_t words[4];
    take_elements<C>(words, kept, row_smem, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* s = &s_rmem[0][2 * n + i / 2][2 * (i % 2)];
      add(s[0], math::added_of_16_bits<C::DTYPE>(static_cast<uint16_t>(words[i])));
      add(s[1], math::added_of_16_bits<C::DTYPE>(static_cast<uint16_t>(words[i] >> 16)));
    }
  }
}

// Whether an element of the warp's rows may be not below LARGEST_ADDED, for a whole warp.
template <class C>
__device__ __forceinline__ bool any_huge(const Elements<C>& kept, uint32_t row_smem) {
  static_assert(NEXT_EXPONENT << 1 == HIGH_EXPONENT);
  uint32_t exponents = 0;
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 16; ++n) {
    uint32_t words[4];
    take_elements<C>(words, kept, row_smem, n);
#pragma unroll
    for (const uint32_t word : words) exponents |= word & word << 1;
  }
  return __any_sync(math::FULL_WARP, (exponents & (HIGH_EXPONENT << 16 | HIGH_EXPONENT)) != 0);
}

// Calls add(s, d) with each score of a lane and the distance of its key before its row. distance:
// that of the lane's first key and row.
template <class C, class Add>
__device__ __forceinline__ void add_distances(math::Scores<C>& s_rmem, float distance,
                                              const Add& add) {
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      add(s_rmem[0][n][i], distance + static_cast<float>(8 * (i / 2) - 8 * n - i % 2));
  }
}

// Q as fragments of A, where it is kept.
template <class C>
using QFragments = uint32_t[C::KEEPS_Q ? C::HEAD_DIM / 16 : 1][4];

template <class C>
__device__ __forceinline__ void load_q(QFragments<C>& q_rmem, uint32_t shared_smem, int stage,
                                       int warp_row) {
  using QTile = typename C::QTile;
  const int lane = threadIdx.x % 32;
  const uint32_t row_smem = shared_smem + C::Q_SMEM + stage * QTile::BYTES +
                            warp_row * QTile::ROW_BYTES + QTile::offset(lane % 16, lane / 16);
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM / 16; ++i)
    ptx::ldmatrix_x4(q_rmem[i], QTile::advance(row_smem, 2 * i));
}

// Does what start_qk() does with Q in registers.
template <class C>
__device__ __forceinline__ void start_kept_qk(math::Scores<C>& s_rmem, const QFragments<C>& q_rmem,
                                              uint32_t shared_smem, int stage) {
  using Product = ptx::Wgmma<C::DTYPE, C::BLOCK_K>;
  float* const s = &s_rmem[0][0][0];
  ptx::registers_change<C::BLOCK_K / 2>(s);
  ptx::wgmma_fence();  // the last uses of the scores come before the product
  const ptx::WgmmaDescriptor k =
      describe_tile<typename C::KTile>(shared_smem + C::K_SMEM + stage * C::KTile::BYTES, 16);
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
    Product::template rs<false>(s, q_rmem[i], advance(k, column_step<typename C::KTile>(i)),
                                i != 0);
  }
  ptx::wgmma_commit_group();
}

template <class C>
__device__ __forceinline__ void consume_dense(const DenseParams& all_params, unsigned char* shared,
                                              uint32_t shared_smem) {
  using QTile = typename C::QTile;
  constexpr int SCORES = C::BLOCK_K / 2, OUTPUTS = C::HEAD_DIM_V / 2, WORDS = C::BLOCK_K / 4;
  const Params& params = all_params.call;
  const MaskParams& masks = all_params.masks;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int group = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  const Turns<C> turns{group};
  if (group == C::WARPGROUPS - 1) turns.hand_over();  // warpgroup 0 begins
  RingPosition<C::STAGES> ring;                       // of K and V
  RingPosition<C::MASK_STAGES> mask_ring;
  RingPosition<C::Q_STAGES> q_ring;
  // What is added to scores before they are scaled has this factor.
  const float factor = math::LOG2_E / attention.exp2_scale;
  const bool adds_late = !(factor <= LARGEST_FACTOR);
  const uint32_t clear = attention.transform_scores ? 0 : STATE_SEEN;  // 0: no block is

  while (true) {
    ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);  // Q has landed
    const SeekingTile& tile = tile_message<C, SeekingTile>(shared, q_ring.stage);
    if (uniform(tile.first_row) < 0) break;
    const DenseContext& cta = dense_context<C>(shared, q_ring.stage);
    ring = {uniform(ring.stage), uniform(ring.parity)};
    unsigned char* q = shared + C::Q_SMEM + uniform(q_ring.stage) * QTile::BYTES;
    const ptx::WgmmaDescriptor q_descriptor =
        describe_q<C>(shared_smem, uniform(q_ring.stage), group);
    QFragments<C> q_rmem;

    math::Scores<C> s_rmem;
    Probabilities<C> p_rmem;
    math::Outputs<C> o_rmem;
    float* const s = &s_rmem[0][0][0];
    float* const o = &o_rmem[0][0][0];
    uint32_t* const p = &p_rmem[0][0][0];
    math::RowState<C> state;
    math::clear(state);
    state.large = false;
    // The block whose O += P V is still to be started.
    RingPosition<C::STAGES> pending;
    bool is_pending = false;
    bool has_outputs = false;  // whether o_rmem holds sums already

    const auto begin_qk = [&] {
      if constexpr (C::KEEPS_Q) {
        start_kept_qk<C>(s_rmem, q_rmem, shared_smem, ring.stage);
      } else {
        start_qk<C>(s_rmem, q_descriptor, shared_smem, ring.stage);
      }
    };
    const auto begin_pv = [&] {
      ptx::mbarrier_wait_parity(barriers.v_full(pending.stage), pending.parity);  // V has landed
      // mutants: fence-before-both-products
      start_pv<C>(o_rmem, p_rmem, shared_smem, pending.stage, true);
    };
    // Waits for O += P V of the block before: its V can go then, and P may be overwritten.
    const auto finish_pv = [&] {
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<OUTPUTS>(o);
      ptx::registers_change<WORDS>(p);
      release(barriers.v_empty(pending.stage));
    };
    const auto hand_back_k = [&] { release(barriers.k_empty(ring.stage)); };
    // What the producer says of the next block, which comes with this one.
    const auto read = [&](const BlockMessage& said) {
      return BlockMessage{uniform(said.key), uniform(said.states), uniform(said.last)};
    };
    const auto read_next = [&] { return read(block_message<C>(shared, ring.stage)); };
    // Where this lane's row of the elements lies for ldmatrix.
    const auto find_elements = [&] {
      const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
      const unsigned lane = thread % 32;
      const auto row = static_cast<int>(thread / 32 * 16 + lane % 16);
      return mask_smem<C>(shared_smem, mask_ring.stage) +
             C::MaskTile::offset(row, static_cast<int>(lane / 16));
    };
    // Hands back the elements of a block, if it has some for any warpgroup. `block_state`: for this
    // warp, which without ADDED has read none.
    const auto hand_back_elements = [&](uint32_t block_state, uint32_t states) {
      if ((states & ADDED_FOR_ANY) == 0) return;
      // These reads come before TMA's next write there. Kept elements have a fence where they are
      // read.
      if (!C::KEEPS_ELEMENTS && (block_state & STATE_ADDED) != 0) ptx::fence_proxy_async_shared();
      release(mask_empty<C>(shared_smem, mask_ring.stage));
      mask_ring.advance();
    };
    // Looks at the elements of a block, and keeps them and hands them back at once if the registers
    // suffice. Returns the state of the block for this warp. Called while the products run.
    const auto look_at_elements = [&](Elements<C>& kept, uint32_t block_state, uint32_t states) {
      const bool unread = (block_state & STATE_UNREAD) != 0;
      if ((block_state & STATE_ADDED) != 0 && (C::KEEPS_ELEMENTS || unread)) {
        const uint32_t row_smem = find_elements();
        if constexpr (C::KEEPS_ELEMENTS) {
#pragma unroll
          for (int n = 0; n < C::BLOCK_K / 16; ++n) load_elements<C>(kept[n], row_smem, n);
        }
        if (unread && any_huge<C>(kept, row_smem)) block_state |= STATE_HUGE;
        if constexpr (C::KEEPS_ELEMENTS) ptx::fence_proxy_async_shared();
      }
      if constexpr (C::KEEPS_ELEMENTS) hand_back_elements(block_state, states);
      return block_state;
    };
    // Which scores of this lane count by attn_mask, ranges and position. Called while the products
    // run.
    const auto find_bits = [&](uint32_t (&seen)[C::SUMMARY_BLOCKS], uint32_t block_state, int key) {
      const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
      const unsigned lane = thread % 32;
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
        seen[part] = 0xFFFFFFFFu;
        if ((block_state & STATE_HIDDEN) == 0) continue;
        // Keys behind the last block of the summary are hidden by their position. Behind the last
        // row block no block is seen.
        const int number = min(key / MASK_BLOCK + part, all_params.key_blocks - 1);
        const int64_t block = static_cast<int64_t>(group) * all_params.key_blocks + number;
        seen[part] = __ldg(cta.bits_gmem + block * SUMMARY_WORDS + thread % C::WARPGROUP);
      }
      if ((block_state & (STATE_RANGED | STATE_BEYOND)) == 0) return;
      // The keys from `begin` to `end` of a row, as the lane's bits of one of its two rows.
      const auto bits_of = [&](int part, int r, int begin, int end) {
        const int lane_key = key + part * MASK_BLOCK + static_cast<int>(lane % 4 * 2);
        return math::lane_bits<SummaryConfig<C::DTYPE>>(begin - lane_key, end - lane_key)
               << (16 * r);
      };
      const int lane_row = tile.first_row + static_cast<int>(thread / 32 * 16 + lane / 4);
      if ((block_state & STATE_BEYOND) != 0) {
        const math::VisibleKeys visible = cta.visible;
#pragma unroll
        for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
          uint32_t of_rows = 0;
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const int row = lane_row + 8 * r;
            of_rows |= bits_of(part, r, visible.first(row), visible.last(row) + 1);
          }
          seen[part] &= of_rows;
        }
      }
      if ((block_state & STATE_RANGED) != 0) {
        uint32_t in_ranges[C::SUMMARY_BLOCKS] = {};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = min(lane_row + 8 * r, attention.nq - 1);
          const int32_t* range = cta.ranges_gmem + row * masks.ranges_row;
#pragma unroll 1
          for (int number = 0; number < masks.ranges; ++number, range += 2) {
            const int begin = max(range[0], 0), end = range[1];
#pragma unroll
            for (int part = 0; part < C::SUMMARY_BLOCKS; ++part)
              in_ranges[part] |= bits_of(part, r, begin, end);
          }
        }
#pragma unroll
        for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) seen[part] &= in_ranges[part];
      }
    };
    // What a block needs that is not clear. Returns the scale of scores that are finished.
    const auto finish_scores = [&](const uint32_t (&seen)[C::SUMMARY_BLOCKS],
                                   const Elements<C>& kept, uint32_t block_state, int key,
                                   bool may_add) {
      float scale = attention.exp2_scale;
      const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
      const unsigned lane = thread % 32;
      if (may_add && attention.transform_scores)
        math::transform_scores<C>(s_rmem, attention.tanh_scale, attention.softcap);
      if (may_add && (block_state & STATE_ADDED) != 0) {
        const uint32_t row_smem = C::KEEPS_ELEMENTS ? 0 : find_elements();
        const auto add_late = [&](float& x, float element) {
          x = fmaf(element, math::LOG2_E, __fmul_rn(x, scale));
          if (x < math::LOWEST_LOG2) x = math::LOWEST_LOG2;  // not fmaxf: a NaN stays one
        };
        if ((block_state & (STATE_HUGE | STATE_UNREAD)) == (STATE_HUGE | STATE_UNREAD)) {
          add_elements<C>(s_rmem, kept, row_smem, [&](float& x, float element) {
            add_late(x, element);
            if (element == math::MINUS_INFINITY) x = element;  // also where it is NaN
          });
          scale = 1.0f;
        } else if ((block_state & STATE_HUGE) != 0 || adds_late) {
          add_elements<C>(s_rmem, kept, row_smem, add_late);
          scale = 1.0f;
        } else {
          add_elements<C>(s_rmem, kept, row_smem,
                          [&](float& x, float element) { x = fmaf(element, factor, x); });
        }
      }
      if (may_add && (block_state & STATE_SLOPED) != 0) {
        const int64_t q_offset = cta.q_offset;
        const float slope = cta.slope;
        const float longest = fabsf(static_cast<float>(q_offset)) +
                              static_cast<float>(attention.nq) + static_cast<float>(attention.nk);
        const bool late = adds_late || !(fabsf(slope) * longest < LARGEST_ADDED);
        // The positions of the warpgroup's first and last row, from the block's first key on.
        const int64_t first = q_offset + tile.first_row + group * C::GROUP_ROWS - key;
        const int64_t last = first + C::GROUP_ROWS - 1;
        const auto lane_row = static_cast<int>(thread % C::WARPGROUP / 32 * 16 + lane / 4);
        const auto distance = static_cast<float>(first + lane_row - static_cast<int>(lane % 4 * 2));
        if (late) {
          const float step = slope * math::LOG2_E;
          add_distances<C>(s_rmem, distance, [&](float& x, float d) {
            x = fmaf(-step, fabsf(d), __fmul_rn(x, scale));
            if (x < math::LOWEST_LOG2) x = math::LOWEST_LOG2;  // not fmaxf: a NaN stays one
          });
          scale = 1.0f;
        } else if (first < C::BLOCK_K - 1 && last > 0) {
          const float step = slope * factor;
          add_distances<C>(s_rmem, distance,
                           [&](float& x, float d) { x = fmaf(-step, fabsf(d), x); });
        } else {  // all keys lie on one side of all rows
          const float step = last > 0 ? slope * factor : -slope * factor;
          add_distances<C>(s_rmem, distance, [&](float& x, float d) { x = fmaf(-step, d, x); });
        }
      }
      if ((block_state & (STATE_HIDDEN | STATE_RANGED | STATE_BEYOND)) != 0)
        select_scores<C>(s_rmem, seen);
      return scale;
    };
    const auto advance = [&] {
      pending = ring;
      is_pending = true;
      ring.advance();
    };

    // Steps return what the producer says of the next block. `states`: those of all warpgroups.
    const auto skip_block = [&](uint32_t states) {
      const BlockMessage next = read_next();
      if (is_pending) {  // its V cannot wait for a block that comes later
        begin_pv();
        finish_pv();
        is_pending = false;
      }
      // The warps still wait for the block: otherwise they could lap the ring and hand back a stage
      // a phase too early.
      hand_back_k();
      hand_back_elements(0, states);
      turns.wait();  // each warpgroup takes one turn for a block
      turns.hand_over();
      // mutants: few-skipped-blocks
      ptx::mbarrier_wait_parity(barriers.v_full(ring.stage), ring.parity);
      release(barriers.v_empty(ring.stage));
      ring.advance();
      return next;
    };
    // A block before which no product is pending. In most tiles it is the first one that the
    // warpgroup sees, so bases rise without asking whether they must.
    const auto step_alone = [&](uint32_t block_state, int key, uint32_t states) {
      turns.wait();
      begin_qk();
      turns.hand_over();
      if (!has_outputs) {
        clear_outputs<C>(o_rmem);
        ptx::registers_change<OUTPUTS>(o);  // now, while the product runs
      }
      const BlockMessage next = read_next();
      uint32_t seen[C::SUMMARY_BLOCKS];
      find_bits(seen, block_state, key);
      Elements<C> kept;
      block_state = look_at_elements(kept, block_state, states);
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<SCORES>(s);
      hand_back_k();
      float scale = attention.exp2_scale;
      if (block_state != clear) scale = finish_scores(seen, kept, block_state, key, true);
      if constexpr (!C::KEEPS_ELEMENTS) hand_back_elements(block_state, states);
      const auto now = [&](const float (&corrections)[2]) {
        if (has_outputs) rescale<C>(o_rmem, corrections);
        has_outputs = true;
      };
      scale = follow_maxima<C, true>(s_rmem, state, scale, now);
      weigh_rows<C>(s_rmem, state, scale);
      pack<C>(s_rmem, p_rmem);
      advance();
      return next;
    };
    const auto step = [&]<bool MASKED, bool MAY_ADD>(uint32_t block_state, int key,
                                                     uint32_t states) {
      turns.wait();
      begin_qk();
      begin_pv();
      turns.hand_over();
      const BlockMessage next = read_next();
      uint32_t seen[C::SUMMARY_BLOCKS];
      if constexpr (MASKED) find_bits(seen, block_state, key);
      Elements<C> kept;
      if constexpr (MAY_ADD) block_state = look_at_elements(kept, block_state, states);
      ptx::wgmma_wait_group<1>();  // the scores are there
      ptx::registers_change<SCORES>(s);
      hand_back_k();
      float scale = attention.exp2_scale;
      if constexpr (MASKED) scale = finish_scores(seen, kept, block_state, key, MAY_ADD);
      if constexpr (!C::KEEPS_ELEMENTS || !MAY_ADD) hand_back_elements(block_state, states);
      bool raised = false;
      float corrections[2];
      const auto note = [&](const float (&wanted)[2]) {
        raised = true;
        corrections[0] = wanted[0], corrections[1] = wanted[1];
      };
      scale = follow_maxima<C>(s_rmem, state, scale, note);
      weigh_rows<C>(s_rmem, state, scale);
      finish_pv();
      pack<C>(s_rmem, p_rmem);
      if (raised) rescale<C>(o_rmem, corrections);
      advance();
      return next;
    };

    if (tile.any_block) {
      if constexpr (C::KEEPS_Q) load_q<C>(q_rmem, shared_smem, q_ring.stage, warp_row);
      BlockMessage block = read(cta.first);
#pragma unroll 1
      do {
        ptx::mbarrier_wait_parity(barriers.k_full(ring.stage), ring.parity);  // K has landed
        const uint32_t states = block.states, block_state = states >> (8 * group) & 0xFF;
        const int key = block.key;
        if (block_state == 0) {
          block = skip_block(states);
        } else if (!is_pending) {
          block = step_alone(block_state, key, states);
        } else if (block_state == clear) {
          block = step.template operator()<false, false>(block_state, key, states);
        } else if ((block_state & (STATE_ADDED | STATE_SLOPED)) == 0 && clear != 0) {
          block = step.template operator()<true, false>(block_state, key, states);
        } else {
          block = step.template operator()<true, true>(block_state, key, states);
        }
      } while (!block.last);
    }

    // How the tile ends is found while the last product runs, and rows are written while Q goes
    // back.
    const auto find_end = [&] { return TileEnd<C>(state, attention, cta.head, tile, warp_row); };
    const auto end_tile = [&](const TileEnd<C>& end) {
      store_through_q<C>(o_rmem, end, attention, q + warp_row * QTile::ROW_BYTES,
                         [&] { hand_back_q(barriers, q_ring.stage); });
      end.store_lse();
    };
    if (is_pending) {
      begin_pv();
      const TileEnd<C> end = find_end();
      finish_pv();
      end_tile(end);
    } else {
      if (!has_outputs) clear_outputs<C>(o_rmem);
      end_tile(find_end());
    }
    advance_q<C>(q_ring, masks);
  }
  // The last turn that was handed over: no warpgroup waits for it, and a barrier must not end with
  // arrivals.
  if (group == 0) turns.wait();
}

template <class C>
__device__ __forceinline__ void dense_fwd(const DenseParams& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < C::MASK_STAGES; ++stage)
      ptx::mbarrier_init_for_warps(mask_empty<C>(shared_smem, stage), C::WARPS);
    Barriers<C>{shared_smem + C::BARRIER_SMEM}.initialise();  // with the fence for all of them
  }
  run_roles<C>([&] { consume_dense<C>(params, shared, shared_smem); },
               [&] { produce_dense<C>(params, shared, shared_smem); }, [] {});
}

}  // namespace archflash::hopper

// An entry point, under the name that plan.cpp asks for.
#define ARCHFLASH_HOPPER_DENSE_KERNEL(NAME, CONFIG)                                  \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::hopper::DenseParams params) {          \
    archflash::hopper::dense_fwd<CONFIG>(params);                                    \
  }
