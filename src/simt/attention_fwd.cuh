// Exact fp32 attention forward on CUDA cores (no tensor cores), for every GPU from compute
// capability 7.5 on. Inputs are fp32, fp16 or bf16; every product, sum and exponential is fp32.
//
// One CTA computes BLOCK_Q query rows with an online softmax. It visits the key blocks that its
// rows see, from the last one (which may be shorter) back to the first. There are no roles: each
// warp loads, multiplies and owns WARP_ROWS rows, whose scores, maxima and outputs stay in its
// registers. P goes through the warp's own part of shared memory, because the product P V needs it
// in another layout than Q K^T leaves it in. Two barriers per block hide each copy behind a
// product:
//   wait K | barrier | start V      | S = Q K^T, softmax
//   wait V | barrier | start next K | O = correction * O + P V
//
// The main loop, attend(), serves all forward kernels. It takes a tile, which says which keys and
// rows there are, where they come from, and what masks do: DenseTile below, MaskedTile in
// masked_fwd.cuh and CacheTile in cache_fwd.cuh. tile.cuh has the loads, the lane map and the
// products, config.cuh the tile sizes, plan.cpp the choice among them, NOTES.md the decisions.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/ex2.cuh"
#include "simt/config.cuh"
#include "simt/params.h"
#include "simt/tile.cuh"

namespace archflash::simt {

using device::MINUS_INFINITY;

// The tile index of this CTA. CTAs from snake_from on take their tiles in reverse order: where two
// CTAs share an SM, one with many visible keys is then paired with one that has few.
__device__ __forceinline__ int find_index(const Params& params) {
  const int index = blockIdx.x;
  const int last_index = static_cast<int>(gridDim.x) - 1;
  return index < params.snake_from ? index : params.snake_from + last_index - index;
}

// Scales the scores before the softmax. Only needed for a softcap, or for a scale that cannot be
// folded into the exponential because it is zero or negative.
template <class C>
__device__ __forceinline__ void transform_scores(Scores<C>& s_rmem, const AttentionParams& params) {
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) s_rmem[i][j] = params.rule.score(s_rmem[i][j]);
  }
}

// Sets the scores of invisible keys to -inf. Selecting (not adding) makes the old value irrelevant,
// even if it was NaN. row_of(row) is the row of the sequence that a row of the tile is.
template <class C, class Visible, class RowOf>
__device__ __forceinline__ void mask_scores(Scores<C>& s_rmem, const Visible& visible,
                                            int key_first, const RowOf& row_of) {
  const Lane<C> lane;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const int row = row_of(lane.warp_row + i * C::LANE_ROWS + lane.row);
    const int first = visible.first(row), last = visible.last(row);
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      const int key = key_first + j * C::LANE_COLS + lane.col;
      if (key < first || key > last) s_rmem[i][j] = MINUS_INFINITY;
    }
  }
}

// The softmax so far of each row of this thread: the largest score of the row, and the sum of P
// over the keys that this thread holds.
template <class C>
struct RowState {
  float max_rmem[C::THREAD_ROWS];
  float sum_rmem[C::THREAD_ROWS];
};

// Replaces S by P = 2^((S - max) * exp2_scale) and updates the maxima and sums. `correction` is the
// factor that brings O to the new maximum. The subtraction comes first, because one FMA for
// S * exp2_scale - max * exp2_scale would keep the rounding error of max * exp2_scale, which grows
// with the scores without bound.
template <class C>
__device__ __forceinline__ void online_softmax(Scores<C>& s_rmem, RowState<C>& state,
                                               float (&correction)[C::THREAD_ROWS],
                                               float exp2_scale) {
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    float block_max = s_rmem[i][0];
#pragma unroll
    for (int j = 1; j < C::THREAD_KEYS; ++j) block_max = fmaxf(block_max, s_rmem[i][j]);
    block_max = Lane<C>::reduce_cols(block_max, [](float x, float y) { return fmaxf(x, y); });
    const float new_max = fmaxf(state.max_rmem[i], block_max);
    // A row that has seen no key uses 0, since -inf - (-inf) would be NaN.
    const float base = new_max == MINUS_INFINITY ? 0.0f : new_max;
    correction[i] = ptx::ex2_approx_ftz((state.max_rmem[i] - base) * exp2_scale);
    state.max_rmem[i] = new_max;
    float block_sum = 0.0f;
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      s_rmem[i][j] = ptx::ex2_approx_ftz((s_rmem[i][j] - base) * exp2_scale);
      block_sum += s_rmem[i][j];
    }
    state.sum_rmem[i] = fmaf(state.sum_rmem[i], correction[i], block_sum);
  }
}

