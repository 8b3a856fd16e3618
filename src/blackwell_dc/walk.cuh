// The walk that all roles take: over the same row tiles, their shares of the keys and blocks of
// keys, last tile first, last (ragged) block first.
#pragma once

#include "blackwell_dc/params.h"
#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/tile_walk.cuh"
#include "common/math/visible_keys.cuh"

namespace archflash::blackwell_dc {

constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

// x, the same in all lanes of a warp, as the assembler knows it after a shuffle: it keeps x in a
// uniform register and computes with it once for the warp, where it would otherwise make it anew,
// or move it, at each use.
template <typename T>
__device__ __forceinline__ T uniform(T x) {
  // mutants: same-in-all-lanes
  return __shfl_sync(FULL_WARP, x, 0);
}

template <class C>
using TileIndex = math::SharedTileIndex<C::CTAS>;

// A row tile and which share of its keys.
struct Tile : math::Work {
  int split;
};

// Whether tiles have several shares.
template <class C>
__device__ __forceinline__ bool splits_keys(const Params& params) {
  return C::CAN_SPLIT && params.partials.splits > 1;
}
// Which of its pair's CTAs this one is: the first has the lower rows. Alone it is the first.
template <class C>
__device__ __forceinline__ int rank_in_pair() {
  return C::CTAS == 1 ? 0 : blockIdx.x % C::CTAS;
}
// The rows of this CTA, and its share of their keys.
template <class C>
__device__ __forceinline__ Tile find_tile(const Params& params, const TileIndex<C>& index) {
  const int splits = C::CAN_SPLIT ? params.partials.splits : 1;
  Tile work{math::find_tile<C::BLOCK_Q>(params.attention, params.tiles, index, splits),
            static_cast<int>(index.value()) % splits};
  if (!C::SWITCHES.longest_first && work.first_row >= 0)
    work.first_row = (work.nq - 1) / C::BLOCK_Q * C::BLOCK_Q - work.first_row;
  if (C::CTAS > 1 && work.first_row >= 0) work.first_row += rank_in_pair<C>() * C::CTA_ROWS;
  return work;
}
// The blocks of a tile: those of both CTAs' rows.
template <class C>
__device__ __forceinline__ math::Blocks find_blocks(const Params& params, Tile work,
                                                    const math::VisibleKeys& visible) {
  if (C::CTAS > 1) work.first_row -= rank_in_pair<C>() * C::CTA_ROWS;
  const math::Blocks blocks = math::find_blocks<C::BLOCK_Q, C::BLOCK_K>(work, visible);
  if constexpr (!C::CAN_SPLIT) return blocks;
  return math::split_blocks<C::BLOCK_K>(blocks, work.split, params.partials.splits);
}
template <class C>
__device__ __forceinline__ math::Blocks find_blocks(const Params& params, const Tile& work) {
  return find_blocks<C>(params, work, math::find_visible_keys(params.attention, work));
}
template <class C>
__device__ __forceinline__ int count_blocks(const math::Blocks& blocks) {
  return blocks.last < blocks.first ? 0 : (blocks.last - blocks.first) / C::BLOCK_K + 1;
}
// Whether the last block of a sequence may have rows of the next one: beyond the tensor TMA reads
// zeros.
template <class C>
__device__ __forceinline__ bool is_ragged(const AttentionParams& params, const math::Work& work,
                                          const math::Blocks& blocks) {
  return params.cu_seqlens_k_gmem != nullptr && blocks.last + C::BLOCK_K > work.nk;
}

}  // namespace archflash::blackwell_dc
