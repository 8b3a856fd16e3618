// The producer of a stream of a kernel for tables of blocks, one warp: finds tiles and the blocks
// of keys that they see, and copies Q, K and V to shared memory.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/slab_load.cuh"
#include "common/device/table_blocks.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/masks/masked_params.h"
#include "hopper/masks/table_messages.cuh"

namespace archflash::hopper {

// `shared`: of the stream with this number.
template <class C>
__device__ __forceinline__ void load_table(const MaskedParams& all_params, unsigned char* shared,
                                           uint32_t shared_smem, int stream) {
  const Params& params = all_params.call;
  const AttentionParams& attention = params.attention;
  const MaskParams& masks = all_params.masks;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes wait and count
  TableRing<C> ring(stream);
  uint32_t q_parity = 0, ragged_parity = 0;

  // The first tiles go to the streams of all CTAs, the others to who is done first.
  const auto tiles = static_cast<unsigned>(params.tiles);
  const auto take = [&]() -> unsigned {
    if (params.taken_gmem == nullptr) return tiles;
    ptx::griddepcontrol_wait();  // the kernel before this one, if any, has cleared the counter
    unsigned taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(params.taken_gmem, 1);
    return C::STREAMS * gridDim.x + uniform(taken);
  };
  const auto send_q = [&](const TableTile& tile) {
    // The products have read Q, and the warps are done with the message that is overwritten.
    ptx::mbarrier_wait_parity(barriers.q_empty(0), q_parity ^ 1);
    if (leader) {
      table_message<C>(shared, q_parity) = tile;
      if (tile.first_row < 0 || !tile.any_block) {
        ptx::mbarrier_arrive(barriers.q_full(0));  // no Q is needed
      } else {
        device::start_load<typename C::QTile>(shared_smem + C::Q_SMEM, params.q_map, tile.first_row,
                                              attention.q_head == 0 ? 0 : tile.head.head,
                                              attention.q_batch == 0 ? 0 : tile.head.batch,
                                              barriers.q_full(0));
      }
    }
    q_parity ^= 1;
  };

  // A tile, and the blocks of keys that it sees.
  struct TileToLoad {
    TableTile tile;
    device::TableBlocks<1> blocks;
    int kv_head;               // once for a tile: a division takes longer than all else for a block
    int seen_begin, seen_end;  // the keys that any row of the sequence sees
  };
  const auto find_tile = [&](unsigned index) -> TileToLoad {
    int number = static_cast<int>(index);
    const int place = number - (params.tiles - all_params.ordered);
    if (place >= 0) {
      ptx::griddepcontrol_wait();  // the kernel before this one has written the order
      number = all_params.order_gmem[place];
    }
    TableTile tile{};
    static_cast<device::Work&>(tile) = device::find_work<C::BLOCK_Q>(attention, number);
    tile.end_row = tile.nq;
    tile.head = {tile.batch_head / attention.heads_q, tile.batch_head % attention.heads_q};
    const device::VisibleKeys visible = device::find_visible_keys(attention, tile);
    // Behind the last key TMA reads zeros.
    const int end = visible.end(tile.nq) == tile.nk ? INT32_MAX : visible.end(tile.nq);
    return {
        tile,
        {masks.blocks_gmem + tile.head.batch * masks.blocks_batch +
             tile.head.head * masks.blocks_head + tile.first_row / MASK_BLOCK * masks.blocks_row,
         masks.blocks_row, visible, tile.first_row, min(tile.first_row + C::BLOCK_Q, tile.nq),
         C::KEYS},
        tile.head.head / attention.heads_per_kv,
        visible.begin(),
        end};
  };
  // V of a block.
  struct VToLoad {
    int key;  // negative: none
    int batch, kv_head, seen_begin, seen_end;
  };
  const auto load_k = [&](const VToLoad& of, const device::TableBlock& block) {
    // The products of every consumer warp have read what the stage held.
    ptx::mbarrier_wait_parity(barriers.k_empty(ring.stage), ring.parity ^ 1);
    if (leader) {
      table_block<C>(shared, ring.stage) = block;
      device::start_load<typename C::KTile>(
          shared_smem + C::K_SMEM + ring.stage * C::KTile::BYTES, params.k_map, block.key,
          attention.k_head == 0 ? 0 : of.kv_head, attention.k_batch == 0 ? 0 : of.batch,
          barriers.k_full(ring.stage));
    }
    ring.advance();
  };
  const auto load_v = [&](const VToLoad& v) {
    const bool ragged = v.key < v.seen_begin || v.key > v.seen_end - C::BLOCK_K;
    const int offset = C::V_SMEM + ring.stage * C::VTile::BYTES;
    // The products of every consumer warp have read what the stage held.
    ptx::mbarrier_wait_parity(barriers.k_empty(ring.stage), ring.parity ^ 1);
    if (leader) {
      device::start_load<typename C::VTile>(
          shared_smem + offset, params.v_map, v.key, attention.v_head == 0 ? 0 : v.kv_head,
          attention.v_batch == 0 ? 0 : v.batch,
          ragged ? barriers.v_ragged() : barriers.k_full(ring.stage));
    }
    if (ragged) {
      ptx::mbarrier_wait_parity(barriers.v_ragged(), ragged_parity);  // V has landed
      ragged_parity ^= 1;
      clear_rows<typename C::VTile>(shared + offset, v.seen_begin - v.key, v.seen_end - v.key);
      if (leader) ptx::mbarrier_arrive(barriers.k_full(ring.stage));
    }
    ring.advance();
  };

  unsigned index = blockIdx.x + gridDim.x * stream;
  TileToLoad now{};
  if (index < tiles) now = find_tile(index);
#pragma unroll 1
  while (index < tiles) {
    TableTile tile = now.tile;
    VToLoad v{-1, tile.head.batch, now.kv_head, now.seen_begin, now.seen_end};
    device::TableBlocks<1> blocks = now.blocks;
    device::TableBlock block = blocks.next();
    tile.any_block = block.key >= 0;
    if (!tile.any_block) send_q(tile);
    bool is_first = true, is_next_known = false;
    // The next tile is taken before the last blocks are waited for, which hides the time of it.
    const auto find_next = [&] {
      index = take();
      if (index < tiles) now = find_tile(index);
      is_next_known = true;
    };
#pragma unroll 1
    while (block.key >= 0) {
      const device::TableBlock next = blocks.next();
      block.last = next.key < 0;
      load_k(v, block);
      if (is_first) send_q(tile);
      is_first = false;
      if (v.key >= 0) load_v(v);  // a block behind K, in the order of the products
      v.key = block.key;
      if (!is_next_known && blocks.ends_soon()) find_next();
      block = next;
    }
    if (v.key >= 0) load_v(v);
    if (!is_next_known) find_next();
  }
  TableTile none{};
  none.first_row = -1;
  send_q(none);
}

}  // namespace archflash::hopper
