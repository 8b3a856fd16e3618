// The walk that all roles take: over the same row tiles, the same share of each tile's keys, and
// the same blocks of keys, from the last tile and the last (ragged) block to the first.
#pragma once

#include "blackwell_dc/params.h"
#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/uniform.cuh"
#include "common/device/visible_keys.cuh"

namespace archflash::blackwell_dc {

using device::FULL_WARP;
using device::uniform;

// A row tile and the number of the share of its keys.
struct Tile : device::Work {
  int split;
};

// Whether the keys of a tile are split into several shares.
template <class C>
__device__ __forceinline__ bool splits_keys(const Params& params) {
  return C::CAN_SPLIT && params.partials.splits > 1;
}
// Whether the outputs of 16-bit inputs are fp32.
template <class C>
__device__ __forceinline__ bool writes_f32(const Params& params) {
  return !C::FP8 && params.out_dtype == DType::F32;
}
// Whether the rows of a tile are fp32 numbers, which correction writes itself: where keys are
// split, to the workspace, else to the output.
template <class C>
__device__ __forceinline__ bool correction_writes(const Params& params) {
  return splits_keys<C>(params) || writes_f32<C>(params);
}
// How the rows of a tile are shared out among heads. Without packing they are BLOCK_Q rows of one
// head.
template <class C>
__device__ __forceinline__ device::PackedHeads find_packed_heads(const Params& params) {
  if constexpr (C::CAN_PACK) return params.packed_heads;
  return {1, C::BLOCK_Q_BITS};
}
// The number of this CTA in its pair: 0 has the lower rows. A CTA that works alone is number 0.
template <class C>
__device__ __forceinline__ int rank_in_pair() {
  return C::CTAS == 1 ? 0 : blockIdx.x % C::CTAS;
}
// This CTA's rows of the tile with an index, and its share of their keys; first_row negative:
// nothing to do. Each row tile has `splits` consecutive indices, one for each share of its keys.
template <class C>
__device__ __forceinline__ Tile find_tile(const Params& params, int index) {
  const int splits = C::CAN_SPLIT ? params.partials.splits : 1;
  const device::PackedHeads packed_heads = find_packed_heads<C>(params);
  Tile work{};
  work.first_row = -1;
  if (index >= params.tiles) return work;
  work = {
      device::find_work(params.attention, index / splits, packed_heads.rows(), packed_heads.count),
      index % splits};
  if (!C::SWITCHES.longest_first && work.first_row >= 0)
    work.first_row = (work.nq - 1) / packed_heads.rows() * packed_heads.rows() - work.first_row;
  if (C::CTAS > 1 && work.first_row >= 0) work.first_row += rank_in_pair<C>() * C::CTA_ROWS;
  return work;
}
// The blocks of a share. Both CTAs of a pair visit the blocks that the rows of either CTA see.
template <class C>
__device__ __forceinline__ device::Blocks find_blocks(const Params& params, Tile work,
                                                      const device::VisibleKeys& visible) {
  if (C::CTAS > 1) work.first_row -= rank_in_pair<C>() * C::CTA_ROWS;
  const device::Blocks blocks =
      device::find_blocks<C::BLOCK_K>(work, visible, find_packed_heads<C>(params).rows());
  if constexpr (!C::CAN_SPLIT) return blocks;
  return device::split_blocks<C::BLOCK_K>(blocks, work.split, params.partials.splits);
}
template <class C>
__device__ __forceinline__ device::Blocks find_blocks(const Params& params, const Tile& work) {
  return find_blocks<C>(params, work, device::find_visible_keys(params.attention, work));
}
template <class C>
__device__ __forceinline__ int count_blocks(const device::Blocks& blocks) {
  return blocks.last < blocks.first ? 0 : (blocks.last - blocks.first) / C::BLOCK_K + 1;
}
// The rows of V that count, because some row of the sequence sees them. The last block of a tile,
// or the first one, may have others, too. Without cu_seqlens TMA reads zeros behind the last key.
struct CountedKeys {
  int begin, end;

  __device__ __forceinline__ CountedKeys(const AttentionParams& params, const device::Work& work,
                                         const device::VisibleKeys& visible)
      : begin(visible.begin()), end(visible.end(work.nq)) {
    if (params.cu_seqlens_k_gmem == nullptr && end == work.nk) end = INT32_MAX;
  }
  __device__ __forceinline__ bool lack_some(int block, int block_keys) const {
    return block < begin || block > end - block_keys;
  }
};

// Whether any tile of the call may have such a block.
__device__ __forceinline__ bool any_ragged(const AttentionParams& params) {
  if (params.cu_seqlens_k_gmem != nullptr || params.offset_mode == OffsetMode::PerBatch)
    return true;
  const device::Work work{.nq = params.nq, .nk = params.nk};
  const device::VisibleKeys visible = device::find_visible_keys(params, work);
  return visible.begin() > 0 || visible.end(params.nq) < params.nk;
}

}  // namespace archflash::blackwell_dc
