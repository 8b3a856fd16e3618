// Exact fp32 attention over a KV cache on CUDA cores: lengths and page tables are read on the
// device, the heads that share a head of K are packed as rows of one tile, and keys may be split
// over CTAs.
//
// The main loop, the products and the softmax are those of simt/attention_fwd.cuh. A thread finds
// the address of each row of K and V that it copies by itself.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/chunked_keys.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/kv_cache.cuh"
#include "common/device/tile_walk.cuh"
#include "common/ptx/cp_async.cuh"
#include "simt/attention_fwd.cuh"
#include "simt/tile.cuh"

namespace archflash::simt {

// Starts the copy of rows of a tile, each from where row_of(row) says; a null pointer stands for a
// row of zeros. some_gmem: an address that may be read. Readers need copies_wait_all() and a
// barrier.
template <class C, int ROWS, int PITCH, class RowOf>
__device__ __forceinline__ void start_rows(float* tile_smem /* (ROWS, PITCH) */, int columns,
                                           const float* some_gmem, RowOf row_of) {
  constexpr int CHUNKS_PER_ROW = C::HEAD_DIM / 4;
  constexpr int ROWS_PER_STEP = C::THREADS / CHUNKS_PER_ROW;
  constexpr int STEPS = ROWS / ROWS_PER_STEP;
  static_assert(STEPS * ROWS_PER_STEP == ROWS && ROWS_PER_STEP * CHUNKS_PER_ROW == C::THREADS,
                "threads must tile the rows");
  const int thread = ptx::mov_tid_x_volatile();
  const int column = thread % CHUNKS_PER_ROW * 4;
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    const int row = thread / CHUNKS_PER_ROW + step * ROWS_PER_STEP;
    const float* source = column < columns ? row_of(row) : nullptr;
    const bool valid = source != nullptr;
    ptx::copy_16_bytes_async(tile_smem + row * PITCH + column, valid ? source + column : some_gmem,
                             valid);
  }
}

// Where the keys of a sequence lie.
struct KeysOfCache {
  const KvCache& cache;
  int sequence;
  device::CacheRows rows;

  // A block outside the cache is clamped into it.
  __device__ __forceinline__ const float* find(const float* head_gmem, int key,
                                               int64_t block_stride, int64_t row_stride) const {
    const int row = key + rows.first;
    const int block = min(max(device::find_cache_block(cache, sequence, row), 0), cache.blocks - 1);
    return head_gmem + block * block_stride + row % cache.block_rows * row_stride;
  }
};

// Subtracts what ALiBi does from the scores.
template <class C>
__device__ __forceinline__ void add_alibi(Scores<C>& s_rmem, const CacheParams& params,
                                          const device::Work& work, int key_first) {
  const Lane<C> lane;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const device::FewRow row(params.attention, params.packed_heads, work,
                             lane.warp_row + i * C::LANE_ROWS + lane.row);
    const float slope =
        params.slopes.gmem[row.batch * params.slopes.batch + row.head * params.slopes.head];
    const float distance = static_cast<float>(row.row + work.nk - work.nq - key_first - lane.col);
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      const float of_key = distance - static_cast<float>(j * C::LANE_COLS);
      s_rmem[i][j] = fmaf(-slope, fabsf(of_key), s_rmem[i][j]);
    }
  }
}

// Hides the keys that attn_mask and key_ranges hide, and all of them in rows that do not exist.
template <class C>
__device__ __forceinline__ void apply_cache_masks(Scores<C>& s_rmem, const CacheParams& params,
                                                  const device::Work& work, int key_first) {
  const MaskParams& masks = params.masks;
  const int mask_begin = work.nk - static_cast<int>(params.mask_keys);
  const Lane<C> lane;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const device::FewRow row(params.attention, params.packed_heads, work,
                             lane.warp_row + i * C::LANE_ROWS + lane.row);
    const int32_t* range_gmem = masks.ranges_gmem + row.batch * masks.ranges_batch +
                                row.head * masks.ranges_head + row.packed * masks.ranges_row;
    const uint8_t* mask_gmem = static_cast<const uint8_t*>(masks.mask_gmem) +
                               row.batch * masks.mask_batch + row.head * masks.mask_head +
                               row.packed * masks.mask_row;
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      const int key = key_first + lane.col + j * C::LANE_COLS;
      bool seen = row.wanted && masks.ranges == 0;
#pragma unroll 1
      for (int number = 0; row.wanted && number < masks.ranges && !seen; ++number)
        seen = key >= range_gmem[2 * number] && key < range_gmem[2 * number + 1];
      if (seen && masks.mask_gmem != nullptr && key >= mask_begin && key < work.nk)
        seen = mask_gmem[(key - mask_begin) * masks.mask_key] != 0;
      if (!seen) s_rmem[i][j] = MINUS_INFINITY;
    }
  }
}

