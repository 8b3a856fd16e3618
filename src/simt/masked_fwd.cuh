// Exact fp32 attention forward on CUDA cores with masks as data: attn_mask (bool or added),
// key_ranges, alibi_slopes and block_mask, together with the causal mask and the window; and with
// dropout.
//
// The kernel is that of simt/attention_fwd.cuh with another walk: it goes from each block of keys
// to the next one of which any row of the tile may see a key, so that blocks that ranges or the
// table of blocks hide are neither copied nor multiplied. Scores are natural logarithms here:
// params.tanh_scale includes the scale, and exp2_scale is log2(e).
#pragma once

#include <cstdint>

#include "common/math/attention_work.cuh"
#include "common/math/dropout.cuh"
#include "common/math/masks.cuh"
#include "common/math/packed_heads.cuh"
#include "common/ptx/cp_async.cuh"
#include "simt/attention_fwd.cuh"
#include "simt/masked_config.cuh"
#include "simt/masked_params.h"
#include "simt/tile.cuh"

namespace archflash::simt {

// What is added to a score for attn_mask: -inf for a key that is not seen.
__device__ __forceinline__ float added_by_mask(const MaskParams& params, int64_t element) {
  if (params.mask_element == MaskElement::F32)
    return static_cast<const float*>(params.mask_gmem)[element];
  return static_cast<const uint8_t*>(params.mask_gmem)[element] ? 0.0f : MINUS_INFINITY;
}

// Adds what the masks add, and sets the scores of keys that a row does not see to -inf. Selecting
// makes the old value irrelevant, even if it was NaN.
template <class C>
__device__ __forceinline__ void apply_masks(float (&s_rmem)[C::THREAD_ROWS][C::THREAD_KEYS],
                                            const math::TileMasks& masks,
                                            const math::VisibleKeys& visible, int64_t q_offset,
                                            int key_first) {
  const MaskParams& params = masks.params;
  const Lane<C> lane;
  const float slope = params.slopes_gmem == nullptr ? 0.0f : masks.slope(0);
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const int row = masks.first_row + lane.warp_row + i * C::LANE_ROWS + lane.row;
    const bool exists = row < masks.nq;
    uint8_t state = 1;
    if (exists && params.blocks_gmem != nullptr) state = masks.block(0, row, key_first);
    const bool reads = params.mask_element != MaskElement::None && state != BLOCK_FULL;
    const int64_t first_element = exists ? masks.element(0, row, 0) : 0;
    const float position = static_cast<float>(q_offset + row - key_first);
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      const int key_of_block = j * C::LANE_COLS + lane.col, key = key_first + key_of_block;
      bool seen = exists && state != BLOCK_UNSEEN && visible.sees(row, key);
      if (seen && params.ranges_gmem != nullptr) {
        seen = false;
#pragma unroll 1
        for (int number = 0; number < params.ranges; ++number) {
          const math::KeyRange keys = masks.range(0, row, number);
          seen |= key >= keys.begin && key < keys.end;
        }
      }
      float s = s_rmem[i][j];
      float bias = 0.0f;
      if (seen && reads) bias = added_by_mask(params, first_element + key * params.mask_key);
      s += bias;
      if (params.slopes_gmem != nullptr) s = fmaf(-slope, fabsf(position - key_of_block), s);
      if (s < math::LOWEST_SCORE) s = math::LOWEST_SCORE;  // not fmaxf: a NaN stays one
      if (!seen || bias == MINUS_INFINITY) s = MINUS_INFINITY;
      s_rmem[i][j] = s;
    }
  }
}

// Sets the dropped weights of a thread to 0. An element has bits of its own, of which its group has
// those of 8: here they are computed for each element, next to products that cost much more.
template <class C>
__device__ __forceinline__ void drop_weights(float (&p_rmem)[C::THREAD_ROWS][C::THREAD_KEYS],
                                             const DropoutParams& params, const math::Work& work,
                                             int key_first) {
  const Lane<C> lane;
  const math::Dropout dropout(params, work.batch_head);
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const int row = work.first_row + lane.warp_row + i * C::LANE_ROWS + lane.row;
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      const int key = key_first + j * C::LANE_COLS + lane.col;
      if (!dropout.keeps(dropout.bits(row, key).of(row, key))) p_rmem[i][j] = 0.0f;
    }
  }
}