// Divides the outputs by the row sums and writes them as OUT, and the LSE where it is asked for.
template <class C, DType OUT = C::DTYPE>
__device__ __forceinline__ void store_out(const Outputs<C>& o_rmem, const RowState<C>& state,
                                          const AttentionParams& params, const device::Work& work) {
  using Element = typename ElementOf<OUT>::Type;
  const Lane<C> lane;
  const int batch = work.batch_head / params.heads_q;
  const int head = work.batch_head % params.heads_q;
  const int first_row = work.first_row + lane.warp_row + lane.row;
  const int first_column = 4 * lane.col;
  const int64_t packed_row =
      device::sequence_start(params.cu_seqlens_q_gmem, batch, params.nq) + first_row;
  Element* row_gmem = static_cast<Element*>(params.out_gmem) + batch * params.out_batch +
                      head * params.out_head + packed_row * params.out_row + first_column;
  float* lse_gmem = params.lse_gmem;
  if (lse_gmem != nullptr) {
    lse_gmem += batch * params.lse_batch + head * params.lse_head + packed_row;
  }
  const float sink = device::load_sink(params, head);
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const float keys_sum =
        Lane<C>::reduce_cols(state.sum_rmem[i], [](float x, float y) { return x + y; });
    const float keys_max = state.max_rmem[i] * params.exp2_scale * device::LN_2;
    const device::RowEnd end = device::finish_row(keys_max, keys_sum, sink);

    if (first_row + i * C::LANE_ROWS < work.nq) {
#pragma unroll
      for (int n = 0; n < C::OUT_GROUPS; ++n) {
        float x[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) x[c] = o_rmem[i][4 * n + c] * end.factor;
        const int column = 4 * n * C::LANE_COLS;
        if (first_column + column < params.dv) store_4<OUT>(row_gmem + column, x);
      }
      if (lse_gmem != nullptr && lane.col == 0) {
        lse_gmem[i * C::LANE_ROWS] = end.lse;
      }
    }
    row_gmem += C::LANE_ROWS * params.out_row;
  }
}

// O = correction * O + P V for a block of keys. P goes through the warp's part of shared memory, in
// parts of P_KEYS keys. selects: a P of 0 adds nothing, whatever V is.
template <class C>
__device__ __forceinline__ void add_values(Outputs<C>& o_rmem, const Scores<C>& p_rmem,
                                           const float (&correction)[C::THREAD_ROWS], float* shared,
                                           const float* v_smem /* (BLOCK_K, V_PITCH) */,
                                           bool selects) {
  const Lane<C> lane;
  // This lane's first row in the warp's P.
  // mutants: field-to-last-bit (tests/sim/tags.py)
  const float* p_smem = shared + C::P_SMEM + (lane.warp_row + lane.row) * C::P_PITCH;
  Outputs<C> pv_rmem = {};
#pragma unroll
  for (int part = 0; part < C::P_PARTS; ++part) {
    if (part > 0) __syncwarp();  // all lanes have read the previous part, overwritten below
    store_part<C>(p_rmem, shared, part);
    __syncwarp();  // the warp's part of P is complete before any lane reads it
    const float* of_part = v_smem + part * C::P_KEYS * C::V_PITCH + 4 * lane.col;
    if (selects) {
      multiply_pv<C, true>(pv_rmem, p_smem, of_part);
    } else {
      multiply_pv<C>(pv_rmem, p_smem, of_part);
    }
  }
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
    for (int c = 0; c < 4 * C::OUT_GROUPS; ++c) {
      o_rmem[i][c] = fmaf(o_rmem[i][c], correction[i], pv_rmem[i][c]);
    }
  }
}

