// Exact fp32 attention backward on CUDA cores with the register tiles of the forward kernel, for
// GPUs with more than 64 KB of shared memory for a CTA. Every product, sum and exponential is fp32.
//
// A CTA owns keys, and blocks of queries pass by:
//   wait block | barrier | S = K Q^T | dP = V dO^T | dV += P dO | dK += dS Q | barrier |
//   start next block | dQ = dS^T K, added to sums
// A warp has the scores of its own keys and all passing queries, so that P is private to it; dQ
// needs dS of all warps. P and dS go through the same part of shared memory. A block has a sum of
// its own, because short sums round less. CTAs always add to dQ in turns (device/dq_turns.cuh).
#pragma once

#include <cstdint>

#include "common/device/backward_sums.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/dq_turns.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/global_order.cuh"
#include "simt/backward_config.cuh"
#include "simt/gradients.cuh"
#include "simt/tile.cuh"

namespace archflash::simt {

// Adds W times the passing rows to a gradient. W goes through the warp's part of shared memory.
template <class C>
__device__ __forceinline__ void add_tile_product(Outputs<C>& gradient_rmem, const Scores<C>& w_rmem,
                                                 float* shared,
                                                 const float* rows_smem /* (BLOCK, V_PITCH) */) {
  __syncwarp();  // all lanes have read what the warp wrote before, which is overwritten below
  store_part<C>(w_rmem, shared, 0);
  __syncwarp();  // the warp's W is complete before any lane reads it
  const Lane<C> lane;
  Outputs<C> sum_rmem = {};
  multiply_pv<C>(sum_rmem, shared + C::P_SMEM + (lane.warp_row + lane.row) * C::P_PITCH,
                 rows_smem + 4 * lane.col);
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
    for (int c = 0; c < 4 * C::OUT_GROUPS; ++c) gradient_rmem[i][c] += sum_rmem[i][c];
  }
}

// A lane's part of dQ of a block: queries row + 8 * (i / 4) + i % 4 and columns column + c, in
// fp32, where element (i, c) of lane l of a warp lies in the sums at 32 * (4 * (8 * warp + i) + c)
// + l.
struct DqPart {
  static constexpr int ROWS = 8;
  int row, column;  // of the block

  __device__ __forceinline__ DqPart(int warp, int lane, int column_warps)
      : row(warp / column_warps * DQ_WARP_ROWS + lane % 2 * 4),
        column(warp % column_warps * DQ_WARP_COLUMNS + lane / 2 * 4) {}
  static __device__ __forceinline__ int row_of(int i) { return i / 4 * 8 + i % 4; }
};

// dQ = dS^T K of all keys of the CTA, added to the sums of a block.
template <class C>
__device__ __forceinline__ void add_dq(const DqSums& sums, const float* shared, int64_t number,
                                       int turn, bool waits) {
  const int thread = ptx::mov_tid_x_volatile();
  const DqPart part(thread / 32, thread % 32, C::DQ_COLUMN_WARPS);
  const float* ds_smem = shared + C::P_SMEM + part.row;
  const float* k_smem = shared + C::OWN_FIRST_SMEM + part.column;
  float dq_rmem[DqPart::ROWS][4] = {};
#pragma unroll 1
  for (int key = 0; key < C::ROWS; key += C::KEY_STEP) {
#pragma unroll
    for (int step = 0; step < C::KEY_STEP; ++step) {
      float ds[2][4], k[4];
      load_4(ds[0], ds_smem + step * C::P_PITCH);
      load_4(ds[1], ds_smem + step * C::P_PITCH + 8);
      load_4(k, k_smem + step * C::QK_PITCH);
#pragma unroll
      for (int i = 0; i < DqPart::ROWS; ++i) {
#pragma unroll
        for (int step_c = 0; step_c < 4; ++step_c) {
          const int c = i % 2 == 0 ? step_c : 3 - step_c;  // as in multiply_pv()
          dq_rmem[i][c] = fmaf(ds[i / 4][i % 4], k[c], dq_rmem[i][c]);
        }
      }
    }
    ds_smem += C::KEY_STEP * C::P_PITCH;
    k_smem += C::KEY_STEP * C::QK_PITCH;
  }
  float* sums_gmem = sums.gmem + number * (C::BLOCK * C::HEAD_DIM) +
                     thread / 32 * (DqPart::ROWS * 4 * 32) + thread % 32;
  const auto for_each = [&](auto&& put) {
#pragma unroll
    for (int i = 0; i < DqPart::ROWS; ++i) {
#pragma unroll
      for (int c = 0; c < 4; ++c) put(sums_gmem + 32 * (4 * i + c), dq_rmem[i][c]);
    }
  };
  if (waits) {
    while (ptx::ld_acquire_s32(sums.turns_gmem + number) < turn) continue;
    for_each([](float* gmem, float x) { ptx::red_add_f32(gmem, x); });
  } else {
    for_each([](float* gmem, float x) { *gmem = x; });
  }
}

