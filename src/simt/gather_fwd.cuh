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

// The tile of attend() for rows of packed heads and one share of their list.
template <class C>
struct GatherTile {
  const CacheParams& call;
  const AttentionParams& params;
  const device::PackedHeads& packed;
  const device::Work& work;
  device::VisibleKeys visible;
  device::KeyList list;
  device::Blocks share;
  const float *q_gmem, *k_gmem, *v_gmem;  // of K and V the head's
  int first_row;                          // of this warp in the tile

  __device__ __forceinline__ GatherTile(const GatherParams& all, const device::Work& work,
                                        const device::CacheRows& rows)
      : call(all.call),
        params(call.attention),
        packed(call.packed_heads),
        work(work),
        visible(device::find_visible_keys(params, work)),
        first_row(threadIdx.x / 32 * C::WARP_ROWS) {
    const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
    q_gmem = static_cast<const float*>(params.q_gmem);
    k_gmem = static_cast<const float*>(params.k_gmem) + kv_head * params.k_head;
    v_gmem = static_cast<const float*>(params.v_gmem) + kv_head * params.v_head;
    const int last_row = min(work.first_row + packed.rows(), work.nq) - 1;
    list = device::find_key_list(params, all.lists, work, rows, visible, last_row);
    share =
        device::split_blocks<C::BLOCK_K>({0, (list.count - 1) & -C::BLOCK_K},
                                         blockIdx.x % call.partials.splits, call.partials.splits);
  }

  __device__ __forceinline__ int last_block() const { return share.last; }
  __device__ __forceinline__ bool has(int block) const { return block >= share.first; }
  __device__ __forceinline__ int before(int block) const { return block - C::BLOCK_K; }
  __device__ __forceinline__ void start_q(float* q_smem) const {
    start_rows<C, C::BLOCK_Q, C::QK_PITCH>(q_smem, params.d, q_gmem, [&](int row_of_tile) {
      const device::FewRow row(params, packed, work, row_of_tile);
      const float* row_gmem = q_gmem + row.batch * params.q_batch + row.head * params.q_head +
                              row.packed * params.q_row;
      return row.wanted ? row_gmem : nullptr;
    });
  }
  __device__ __forceinline__ const float* find(const float* head_gmem, int place,
                                               int64_t block_stride, int64_t row_stride) const {
    const device::KeyPlace key = list.find(call.cache, list.entry(place));
    if (key.position == device::NO_KEY) return nullptr;
    return head_gmem + key.block * block_stride + key.row * row_stride;
  }
  __device__ __forceinline__ void start_k(float* k_smem, int block) const {
    start_rows<C, C::BLOCK_K, C::QK_PITCH>(k_smem, params.d, q_gmem, [&](int row) {
      return find(k_gmem, block + row, params.k_batch, params.k_row);
    });
  }
  __device__ __forceinline__ void start_v(float* v_smem, int block) const {
    start_rows<C, C::BLOCK_K, C::V_PITCH>(v_smem, params.dv, q_gmem, [&](int row) {
      return find(v_gmem, block + row, params.v_batch, params.v_row);
    });
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
  __device__ __forceinline__ void drop(Scores<C>&, int) const {}
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
