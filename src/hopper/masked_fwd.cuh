// Attention forward on TMA, mbarriers and wgmma with masks as data: attn_mask (bool or added),
// key_ranges, alibi_slopes and block_mask, together with the causal mask and the window.
//
// The kernel is that of attention_fwd.cuh for few query rows, one warpgroup of 64 rows, two of
// whose CTAs share an SM, with another walk. Which blocks of keys the tile sees is the producer's
// affair: it looks at 32 blocks at a time, one in each lane, while the consumers multiply, and
// copies only those of which some row sees a key. With each block's K comes a message for the
// consumers: whether it is the last block, and if not, where the next one lies and whether any of
// its scores changes. They read it while products run, and so know what to do with the next block
// before it is there.
// A block of which every row sees every key, and to which nothing is added, runs the same step as
// in a call without masks. In the others each lane finds the masks of its scores while both
// products run, so that they hide the loads of a bool mask, and applies them when both are done,
// because their registers are needed (math/lane_masks.cuh); the other CTA of the SM multiplies
// meanwhile.
//
// Barriers and hazards are those of pipeline.cuh. The message that comes with a block is written
// before the producer arrives at its k_full, and read before a consumer warp arrives at its
// k_empty. Q goes back to the producer when the scores of the last block are there. The message
// about the tile is still read then, so there are two: a message is overwritten after the next
// tile's Q has come back, when every warp is done with this tile.
#pragma once

#include <cstdint>

#include "common/math/attention_work.cuh"
#include "common/math/lane_masks.cuh"
#include "common/math/masks.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/slab_load.cuh"
#include "common/math/tile_walk.cuh"
#include "common/math/visible_keys.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/block_messages.cuh"
#include "hopper/clear_outputs.cuh"
#include "hopper/masked_config.cuh"
#include "hopper/masked_params.h"

namespace archflash::hopper {

// What the producer says of a tile besides its message: what find_lane_masks() is told, where the
// tile's rows lie, and its first block.
struct MaskedContext {
  math::Work work;
  math::PackedHeads packed_heads;
  math::VisibleKeys visible;
  int64_t q_offset;
  TileHead head;
  BlockMessage first;
};

static_assert(sizeof(MaskedContext) <= MASKED_CONTEXT_BYTES);

template <class C>
__device__ __forceinline__ MaskedContext& masked_context(unsigned char* shared, int message) {
  return *reinterpret_cast<MaskedContext*>(shared + C::CONTEXT_SMEM +
                                           message * MASKED_CONTEXT_BYTES);
}

// --- producer ---

// The blocks of keys that a tile sees, from the last one to the first. For a whole warp.
template <class C>
struct SeenBlocks {
  const MaskParams& params;
  math::TileMasks masks;
  math::VisibleKeys visible;
  int rows;      // of each head in the tile
  int first;     // the first key of the first block that may be seen
  int top = -1;  // the first key of the block of lane 0; the block of lane i is i blocks before
  uint32_t seen = 0, masked = 0;  // a bit for each lane: some row sees a key; some score changes

  struct Block {
    int key;  // the first one; -1: there is no more
    uint32_t masked;
  };

  // The last block up to the one at `key` that is seen.
  __device__ __forceinline__ Block up_to(int key) {
    while (key >= first) {
      if (top < 0 || key <= top - 32 * C::BLOCK_K) {
        key = look_at(key);
        if (key < first) break;
      }
      const int lanes = (top - key) / C::BLOCK_K;
      const uint32_t bits = seen >> lanes;
      if (bits != 0) {
        const int lane = lanes + __ffs(static_cast<int>(bits)) - 1;
        return {top - lane * C::BLOCK_K, masked >> lane & 1};
      }
      key = top - 32 * C::BLOCK_K;
    }
    return {-1, 0};
  }