// dQ of a block of the sums for each CTA.
__device__ __forceinline__ void tiled_dq(const BackwardParams& params) {
  const DqSums& sums = params.dq_sums;
  const device::SummedBlock block = device::find_summed_block(params, blockIdx.x);
  if (block.batch < 0) return;
  // The first CTA writes a block; one to which none has come stays as it was.
  const bool any = sums.turns_gmem[blockIdx.x] != 0;
  const int lane = threadIdx.x % 32;
  const int parts = sums.block_rows * sums.columns / (4 * 32);  // element rows of all warps
  const float* sums_gmem =
      sums.gmem + static_cast<int64_t>(blockIdx.x) * sums.block_rows * sums.columns + lane;
  float* const first_gmem = static_cast<float*>(params.dq.gmem) + block.batch * params.dq.batch +
                            block.head * params.dq.head;
#pragma unroll 2
  for (int index = threadIdx.x / 32; index < parts; index += BACKWARD_DQ_THREADS / 32) {
    const DqPart part(index / DqPart::ROWS, lane, sums.columns / DQ_WARP_COLUMNS);
    const int row = block.first_row + part.row + DqPart::row_of(index % DqPart::ROWS);
    if (row >= block.rows || part.column >= params.attention.d) continue;
    float* target_gmem =
        first_gmem + (static_cast<int64_t>(block.start) + row) * params.dq.row + part.column;
    float x[4] = {};
    if (any) {
#pragma unroll
      for (int c = 0; c < 4; ++c) x[c] = sums_gmem[32 * (4 * index + c)];
    }
    store_gradient_4(target_gmem, x, params.scale, params.dq.accumulate);
  }
}

// Writes, or adds, a thread's part of a gradient times `factor`.
template <class C>
__device__ __forceinline__ void store_tile_gradient(const Outputs<C>& gradient_rmem,
                                                    const GradientParams& gradient,
                                                    const device::BackwardWork& cta, int columns,
                                                    float factor) {
  const Lane<C> lane;
  const int first = cta.first_row + lane.warp_row + lane.row;
  float* rows_gmem = static_cast<float*>(gradient.gmem) + cta.batch * gradient.batch +
                     cta.head * gradient.head +
                     (static_cast<int64_t>(cta.own_start) + first) * gradient.row;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    if (first + i * C::LANE_ROWS >= cta.own_rows) continue;
#pragma unroll
    for (int n = 0; n < C::OUT_GROUPS; ++n) {
      const int column = 4 * (n * C::LANE_COLS + lane.col);
      if (column >= columns) continue;
      const float* of_lane = &gradient_rmem[i][4 * n];
      const float x[4] = {of_lane[0], of_lane[1], of_lane[2], of_lane[3]};
      store_gradient_4(rows_gmem + i * C::LANE_ROWS * gradient.row + column, x, factor,
                       gradient.accumulate);
    }
  }
}

