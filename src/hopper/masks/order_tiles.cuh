// Orders the last tiles of a call with block_mask, before the attention kernel: those of which the
// most blocks are seen come first. CTAs take tiles one by one, so that the call ends when the last
// tiles do, and these are short then. The tiles before them keep the order in which the heads at
// work share L2.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/uniform.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_params.h"

namespace archflash::hopper {

// Every CTA counts the blocks of all ordered tiles, and finds the places of ORDER_TILES of them:
// one warp for each.
__device__ __forceinline__ void order_tiles(const MaskedParams& params) {
  __shared__ int seen[MOST_ORDERED];
  __shared__ int64_t starts[MOST_ORDERED];  // of the tiles' rows of blocks, in elements
  ptx::griddepcontrol_launch_dependents();  // its first tiles have no order to wait for
  const AttentionParams& attention = params.call.attention;
  const MaskParams& masks = params.masks;
  const int first_tile = params.call.tiles - params.ordered;
  const int i = threadIdx.x;
  static_assert(MOST_ORDERED <= ORDER_THREADS, "a thread finds one tile");
  if (i < params.ordered) {
    __builtin_assume(attention.cu_seqlens_q_gmem == nullptr);  // the plan orders no others
    const device::Work work = device::find_work<MASK_BLOCK>(attention, first_tile + i);
    const int batch = work.batch_head / attention.heads_q;
    const int head = work.batch_head % attention.heads_q;
    seen[i] = 0;
    starts[i] = batch * masks.blocks_batch + head * masks.blocks_head +
                work.first_row / MASK_BLOCK * masks.blocks_row;
  }
  __syncthreads();  // all starts are there, and all counts are 0

  const int key_blocks = (attention.nk + MASK_BLOCK - 1) / MASK_BLOCK;
  const auto address = reinterpret_cast<uintptr_t>(masks.blocks_gmem);
  const bool by_words = ((static_cast<int64_t>(address) | masks.blocks_batch | masks.blocks_head |
                          masks.blocks_row | key_blocks) &
                         3) == 0;
  const int bytes = by_words ? 4 : 1;
  const int chunks = key_blocks / bytes;  // of a row of blocks
#pragma unroll 4
  for (int number = i; number < params.ordered * chunks; number += ORDER_THREADS) {
    const int tile = number / chunks;
    const uint8_t* chunk = masks.blocks_gmem + starts[tile] + number % chunks * bytes;
    uint32_t states = by_words ? *reinterpret_cast<const uint32_t*>(chunk) : *chunk;
    states |= states >> 4;
    states |= states >> 2;
    states |= states >> 1;  // the lowest bit of a byte says whether any of its bits was set
    const int count = __popc(states & 0x01010101);
    if (count != 0) atomicAdd(&seen[tile], count);
  }
  __syncthreads();  // all counts are there

  const int tile = static_cast<int>(blockIdx.x * ORDER_TILES + threadIdx.x / 32);
  if (tile >= params.ordered) return;
  int place = 0;
  for (int other = threadIdx.x % 32; other < params.ordered; other += 32)
    place += seen[other] > seen[tile] || (seen[other] == seen[tile] && other < tile);
  place = __reduce_add_sync(device::FULL_WARP, place);
  if (threadIdx.x % 32 == 0) {
    params.order_gmem[place] = first_tile + tile;
    if (tile == 0) *params.call.taken_gmem = 0;  // the attention kernel counts its tiles there
  }
}

}  // namespace archflash::hopper