 private:
  // Looks at 32 blocks, from the one at `key` or the last one before it that is in a range.
  // Returns the first key of the first one looked at; it is below `first` if there is none.
  __device__ __forceinline__ int look_at(int key) {
    if (params.ranges_gmem != nullptr) {
      const int last = masks.template last_in_ranges<C::BLOCK_Q>(key + C::BLOCK_K - 1);
      if (last < first) return -1;
      key = last & -C::BLOCK_K;
    }
    top = key;
    const int of_lane = key - static_cast<int>(threadIdx.x % 32) * C::BLOCK_K;
    bool any = false, all = true;
    if (of_lane >= first) {
      look_at_rows(of_lane, any, all);
      if (any && params.blocks_gmem != nullptr) {
        bool any_head = false;
#pragma unroll 1
        for (int head = 0; head < masks.packed_heads.count; ++head) {
          const uint8_t state = masks.block(head, masks.first_row, of_lane);
          any_head |= state != BLOCK_UNSEEN;
          const bool whole = state == BLOCK_FULL ||
                             (state != BLOCK_UNSEEN && params.mask_element == MaskElement::None);
          all &= whole;
        }
        any = any_head;
      } else if (params.mask_element != MaskElement::None) {
        all = false;
      }
      if (params.slopes_gmem != nullptr) all = false;
    }
    seen = __ballot_sync(math::FULL_WARP, any);
    masked = __ballot_sync(math::FULL_WARP, !all);
    return key;
  }

  // Whether any row sees any of the keys from `key` on by position and ranges, and whether all see
  // them all. A row whose ranges only together have all of them counts as not seeing them all.
  __device__ __forceinline__ void look_at_rows(int key, bool& any, bool& all) const {
    const int end = key + C::BLOCK_K;
    const int first_row = masks.first_row, last_row = min(first_row + rows, masks.nq) - 1;
    any = !visible.hides(first_row, last_row, key, end - 1);
    all = !visible.masks(first_row, last_row, key, end - 1);
    if (params.ranges_gmem == nullptr || !any) return;
    any = false;
    const int heads = params.ranges_head == 0 ? 1 : masks.packed_heads.count;
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
#pragma unroll 1
      for (int row = first_row; row <= last_row; ++row) {
        const int row_first = visible.first(row), row_end = visible.last(row) + 1;
        bool whole = false;
#pragma unroll 1
        for (int number = 0; number < params.ranges; ++number) {
          const math::KeyRange keys = masks.range(head, row, number);
          const int from = max(keys.begin, row_first), to = min(keys.end, row_end);
          any |= max(from, key) < min(to, end);
          whole |= from <= key && to >= end;
        }
        all &= whole;
      }
    }
  }
};

// The number of the tile that is taken at position `index`.
__device__ __forceinline__ int ordered_tile(const MaskedParams& params, int index) {
  const int place = index - (params.call.tiles - params.ordered);
  return place < 0 ? index : params.order_gmem[place];
}