// Turns the scores into P = 2^(score - LSE), and dP into dS = P * (dP - delta), the gradient of the
// score before its scale. What belongs to a query and a key that it does not see becomes 0.
template <class C>
__device__ __forceinline__ void exponentiate_tile(Scores<C>& s_rmem, Scores<C>& dp_rmem,
                                                  const AttentionParams& attention,
                                                  const device::BackwardWork& cta,
                                                  int passing_first,
                                                  const device::RowTerms* terms_gmem) {
  const Lane<C> lane;
  const bool capped = attention.transform_scores && attention.rule.softcap != 0.0f;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
    const int row = cta.first_row + lane.warp_row + i * C::LANE_ROWS + lane.row;
    const int first = cta.visible.first(row), last = cta.visible.last(row);
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) {
      const int column_of_block = j * C::LANE_COLS + lane.col;
      const int column = passing_first + column_of_block;
      // dS of a key behind the end is 0 in dQ.
      const bool seen = row < cta.own_rows && column >= first && column <= last;
      float p = 0.0f, ds = 0.0f;
      if (seen) {
        float s = s_rmem[i][j];
        float slope = 1.0f;
        if (attention.transform_scores) {
          s *= attention.rule.tanh_scale;
          if (capped) slope = cap_score(s, attention.rule.softcap);
        }
        const device::RowTerms terms = terms_gmem[column_of_block];
        p = device::probability(fmaf(s, attention.exp2_scale, -terms.lse_log2));
        ds = p * (dp_rmem[i][j] - terms.delta) * slope;
      }
      s_rmem[i][j] = p;
      dp_rmem[i][j] = ds;
    }
  }
}

template <class C>
__device__ __forceinline__ void tiled_bwd(const BackwardParams& params) {
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  const AttentionParams& attention = params.attention;
  const DqSums& sums = params.dq_sums;
  device::clear_keys_of_no_sequence<C::ROWS, DK | DV>(params, blockIdx.x, C::WARPS);
  const device::BackwardWork cta =
      device::find_backward_work<Owns::Keys, C::ROWS>(attention, blockIdx.x);
  if (cta.first_row < 0) return;

  const device::DqWalk walk = device::find_dq_walk<C::ROWS, C::BLOCK>(sums, cta);
  const int turn = cta.first_row / C::ROWS;
  int blocks_left = walk.blocks<C::BLOCK>();
  device::Passing block{0, walk.last};
  const auto start_passing = [&] {
    const int head = device::passing_head<Owns::Keys>(attention, cta, block);
    const auto rows = device::query_rows<float>(
        params, cta.batch, head, static_cast<int64_t>(cta.passing_start) + block.row);
    const int begin = cta.passing_begin() - block.row, end = cta.passing_end() - block.row;
    start_load<C, C::BLOCK, C::QK_PITCH>(shared + C::FIRST_SMEM, rows.first_gmem, rows.first_row,
                                         begin, end, attention.d);
    start_load<C, C::BLOCK, C::QK_PITCH>(shared + C::SECOND_SMEM, rows.second_gmem, rows.second_row,
                                         begin, end, attention.dv);
  };
  if (blocks_left > 0) {
    const auto own = device::key_rows<float>(params, cta.batch, cta.head,
                                             static_cast<int64_t>(cta.own_start) + cta.first_row);
    const int begin = cta.own_begin() - cta.first_row, end = cta.own_end() - cta.first_row;
    start_load<C, C::ROWS, C::QK_PITCH>(shared + C::OWN_FIRST_SMEM, own.first_gmem, own.first_row,
                                        begin, end, attention.d);
    start_load<C, C::ROWS, C::QK_PITCH>(shared + C::OWN_SECOND_SMEM, own.second_gmem,
                                        own.second_row, begin, end, attention.dv);
    start_passing();
  }

  Outputs<C> dk_rmem = {}, dv_rmem = {};
  int64_t added = -1;  // the number of the block to which the CTA has added last
  // By one thread, when all have added.
  const auto pass = [&] {
    if (added >= 0 && threadIdx.x == 0) device::pass_turn(sums, added, turn);
  };
#pragma unroll 1
  while (blocks_left > 0) {
    const int warp_first = cta.first_row + Lane<C>().warp_row;
    const int warp_last = min(warp_first + C::WARP_ROWS, cta.own_rows) - 1;  // none: < warp_first
    ptx::copies_wait_all();
    __syncthreads();  // the copies of all threads have arrived, and all have added to dQ
    pass();
    // A warp whose keys have nothing to do with the block skips the work, but not the barriers.
    Scores<C> ds_rmem = {};
    if (warp_last >= warp_first &&
        !cta.visible.hides(warp_first, warp_last, block.row, block.row + C::BLOCK - 1)) {
      Scores<C> s_rmem;
      {
        const Lane<C> lane;
        const int own = (lane.warp_row + lane.row) * C::QK_PITCH;
        const int passing = lane.col * C::QK_PITCH;
        multiply_qk<C>(s_rmem, shared + C::OWN_FIRST_SMEM + own, shared + C::FIRST_SMEM + passing,
                       attention.d);
        multiply_qk<C>(ds_rmem, shared + C::OWN_SECOND_SMEM + own,
                       shared + C::SECOND_SMEM + passing, attention.dv);
      }
      const int head = device::passing_head<Owns::Keys>(attention, cta, block);
      exponentiate_tile<C>(s_rmem, ds_rmem, attention, cta, block.row,
                           device::terms_of(params, cta.batch, head,
                                            static_cast<int64_t>(cta.passing_start) + block.row));
      add_tile_product<C>(dv_rmem, s_rmem, shared, shared + C::SECOND_SMEM);
      add_tile_product<C>(dk_rmem, ds_rmem, shared, shared + C::FIRST_SMEM);
    } else {
      store_part<C>(ds_rmem, shared, 0);  // zeros, which dQ reads
    }
    added = device::dq_block_number(params, cta, block, C::BLOCK);
    const bool waits = walk.waits(block);
    if (++block.head == cta.heads) {
      block = {0, block.row - C::BLOCK};
      --blocks_left;
    }
    __syncthreads();  // dS is complete, and no warp still reads the block, which is overwritten
                      // next
    if (blocks_left > 0) start_passing();
    add_dq<C>(sums, shared, added, turn, waits);
  }
  __syncthreads();  // all have added to dQ
  pass();

  store_tile_gradient<C>(dk_rmem, params.dk, cta, attention.d, params.scale);
  store_tile_gradient<C>(dv_rmem, params.dv, cta, attention.dv, 1.0f);
}