// Writes the rows of a tile: to the workspace if the keys are split, else to the output. The base
// of a share is its largest score, which combine_shares() scales.
template <class C>
__device__ __forceinline__ void store_packed_rows(const Outputs<C>& o_rmem,
                                                  const RowState<C>& state,
                                                  const CacheParams& params,
                                                  const device::Work& work) {
  const AttentionParams& attention = params.attention;
  const Partials& partials = params.partials;
  const Lane<C> lane;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const float keys_sum =
        Lane<C>::reduce_cols(state.sum_rmem[i], [](float x, float y) { return x + y; });
    const device::FewRow row(attention, params.packed_heads, work,
                             lane.warp_row + i * C::LANE_ROWS + lane.row);
    if (!row.wanted) continue;
    const int64_t lse_index = row.lse_index(attention);
    float factor = 1.0f;
    float* row_gmem;
    if (partials.wanted()) {
      const int64_t index = partials.index(blockIdx.x % partials.splits, lse_index);
      if (lane.col == 0) partials.ends_gmem[index] = {state.max_rmem[i], keys_sum};
      if (keys_sum == 0.0f) continue;  // the combining kernel does not read the outputs
      row_gmem = partials.rows_gmem + index * attention.dv;
    } else {
      const device::RowEnd end =
          device::finish_row(state.max_rmem[i] * attention.exp2_scale * device::LN_2, keys_sum,
                             device::load_sink(attention, row.head));
      if (attention.lse_gmem != nullptr && lane.col == 0) attention.lse_gmem[lse_index] = end.lse;
      factor = end.factor;
      row_gmem = static_cast<float*>(attention.out_gmem) + row.batch * attention.out_batch +
                 row.head * attention.out_head + row.packed * attention.out_row;
    }
#pragma unroll
    for (int n = 0; n < C::OUT_GROUPS; ++n) {
      const int column = 4 * lane.col + 4 * n * C::LANE_COLS;
      float x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = o_rmem[i][4 * n + c] * factor;
      if (column < attention.dv) store_4<DType::F32>(row_gmem + column, x);
    }
  }
}

// What tiles of attend() for rows of packed heads and one share of the keys have in common.
// Tile::find(head_gmem, key, block_stride, row_stride) says where the row of a key lies; null:
// zeros.
template <class C, class Tile>
struct PackedTile {
  const CacheParams& all_params;
  const AttentionParams& params;
  const device::PackedHeads& packed;
  const device::Work& work;
  const float *q_gmem, *k_gmem, *v_gmem;  // of K and V the head's
  device::Blocks share;

  __device__ __forceinline__ PackedTile(const CacheParams& all_params, const device::Work& work)
      : all_params(all_params),
        params(all_params.attention),
        packed(all_params.packed_heads),
        work(work) {}