template <class C>
__device__ __forceinline__ void produce_masked(const MaskedParams& all_params,
                                               unsigned char* shared, uint32_t shared_smem) {
  const Params& params = all_params.call;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes wait and count
  const int shares = shares_of_tile<C>(params);
  RingPosition<C::STAGES> k_ring, v_ring;
  RingPosition<C::Q_STAGES> q_ring;
  uint32_t ragged_parity = 0;

  // The counter of tiles and their order are what the kernel before this one writes.
  const auto find_next = [&](unsigned index) {
    ptx::griddepcontrol_wait();
    return next_tile(params, index);
  };
  unsigned next_index = 0;
  for (unsigned index = blockIdx.x; index < static_cast<unsigned>(params.tiles);
       index = next_index) {
    if (static_cast<int>(index) >= params.tiles - all_params.ordered) ptx::griddepcontrol_wait();
    SeekingTile tile{};
    static_cast<math::Work&>(tile) =
        math::find_work(attention, ordered_tile(all_params, static_cast<int>(index)) / shares,
                        rows_of_tile<C>(params), params.packed_heads.count);
    if (tile.first_row < 0) {
      next_index = find_next(index);
      continue;
    }
    tile.split = static_cast<int>(index) % shares;
    tile.end_row = tile.nq;
    const math::VisibleKeys visible = math::find_visible_keys(attention, tile);
    const math::Blocks blocks = find_blocks<C>(params, tile, visible);
    const int batch = tile.batch_head / attention.heads_q;
    const int head = tile.batch_head % attention.heads_q;
    const int kv_head = head / attention.heads_per_kv;
    const int keys_start = math::sequence_start(attention.cu_seqlens_k_gmem, batch, attention.nk);
    const math::TileMasks tile_masks(all_params.masks, attention, tile, params.packed_heads);
    {
      math::KeyRange counted{visible.begin(), visible.end(tile.nq)};
      if (all_params.masks.ranges_gmem != nullptr) {
        const math::KeyRange ranged = tile_masks.template all_ranges<C::BLOCK_Q>();
        counted = {max(counted.begin, ranged.begin), min(counted.end, ranged.end)};
      }
      // Without cu_seqlens TMA reads zeros behind the last key.
      if (attention.cu_seqlens_k_gmem == nullptr && counted.end == tile.nk) counted.end = INT32_MAX;
      set_counted_keys<C>(shared, counted);
    }

    using Block = typename SeenBlocks<C>::Block;
    const auto load_k = [&](const Block& block, const Block& next) {
      // The products of every consumer warp have read the K that the stage held.
      // mutants: needless-with-one-tile (tests/sim/tags.py)
      ptx::mbarrier_wait_parity(barriers.k_empty(k_ring.stage), k_ring.parity ^ 1);
      if (leader) {
        block_message<C>(shared, k_ring.stage) = {next.key, next.masked, next.key < 0};
        math::start_load<typename C::KTile>(
            shared_smem + C::K_SMEM + k_ring.stage * C::KTile::BYTES, params.k_map,
            keys_start + block.key, attention.k_head == 0 ? 0 : kv_head,
            attention.k_batch == 0 ? 0 : batch, barriers.k_full(k_ring.stage));
      }
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
            shared_smem + offset, params.v_map, keys_start + block,
            attention.v_head == 0 ? 0 : kv_head, attention.v_batch == 0 ? 0 : batch,
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

    SeenBlocks<C> seen{all_params.masks, tile_masks, visible, rows_of_tile<C>(params),
                       blocks.first};
    auto block = seen.up_to(blocks.last);
    auto next = seen.up_to(block.key - C::BLOCK_K);
    tile.any_block = block.key >= 0;
    // The first block comes before Q: the rings are free while the previous tile's products still
    // read Q.
    if (tile.any_block) load_k(block, next);
    // The products have read Q, and the consumers are done with the tile before that one, whose
    // message is overwritten.
    // mutants: needless-with-one-tile
    ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
    if (leader) {
      const auto message = static_cast<int>(q_ring.parity);
      tile_message<C, SeekingTile>(shared, message) = tile;
      masked_context<C>(shared, message) = {.work = tile,
                                            .packed_heads = params.packed_heads,
                                            .visible = visible,
                                            .q_offset = math::find_q_offset(attention, tile),
                                            .head = {batch, head},
                                            .first = {block.key, block.masked, false}};
      if (tile.any_block) {
        const int q_start = math::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
        math::start_load<typename C::QTile>(
            shared_smem + C::Q_SMEM + q_ring.stage * C::QTile::BYTES, params.q_map,
            q_start + tile.first_row, attention.q_head == 0 ? 0 : head,
            attention.q_batch == 0 ? 0 : batch, barriers.q_full(q_ring.stage));
      } else {
        ptx::mbarrier_arrive(barriers.q_full(q_ring.stage));  // a tile without keys needs no Q
      }
    }
    q_ring.advance();
    // The next tile is taken before the last block is waited for, which hides the time of it.
    if (next.key < 0) next_index = find_next(index);
#pragma unroll 1
    while (block.key >= 0) {
      const int key = block.key;
      block = next;
      if (block.key >= 0) {
        next = seen.up_to(block.key - C::BLOCK_K);
        if (next.key < 0) next_index = find_next(index);
        load_k(block, next);
      }
      load_v(key);
    }
  }
  // No tile follows.
  ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
  if (leader) {
    tile_message<C, SeekingTile>(shared, static_cast<int>(q_ring.parity)).first_row = -1;
    ptx::mbarrier_arrive(barriers.q_full(q_ring.stage));
  }
}

// --- consumers ---

// Writes a warp's rows of outputs from registers: the four lanes of a row exchange their columns,
// and each lane writes 16 bytes.
template <class C>
__device__ __forceinline__ void store_by_quads(const math::Outputs<C>& o_rmem,
                                               const TileEnd<C>& end,
                                               const AttentionParams& params) {
  static_assert(C::HEAD_DIM_V % 32 == 0, "the lanes of a quad exchange 32 columns at a time");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 8 * r + lane / 4, first_column = lane % 4 * 8;
    uint16_t* place = end.place(params, row, first_column);
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; n += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = end.pair(&o_rmem[0][n + i][2 * r], r);
      math::transpose_in_quad(words);
      end.store(params, place + 8 * n, row, first_column + 8 * n, words);
    }
  }
}

