// Attention forward for fp32 inputs on mma.sync tensor cores (tensor_parts.cuh): 64 columns of
// Q K^T, and 64 keys of P V, are summed at a time.
//
// One CTA computes BLOCK_Q query rows with an online softmax. It visits the key blocks that its
// rows see, from the last one (which may be shorter) back to the first. There are no roles: each
// warp loads, multiplies and owns 16 rows.
//   wait K | barrier | start V | S = Q K^T, P | wait V | barrier | start next K | O += P V
//
// mma.sync takes columns and keys in any order, as long as both operands have the same: so that a
// lane reads 16 bytes at a time, its columns of 16 of Q and K are 4t to 4t+3 (t = lane % 4), and
// its columns of 32 of V and O are 4g to 4g+3 and 8t to 8t+7 (g = lane / 4). Its keys of 8 of V are
// 2t and 2t+1, those of its scores, so that P is operand A as it lies.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"
#include "simt/attention_fwd.cuh"
#include "simt/tensor_config.cuh"
#include "simt/tensor_parts.cuh"

namespace archflash::simt::tensor {

// S = Q K^T over `columns` columns, in sums of SUM_COLUMNS. In s_rmem[0][n], lane l holds rows l/4
// and l/4 + 8 of the warp, and of each row the keys 8n + 2*(l%4) and the next one.
template <class C, bool CHECKS>
__device__ __forceinline__ void multiply_qk(device::Scores<C>& s_rmem,
                                            const float* q_smem /* this lane's first columns */,
                                            const float* k_smem /* this lane's first columns */,
                                            int columns) {
  constexpr int KEY_TILES = C::STEP_KEYS / 8;
  // Four sums in a row would take registers of which the wide kernel has none.
#pragma unroll(C::HEAD_DIM > 128 ? 1 : C::HEAD_DIM / C::SUM_COLUMNS)
  for (int first = 0; first < C::HEAD_DIM; first += C::SUM_COLUMNS) {
    if (first >= columns) break;
    float sum_rmem[KEY_TILES][4] = {}, small_rmem[KEY_TILES][4] = {};
    const int end = min(columns, first + C::SUM_COLUMNS);
#pragma unroll 1
    for (int column = first; column < end; column += 16) {
      // Columns 4t and 4t+1 are one step of mma.sync, 4t+2 and 4t+3 the other one.
      Parts q[2];
      {
        float row[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float4 x = *reinterpret_cast<const float4*>(q_smem + 8 * r * C::QK_PITCH + column);
          row[r][0] = x.x, row[r][1] = x.y, row[r][2] = x.z, row[r][3] = x.w;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i)
          split<CHECKS>(row[i % 2][i / 2], q[i / 4].big[i % 4], q[i / 4].small[i % 4]);
      }
#pragma unroll
      for (int n = 0; n < KEY_TILES; ++n) {
        const float4 x = *reinterpret_cast<const float4*>(k_smem + 8 * n * C::QK_PITCH + column);
        const float row[4] = {x.x, x.y, x.z, x.w};
        uint32_t big[4], small[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) split<CHECKS>(row[i], big[i], small[i]);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          multiply(sum_rmem[n], small_rmem[n], q[step], big[2 * step], big[2 * step + 1],
                   small[2 * step], small[2 * step + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float sum = sum_rmem[n][i] + small_rmem[n][i];
        s_rmem[0][n][i] = first == 0 ? sum : s_rmem[0][n][i] + sum;
      }
    }
  }
}

// Replaces S by P = 2^(S * exp2_scale - base), and adds to its sums.
template <class C>
__device__ __forceinline__ void exponentiate(device::Scores<C>& s_rmem, device::RowState<C>& state,
                                             float exp2_scale) {
#pragma unroll
  for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float& p = s_rmem[0][n][2 * r + i];
        p = ptx::ex2_approx_ftz(fmaf(p, exp2_scale, -state.base[0][r]));
        state.sum[0][r] += p;
      }
    }
  }
}

