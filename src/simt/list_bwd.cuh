// Exact fp32 gradients of attention to listed keys (key_indices) on CUDA cores. Only rows of K and
// V that lists name are read.
//
// A CTA has up to ROWS rows that share a list, the packed query heads of a position or rows of a
// block, and walks the list, BLOCK keys at a time, as a CTA of attention_bwd.cuh that owns queries
// walks keys. dQ of its rows is its own and stays in registers. dK and dV of a key belong to all
// lists that name it: the CTAs add theirs to sums (KeySums), of which device::list_gradients()
// makes dK and dV in the end: in any order, so that their last bits may differ from one time to the
// next, or in turns (ListOrder).
//
//   positions of the block's keys | barrier | copy K, V | barrier | S, dP, then P, dS to shared
//   memory | barrier | dQ += dS K, dV = P^T dO and dK = dS^T Q to the sums | barrier
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/few_rows.cuh"
#include "common/device/key_lists.cuh"
#include "common/device/list_backward.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/list_backward_params.h"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/red_global.cuh"
#include "simt/attention_bwd.cuh"
#include "simt/backward_config.cuh"
#include "simt/gradients.cuh"
#include "simt/tile.cuh"

namespace archflash::simt {

// Starts the copies of rows to shared memory, each from row_of(row). Where that is null, and from
// `columns` on, zeros are written. any_gmem: memory that may be read.
template <class C, int ROWS, class RowOf>
__device__ __forceinline__ void start_listed_rows(float* tile_smem /* (ROWS, PITCH) */, int columns,
                                                  const void* any_gmem, const RowOf& row_of) {
  constexpr int CHUNKS_PER_ROW = C::HEAD_DIM / 4;
  constexpr int ROWS_PER_STEP = C::THREADS / CHUNKS_PER_ROW;
  static_assert(ROWS % ROWS_PER_STEP == 0, "threads must tile the rows");
  const int first_row = static_cast<int>(threadIdx.x) / CHUNKS_PER_ROW;
  const int column = static_cast<int>(threadIdx.x) % CHUNKS_PER_ROW * 4;
#pragma unroll
  for (int step = 0; step < ROWS; step += ROWS_PER_STEP) {
    const int row = first_row + step;
    const float* row_gmem = row_of(row);
    const bool valid = row_gmem != nullptr && column < columns;
    ptx::copy_16_bytes_async(tile_smem + row * C::PITCH + column,
                             valid ? row_gmem + column : static_cast<const float*>(any_gmem),
                             valid);
  }
}

// dot() in sums of 16 columns, whose own sum keeps what it rounds: a key has the gradients of few
// rows, which do not even out errors of S and dP.
__device__ __forceinline__ float dot_in_parts(const float* x_smem, const float* y_smem,
                                              int columns) {
  constexpr int PART = 16;
  float sum = 0.0f, rounded = 0.0f;
  for (int column = 0; column < columns; column += PART) {
    const float part = dot(x_smem + column, y_smem + column, min(PART, columns - column));
    const float next = sum + part, added = next - sum;
    rounded += (sum - (next - added)) + (part - added);
    sum = next;
  }
  return sum + rounded;
}

// Adds to the sums of a block's keys the product of P or dS, transposed, and dO or Q, all rows of
// the CTA: a thread's keys, and four columns.
template <class C>
__device__ __forceinline__ void add_to_keys(float* sums_gmem, int columns, const int* positions,
                                            const float* weights_smem /* (ROWS, P_PITCH) */,
                                            const float* rows_smem /* (ROWS, PITCH) */) {
  const int first_key = static_cast<int>(threadIdx.x) / C::COLUMN_GROUPS * C::THREAD_KEYS;
  const int column = static_cast<int>(threadIdx.x) % C::COLUMN_GROUPS * 4;
  if (column >= columns) return;
  float sum_rmem[C::THREAD_KEYS][4] = {};
#pragma unroll 4
  for (int row = 0; row < C::ROWS; ++row) {
    float x[4];
    load_4(x, rows_smem + row * C::PITCH + column);
#pragma unroll
    for (int i = 0; i < C::THREAD_KEYS; ++i) {
      const float weight = weights_smem[row * C::P_PITCH + first_key + i];
#pragma unroll
      for (int c = 0; c < 4; ++c) sum_rmem[i][c] = fmaf(weight, x[c], sum_rmem[i][c]);
    }
  }
#pragma unroll
  for (int i = 0; i < C::THREAD_KEYS; ++i) {
    const int position = positions[first_key + i];
    if (position == device::NO_KEY) continue;
    float* const sum_gmem = sums_gmem + static_cast<int64_t>(position) * columns + column;
    const float (&sum)[4] = sum_rmem[i];
    if constexpr (ptx::HAS_RED_V4) {
      ptx::red_add_v4_f32(sum_gmem, sum[0], sum[1], sum[2], sum[3]);
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) ptx::red_add_f32(sum_gmem + c, sum[c]);
    }
  }
}