template <class C>
__device__ __forceinline__ void consume_masked(const MaskedParams& all_params,
                                               unsigned char* shared, uint32_t shared_smem) {
  constexpr int SCORES = C::BLOCK_K / 2, OUTPUTS = C::HEAD_DIM_V / 2, WORDS = C::BLOCK_K / 4;
  const Params& params = all_params.call;
  const MaskParams& masks = all_params.masks;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  RingPosition<C::STAGES> k_ring, v_ring;
  RingPosition<C::Q_STAGES> q_ring;

  while (true) {
    ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);  // Q has landed
    // Both stay in shared memory: they are read where masks are found, which have few registers.
    const auto message = static_cast<int>(uniform(q_ring.parity));
    const SeekingTile& tile = tile_message<C, SeekingTile>(shared, message);
    if (uniform(tile.first_row) < 0) break;
    const MaskedContext& cta = masked_context<C>(shared, message);
    k_ring = {uniform(k_ring.stage), uniform(k_ring.parity)};
    v_ring = k_ring;
    const ptx::WgmmaDescriptor q_descriptor = describe_q<C>(shared_smem, 0, 0);

    math::Scores<C> s_rmem;
    Probabilities<C> p_rmem;
    math::Outputs<C> o_rmem;
    float* const s = &s_rmem[0][0][0];
    float* const o = &o_rmem[0][0][0];
    uint32_t* const p = &p_rmem[0][0][0];
    math::RowState<C> state;
    math::clear(state);
    state.large = false;

    const auto begin_qk = [&] { start_qk<C>(s_rmem, q_descriptor, shared_smem, k_ring.stage); };
    const auto begin_pv = [&] {
      // mutants: fence-before-both-products
      start_pv<C>(o_rmem, p_rmem, shared_smem, v_ring.stage, true);
    };
    const auto wait_for_outputs = [&] {
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<OUTPUTS>(o);
    };
    const auto release_q = [&] { release(barriers.q_empty(q_ring.stage)); };
    // What the producer says of the next block. Its states are not 0 if any of its scores changes.
    const auto read = [&](const BlockMessage& said) {
      return BlockMessage{uniform(said.key), uniform(said.states | attention.transform_scores),
                          uniform(said.last)};
    };
    const auto read_next = [&] { return read(block_message<C>(shared, k_ring.stage)); };
    // `next`: what came with the block.
    const auto scores_are_there = [&](const BlockMessage& next) {
      ptx::registers_change<SCORES>(s);
      release(barriers.k_empty(k_ring.stage));
      if (next.last) release_q();
      k_ring.advance();
    };
    const auto wait_for_k = [&] {
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
    };
    math::LaneMasks<C> of_lane;
    const auto find_masks = [&](int block) {
      math::find_lane_masks<C>(of_lane, masks, attention, cta, warp_row, block);
    };
    // Returns the scale of scores that are finished: they are logarithms to base 2.
    const auto finish_scores = [&] {
      if (attention.transform_scores)
        math::transform_scores<C>(s_rmem, attention.tanh_scale, attention.softcap);
      math::apply_lane_masks<C>(s_rmem, of_lane, masks, attention.exp2_scale);
      return 1.0f;
    };

    // Waits for O += P V of the block before: its V can go then, and P may be overwritten.
    const auto finish_pv = [&] {
      wait_for_outputs();
      ptx::registers_change<WORDS>(p);
      release(barriers.v_empty(v_ring.stage));
      v_ring.advance();
    };

    // The first block, whose P V the next step starts. Steps return what the producer says of the
    // next block.
    const auto first_step = [&](const BlockMessage& block) {
      wait_for_k();
      begin_qk();
      clear_outputs<C>(o_rmem);
      ptx::registers_change<OUTPUTS>(o);  // now, while the product runs
      const BlockMessage next = read_next();
      ptx::wgmma_wait_group<0>();
      scores_are_there(next);
      float scale = attention.exp2_scale;
      if (block.states != 0) {
        find_masks(block.key);
        scale = finish_scores();
      }
      const auto nothing_to_rescale = [](const float (&)[2]) {};  // the outputs are still 0
      scale = follow_maxima<C, true>(s_rmem, state, scale, nothing_to_rescale);
      weigh_rows<C>(s_rmem, state, scale);
      pack<C>(s_rmem, p_rmem);
      return next;
    };
    const auto step = [&]<bool MASKED>(const BlockMessage& block) {
      wait_for_k();
      begin_qk();
      ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
      begin_pv();
      const BlockMessage next = read_next();
      if constexpr (MASKED) find_masks(block.key);
      ptx::wgmma_wait_group<1>();  // the scores are there
      scores_are_there(next);
      float scale = attention.exp2_scale;
      if constexpr (MASKED) {
        finish_pv();  // masks need the registers of P
        scale = finish_scores();
      }
      bool raised = false;
      float corrections[2];
      const auto note = [&](const float (&wanted)[2]) {
        raised = true;
        corrections[0] = wanted[0], corrections[1] = wanted[1];
      };
      scale = follow_maxima<C>(s_rmem, state, scale, note);
      weigh_rows<C>(s_rmem, state, scale);
      if constexpr (!MASKED) finish_pv();
      pack<C>(s_rmem, p_rmem);
      if (raised) rescale<C>(o_rmem, corrections);
      return next;
    };

    const auto find_end = [&] { return TileEnd<C>(state, attention, cta.head, tile, warp_row); };
    const auto end_tile = [&](const TileEnd<C>& end) {
      if (params.partials.splits > 1) {
        math::store_partials<C>(o_rmem, state, attention, params.partials, params.packed_heads,
                                tile, tile.split, warp_row);
      } else if (params.packed_heads.count > 1) {
        math::store_packed_out<C>(o_rmem, state, attention, params.packed_heads, tile, warp_row);
      } else {
        store_by_quads<C>(o_rmem, end, attention);
        end.store_lse();
      }
    };

    if (tile.any_block) {
      BlockMessage block = first_step(read(cta.first));
#pragma unroll 1
      while (!block.last) {
        if (block.states != 0) {
          block = step.template operator()<true>(block);
        } else {
          block = step.template operator()<false>(block);
        }
      }
      ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
      begin_pv();
      const TileEnd<C> end = find_end();
      wait_for_outputs();
      // mutants: needless-with-one-tile
      release(barriers.v_empty(v_ring.stage));
      v_ring.advance();
      end_tile(end);
    } else {
      release_q();
      clear_outputs<C>(o_rmem);
      end_tile(find_end());
    }
    q_ring.advance();
  }
}

template <class C>
__device__ __forceinline__ void masked_fwd(const MaskedParams& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (threadIdx.x == 0) Barriers<C>{shared_smem + C::BARRIER_SMEM}.initialise();
  run_roles<C>([&] { consume_masked<C>(params, shared, shared_smem); },
               [&] { produce_masked<C>(params, shared, shared_smem); },
               [&] { write_rows_of_no_sequence<C>(params.call); });
}

}  // namespace archflash::hopper

// An entry point, under the name that plan.cpp asks for.
#define ARCHFLASH_HOPPER_MASKED_KERNEL(NAME, CONFIG)                                 \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::hopper::MaskedParams params) {         \
    archflash::hopper::masked_fwd<CONFIG>(params);                                   \
  }