// Whether some key of a block is seen by no row of the warp, from scores that have been masked:
// then its V must not be multiplied, because 0 * NaN would be NaN. Called by whole warps.
template <class C>
__device__ __forceinline__ bool any_key_unseen(const Scores<C>& s_rmem) {
  uint32_t seen = 0;  // a bit for each key of the lane
#pragma unroll
  for (int j = 0; j < C::THREAD_KEYS; ++j) {
#pragma unroll
    for (int i = 0; i < C::THREAD_ROWS; ++i) {
      if (s_rmem[i][j] != MINUS_INFINITY) seen |= 1u << j;
    }
  }
  seen |= __shfl_xor_sync(FULL_WARP, seen, 1);  // the other lanes with these keys: see Lane
  if constexpr (C::LANE_ROWS == 4) seen |= __shfl_xor_sync(FULL_WARP, seen, 16);
  return __any_sync(FULL_WARP, seen != (1u << C::THREAD_KEYS) - 1);
}

// The main loop over the keys of a CTA's tile. A tile has
//   params              the AttentionParams
//   last_block()        the first key of the block that is visited first
//   has(block)          whether there is such a block
//   before(block)       the first key of the block that is visited after it
//   start_q(q_smem), start_k(k_smem, block), start_v(v_smem, block)   start the copies
//   sees(block)         whether the rows of this warp see any key of the block
//   mask(s_rmem, block) transforms and masks the scores. True if some key is seen by no row of the
//                       warp and its V may be anything, NaN too
//   drop(p_rmem, block) drops some of P
template <class C, class Tile>
__device__ __forceinline__ void attend(const Tile& tile, float* shared, Outputs<C>& o_rmem,
                                       RowState<C>& state) {
  float* q_smem = shared + C::Q_SMEM;  // (BLOCK_Q, QK_PITCH)
  float* k_smem = shared + C::K_SMEM;  // (BLOCK_K, QK_PITCH)
  float* v_smem = shared + C::V_SMEM;  // (BLOCK_K, V_PITCH)
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    state.max_rmem[i] = MINUS_INFINITY;
    state.sum_rmem[i] = 0.0f;
  }
  int block = tile.last_block();
  if (tile.has(block)) {
    tile.start_q(q_smem);
    tile.start_k(k_smem, block);
  }
#pragma unroll 1
  while (tile.has(block)) {
    const int next = tile.before(block);
    const bool computes = tile.sees(block);
    Scores<C> s_rmem;
    float correction[C::THREAD_ROWS];
    bool selects = false;

    // Each thread waits for its own copies of K (and of Q in the first round). The barrier then
    // makes the copies of all threads visible, and no warp still reads the previous V, which
    // start_v overwrites.
    ptx::copies_wait_all();
    __syncthreads();
    tile.start_v(v_smem, block);
    if (computes) {
      const Lane<C> lane;
      // mutants: field-to-last-bit
      multiply_qk<C>(s_rmem, q_smem + (lane.warp_row + lane.row) * C::QK_PITCH,
                     k_smem + lane.col * C::QK_PITCH, tile.params.d);
      selects = tile.mask(s_rmem, block);
      online_softmax<C>(s_rmem, state, correction, tile.params.exp2_scale);
      tile.drop(s_rmem, block);
    }

    // After the barrier V has arrived from all threads, and no warp still reads K, which start_k
    // overwrites.
    ptx::copies_wait_all();
    __syncthreads();
    if (tile.has(next)) tile.start_k(k_smem, next);
    if (computes) add_values<C>(o_rmem, s_rmem, correction, shared, v_smem, selects);
    block = next;
  }
}

// BLOCK_Q rows of one head and the keys that they see, without a cache: the copies of attend().
template <class C>
struct DenseCopies {
  using Element = typename ElementOf<C::DTYPE>::Type;
  const AttentionParams& params;
  const device::Work& work;
  const Element *q_gmem, *k_gmem, *v_gmem;
  device::VisibleKeys visible;
  int begin, last;  // first key of the first and of the last block that any row sees