template <class C>
__device__ __forceinline__ void list_bwd(const ListBackwardParams& params) {
  extern __shared__ float4 shared_memory[];
  __shared__ device::ListBackwardWork<float> cta;
  __shared__ int
      positions[C::BLOCK];  // of the block's keys; NO_KEY where no row of the CTA sees one
  float* shared = reinterpret_cast<float*>(shared_memory);
  const AttentionParams& attention = params.call.attention;
  const device::PackedHeads& packed = params.packed_heads;
  const device::TileInOrder tile(params.order);
  const device::Work work = device::find_list_work(attention, params.lists, packed, tile.index);
  if (work.first_row < 0) return device::pass_turns(params.order);
  if (threadIdx.x == 0) cta = device::find_list_backward_work<float>(params, work, tile.chain);
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it
  device::find_rows_that_see<C::THREADS>(cta, packed.rows());
  __syncthreads();  // which rows see a key is known to all

  const int count = cta.list.count;
  if (count > 0) {
    start_listed_rows<C, C::ROWS>(
        shared + C::OWN_FIRST_SMEM, attention.d, attention.q_gmem,
        device::listing_rows(params, cta, attention.q_gmem, attention.q_batch, attention.q_head,
                             attention.q_row));
    start_listed_rows<C, C::ROWS>(
        shared + C::OWN_SECOND_SMEM, attention.dv, attention.q_gmem,
        device::listing_rows(params, cta, params.call.dout_gmem, params.call.dout_batch,
                             params.call.dout_head, params.call.dout_row));
  }

  // The rows of a thread's scores.
  const int thread = static_cast<int>(threadIdx.x);
  const int score_row = thread / C::GRID_COLS, score_col = thread % C::GRID_COLS;
  device::RowTerms terms[C::THREAD_ROWS];
  int first_key[C::THREAD_ROWS], last_key[C::THREAD_ROWS];  // that the row may see
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const device::FewRow row(attention, packed, work, score_row + i * C::GRID_ROWS);
    first_key[i] = cta.visible.first(row.row), last_key[i] = cta.visible.last(row.row);
    if (!row.wanted) first_key[i] = 0, last_key[i] = -1;
    terms[i] =
        row.wanted
            ? static_cast<const device::RowTerms*>(params.call.terms_gmem)[row.lse_index(attention)]
            : device::RowTerms{};
  }
  const int out_row = thread / C::COLUMN_GROUPS * C::OUT_ROWS;
  const int out_column = thread % C::COLUMN_GROUPS * 4;
  const bool capped = attention.transform_scores && attention.rule.softcap != 0.0f;
  float dq_rmem[C::OUT_ROWS][4] = {};
  device::ListTurns<C::BLOCK, float> turns(cta, params.order, C::THREADS / 2);

#pragma unroll 1
  for (int block = 0; block * C::BLOCK < count; ++block) {
    if (thread < C::BLOCK)
      positions[thread] = device::find_listed_position<C::BLOCK>(cta.list, block);
    __syncthreads();  // the positions are there, before the copies
    const auto row_of = [&](const float* head_gmem, int64_t row_stride) {
      return [=](int number) -> const float* {
        const int position = positions[number];
        return position == device::NO_KEY ? nullptr : head_gmem + position * row_stride;
      };
    };
    start_listed_rows<C, C::BLOCK>(shared + C::FIRST_SMEM, attention.d, attention.q_gmem,
                                   row_of(cta.k_gmem, attention.k_row));
    start_listed_rows<C, C::BLOCK>(shared + C::SECOND_SMEM, attention.dv, attention.q_gmem,
                                   row_of(cta.v_gmem, attention.v_row));
    ptx::copies_wait_all();
    __syncthreads();  // the copies of all threads have arrived
    turns.take(block);
#pragma unroll
    for (int i = 0; i < C::THREAD_ROWS; ++i) {
      const int row = score_row + i * C::GRID_ROWS;
#pragma unroll
      for (int j = 0; j < C::THREAD_COLS; ++j) {
        const int column = score_col + j * C::GRID_COLS;
        const int position = positions[column];
        float p = 0.0f, ds = 0.0f;
        if (position != device::NO_KEY && position >= first_key[i] && position <= last_key[i]) {
          float s = dot_in_parts(shared + C::OWN_FIRST_SMEM + row * C::PITCH,
                                 shared + C::FIRST_SMEM + column * C::PITCH, attention.d);
          const float dp = dot_in_parts(shared + C::OWN_SECOND_SMEM + row * C::PITCH,
                                        shared + C::SECOND_SMEM + column * C::PITCH, attention.dv);
          float slope = 1.0f;
          if (attention.transform_scores) {
            s *= attention.rule.tanh_scale;
            if (capped) slope = cap_score(s, attention.rule.softcap);
          }
          p = device::probability(fmaf(s, attention.exp2_scale, -terms[i].lse_log2));
          ds = p * (dp - terms[i].delta) * slope;
        }
        shared[C::P_SMEM + row * C::P_PITCH + column] = p;
        shared[C::DS_SMEM + row * C::P_PITCH + column] = ds;
      }
    }
    __syncthreads();  // P and dS are complete
    add_products<C>(dq_rmem, shared + C::DS_SMEM + out_row * C::P_PITCH,
                    shared + C::FIRST_SMEM + out_column);
    add_to_keys<C>(cta.dv_gmem, params.sums.dv_columns, positions, shared + C::P_SMEM,
                   shared + C::OWN_SECOND_SMEM);
    add_to_keys<C>(cta.dk_gmem, params.sums.dk_columns, positions, shared + C::DS_SMEM,
                   shared + C::OWN_FIRST_SMEM);
    __syncthreads();  // no thread still reads the block, its positions, P or dS, before the next
  }

  turns.end();  // a barrier stands behind the last additions
  const GradientParams& dq = params.call.dq;
  if (out_column >= attention.d) return;
#pragma unroll
  for (int i = 0; i < C::OUT_ROWS; ++i) {
    const device::FewRow row(attention, packed, work, out_row + i);
    if (!row.wanted) continue;
    float* const row_gmem = static_cast<float*>(dq.gmem) + row.batch * dq.batch +
                            row.head * dq.head + row.packed * dq.row + out_column;
    store_gradient_4(row_gmem, dq_rmem[i], params.call.scale, dq.accumulate);
  }
}

}  // namespace archflash::simt
