// The producer of a kernel with mask tensors, one warp: finds the tile and the blocks of keys that
// it sees, and copies Q, and K and V of these blocks, to shared memory.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/masks.cuh"
#include "common/device/row_tiles.h"
#include "common/device/slab_load.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_messages.cuh"
#include "hopper/masks/masked_params.h"

namespace archflash::hopper {

// The blocks of keys that a tile sees, from the last one to the first. Look looks at 32 of them at
// a time, one in each lane: `top` is the first key of the block of lane 0, or -1 before the first
// look, that of lane i is i blocks before it, and `seen` has a bit for each lane. For a whole warp.
template <class C, class Look>
struct SeenBlocks : Look {
  using Look::Look;

  struct Block {
    int key;  // the first one; -1: there is no more
    uint32_t states;
  };

  // The last block up to the one at `key` that is seen.
  __device__ __forceinline__ Block up_to(int key) {
    while (key >= this->first) {
      if (this->top < 0 || key <= this->top - 32 * C::BLOCK_K) {
        key = this->look_at(key);
        if (key < this->first) break;
      }
      const int lanes = (this->top - key) / C::BLOCK_K;
      const uint32_t bits = this->seen >> lanes;
      if (bits != 0) {
        const int lane = lanes + __ffs(static_cast<int>(bits)) - 1;
        return {this->top - lane * C::BLOCK_K, this->states_of(lane)};
      }
      key = this->top - 32 * C::BLOCK_K;
    }
    return {-1, 0};
  }
};

// The bytes of a block's elements that are added. once: one row of them comes.
template <class C>
__device__ __forceinline__ int bytes_of_elements(bool once) {
  return C::MaskTile::BYTES / (once ? C::MaskTile::ROWS : 1) * (C::WIDE ? 2 : 1);
}

// Starts the copy of a block's elements of 32 bits, half of the keys to each stage. A box is as
// many bytes as one of 16 bits, of half as many keys. Called by one thread.
template <class C>
__device__ __forceinline__ void copy_wide_elements(uint32_t shared_smem, const TensorMap& map,
                                                   int row, int head, int batch,
                                                   uint32_t barrier_smem, int key) {
  using Tile = typename C::MaskTile;
#pragma unroll
  for (int slab = 0; slab < 2 * Tile::SLABS; ++slab) {
    const uint32_t slab_smem =
        mask_smem<C>(shared_smem, slab / Tile::SLABS) + slab % Tile::SLABS * Tile::SLAB_BYTES;
    ptx::cp_async_bulk_tensor_4d_load(slab_smem, map, key + slab * Tile::SLAB / 2, row, head, batch,
                                      barrier_smem);
  }
}

template <class C, class Masks>
__device__ __forceinline__ void load_masked(const typename Masks::Params& all_params,
                                            unsigned char* shared, uint32_t shared_smem) {
  using Seen = SeenBlocks<C, typename Masks::Look>;
  using Block = typename Seen::Block;
  const Params& params = all_params.call;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes wait and count
  const int shares = shares_of_tile<C>(params);
  RingPosition<C::STAGES> k_ring, v_ring;
  [[maybe_unused]] RingPosition<C::MASK_STAGES> mask_ring;
  RingPosition<C::Q_STAGES> q_ring;
  uint32_t ragged_parity = 0;

  const auto find_next = [&](unsigned index) {
    ptx::griddepcontrol_wait();  // the kernel before this one has cleared the counter of tiles
    return next_tile(params, index);
  };
  unsigned next_index = 0;
  for (unsigned index = blockIdx.x; index < static_cast<unsigned>(params.tiles);
       index = next_index) {
    SeekingTile tile{};
    static_cast<device::Work&>(tile) =
        device::find_work(attention, Seen::tile_at(all_params, static_cast<int>(index)) / shares,
                          rows_of_tile<C>(params), C::CAN_PACK ? params.packed_heads.count : 1);
    if (tile.first_row < 0) {
      next_index = find_next(index);
      continue;
    }
    tile.split = static_cast<int>(index) % shares;
    tile.end_row = tile.nq;
    if constexpr (C::TILE_STEP > 0) {
      const device::RowTile rows =
          device::row_tile_from_end(tile.nq, tile.first_row, C::BLOCK_Q, C::TILE_STEP);
      tile.first_row = rows.first_row;
      tile.end_row = rows.end_row;
    }
    const device::VisibleKeys visible = device::find_visible_keys(attention, tile);
    const TileHead at{tile.batch_head / attention.heads_q, tile.batch_head % attention.heads_q};
    const int kv_head = at.head / attention.heads_per_kv;
    const int keys_start =
        device::sequence_start(attention.cu_seqlens_k_gmem, at.batch, attention.nk);
    Seen seen(all_params, tile, at, visible);
    const device::Blocks blocks = seen.in_ranges(find_blocks<C>(params, tile, visible));
    seen.first = blocks.first;
    {
      device::KeyRange counted{visible.begin(), visible.end(tile.nq)};
      if constexpr (!C::ADDS_ALONE) {
        if (all_params.masks.ranges_gmem != nullptr) {
          const device::KeyRange ranged = seen.all_ranges();
          counted = {max(counted.begin, ranged.begin), min(counted.end, ranged.end)};
        }
      }
      // Without cu_seqlens TMA reads zeros behind the last key.
      if (attention.cu_seqlens_k_gmem == nullptr && counted.end == tile.nk) counted.end = INT32_MAX;
      set_counted_keys<C>(shared, counted);
    }

    // Where all rows of a mask are the same, one of them comes.
    [[maybe_unused]] const bool once = all_params.masks.mask_row == 0;
    const auto load_k = [&](const Block& block, const Block& next) {
      bool added = false;  // whether elements of attn_mask come with the block
      if constexpr (C::SUMMARIZED && !C::COPIES_OWN) added = (block.states & ADDED_FOR_ANY) != 0;
      // Whether it has a stage of the ring of elements.
      const bool has_stage = !C::COPIES_OWN && (C::ADDS_ALONE || added);
      // The products of every consumer warp have read the K that the stage held.
      ptx::mbarrier_wait_parity(barriers.k_empty(k_ring.stage), k_ring.parity ^ 1);
      if constexpr (C::SUMMARIZED) {
        // Every consumer warp has read the elements that the stage held.
        if (has_stage)
          ptx::mbarrier_wait_parity(mask_empty<C>(shared_smem, mask_ring.stage),
                                    mask_ring.parity ^ 1);
        if (C::WIDE && added)
          ptx::mbarrier_wait_parity(mask_empty<C>(shared_smem, 1), mask_ring.parity ^ 1);
      }
      if (leader) {
        block_message<C>(shared, k_ring.stage) = {next.key, next.states, next.key < 0};
        const uint32_t full = barriers.k_full(k_ring.stage);
        int bytes = C::KTile::BYTES;
        if constexpr (C::SUMMARIZED) bytes += added ? bytes_of_elements<C>(once) : 0;
        ptx::mbarrier_arrive_expect_tx(full, bytes);
        device::start_copy<typename C::KTile>(
            shared_smem + C::K_SMEM + k_ring.stage * C::KTile::BYTES, params.k_map,
            keys_start + block.key, attention.k_head == 0 ? 0 : kv_head,
            attention.k_batch == 0 ? 0 : at.batch, full);
        if constexpr (C::SUMMARIZED) {
          const int row = once ? 0 : tile.first_row;
          if (C::WIDE && added) {
            copy_wide_elements<C>(shared_smem, all_params.mask_map, row, seen.mask_head,
                                  seen.mask_batch, full, block.key);
          } else if (added) {
            device::start_copy<typename C::MaskTile>(mask_smem<C>(shared_smem, mask_ring.stage),
                                                     all_params.mask_map, row, seen.mask_head,
                                                     seen.mask_batch, full, block.key);
          }
        }
      }
      if (C::WIDE && added) {
        mask_ring.parity ^= 1;
      } else if (has_stage) {
        mask_ring.advance();
      }
      k_ring.advance();
    };
    const auto load_v = [&](int block) {
      const device::KeyRange& counted = counted_keys<C>(shared);
      const bool ragged = block < counted.begin || block > counted.end - C::BLOCK_K;
      const int offset = C::V_SMEM + v_ring.stage * C::VTile::BYTES;
      // The products of every consumer warp have read the V that the stage held.
      ptx::mbarrier_wait_parity(barriers.v_empty(v_ring.stage), v_ring.parity ^ 1);
      if (leader) {
        device::start_load<typename C::VTile>(
            shared_smem + offset, params.v_map, keys_start + block,
            attention.v_head == 0 ? 0 : kv_head, attention.v_batch == 0 ? 0 : at.batch,
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

    Block block = seen.up_to(blocks.last);
    Block next = seen.up_to(block.key - C::BLOCK_K);
    tile.any_block = block.key >= 0;
    // The first block comes before Q: the rings are free while the previous tile still needs Q's
    // part.
    if (tile.any_block) load_k(block, next);
    // The products have read Q, or output rows have left its part, and the consumers are done with
    // the tile whose message is overwritten.
    ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
    if (leader) {
      const int message = message_of<C>(q_ring);
      tile_message<C, SeekingTile>(shared, message) = tile;
      masked_context<C, typename Masks::Context>(shared, message) =
          seen.context(tile, at, {block.key, block.states, false});
      if (tile.any_block) {
        const int q_start =
            device::sequence_start(attention.cu_seqlens_q_gmem, at.batch, attention.nq);
        device::start_load<typename C::QTile>(
            shared_smem + C::Q_SMEM + q_ring.stage * C::QTile::BYTES, params.q_map,
            q_start + tile.first_row, attention.q_head == 0 ? 0 : at.head,
            attention.q_batch == 0 ? 0 : at.batch, barriers.q_full(q_ring.stage));
      } else {
        ptx::mbarrier_arrive(barriers.q_full(q_ring.stage));  // a tile without keys needs no Q
      }
    }
    advance_q<C>(q_ring, all_params.masks);
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
    tile_message<C, SeekingTile>(shared, message_of<C>(q_ring)).first_row = -1;
    ptx::mbarrier_arrive(barriers.q_full(q_ring.stage));
  }
  ptx::griddepcontrol_launch_dependents();  // the next kernel may start where CTAs have ended
}

}  // namespace archflash::hopper
