// Exact fp32 attention backward on CUDA cores, for every GPU from compute capability 7.5 on. Every
// product, sum and exponential is fp32.
//
// A CTA owns rows of one side, and blocks of the other side pass by, as in the backward kernel on
// mma.sync (common/mma_sync/attention_bwd.cuh). P and dS go through shared memory, because the
// products into the gradients need whole rows of them:
//   wait block | barrier | S, dP, then P, dS to shared memory | barrier |
//   products into the gradients | barrier | start next block
// Each gradient belongs to one thread: the same inputs always give the same bits.
#pragma once

#include <cstdint>

#include "common/device/backward_masks.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/global_order.cuh"
#include "simt/backward_config.cuh"
#include "simt/gradients.cuh"
#include "simt/tile.cuh"

namespace archflash::simt {

// The product of one row by one row of shared memory. Four short sums round less than a long one.
__device__ __forceinline__ float dot(const float* x_smem, const float* y_smem, int columns) {
  float sums[4] = {};
  for (int column = 0; column < columns; column += 4) {
    float x[4], y[4];
    load_4(x, x_smem + column);
    load_4(y, y_smem + column);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = fmaf(x[i], y[i], sums[i]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Adds weights times passing rows to a thread's rows and columns of a gradient. A block has a sum
// of its own, because short sums round less.
template <class C>
__device__ __forceinline__ void add_products(float (&gradient_rmem)[C::OUT_ROWS][4],
                                             const float* weights_smem /* its first row */,
                                             const float* rows_smem /* its first column */) {
  float sum_rmem[C::OUT_ROWS][4] = {};
#pragma unroll 4
  for (int passing = 0; passing < C::BLOCK; ++passing) {
    float x[4];
    load_4(x, rows_smem + passing * C::PITCH);
#pragma unroll
    for (int i = 0; i < C::OUT_ROWS; ++i) {
      const float weight = weights_smem[i * C::P_PITCH + passing];
#pragma unroll
      for (int c = 0; c < 4; ++c) sum_rmem[i][c] = fmaf(weight, x[c], sum_rmem[i][c]);
    }
  }
#pragma unroll
  for (int i = 0; i < C::OUT_ROWS; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) gradient_rmem[i][c] += sum_rmem[i][c];
  }
}

// Writes, or adds, a thread's part of a gradient times `factor`.
template <class C>
__device__ __forceinline__ void store_gradient(const float (&gradient_rmem)[C::OUT_ROWS][4],
                                               const GradientParams& gradient,
                                               const device::BackwardWork& cta, int first,
                                               int column, float factor) {
  float* rows_gmem =
      static_cast<float*>(gradient.gmem) + cta.batch * gradient.batch + cta.head * gradient.head +
      (static_cast<int64_t>(cta.own_start) + cta.first_row + first) * gradient.row + column;
#pragma unroll
  for (int i = 0; i < C::OUT_ROWS; ++i) {
    if (cta.first_row + first + i >= cta.own_rows) continue;
    store_gradient_4(rows_gmem + i * gradient.row, gradient_rmem[i], factor, gradient.accumulate);
  }
}

// P and dS of one score, and the gradient of attn_mask. The scores of masked kernels are natural
// logarithms.
struct PAndDs {
  float p, ds;
};
template <class C>
__device__ __forceinline__ PAndDs exponentiate_masked(const MaskedBackwardParams& params,
                                                      const device::HeadMasks& masks, int query,
                                                      int key, float s, float dp,
                                                      const device::RowTerms& terms) {
  const AttentionParams& attention = params.call.attention;
  s *= attention.rule.tanh_scale;
  float slope_of_cap = 1.0f;
  if (attention.rule.softcap != 0.0f) slope_of_cap = cap_score(s, attention.rule.softcap);
  bool seen = true, reads = params.masks.mask_element != MaskElement::None;
  if (params.masks.blocks_gmem != nullptr) {
    const uint8_t state = masks.block(query, key);
    seen = state != BLOCK_UNSEEN;
    reads &= state != BLOCK_FULL;
  }
  if (seen && params.masks.ranges_gmem != nullptr) seen = masks.in_ranges(query, key);
  const float bias = seen && reads ? masks.added_to<DType::F32>(query, key) : 0.0f;
  float slope = 0.0f, distance = 0.0f;
  if (params.masks.slopes_gmem != nullptr) {
    slope = masks.slope();
    distance = static_cast<float>(device::find_q_offset(attention, masks) + query - key);
  }
  const auto masked = device::masked_score<false>(s, seen, bias, slope, distance);
  if (!masked.seen) return {0.0f, 0.0f};
  const float p =
      device::probability_up_to(device::most_weight(terms.lse_log2),
                                fmaf(masked.score, attention.exp2_scale, -terms.lse_log2));
  bool kept = true;
  if (params.dropout.state_gmem != nullptr) {
    const DroppedHeads& heads = params.dropped_heads;
    const device::Dropout dropout(params.dropout,
                                  heads.first + masks.batch * heads.of_sequence + masks.head);
    kept = dropout.keeps(dropout.bits(query, key).of(query, key));
  }
  const float ds = p * ((kept ? dp * params.dropout.scale : 0.0f) - terms.delta);
  if constexpr ((C::GRADIENTS & DQ) != 0) {
    const MaskGradientParams& dmask = params.dmask;
    if (dmask.gmem != nullptr) {
      ptx::red_add_f32(dmask.gmem + masks.batch * dmask.batch + masks.head * dmask.head +
                           query * dmask.row + key * dmask.key,
                       ds);
    }
  }
  return {kept ? p : 0.0f, ds * slope_of_cap};
}

template <class C>
__device__ __forceinline__ void attention_bwd(const typename C::Params& all_params) {
  constexpr bool OWNS_KEYS = C::OWNS == Owns::Keys;
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  const BackwardParams& params = call_of<C>(all_params);
  const AttentionParams& attention = params.attention;
  if constexpr (OWNS_KEYS)
    device::clear_keys_of_no_sequence<C::ROWS, C::GRADIENTS>(params, blockIdx.x, C::THREADS / 32);
  const device::BackwardWork cta =
      device::find_backward_work<C::OWNS, C::ROWS>(attention, blockIdx.x);
  if (cta.first_row < 0) return;

  // Passing rows that any owned row has to do with; begin > last if there is none.
  int begin = cta.visible.first(cta.first_row) & -C::BLOCK;
  const int last = cta.visible.last(min(cta.first_row + C::ROWS, cta.own_rows) - 1) & -C::BLOCK;
  // The next block of rows from one on, in which some score may count; beyond `last` if there is
  // none.
  [[maybe_unused]] const int first_block = begin;
  const auto row_of = [&](int number) { return first_block + number * C::BLOCK; };
  [[maybe_unused]] auto seen_blocks = [&] {
    if constexpr (C::MASKED) {
      const MaskParams& masks = all_params.masks;
      return device::SeenBlocks<C>{masks, cta, attention.heads_per_kv,
                                   begin <= last ? (last - begin) / C::BLOCK + 1 : 0,
                                   masks.ranges_gmem == nullptr && masks.blocks_gmem == nullptr};
    } else {
      return 0;
    }
  }();
  const auto next_seen = [&](int row) {
    if constexpr (C::MASKED) {
      return row_of(seen_blocks.next((row - first_block) / C::BLOCK, row_of));
    } else {
      return row;
    }
  };
  begin = next_seen(begin);
  const auto rows_of = [&](bool keys, int head, int64_t row) {
    return keys ? device::key_rows<float>(params, cta.batch, head, row)
                : device::query_rows<float>(params, cta.batch, head, row);
  };
  if (begin <= last) {
    const auto own =
        rows_of(OWNS_KEYS, cta.head, static_cast<int64_t>(cta.own_start) + cta.first_row);
    const int begin_own = cta.own_begin() - cta.first_row, end_own = cta.own_end() - cta.first_row;
    start_load<C, C::ROWS, C::PITCH>(shared + C::OWN_FIRST_SMEM, own.first_gmem, own.first_row,
                                     begin_own, end_own, attention.d);
    start_load<C, C::ROWS, C::PITCH>(shared + C::OWN_SECOND_SMEM, own.second_gmem, own.second_row,
                                     begin_own, end_own, attention.dv);
  }

  const int thread = threadIdx.x;
  const int score_row = thread / C::GRID_COLS, score_col = thread % C::GRID_COLS;
  const int out_row = thread / C::COLUMN_GROUPS * C::OUT_ROWS;
  const int out_column = thread % C::COLUMN_GROUPS * 4;
  const bool capped = attention.transform_scores && attention.rule.softcap != 0.0f;
  float first_rmem[C::OUT_ROWS][4] = {};   // dQ or dK
  float second_rmem[C::OUT_ROWS][4] = {};  // dV; unused where the CTA owns queries

#pragma unroll 1
  for (device::Passing block{0, begin}; block.head < cta.heads && begin <= last;) {
    const int head = device::passing_head<C::OWNS>(attention, cta, block);
    const int64_t passing_row = static_cast<int64_t>(cta.passing_start) + block.row;
    const auto rows = rows_of(!OWNS_KEYS, head, passing_row);
    const int begin_seen = cta.passing_begin() - block.row;
    const int end_seen = cta.passing_end() - block.row;
    start_load<C, C::BLOCK, C::PITCH>(shared + C::FIRST_SMEM, rows.first_gmem, rows.first_row,
                                      begin_seen, end_seen, attention.d);
    start_load<C, C::BLOCK, C::PITCH>(shared + C::SECOND_SMEM, rows.second_gmem, rows.second_row,
                                      begin_seen, end_seen, attention.dv);
    ptx::copies_wait_all();
    __syncthreads();  // the copies of all threads have arrived
    const device::RowTerms* terms_gmem =
        OWNS_KEYS ? device::terms_of(params, cta.batch, head, passing_row)
                  : device::terms_of(params, cta.batch, cta.head,
                                     static_cast<int64_t>(cta.own_start) + cta.first_row);
#pragma unroll
    for (int i = 0; i < C::THREAD_ROWS; ++i) {
      const int row = score_row + i * C::GRID_ROWS;
#pragma unroll
      for (int j = 0; j < C::THREAD_COLS; ++j) {
        const int column = score_col + j * C::GRID_COLS;
        float p = 0.0f, ds = 0.0f;
        // An owned row behind the end has no terms, and its gradients are not stored.
        if (cta.first_row + row < cta.own_rows &&
            cta.visible.sees(cta.first_row + row, block.row + column)) {
          float s = dot(shared + C::OWN_FIRST_SMEM + row * C::PITCH,
                        shared + C::FIRST_SMEM + column * C::PITCH, attention.d);
          const float dp = dot(shared + C::OWN_SECOND_SMEM + row * C::PITCH,
                               shared + C::SECOND_SMEM + column * C::PITCH, attention.dv);
          const device::RowTerms terms = terms_gmem[OWNS_KEYS ? column : row];
          if constexpr (C::MASKED) {
            const int owned = cta.first_row + row, passing = block.row + column;
            const auto masks =
                device::HeadMasks::of<C::OWNS>(all_params.masks, cta, OWNS_KEYS ? head : cta.head);
            const PAndDs found =
                exponentiate_masked<C>(all_params, masks, OWNS_KEYS ? passing : owned,
                                       OWNS_KEYS ? owned : passing, s, dp, terms);
            p = found.p, ds = found.ds;
          } else {
            float slope = 1.0f;
            if (attention.transform_scores) {
              s *= attention.rule.tanh_scale;
              if (capped) slope = cap_score(s, attention.rule.softcap);
            }
            p = device::probability(fmaf(s, attention.exp2_scale, -terms.lse_log2));
            ds = p * (dp - terms.delta) * slope;
          }
        }
        shared[C::P_SMEM + row * C::P_PITCH + column] = p;
        shared[C::DS_SMEM + row * C::P_PITCH + column] = ds;
      }
    }
    __syncthreads();  // P and dS are complete
    add_products<C>(first_rmem, shared + C::DS_SMEM + out_row * C::P_PITCH,
                    shared + C::FIRST_SMEM + out_column);
    if constexpr (OWNS_KEYS) {
      add_products<C>(second_rmem, shared + C::P_SMEM + out_row * C::P_PITCH,
                      shared + C::SECOND_SMEM + out_column);
    }
    __syncthreads();  // no thread still reads the block, P or dS, which are overwritten next
    block.row = next_seen(block.row + C::BLOCK);
    if (block.row > last) {
      block = {block.head + 1, begin};
      if constexpr (C::MASKED) seen_blocks.base = -1;
    }
  }

  if (out_column < attention.d) {
    store_gradient<C>(first_rmem, OWNS_KEYS ? params.dk : params.dq, cta, out_row, out_column,
                      params.scale);
  }
  if constexpr (OWNS_KEYS) {
    float dv_factor = 1.0f;
    if constexpr (C::MASKED) dv_factor = all_params.dropout.scale;
    if (out_column < attention.dv)
      store_gradient<C>(second_rmem, params.dv, cta, out_row, out_column, dv_factor);
  }
}

}  // namespace archflash::simt