// Adds up the shares of dK and dV of CTAs that share out the query heads of a tile of keys, in
// their order: 8 columns of a row by each thread, as device/backward_shares.cuh does for 16 bits.
__device__ __forceinline__ void add_shares(const SharedGradientsParams& params) {
  const int64_t number = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (number >= params.all_chunks) return;
  const int64_t row_of_all = number / params.chunks, head_of_all = row_of_all / params.nk;
  const int64_t row = row_of_all % params.nk;
  const int chunk = static_cast<int>(number % params.chunks);
  const bool of_dk = chunk < params.d_chunks;
  const int column = 8 * (of_dk ? chunk : chunk - params.d_chunks);
  const int columns = 8 * (of_dk ? params.d_chunks : params.chunks - params.d_chunks);
  const float* shares_gmem = (of_dk ? params.dk_shares_gmem : params.dv_shares_gmem) +
                             (head_of_all * params.shares * params.nk + row) * columns + column;
  const GradientParams& gradient = of_dk ? params.dk : params.dv;
  float* target_gmem = static_cast<float*>(gradient.gmem) +
                       head_of_all / params.heads_kv * gradient.batch +
                       head_of_all % params.heads_kv * gradient.head + row * gradient.row + column;
#pragma unroll
  for (int half = 0; half < 8; half += 4) {
    float sum[4] = {};
    for (int share = 0; share < params.shares; ++share) {
      float x[4];
      load_4(x, shares_gmem + static_cast<int64_t>(share) * params.nk * columns + half);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += x[c];
    }
    store_gradient_4(target_gmem + half, sum, 1.0f, gradient.accumulate != 0);
  }
}

}  // namespace archflash::simt
