// Attention forward on TMA, mbarriers and wgmma with block_mask, a table of blocks of 64 rows and
// 64 keys, alone or beside an attn_mask that says which keys of a block count, the same for all
// rows.
//
// A row of blocks sees few blocks of keys. So its tile is short, and a warpgroup that computes it
// waits for most of the time: for S, for the softmax between its two products, for the first block
// of the next tile. A CTA therefore has as many streams as fit on an SM, each with a consumer
// warpgroup and a producer warp, tiles, rings and barriers of its own, which wait for one another
// nowhere.
//
// clang-format off
//   role        warps                          code                 work
//   consumers   4 of each of STREAMS           table_mainloop.cuh   S = Q K^T, softmax, O += P V; output
//                                                                   rows
//   producers   one of each stream, behind     table_load.cuh       find tiles and blocks; Q, K, V ->
//               the consumers                                       shared memory, by TMA
//
//   what is handed over       from -> to              barriers of the stream: ready / free again
//   Q, the tile's message     producer -> consumers   q_full / q_empty
//   K, the block's message    producer -> consumers   k_full / k_empty, one ring for both: what
//   V                         producer -> consumers   comes next takes the stage that is free first
//
//   one step of a consumer warpgroup:
//
//   tensor cores   S of block b | O += P V of block b + 1
//   warps                       | row maxima, exponentials and row sums of block b | P of b in 16 bits
// clang-format on
//
// Q goes back when the scores of a tile's last block are there. The message about the tile is still
// read then, so there are two. The tiles are in table_config.cuh. The last ones are taken in the
// order of their work, which a launch before finds (order_tiles.cuh).
#pragma once

#include <cstdint>

#include "hopper/attention_fwd.cuh"
#include "hopper/masks/masked_params.h"
#include "hopper/masks/table_config.cuh"
#include "hopper/masks/table_load.cuh"
#include "hopper/masks/table_mainloop.cuh"
#include "hopper/masks/table_messages.cuh"

namespace archflash::hopper {

template <class C>
__device__ __forceinline__ void table_fwd(const MaskedParams& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (threadIdx.x == 0) {
    for (int stream = 0; stream < C::STREAMS; ++stream)
      initialise_barriers(Barriers<C>{shared_smem + stream * C::STREAM_BYTES + C::BARRIER_SMEM});
  }
  __syncthreads();  // the barriers are initialised before any warp uses them
  if (threadIdx.x < C::CONSUMER_THREADS) {
    ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    const int start = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP) * C::STREAM_BYTES;
    compute_table<C>(params, shared + start, shared_smem + start);
  } else {
    ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    const int stream = uniform(static_cast<int>(threadIdx.x) / 32) - C::CONSUMER_THREADS / 32;
    if (stream < C::STREAMS) {
      load_table<C>(params, shared + stream * C::STREAM_BYTES,
                    shared_smem + stream * C::STREAM_BYTES, stream);
    }
  }
}

}  // namespace archflash::hopper