// O += P V for a block of keys. o_rmem[0][4 * n + j] has rows l/4 and l/4 + 8, and of each row the
// columns 32n + 8t + j and 32n + 8t + 4 + j.
template <class C, bool CHECKS>
__device__ __forceinline__ void add_pv(device::Outputs<C>& o_rmem, const device::Scores<C>& p_rmem,
                                       const float* v_smem /* this lane's first key and column */,
                                       int columns) {
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM / 32; ++n) {
    if (32 * n >= columns) break;
    float sum_rmem[4][4] = {}, small_rmem[4][4] = {};
#pragma unroll
    for (int step = 0; step < C::STEP_KEYS / 8; ++step) {
      Parts p;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        split<false>(p_rmem[0][step][i], p.big[i / 2 + i % 2 * 2], p.small[i / 2 + i % 2 * 2]);
      uint32_t big[2][4], small[2][4];
#pragma unroll
      for (int key = 0; key < 2; ++key) {
        const float4 x =
            *reinterpret_cast<const float4*>(v_smem + (8 * step + key) * C::V_PITCH + 32 * n);
        const float row[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) split<CHECKS>(row[j], big[key][j], small[key][j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        multiply(sum_rmem[j], small_rmem[j], p, big[0][j], big[1][j], small[0][j], small[1][j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_rmem[0][4 * n + j][i] += sum_rmem[j][i] + small_rmem[j][i];
    }
  }
}

// Visits the key blocks of a CTA.
template <class C, bool CHECKS>
__device__ __forceinline__ void attend(const AttentionParams& params, const device::Work& work,
                                       float* shared, device::Outputs<C>& o_rmem,
                                       device::RowState<C>& state) {
  float* q_smem = shared + C::Q_SMEM;  // (BLOCK_Q, QK_PITCH)
  float* k_smem = shared + C::K_SMEM;  // (BLOCK_K, QK_PITCH)
  float* v_smem = shared + C::V_SMEM;  // (BLOCK_K, V_PITCH)
  const DenseCopies<C> tile(params, work);
  const device::VisibleKeys& visible = tile.visible;

#pragma unroll
  for (int n = 0; n < C::HEAD_DIM / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o_rmem[0][n][i] = 0.0f;
  }
  state.large = false;
  device::clear(state);
  int block = tile.last_block();
  if (tile.has(block)) {
    tile.start_q(q_smem);
    tile.start_k(k_smem, block);
  }
#pragma unroll 1
  while (tile.has(block)) {
    const int next = tile.before(block);
    const unsigned thread = ptx::mov_tid_x_volatile();
    const int lane_row = thread % 32 / 4, lane_column = thread % 4;
    const int warp_row = thread / 32 * C::WARP_ROWS;
    const int first_row = work.first_row + warp_row;
    const int last_row = min(first_row + C::WARP_ROWS, work.nq) - 1;  // none: < first_row
    const bool computes =
        last_row >= first_row && !visible.hides(first_row, last_row, block, block + C::BLOCK_K - 1);
    device::Scores<C> s_rmem;  // then P

    // Each thread waits for its own copies of K (and of Q in the first round). The barrier then
    // makes the copies of all threads visible, and no warp still reads the previous V, which is
    // overwritten next.
    ptx::copies_wait_all();
    __syncthreads();
    tile.start_v(v_smem, block);
    if (computes) {
      multiply_qk<C, CHECKS>(s_rmem, q_smem + (warp_row + lane_row) * C::QK_PITCH + 4 * lane_column,
                             k_smem + lane_row * C::QK_PITCH + 4 * lane_column, params.d);
      if (params.transform_scores) device::transform_scores<C>(s_rmem, params.rule);
      if (visible.masks(first_row, last_row, block, block + C::BLOCK_K - 1)) {
        device::mask_scores<C>(s_rmem, visible, first_row + lane_row, block + 2 * lane_column);
      }
      const float exp2_scale =
          device::update_row_max<C>(s_rmem, state, o_rmem, params.exp2_scale, nullptr);
      exponentiate<C>(s_rmem, state, exp2_scale);
    }

    // After the barrier V has arrived from all threads, and no warp still reads K, which is
    // overwritten next.
    ptx::copies_wait_all();
    __syncthreads();
    if (tile.has(next)) tile.start_k(k_smem, next);
    if (computes) {
      add_pv<C, CHECKS>(o_rmem, s_rmem, v_smem + 2 * lane_column * C::V_PITCH + 4 * lane_row,
                        params.dv);
    }
    block = next;
  }
}

// Divides the outputs by the row sums and writes them, and the LSE where it is asked for.
template <class C>
__device__ __forceinline__ void store_out(const device::Outputs<C>& o_rmem,
                                          const device::RowState<C>& state,
                                          const AttentionParams& params, const device::Work& work) {
  const unsigned thread = threadIdx.x;
  const device::OutRows out(params, work, thread / 32 * C::WARP_ROWS);
  float* out_gmem = static_cast<float*>(params.out_gmem) + out.batch * params.out_batch +
                    out.head * params.out_head + out.packed_row * params.out_row;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const device::RowEnd end = device::finish_lane_row<C>(state, 0, r, out.sink);
    const int row = 8 * r + thread % 32 / 4;
    if (row >= out.rows) continue;
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM / 32; ++n) {
      const int column = 32 * n + thread % 4 * 8;
      if (column >= params.dv) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
          x[j] = __float_as_uint(o_rmem[0][4 * n + j][2 * r + half] * end.factor);
        ptx::st_global_v4_b32(out_gmem + row * params.out_row + column + 4 * half, x[0], x[1], x[2],
                              x[3]);
      }
    }
    if (params.lse_gmem != nullptr && thread % 4 == 0) out.store_lse(params, row, end.lse);
  }
}

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& params) {
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  int* again_smem = reinterpret_cast<int*>(shared + C::AGAIN_SMEM);  // (WARPS,)
  device::write_rows_of_no_sequence<C::BLOCK_Q, 4>(params, blockIdx.x, threadIdx.x, C::THREADS);
  const device::Work found = device::find_work<C::BLOCK_Q>(params, blockIdx.x);
  if (found.first_row < 0) return;
  device::Work& kept = *reinterpret_cast<device::Work*>(shared + C::WORK_SMEM);
  if constexpr (C::KEEPS_WORK) {
    static_assert(sizeof(device::Work) <= C::WORK_BYTES);
    if (threadIdx.x == 0) kept = found;
    __syncthreads();  // thread 0 has written it, before the other threads read it
  }
  const device::Work& work = C::KEEPS_WORK ? kept : found;
  device::Outputs<C> o_rmem;
  device::RowState<C> state;
  attend<C, false>(params, work, shared, o_rmem, state);
  // Where an output is not finite, all is computed again with what infinity takes.
  float zero = 0.0f;
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) zero = fmaf(o_rmem[0][n][i], 0.0f, zero);
  }
  const bool is_finite = __all_sync(FULL_WARP, zero == 0.0f);
  if (threadIdx.x % 32 == 0) again_smem[threadIdx.x / 32] = !is_finite;
  __syncthreads();  // every warp has said so, and none still reads K or V
  int again = 0;
#pragma unroll
  for (int warp = 0; warp < C::WARPS; ++warp) again |= again_smem[warp];
  if (again != 0) attend<C, true>(params, work, shared, o_rmem, state);
  store_out<C>(o_rmem, state, params, work);
}

}  // namespace archflash::simt::tensor