  __device__ __forceinline__ DenseCopies(const AttentionParams& params, const device::Work& work)
      : params(params), work(work), visible(device::find_visible_keys(params, work)) {
    const device::Offsets offsets = device::find_offsets(params, work);
    q_gmem = static_cast<const Element*>(params.q_gmem) + offsets.q;
    k_gmem = static_cast<const Element*>(params.k_gmem) + offsets.k;
    v_gmem = static_cast<const Element*>(params.v_gmem) + offsets.v;
    begin = visible.first(work.first_row) & -C::BLOCK_K;
    last = visible.last(min(work.first_row + C::BLOCK_Q, work.nq) - 1) & -C::BLOCK_K;
  }

  __device__ __forceinline__ int last_block() const { return last; }
  __device__ __forceinline__ bool has(int block) const { return block >= begin; }
  __device__ __forceinline__ int before(int block) const { return block - C::BLOCK_K; }
  __device__ __forceinline__ void start_q(float* q_smem) const {
    start_load<C, C::BLOCK_Q, C::QK_PITCH>(q_smem, q_gmem, params.q_row, 0,
                                           work.nq - work.first_row, params.d);
  }
  __device__ __forceinline__ void start_k(float* k_smem, int key) const {
    start_load<C, C::BLOCK_K, C::QK_PITCH>(k_smem, k_gmem + key * params.k_row, params.k_row,
                                           visible.begin() - key, visible.end(work.nq) - key,
                                           params.d);
  }
  __device__ __forceinline__ void start_v(float* v_smem, int key) const {
    start_load<C, C::BLOCK_K, C::V_PITCH>(v_smem, v_gmem + key * params.v_row, params.v_row,
                                          visible.begin() - key, visible.end(work.nq) - key,
                                          params.dv);
  }
};

// The tile of attend() for these rows, without masks as data.
template <class C>
struct DenseTile : DenseCopies<C> {
  using DenseCopies<C>::params, DenseCopies<C>::work, DenseCopies<C>::visible;
  using DenseCopies<C>::DenseCopies;

  // The rows of this warp; last < first if it has none.
  __device__ __forceinline__ int warp_first() const { return work.first_row + Lane<C>().warp_row; }
  __device__ __forceinline__ int warp_last(int first) const {
    return min(first + C::WARP_ROWS, work.nq) - 1;
  }
  __device__ __forceinline__ bool sees(int block) const {
    const int first = warp_first(), last_row = warp_last(first);
    return last_row >= first && !visible.hides(first, last_row, block, block + C::BLOCK_K - 1);
  }
  __device__ __forceinline__ bool mask(Scores<C>& s_rmem, int block) const {
    if (params.transform_scores) transform_scores<C>(s_rmem, params);
    const int first = warp_first();
    if (visible.masks(first, warp_last(first), block, block + C::BLOCK_K - 1))
      mask_scores<C>(s_rmem, visible, block, [&](int row) { return work.first_row + row; });
    return false;
  }
  __device__ __forceinline__ void drop(Scores<C>&, int) const {}
};

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& params) {
  extern __shared__ float4 shared_memory[];
  const int index = find_index(params);
  const bool writes_f32 = C::DTYPE == DType::F32 || params.out_dtype == DType::F32;
  if (writes_f32) {
    device::write_rows_of_no_sequence<C::BLOCK_Q, 4>(params, index, threadIdx.x, C::THREADS);
  } else {
    device::write_rows_of_no_sequence<C::BLOCK_Q>(params, index, threadIdx.x, C::THREADS);
  }
  const device::Work work = device::find_work<C::BLOCK_Q>(params, index);
  if (work.first_row < 0) return;
  Outputs<C> o_rmem = {};
  RowState<C> state;
  attend<C>(DenseTile<C>(params, work), reinterpret_cast<float*>(shared_memory), o_rmem, state);
  if (writes_f32) {
    store_out<C, DType::F32>(o_rmem, state, params, work);
  } else {
    store_out<C>(o_rmem, state, params, work);
  }
}

}  // namespace archflash::simt
