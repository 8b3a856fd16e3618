// How the CTAs of decode_fwd.cuh are shared out where the sequences of a cache may differ in
// length: each sequence has as many CTAs as its length deserves. Lengths are on the device only, so
// every warp adds them up, a lane a sequence, and finds the work of its CTA by that. The CTAs
// behind the last share find none.
#pragma once

#include <algorithm>

#include "common/device/attention_work.cuh"
#include "common/device/kv_cache.cuh"
#include "common/mma_sync/decode_params.h"

namespace archflash::mma_sync {

// A row tile, and which share of its keys out of how many.
struct SharedWork {
  device::Work work;  // nk is not filled in
  int share, shares;
};

// The tiles of all heads of a sequence and the blocks of keys of each, at least one.
struct SequenceTiles {
  int nq, tiles, blocks;

  __device__ __forceinline__ int shares(int share_blocks, int most) const {
    return min(max((blocks + share_blocks / 2) / share_blocks, 1), most);
  }
};

template <int BLOCK_K>
__device__ __forceinline__ SequenceTiles tiles_of_sequence(const CacheParams& params,
                                                           int sequence) {
  const AttentionParams& attention = params.attention;
  const device::PackedHeads& packed = params.packed_heads;
  const int* cu_q = attention.cu_seqlens_q_gmem;
  SequenceTiles found;
  found.nq = attention.nq;
  if (cu_q != nullptr) {
    found.nq = max(device::sequence_start(cu_q, sequence + 1, attention.nq) -
                       device::sequence_start(cu_q, sequence, attention.nq),
                   0);
  }
  const bool wanted = params.few_rows == 0 || found.nq <= params.few_rows;
  const int row_tiles = wanted ? (found.nq + packed.rows() - 1) >> packed.row_bits : 0;
  found.tiles = row_tiles * (attention.heads_q / packed.count);
  const int keys = device::find_cache_rows(params.cache, sequence).count;
  found.blocks = max((keys + BLOCK_K - 1) / BLOCK_K, 1);
  return found;
}

// Called by whole warps. first_row is negative if nothing is left for the CTA.
template <int BLOCK_K>
__device__ __forceinline__ SharedWork find_shared_work(const DecodeParams& params) {
  constexpr unsigned ALL = 0xFFFFFFFFu;
  const AttentionParams& attention = params.attention;
  const device::PackedHeads& packed = params.packed_heads;
  const int lane = threadIdx.x % 32, batch = attention.batch;
  int tiles = 0, blocks = 0, longest = 0;
  for (int sequence = lane; sequence < batch; sequence += 32) {
    const SequenceTiles of = tiles_of_sequence<BLOCK_K>(params, sequence);
    tiles += of.tiles;
    blocks += of.tiles * of.blocks;
    if (of.tiles > 0) longest = max(longest, of.blocks);
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    tiles += __shfl_xor_sync(ALL, tiles, lanes);
    blocks += __shfl_xor_sync(ALL, blocks, lanes);
    longest = max(longest, __shfl_xor_sync(ALL, longest, lanes));
  }
  // Long shares do where no sequence is much longer than the mean.
  const bool alike = 4.0f * tiles * longest <= 5.0f * blocks;
  const int ctas = alike ? params.share_ctas * 2 / 3 : params.share_ctas;
  const int share_blocks = max((blocks + ctas - 1) / ctas, FEWEST_SHARE_BLOCKS);

  int before = 0;  // CTAs of the sequences before
  for (int first = 0; first < batch; first += 32) {
    SequenceTiles of{};
    int shares = 1;
    if (first + lane < batch) {
      of = tiles_of_sequence<BLOCK_K>(params, first + lane);
      shares = of.shares(share_blocks, params.partials.splits);
    }
    const int own = of.tiles * shares;
    int end = own;  // CTAs of the lanes up to this one
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      const int other = __shfl_up_sync(ALL, end, lanes);
      if (lane >= lanes) end += other;
    }
    const int index = static_cast<int>(blockIdx.x) - before;
    const unsigned behind = __ballot_sync(ALL, index < end);
    if (behind != 0) {
      const int found = __ffs(behind) - 1;
      shares = __shfl_sync(ALL, shares, found);
      const int of_sequence = index - __shfl_sync(ALL, end - own, found);
      const int tile = of_sequence / shares, groups = attention.heads_q / packed.count;
      SharedWork shared{};
      shared.work.batch_head = (first + found) * attention.heads_q + tile % groups * packed.count;
      shared.work.first_row = tile / groups * packed.rows();
      shared.work.nq = __shfl_sync(ALL, of.nq, found);
      shared.share = of_sequence % shares;
      shared.shares = shares;
      return shared;
    }
    before += __shfl_sync(ALL, end, 31);
  }
  SharedWork none{};
  none.work.first_row = -1;
  return none;
}

}  // namespace archflash::mma_sync
