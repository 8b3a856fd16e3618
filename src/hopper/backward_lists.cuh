// Calls with block_mask: a CTA of the backward pass lists the rounds of queries that see any of its
// keys, and goes over these.
#pragma once

#include <cstdint>

#include "common/device/backward_rounds.cuh"
#include "common/mask_params.h"
#include "hopper/backward_config.cuh"
#include "hopper/backward_params.h"
#include "hopper/backward_pipeline.cuh"

namespace archflash::hopper {

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
  int count = 0;
  uint32_t seen_of_any = 0;  // a bit for each warpgroup's keys
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
#pragma unroll 1
      for (int top = second ? work.last : min(work.last, start); top >= end; top -= 32 * C::ROUND) {
        const int row = top - lane * C::ROUND;
        const uint32_t seen = row < end ? 0 : find_seen(row, work.first_row);
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
        count += __popc(lanes);
        seen_of_any |= __reduce_or_sync(device::FULL_WARP, (seen | seen >> 2) & 3);
      }
    }
    // A list begins with a round of the first head, if need be one that sees nothing.
    if (head == 0 && count == 0 && work.heads > 1 && work.begin <= work.last) {
      if (lane == 0)
        rounds_gmem[0] = ListedRound::of(0, work.last / C::BLOCK, 0, ListedRound::NO_TURN);
      count = 1;
    }
  }
  __syncwarp();  // the list is written before its start is read
  if (lane != 0) return;
  work.rounds_gmem = rounds_gmem;
  work.blocks = count * C::BLOCKS_OF_ROUND;
  if (count > 0) work.start = rounds_gmem[0].row_block() * C::BLOCK;
  work.start_head = 0;
  work.keys_begin = (seen_of_any & 1) != 0 ? 0 : work.first_row + MASK_BLOCK;
  work.keys_end = (seen_of_any & 2) != 0 ? INT32_MAX : work.first_row + MASK_BLOCK;
}

}  // namespace archflash::hopper