  __device__ __forceinline__ void find_tensors() {
    const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
    q_gmem = static_cast<const float*>(params.q_gmem);
    k_gmem = static_cast<const float*>(params.k_gmem) + kv_head * params.k_head;
    v_gmem = static_cast<const float*>(params.v_gmem) + kv_head * params.v_head;
  }
  __device__ __forceinline__ int last_row() const {
    return min(work.first_row + packed.rows(), work.nq) - 1;
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
  __device__ __forceinline__ void start_k(float* k_smem, int block) const {
    start_rows<C, C::BLOCK_K, C::QK_PITCH>(k_smem, params.d, q_gmem, [&](int row) {
      return tile().find(k_gmem, block + row, params.k_batch, params.k_row);
    });
  }
  __device__ __forceinline__ void start_v(float* v_smem, int block) const {
    start_rows<C, C::BLOCK_K, C::V_PITCH>(v_smem, params.dv, q_gmem, [&](int row) {
      return tile().find(v_gmem, block + row, params.v_batch, params.v_row);
    });
  }
  __device__ __forceinline__ const Tile& tile() const { return static_cast<const Tile&>(*this); }
  __device__ __forceinline__ void drop(Scores<C>&, int) const {}
};

template <class C>
struct CacheTile : PackedTile<C, CacheTile<C>> {
  using Packed = PackedTile<C, CacheTile<C>>;
  using Packed::all_params, Packed::params, Packed::packed, Packed::work;
  KeysOfCache keys;
  device::ChunkedKeys visible;
  int begin, end;             // rows of K and V that no row of the sequence sees become zeros
  int warp_first, warp_last;  // this warp's rows, of one head or of each; last < first: none

  __device__ __forceinline__ CacheTile(const CacheParams& all_params, const device::Work& work,
                                       const KeysOfCache& keys)
      : Packed(all_params, work),
        keys(keys),
        visible{device::find_visible_keys(params, work), all_params.attention_chunk,
                work.nk - work.nq},
        begin(visible.begin()),
        end(visible.end(work.nq)) {
    this->find_tensors();
    const int cta_last = this->last_row();
    this->share = device::blocks_of_share<C::BLOCK_K>(
        {visible.first(work.first_row) & -C::BLOCK_K, visible.last(cta_last) & -C::BLOCK_K},
        all_params.partials, blockIdx.x % all_params.partials.splits);
    const int row = threadIdx.x / 32 * C::WARP_ROWS;
    warp_first = work.first_row + packed.row(row);
    const int rows = packed.head(row) < packed.count ? min(C::WARP_ROWS, packed.rows()) : 0;
    warp_last = min(warp_first + rows, work.nq) - 1;
  }

  __device__ __forceinline__ const float* find(const float* head_gmem, int key,
                                               int64_t block_stride, int64_t row_stride) const {
    if (key < begin || key >= end) return nullptr;
    return keys.find(head_gmem, key, block_stride, row_stride);
  }
  __device__ __forceinline__ bool sees(int block) const {
    return warp_last >= warp_first &&
           !visible.hides(warp_first, warp_last, block, block + C::BLOCK_K - 1);
  }
  __device__ __forceinline__ bool mask(Scores<C>& s_rmem, int block) const {
    if (params.transform_scores) transform_scores<C>(s_rmem, params);
    if (all_params.slopes.gmem != nullptr) add_alibi<C>(s_rmem, all_params, work, block);
    if (visible.masks(warp_first, warp_last, block, block + C::BLOCK_K - 1)) {
      mask_scores<C>(s_rmem, visible, block,
                     [&](int row) { return work.first_row + packed.row(row); });
    }
    if (all_params.masks.ranges == 0 && all_params.masks.mask_gmem == nullptr) return false;
    apply_cache_masks<C>(s_rmem, all_params, work, block);
    return any_key_unseen<C>(s_rmem);
  }
};

template <class C>
__device__ __forceinline__ void cache_fwd(const CacheParams& params) {
  const AttentionParams& attention = params.attention;
  const Partials& partials = params.partials;
  const device::PackedHeads& packed = params.packed_heads;
  extern __shared__ float4 shared_memory[];
  for (int head = 0; !partials.wanted() && head < packed.count; ++head) {
    device::write_rows_of_no_sequence<sizeof(float)>(attention, blockIdx.x, threadIdx.x, C::THREADS,
                                                     packed.rows(), packed.count, head);
  }
  device::Work work =
      device::find_work(attention, blockIdx.x / partials.splits, packed.rows(), packed.count);
  if (work.first_row < 0) return;
  const int sequence = work.batch_head / attention.heads_q;
  const KeysOfCache keys{params.cache, sequence, device::find_cache_rows(params.cache, sequence)};
  work.nk = keys.rows.count;
  Outputs<C> o_rmem = {};
  RowState<C> state;
  attend<C>(CacheTile<C>(params, work, keys), reinterpret_cast<float*>(shared_memory), o_rmem,
            state);
  store_packed_rows<C>(o_rmem, state, params, work);
}

}  // namespace archflash::simt
