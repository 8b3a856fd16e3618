// Calls with block_mask: a CTA of the backward pass lists the rounds of queries that see any of its
// keys, and goes over these. The tiles of a head come in the order of their work, so that those
// that run together are of one length, and the last ones are short.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/backward_rounds.cuh"
#include "common/device/visible_keys.cuh"
#include "common/mask_params.h"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/backward/backward_config.cuh"
#include "hopper/backward/backward_params.h"
#include "hopper/backward/backward_pipeline.cuh"

namespace archflash::hopper {

// Orders the tiles of keys of each head, a CTA for each: those with the most rounds come first.
// Called by all threads of a grid.
__device__ __forceinline__ void order_tiles_of_keys(const ListingBackwardParams& params) {
  __shared__ int rounds[MOST_ORDERED_TILES];
  if (params.order_gmem == nullptr) return;
  const AttentionParams& attention = params.call.backward.attention;
  const MaskParams& masks = params.masks;
  const int heads_per_kv = attention.heads_per_kv;
  const int heads = attention.batch * (attention.heads_q / heads_per_kv);
  const int row_blocks = (attention.nq + MASK_BLOCK - 1) / MASK_BLOCK;
  const int key_blocks = (attention.nk + MASK_BLOCK - 1) / MASK_BLOCK;
  const int tiles = (key_blocks + params.tile_blocks - 1) / params.tile_blocks;
  const device::VisibleKeys visible =
      device::find_visible_keys(attention, {0, 0, attention.nq, attention.nk});
  const auto threads = static_cast<int>(blockDim.x), thread = static_cast<int>(threadIdx.x);
  for (int head = static_cast<int>(blockIdx.x); head < heads; head += gridDim.x) {
    for (int tile = thread; tile < tiles; tile += threads) rounds[tile] = 0;
    __syncthreads();  // all counts are 0
    const int first_head = head * heads_per_kv;
    const uint8_t* const table_gmem = masks.blocks_gmem +
                                      first_head / attention.heads_q * masks.blocks_batch +
                                      first_head % attention.heads_q * masks.blocks_head;
    // As many threads as fit count a tile, each in some of the rows of blocks.
    for (int first_tile = 0; first_tile < tiles; first_tile += threads) {
      const int width = min(tiles - first_tile, threads), row_step = threads / width;
      const int tile = first_tile + thread % width;
      const int first_block = tile * params.tile_blocks;
      const int end_block = min(first_block + params.tile_blocks, key_blocks);
      const int rows = thread < row_step * width ? heads_per_kv * row_blocks : 0;
      int count = 0;
#pragma unroll 2
      for (int row = thread / width; row < rows; row += row_step) {
        const int of_head = row / row_blocks, row_block = row - of_head * row_blocks;
        const int first_row = row_block * MASK_BLOCK;
        const int last_row = min(first_row + MASK_BLOCK, attention.nq) - 1;
        const uint8_t* const states_gmem =
            table_gmem + of_head * masks.blocks_head + row_block * masks.blocks_row;
        bool seen = false;
        for (int block = first_block; block < end_block; ++block) {
          const int first_key = block * MASK_BLOCK;
          const int last_key = min(first_key + MASK_BLOCK, attention.nk) - 1;
          seen |= states_gmem[block] != BLOCK_UNSEEN &&
                  !visible.hides(first_row, last_row, first_key, last_key);
        }
        count += seen;
      }
      if (count > 0) atomicAdd(&rounds[tile], count);
    }
    __syncthreads();  // all counts are there
    for (int tile = thread; tile < tiles; tile += threads) {
      int place = 0;
      for (int other = 0; other < tiles; ++other)
        place += rounds[other] > rounds[tile] || (rounds[other] == rounds[tile] && other < tile);
      params.order_gmem[head * tiles + place] = tile;
    }
    __syncthreads();  // all counts are read, before those of the next head
  }
}

// The index of a tile, counted as find_backward_work() does, in whose place another one is taken.
template <class C>
__device__ __forceinline__ int ordered_tile(const BackwardKernelParams& params,
                                            const int32_t* order_gmem, int index) {
  ptx::griddepcontrol_wait();  // the kernel before this one has written the order
  const AttentionParams& attention = params.backward.attention;
  const int heads = attention.batch * (attention.heads_q / attention.heads_per_kv);
  const int tiles = (attention.nk + C::ROWS - 1) / C::ROWS;
  const int head = index % heads;
  return order_gmem[head * tiles + index / heads] * heads + head;
}

// Makes the list of a CTA whose work is `cta`, and has it go over that. Called by the warp that has
// found the work; __syncthreads() then makes the list known to the others.
template <class C>
__device__ __forceinline__ void list_rounds(const BackwardParamsOf<C>& params, CtaWork& cta) {
  using device::ListedRound;
  static_assert(C::GROUP_ROWS == MASK_BLOCK && C::BLOCK == MASK_BLOCK,
                "a warpgroup's keys and a block of queries are a block of block_mask");
  static_assert(sizeof(device::ListedWork) <= C::WORK_BYTES);
  auto& work = static_cast<device::ListedWork&>(cta);
  __syncwarp();  // the work is written
  if (work.first_row < 0) return;
  const MaskParams& masks = params.masks;
  const int lane = threadIdx.x % 32;
  ListedRound* const rounds_gmem =
      params.rounds_gmem + static_cast<int64_t>(blockIdx.x) * params.rounds_of_cta;
  int count = 0, first_row = work.last;  // of the list
  uint32_t seen_of_any = 0;              // a bit for each warpgroup's keys
  // In turns, where tiles start apart, a list begins with that round of a head, and behind the
  // first one goes on with the last one: these rounds have a second sum.
  const int own_tile = work.first_row / C::ROWS;
  const auto start_of = [&](int tile) {
    if (params.call.turn_tiles == 0) return INT32_MAX;
    return (tile % params.call.turn_tiles << params.call.turn_steps_shift) * C::ROUND;
  };
  const int start = start_of(own_tile);
  // Or a round has a sum for each chain of tiles, every so many-th of a head.
  const int chains = params.call.turn_tiles == 0 ? params.call.sums_of_round : 1;
  const int chain = own_tile % chains;
  for (int head = 0; head < work.heads; ++head) {
    const uint8_t* const table_gmem =
        masks.blocks_gmem + work.batch * masks.blocks_batch +
        (work.head * params.call.backward.attention.heads_per_kv + head) * masks.blocks_head;
    // Which blocks of keys of the tile with the first key `tile_key` see which blocks of a round.
    const auto find_seen = [&](int row, int tile_key) {
      uint32_t seen = 0;
#pragma unroll
      for (int i = 0; i < C::WARPGROUPS * C::BLOCKS_OF_ROUND; ++i) {
        const int block = i / C::WARPGROUPS, key_block = i % C::WARPGROUPS;
        const int first_query = row + block * C::BLOCK;
        const int first_key = tile_key + key_block * MASK_BLOCK;
        if (row < work.begin || first_query >= work.passing_rows || first_key >= work.own_rows)
          continue;
        const int last_key = min(first_key + MASK_BLOCK, work.own_rows) - 1;
        const uint8_t state =
            table_gmem[first_query / MASK_BLOCK * masks.blocks_row + first_key / MASK_BLOCK];
        if (state != BLOCK_UNSEEN &&
            !work.visible.hides(first_key, last_key, first_query, first_query + C::BLOCK - 1))
          seen |= 1u << (2 * block + key_block);
      }
      return seen;
    };
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
      const bool second = pass != 0;
      if (second && start >= work.last) break;
      const int end = second ? max(work.begin, start + C::ROUND) : work.begin;
      constexpr int STEP = 32 * C::ROUND, STEPS = 2;  // tables are read for two steps at once
#pragma unroll 1
      for (int top = second ? work.last : min(work.last, start); top >= end; top -= STEPS * STEP) {
        uint32_t seen_of_step[STEPS];
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
          const int row = top - i * STEP - lane * C::ROUND;
          seen_of_step[i] = row < end ? 0 : find_seen(row, work.first_row);
        }
#pragma unroll
        for (int i = 0; i < STEPS; ++i) {
          const int row = top - i * STEP - lane * C::ROUND;
          const uint32_t seen = seen_of_step[i];
          const uint32_t lanes = __ballot_sync(device::FULL_WARP, seen != 0);
          if (seen != 0) {
            // In turns the tile comes behind the last one of those before it that add to the sum.
            int turn = 0;
            if (params.call.turns_gmem != nullptr) {
              int before = own_tile - chains;
              while (before >= 0 &&
                     ((row > start_of(before)) != second || find_seen(row, before * C::ROWS) == 0))
                before -= chains;
              if (before >= 0) turn = before / device::count_chains(params.call) + 1;
              turn |= (second ? 1 : chain) << ListedRound::SUM_SHIFT;
            }
            rounds_gmem[count + __popc(lanes & ((1u << lane) - 1))] =
                ListedRound::of(head, row / C::BLOCK, seen, turn);
          }
          if (count == 0 && lanes != 0)
            first_row = top - i * STEP - (__ffs(static_cast<int>(lanes)) - 1) * C::ROUND;
          count += __popc(lanes);
          seen_of_any |= __reduce_or_sync(device::FULL_WARP, (seen | seen >> 2) & 3);
        }
      }
    }
    // A list begins with a round of the first head, if need be one that sees nothing.
    if (head == 0 && count == 0 && work.heads > 1 && work.begin <= work.last) {
      if (lane == 0)
        rounds_gmem[0] = ListedRound::of(0, work.last / C::BLOCK, 0, ListedRound::NO_TURN);
      count = 1;
    }
  }
  __syncwarp();  // all lanes have read the work
  if (lane != 0) return;
  work.rounds_gmem = rounds_gmem;
  work.blocks = count * C::BLOCKS_OF_ROUND;
  if (count > 0) work.start = first_row;
  work.start_head = 0;
  work.keys_begin = (seen_of_any & 1) != 0 ? 0 : work.first_row + MASK_BLOCK;
  work.keys_end = (seen_of_any & 2) != 0 ? INT32_MAX : work.first_row + MASK_BLOCK;
}

}  // namespace archflash::hopper
