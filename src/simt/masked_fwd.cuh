// Exact fp32 attention forward on CUDA cores with masks as data: attn_mask (bool or added),
// key_ranges, alibi_slopes and block_mask, together with the causal mask and the window; and with
// dropout.
//
// The main loop is that of simt/attention_fwd.cuh. It goes from each block of keys to the next one
// of which any row of the tile may see a key, so that blocks that ranges or the table of blocks
// hide are neither copied nor multiplied. Scores are natural logarithms here:
// params.rule.tanh_scale includes the scale, and exp2_scale is log2(e).
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/dropout.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/device/masks.cuh"
#include "common/device/packed_heads.cuh"
#include "simt/attention_fwd.cuh"
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
__device__ __forceinline__ void apply_masks(Scores<C>& s_rmem, const device::TileMasks& masks,
                                            const device::VisibleKeys& visible, int64_t q_offset,
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
          const device::KeyRange keys = masks.range(0, row, number);
          seen |= key >= keys.begin && key < keys.end;
        }
      }
      float s = s_rmem[i][j];
      float bias = 0.0f;
      if (seen && reads) bias = added_by_mask(params, first_element + key * params.mask_key);
      s += bias;
      if (params.slopes_gmem != nullptr) s = fmaf(-slope, fabsf(position - key_of_block), s);
      if (s < device::LOWEST_SCORE) s = device::LOWEST_SCORE;  // not fmaxf: a NaN stays one
      if (!seen || bias == MINUS_INFINITY) s = MINUS_INFINITY;
      s_rmem[i][j] = s;
    }
  }
}

// Sets the dropped weights of a thread to 0. An element has bits of its own, of which its group has
// those of 8: here they are computed for each element, next to products that cost much more.
template <class C>
__device__ __forceinline__ void drop_weights(Scores<C>& p_rmem, const DropoutParams& params,
                                             const device::Work& work, int key_first) {
  const Lane<C> lane;
  const device::Dropout dropout(params, work.batch_head);
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

// The tile of attend() with masks as data and dropout.
template <class C>
struct MaskedTile : DenseTile<C> {
  using Dense = DenseTile<C>;
  const MaskedParams& all_params;
  device::TileMasks masks;
  int64_t q_offset;

  __device__ __forceinline__ MaskedTile(const MaskedParams& all_params, const device::Work& work)
      : Dense(all_params.attention, work),
        all_params(all_params),
        masks(all_params.masks, all_params.attention, work, {1, __builtin_ctz(C::BLOCK_Q)}),
        q_offset(device::find_q_offset(all_params.attention, work)) {}

  // The blocks of which any row of the tile may see a key; a negative one if there is none.
  __device__ __forceinline__ int before(int block) const {
    return masks.last_block<C::BLOCK_Q, C::BLOCK_K>(block - 1, this->begin);
  }
  __device__ __forceinline__ int last_block() const {
    return before(this->visible.last(min(this->work.first_row + C::BLOCK_Q, this->work.nq) - 1) +
                  1);
  }
  __device__ __forceinline__ bool has(int block) const { return block >= 0; }
  __device__ __forceinline__ bool mask(Scores<C>& s_rmem, int block) const {
    transform_scores<C>(s_rmem, this->params);
    apply_masks<C>(s_rmem, masks, this->visible, q_offset, block);
    return any_key_unseen<C>(s_rmem);
  }
  __device__ __forceinline__ void drop(Scores<C>& p_rmem, int block) const {
    if (all_params.dropout.state_gmem != nullptr)
      drop_weights<C>(p_rmem, all_params.dropout, this->work, block);
  }
};

// Writes the LSEs of rows that see lowest scores only (device/lowest_rows.cuh), behind those of all
// rows.
template <class C>
__device__ __forceinline__ void store_lowest(const RowState<C>& state,
                                             const AttentionParams& attention,
                                             const device::Work& work) {
  const Lane<C> lane;
  const int batch = work.batch_head / attention.heads_q, head = work.batch_head % attention.heads_q;
  const float sink = device::load_sink(attention, head);
  const int first_row = work.first_row + lane.warp_row + lane.row;
  float* const lse_gmem = attention.lse_gmem + batch * attention.lse_batch +
                          head * attention.lse_head +
                          device::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const float keys =
        Lane<C>::reduce_cols(state.sum_rmem[i], [](float x, float y) { return x + y; });
    const int row = first_row + i * C::LANE_ROWS;
    if (row < work.nq && lane.col == 0 && state.max_rmem[i] == device::LOWEST_SCORE &&
        sink < device::LOWEST_SCORE)
      lse_gmem[row] = device::lse_of_lowest(keys);
  }
}

template <class C>
__device__ __forceinline__ void masked_fwd(const MaskedParams& params) {
  extern __shared__ float4 shared_memory[];
  device::write_rows_of_no_sequence<C::BLOCK_Q, sizeof(float)>(params.attention, blockIdx.x,
                                                               threadIdx.x, C::THREADS);
  const device::Work work = device::find_work<C::BLOCK_Q>(params.attention, blockIdx.x);
  if (work.first_row < 0) return;
  Outputs<C> o_rmem = {};
  RowState<C> state;
  attend<C>(MaskedTile<C>(params, work), reinterpret_cast<float*>(shared_memory), o_rmem, state);
  // What dropout leaves of P is scaled by 1 / (1 - dropout_p).
  if (params.dropout.state_gmem != nullptr) {
#pragma unroll
    for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
      for (int c = 0; c < 4 * C::OUT_GROUPS; ++c) o_rmem[i][c] *= params.dropout.scale;
    }
  }
  store_out<C>(o_rmem, state, params.attention, work);
  if (params.attention.lse_gmem != nullptr) store_lowest<C>(state, params.attention, work);
}

}  // namespace archflash::simt
