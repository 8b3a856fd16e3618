// Exact fp32 attention to listed keys (key_indices) on CUDA cores, with a KV cache or without one.
// A CTA computes rows that share a list: the query heads of one position that share a head of K,
// packed, or with a list for 64 rows those rows too.
//
// The main loop, the products and the softmax are those of simt/attention_fwd.cuh, over the places
// of the list instead of keys. A thread looks up the keys that it copies or masks by itself.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/key_lists.cuh"
#include "common/device/tile_walk.cuh"
#include "simt/attention_fwd.cuh"
#include "simt/cache_fwd.cuh"
#include "simt/tile.cuh"

namespace archflash::simt {

// The tile of attend() for rows that share a list: its keys are places of the list.
template <class C>
struct GatherTile : PackedTile<C, GatherTile<C>> {
  using Packed = PackedTile<C, GatherTile<C>>;
  using Packed::params, Packed::packed, Packed::work;
  device::VisibleKeys visible;
  device::KeyList list;
  int first_row;  // of this warp in the tile

  __device__ __forceinline__ GatherTile(const GatherParams& all, const device::Work& work,
                                        const device::CacheRows& rows)
      : Packed(all.call, work),
        visible(device::find_visible_keys(params, work)),
        first_row(threadIdx.x / 32 * C::WARP_ROWS) {
    this->find_tensors();
    list = device::find_key_list(params, all.lists, work, rows, visible, this->last_row());
    const int splits = all.call.partials.splits;
    this->share = device::split_blocks<C::BLOCK_K>({0, (list.count - 1) & -C::BLOCK_K},
                                                   blockIdx.x % splits, splits);
  }

  __device__ __forceinline__ const float* find(const float* head_gmem, int place,
                                               int64_t block_stride, int64_t row_stride) const {
    const device::KeyPlace key = list.find(this->all_params.cache, list.entry(place));
    if (key.position == device::NO_KEY) return nullptr;
    return head_gmem + key.block * block_stride + key.row * row_stride;
  }
  __device__ __forceinline__ bool sees(int) const {
    return packed.head(first_row) < packed.count &&
           work.first_row + packed.row(first_row) < work.nq;
  }
  __device__ __forceinline__ bool mask(Scores<C>& s_rmem, int block) const {
    if (params.transform_scores) transform_scores<C>(s_rmem, params);
    const Lane<C> lane;
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      const int key = list.entry(block + lane.col + j * C::LANE_COLS);
#pragma unroll
      for (int i = 0; i < C::THREAD_ROWS; ++i) {
        const int row = packed.row(lane.warp_row + i * C::LANE_ROWS + lane.row);
        if (!visible.sees(work.first_row + row, key)) s_rmem[i][j] = MINUS_INFINITY;
      }
    }
    return any_key_unseen<C>(s_rmem);
  }
};

template <class C>
__device__ __forceinline__ void gather_fwd(const GatherParams& params) {
  const CacheParams& call = params.call;
  extern __shared__ float4 shared_memory[];
  device::Work work = device::find_list_work(call.attention, params.lists, call.packed_heads,
                                             blockIdx.x / call.partials.splits);
  if (work.first_row < 0) return;
  const device::CacheRows rows =
      device::find_listed_rows(call.cache, work.batch_head / call.attention.heads_q);
  work.nk = rows.count;
  Outputs<C> o_rmem = {};
  RowState<C> state;
  attend<C>(GatherTile<C>(params, work, rows), reinterpret_cast<float*>(shared_memory), o_rmem,
            state);
  store_packed_rows<C>(o_rmem, state, call, work);
}

}  // namespace archflash::simt