// Whether some key of a block is seen by no row of the warp, from scores that have been masked:
// then its V must not be multiplied, because 0 * NaN would be NaN. Called by whole warps.
template <class C>
__device__ __forceinline__ bool any_key_unseen(
    const float (&s_rmem)[C::THREAD_ROWS][C::THREAD_KEYS]) {
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

// O = correction * O + P V for a block of keys. P goes through the warp's part of shared memory, in
// parts of P_KEYS keys.
template <class C>
__device__ __forceinline__ void add_values(float (&o_rmem)[C::THREAD_ROWS][4 * C::OUT_GROUPS],
                                           const float (&p_rmem)[C::THREAD_ROWS][C::THREAD_KEYS],
                                           const float (&correction)[C::THREAD_ROWS], float* shared,
                                           const float* v_smem /* (BLOCK_K, V_PITCH) */,
                                           bool selects = false) {
  const Lane<C> lane;
  // This lane's first row in the warp's P, which is (WARP_ROWS, P_PITCH).
  float* p_smem = shared + C::P_SMEM + (lane.warp_row + lane.row) * C::P_PITCH;
  float pv_rmem[C::THREAD_ROWS][4 * C::OUT_GROUPS] = {};
#pragma unroll
  for (int part = 0; part < C::P_PARTS; ++part) {
    constexpr int COLUMNS = C::P_KEYS / C::LANE_COLS;  // scores of a row that a thread stores
    if (part > 0) __syncwarp();  // all lanes have read the previous part, overwritten below
#pragma unroll
    for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) {
        p_smem[i * C::LANE_ROWS * C::P_PITCH + j * C::LANE_COLS + lane.col] =
            p_rmem[i][part * COLUMNS + j];
      }
    }
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

template <class C>
__device__ __forceinline__ void masked_fwd(const MaskedParams& all_params) {
  const AttentionParams& attention = all_params.attention;
  const Params params{attention, static_cast<int32_t>(gridDim.x)};  // tiles in the usual order
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  float* q_smem = shared + C::Q_SMEM;  // (BLOCK_Q, QK_PITCH)
  float* k_smem = shared + C::K_SMEM;  // (BLOCK_K, QK_PITCH)
  float* v_smem = shared + C::V_SMEM;  // (BLOCK_K, V_PITCH)

  math::write_rows_of_no_sequence<C::BLOCK_Q, sizeof(float)>(attention, blockIdx.x, threadIdx.x,
                                                             C::THREADS);
  const math::Work work = math::find_work<C::BLOCK_Q>(attention, blockIdx.x);
  if (work.first_row < 0) return;

  const math::Offsets offsets = math::find_offsets(attention, work);
  const float* q_gmem = static_cast<const float*>(attention.q_gmem) + offsets.q;
  const float* k_gmem = static_cast<const float*>(attention.k_gmem) + offsets.k;
  const float* v_gmem = static_cast<const float*>(attention.v_gmem) + offsets.v;
  const math::VisibleKeys visible = math::find_visible_keys(attention, work);
  const int64_t q_offset = math::find_q_offset(attention, work);
  constexpr int ROW_BITS = __builtin_ctz(C::BLOCK_Q);
  const math::TileMasks masks(all_params.masks, attention, work, {1, ROW_BITS});

  float o_rmem[C::THREAD_ROWS][4 * C::OUT_GROUPS] = {};
  RowState<C> state;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    state.max_rmem[i] = MINUS_INFINITY;
    state.sum_rmem[i] = 0.0f;
  }

  const int cta_last = min(work.first_row + C::BLOCK_Q, work.nq) - 1;
  const int begin = visible.first(work.first_row) & -C::BLOCK_K;
  // The block of keys before `key` of which any row may see a key; negative if there is none.
  const auto block_before = [&](int key) {
    return masks.last_block<C::BLOCK_Q, C::BLOCK_K>(key - 1, begin);
  };
  const auto start_k = [&](int key) {
    start_load<C, C::BLOCK_K, C::QK_PITCH>(k_smem, k_gmem + key * attention.k_row, attention.k_row,
                                           visible.begin() - key, visible.end(work.nq) - key,
                                           attention.d);
  };
  const auto start_v = [&](int key) {
    start_load<C, C::BLOCK_K, C::V_PITCH>(v_smem, v_gmem + key * attention.v_row, attention.v_row,
                                          visible.begin() - key, visible.end(work.nq) - key,
                                          attention.dv);
  };
  int block = block_before(visible.last(cta_last) + 1);
  if (block >= 0) {
    start_load<C, C::BLOCK_Q, C::QK_PITCH>(q_smem, q_gmem, attention.q_row, 0,
                                           work.nq - work.first_row, attention.d);
    start_k(block);
  }

#pragma unroll 1
  while (block >= 0) {
    const int next = block_before(block);
    const int warp_first = work.first_row + Lane<C>().warp_row;
    const int warp_last = min(warp_first + C::WARP_ROWS, work.nq) - 1;  // < warp_first: no rows
    const bool computes = warp_last >= warp_first &&
                          !visible.hides(warp_first, warp_last, block, block + C::BLOCK_K - 1);
    float s_rmem[C::THREAD_ROWS][C::THREAD_KEYS];
    float correction[C::THREAD_ROWS];
    bool selects = false;

    // Each thread waits for its own copies of K (and of Q in the first round). The barrier then
    // makes the copies of all threads visible, and no warp still reads the previous V, which
    // start_v overwrites.
    ptx::copies_wait_all();
    __syncthreads();
    start_v(block);
    if (computes) {
      const Lane<C> lane;
      multiply_qk<C>(s_rmem, q_smem + (lane.warp_row + lane.row) * C::QK_PITCH,
                     k_smem + lane.col * C::QK_PITCH, attention.d);
      transform_scores<C>(s_rmem, params);
      apply_masks<C>(s_rmem, masks, visible, q_offset, block);
      selects = any_key_unseen<C>(s_rmem);
      online_softmax<C>(s_rmem, state, correction, attention.exp2_scale);
      if (all_params.dropout.state_gmem != nullptr)
        drop_weights<C>(s_rmem, all_params.dropout, work, block);
    }

    // After the barrier V has arrived from all threads, and no warp still reads K, which start_k
    // overwrites.
    ptx::copies_wait_all();
    __syncthreads();
    if (next >= 0) start_k(next);
    if (computes) add_values<C>(o_rmem, s_rmem, correction, shared, v_smem, selects);
    block = next;
  }
  // The weights that are left of a row whose others were dropped weigh more.
  if (all_params.dropout.state_gmem != nullptr) {
#pragma unroll
    for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
      for (int c = 0; c < 4 * C::OUT_GROUPS; ++c) o_rmem[i][c] *= all_params.dropout.scale;
    }
  }
  store_out<C>(o_rmem, state, params, work);
}

}  // namespace archflash::simt

// Defines an entry point. plan.cpp launches it by NAME.
#define ARCHFLASH_SIMT_MASKED_KERNEL(NAME, CONFIG)                                   \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::simt::MaskedParams params) {           \
    archflash::simt::masked_fwd<CONFIG>(params);                                     \
  }
