// Attention backward for fp32 inputs on mma.sync tensor cores (tensor_parts.cuh) in one kernel: 5
// products of queries and keys, S and dP in sums of 8 columns, the others of SUM queries or keys.
//
// A CTA owns ROWS keys; blocks of BLOCK queries pass by. Each warp owns 16 of the keys; SPLIT warps
// share the same ones, and each has the scores of a share of the queries. Its dK and dV are of
// these queries alone, and are added up at the end; or, where registers do not suffice for all
// columns, of a share of the columns: then the warps read the P and dS of one another.
//   wait Q, dO | barrier | S^T = K Q^T  dP^T = V dO^T  P  dS  dV += P^T dO  dK += dS^T Q  dS ->
//   shared barrier | start next Q, dO | dQ = dS K of all keys of the CTA, added to the sums
//
// The order of keys and columns is that of tensor_fwd.cuh. So every fragment but those of dS is
// read by 16 bytes, and P and dS of a warp are operand A as they lie.
#pragma once

#include <cstdint>

#include "common/device/backward_sums.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/dq_turns.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/named_barrier.cuh"
#include "simt/gradients.cuh"
#include "simt/tensor_config.cuh"
#include "simt/tensor_parts.cuh"
#include "simt/tiled_bwd.cuh"

namespace archflash::simt::tensor {

// Rows lie in shared memory without padding. Chunk c (4 columns) of row r is at c ^ swizzle(r), so
// that neither eight lanes that read four neighbouring chunks of two rows hit a bank twice, nor
// eight that read two of every second row.
__device__ __forceinline__ int swizzle(int row) { return (row / 2 % 4 * 2) ^ (row % 2 * 4); }

// Scores of a warp's 16 keys and its share of a block's queries: lane l has keys l/4 and l/4 + 8,
// and of each the queries 8n + 2*(l%4) and the next one.
template <class C>
using BlockScores = float[C::PART / 8][4];
// Lane l has rows l/4 and l/4 + 8, and in [4 * n + j] their columns 32n + 8*(l%4) + j and 4 more.
template <int COLUMNS>
using Gradient = float[COLUMNS / 8][4];

// Starts the copy of rows. Those before `begin` and from `end` on become zeros, and columns from
// `columns` on.
template <class C, int ROWS>
__device__ __forceinline__ void start_rows(float* tile_smem, const float* rows_gmem,
                                           int64_t row_stride, int begin, int end, int columns) {
  constexpr int CHUNKS = C::HEAD_DIM / 4, ROWS_PER_STEP = C::THREADS / CHUNKS;
  // In every second step of 4 rows the swizzle differs by 4 chunks, else by none.
  static_assert(ROWS_PER_STEP % 4 == 0);
  const int thread = ptx::mov_tid_x_volatile();
  const int row = thread / CHUNKS, chunk = thread % CHUNKS;
  // Rows to copy: from the one to the other, counted from `row` on.
  const int first = begin - row, behind = 4 * chunk < columns ? end - row : 0;
  const float* source = rows_gmem + row * row_stride + 4 * chunk;
  float* const target = tile_smem + row * C::HEAD_DIM + 4 * (chunk ^ swizzle(row));
  float* const odd_target = tile_smem + row * C::HEAD_DIM + 4 * (chunk ^ swizzle(row) ^ 4);
#pragma unroll
  for (int step = 0; step < ROWS; step += ROWS_PER_STEP) {
    const bool valid = step >= first && step < behind;
    ptx::copy_16_bytes_async((step % 8 == 0 ? target : odd_target) + step * C::HEAD_DIM,
                             valid ? source : rows_gmem, valid);
    source += ROWS_PER_STEP * row_stride;
  }
}

// Products of a warp's 16 owned rows with its share of the passing rows, over `columns` columns.
// own_smem and passing_smem: this lane's first row of either. Each 8 columns have sums of their
// own: what tensor cores cut off of a score is an error of its P, and so of all three gradients.
template <class C>
__device__ __forceinline__ void multiply_rows(BlockScores<C>& s_rmem, const float* own_smem,
                                              const float* passing_smem, int columns) {
  constexpr int TILES = C::PART / 8;
  const int lane = ptx::mov_tid_x_volatile() % 32;
  const int even_chunks = 4 * (lane % 4 ^ swizzle(lane / 4));  // odd ones: 16 columns further
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s_rmem[n][i] = 0.0f;
  }
#pragma unroll 1
  for (int column = 0; column < columns; column += 16) {
    // Columns 4t and 4t+1 are one step of mma.sync, 4t+2 and 4t+3 the other one.
    const int chunk = (column & ~31) + (even_chunks ^ (column & 16));
    Parts own[2];
    {
      float row[2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) load_4(row[r], own_smem + 8 * r * C::HEAD_DIM + chunk);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        split<false>(row[i % 2][i / 2], own[i / 4].big[i % 4], own[i / 4].small[i % 4]);
    }
    // Without this barrier ptxas loads so much ahead that it spills.
    __syncwarp();
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      float row[4];
      load_4(row, passing_smem + 8 * n * C::HEAD_DIM + chunk);
      uint32_t big[4], small[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) split<false>(row[i], big[i], small[i]);
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        float sum[4] = {};  // the products with a small factor come first
        multiply(sum, sum, own[step], big[2 * step], big[2 * step + 1], small[2 * step],
                 small[2 * step + 1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) s_rmem[n][i] += sum[i];
      }
    }
  }
}

// x += W times 32 columns of 8 * STEPS rows of shared memory. w_of(step): the operand A of 8 of
// these rows. rows_smem: the first row, at the first of the columns.
template <class C, int STEPS, class Operand>
__device__ __forceinline__ void add_columns(float* x_rmem /* [4][4] */, const float* rows_smem,
                                            const Operand& w_of) {
  const int lane = ptx::mov_tid_x_volatile() % 32;
#pragma unroll
  for (int first = 0; first < STEPS; first += C::SUM / 8) {
    float sum_rmem[4][4] = {}, small_rmem[4][4] = {};
    // Without this barrier ptxas loads so much ahead that it spills.
    __syncwarp();
#pragma unroll
    for (int step = first; step < first + C::SUM / 8; ++step) {
      const Parts w = w_of(step);
      uint32_t big[2][4], small[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane % 4 * 2 + i;
        float x[4];
        load_4(x, rows_smem + (8 * step + row) * C::HEAD_DIM + 4 * (lane / 4 ^ swizzle(row)));
#pragma unroll
        for (int j = 0; j < 4; ++j) split<false>(x[j], big[i][j], small[i][j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        multiply(sum_rmem[j], small_rmem[j], w, big[0][j], big[1][j], small[0][j], small[1][j]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) x_rmem[4 * j + i] += sum_rmem[j][i] + small_rmem[j][i];
    }
  }
}

// Adds W, which is P or dS, times passing rows to a gradient: the warp's share of both.
// element(step, i): element [step][i] of W, as in BlockScores. rows_smem: the first row, at the
// first of the warp's columns, of which there are `columns`.
template <class C, class Element>
__device__ __forceinline__ void add_product(Gradient<C::GRADIENT_COLUMNS>& gradient_rmem,
                                            const float* rows_smem, int columns,
                                            const Element& element) {
  constexpr int STEPS = C::GRADIENT_QUERIES / 8;
#pragma unroll
  for (int n = 0; n < C::GRADIENT_COLUMNS / 32; ++n) {
    if (32 * n >= columns) break;
    add_columns<C, STEPS>(&gradient_rmem[4 * n][0], rows_smem + 32 * n, [&](int step) {
      Parts w;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        split<false>(element(step, i), w.big[i / 2 + i % 2 * 2], w.small[i / 2 + i % 2 * 2]);
      return w;
    });
  }
}

// Turns the scores into P = 2^(score - LSE), and dP into dS = P * (dP - delta), the gradient of the
// score before its scale. What belongs to a query and a key that it does not see becomes 0.
// warp_row: the warp's first key of the CTA; first: its first query.
template <class C>
__device__ __forceinline__ void exponentiate(BlockScores<C>& s_rmem, BlockScores<C>& dp_rmem,
                                             const AttentionParams& attention,
                                             const device::BackwardWork& cta, int warp_row,
                                             int first, const device::RowTerms* terms_smem) {
  const int lane = ptx::mov_tid_x_volatile() % 32;
  const auto for_each = [&](auto&& act) {
#pragma unroll
    for (int n = 0; n < C::PART / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        act(s_rmem[n][i], dp_rmem[n][i], i / 2, 8 * n + lane % 4 * 2 + i % 2);
    }
  };
  for_each([&](float&, float& dp, int, int query) { dp -= terms_smem[query].delta; });
  if (attention.transform_scores) {
    const bool capped = attention.rule.softcap != 0.0f;
    for_each([&](float& s, float& dp, int, int) {
      s *= attention.rule.tanh_scale;
      if (capped) dp *= cap_score(s, attention.rule.softcap);
    });
  }
  int row[2], begin[2], last[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row[r] = cta.first_row + warp_row + 8 * r + lane / 4;
    // dS of a key behind the end is 0 in dQ.
    begin[r] = row[r] < cta.own_rows ? cta.visible.first(row[r]) : INT32_MAX;
    last[r] = cta.visible.last(row[r]);
  }
  for_each([&](float& s, float& dp, int r, int query) {
    const bool seen = first + query >= begin[r] && first + query <= last[r];
    const float exponent = fmaf(s, attention.exp2_scale, -terms_smem[query].lse_log2);
    s = seen ? device::probability(exponent) : 0.0f;
    dp = seen ? s * dp : 0.0f;
  });
}

// dQ = dS K of all keys of the CTA, added to the sums of a block, which lie as DqPart says.
template <class C>
__device__ __forceinline__ void add_dq(const DqSums& sums, const float* shared, int columns,
                                       int64_t number, int turn, bool waits) {
  const int thread = ptx::mov_tid_x_volatile();
  const int lane = thread % 32, warp = thread / 32;
  const int first_column = warp % C::DQ_COLUMN_WARPS * DQ_WARP_COLUMNS;
  const float* ds_smem = shared + C::DS_SMEM +
                         (warp / C::DQ_COLUMN_WARPS * DQ_WARP_ROWS + lane / 4) * C::DS_PITCH +
                         lane % 4 * 2;
  // The element of the lane's row l/4 and column 8 * (l%4), of those of its warp.
  float* sums_gmem = sums.gmem + number * (C::BLOCK * C::HEAD_DIM) +
                     32 * 4 * (DqPart::ROWS * warp + lane / 4 % 4) + lane % 4 * 4 + lane / 16;
#pragma unroll 1
  for (int n = 0; n < DQ_WARP_COLUMNS / 32; ++n) {
    float dq_rmem[4][4] = {};
    if (first_column + 32 * n < columns) {
      add_columns<C, C::ROWS / 8>(
          &dq_rmem[0][0], shared + C::OWN_FIRST_SMEM + first_column + 32 * n, [&](int step) {
            Parts ds;
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const float2 x =
                  *reinterpret_cast<const float2*>(ds_smem + 8 * r * C::DS_PITCH + 8 * step);
              split<false>(x.x, ds.big[r], ds.small[r]);
              split<false>(x.y, ds.big[r + 2], ds.small[r + 2]);
            }
            return ds;
          });
    }
    const auto for_each = [&](auto&& put) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
          for (int j = 0; j < 4; ++j)
            put(sums_gmem + 512 * r + 32 * j + 16 * n + 2 * half, dq_rmem[j][2 * r + half]);
        }
      }
    };
    if (waits) {
      while (ptx::ld_acquire_s32(sums.turns_gmem + number) < turn) continue;
      for_each([](float* gmem, float x) { ptx::red_add_f32(gmem, x); });
    } else {
      for_each([](float* gmem, float x) { *gmem = x; });
    }
  }
}

// Writes, or adds, a warp's part of a gradient times `factor`: from column `first_column` on, of
// `columns`.
template <class C>
__device__ __forceinline__ void store_gradient(const Gradient<C::GRADIENT_COLUMNS>& gradient_rmem,
                                               const GradientParams& gradient,
                                               const device::BackwardWork& cta, int warp_row,
                                               int first_column, int columns, float factor) {
  const int lane = ptx::mov_tid_x_volatile() % 32;
  const int first = cta.first_row + warp_row + lane / 4;
  float* rows_gmem = static_cast<float*>(gradient.gmem) + cta.batch * gradient.batch +
                     cta.head * gradient.head +
                     (static_cast<int64_t>(cta.own_start) + first) * gradient.row;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (first + 8 * r >= cta.own_rows) continue;
#pragma unroll
    for (int n = 0; n < C::GRADIENT_COLUMNS / 32; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = first_column + 32 * n + lane % 4 * 8 + 4 * half;
        if (column >= columns) continue;
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = gradient_rmem[4 * n + j][2 * r + half];
        store_gradient_4(rows_gmem + 8 * r * gradient.row + column, x, factor, gradient.accumulate);
      }
    }
  }
}

// What the CTA works on, in shared memory: it is read when it is needed, so that it takes no
// registers.
struct TensorWork : device::BackwardWork {
  device::DqWalk walk;
};

template <class C>
__device__ __forceinline__ void attention_bwd(const BackwardParams& params) {
  extern __shared__ float4 shared_memory[];
  float* shared = reinterpret_cast<float*>(shared_memory);
  device::RowTerms* terms_smem = reinterpret_cast<device::RowTerms*>(shared + C::TERMS_SMEM);
  const AttentionParams& attention = params.attention;
  const DqSums& sums = params.dq_sums;
  device::clear_keys_of_no_sequence<C::ROWS, DK | DV>(params, blockIdx.x, C::WARPS);
  static_assert(sizeof(TensorWork) <= C::WORK_BYTES);
  TensorWork& cta = *reinterpret_cast<TensorWork*>(shared + C::WORK_SMEM);
  {
    const device::BackwardWork found =
        device::find_backward_work<Owns::Keys, C::ROWS>(attention, blockIdx.x);
    if (found.first_row < 0) return;
    if (threadIdx.x == 0) {
      static_cast<device::BackwardWork&>(cta) = found;
      cta.walk = device::find_dq_walk<C::ROWS, C::BLOCK>(sums, found);
    }
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  const int turn = cta.first_row / C::ROWS;
  int blocks_left = cta.walk.blocks<C::BLOCK>();
  device::Passing block{0, cta.walk.last};
  const auto start_passing = [&] {
    const int head = device::passing_head<Owns::Keys>(attention, cta, block);
    const int64_t row = static_cast<int64_t>(cta.passing_start) + block.row;
    const auto rows = device::query_rows<float>(params, cta.batch, head, row);
    const int begin = cta.passing_begin() - block.row, end = cta.passing_end() - block.row;
    start_rows<C, C::BLOCK>(shared + C::FIRST_SMEM, rows.first_gmem, rows.first_row, begin, end,
                            attention.d);
    start_rows<C, C::BLOCK>(shared + C::SECOND_SMEM, rows.second_gmem, rows.second_row, begin, end,
                            attention.dv);
    const device::RowTerms* terms_gmem = device::terms_of(params, cta.batch, head, row);
    const int thread = ptx::mov_tid_x_volatile();
    if (thread < C::BLOCK) {
      const bool exists = thread < end;
      ptx::cp_async_ca_8(static_cast<uint32_t>(__cvta_generic_to_shared(terms_smem + thread)),
                         exists ? terms_gmem + thread : terms_gmem, exists ? 8 : 0);
    }
  };
  if (blocks_left > 0) {
    const auto own = device::key_rows<float>(params, cta.batch, cta.head,
                                             static_cast<int64_t>(cta.own_start) + cta.first_row);
    const int begin = cta.own_begin() - cta.first_row, end = cta.own_end() - cta.first_row;
    start_rows<C, C::ROWS>(shared + C::OWN_FIRST_SMEM, own.first_gmem, own.first_row, begin, end,
                           attention.d);
    start_rows<C, C::ROWS>(shared + C::OWN_SECOND_SMEM, own.second_gmem, own.second_row, begin, end,
                           attention.dv);
    start_passing();
  }

  Gradient<C::GRADIENT_COLUMNS> dk_rmem = {}, dv_rmem = {};
  int64_t added = -1;  // the number of the block to which the CTA has added last
  // By one thread, when all have added.
  const auto pass = [&] {
    if (added >= 0 && threadIdx.x == 0) device::pass_turn(sums, added, turn);
  };
#pragma unroll 1
  while (blocks_left > 0) {
    const int thread = ptx::mov_tid_x_volatile();
    const int lane_row = thread % 32 / 4, part = thread / 32 % C::SPLIT;
    const int warp_row = thread / 32 / C::SPLIT * C::WARP_ROWS;
    const int warp_first = cta.first_row + warp_row;
    const int warp_last = min(warp_first + C::WARP_ROWS, cta.own_rows) - 1;  // none: < warp_first
    const int first = block.row + part * C::PART;
    ptx::copies_wait_all();
    __syncthreads();  // the copies of all threads have arrived, and all have added to dQ
    pass();
    // Where this lane has elements of P, and of dS.
    const int of_lane = (part * C::PART + thread % 4 * 2) * C::DS_PITCH + warp_row + lane_row;
    const auto element = [&](int first_smem) {
      return [=](int n, int i) -> float& {
        return shared[first_smem + (8 * n + i % 2) * C::DS_PITCH + i / 2 * 8];
      };
    };
    const auto store = [&](const BlockScores<C>& x_rmem, int first_smem) {
      const auto place = element(first_smem + of_lane);
#pragma unroll
      for (int n = 0; n < C::PART / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) place(n, i) = x_rmem[n][i];
      }
    };
    const auto hides = [&](int row, int rows) {
      return warp_last < warp_first ||
             cta.visible.hides(warp_first, warp_last, row, row + rows - 1);
    };
    // A warp whose keys have nothing to do with its queries skips the work, but not the barriers.
    const bool computes = !hides(first, C::PART);
    const int passing = part * C::PART * C::HEAD_DIM;
    BlockScores<C> s_rmem = {}, ds_rmem = {};
    if (computes) {
      const int own = (warp_row + lane_row) * C::HEAD_DIM;
      const int passing_of_lane = passing + lane_row * C::HEAD_DIM;
      multiply_rows<C>(s_rmem, shared + C::OWN_FIRST_SMEM + own,
                       shared + C::FIRST_SMEM + passing_of_lane, attention.d);
      multiply_rows<C>(ds_rmem, shared + C::OWN_SECOND_SMEM + own,
                       shared + C::SECOND_SMEM + passing_of_lane, attention.dv);
      exponentiate<C>(s_rmem, ds_rmem, attention, cta, warp_row, first,
                      terms_smem + part * C::PART);
    }
    if constexpr (C::SHARES_COLUMNS) {
      store(s_rmem, C::P_SMEM);
      store(ds_rmem, C::DS_SMEM);
      // Both warps that share the keys have stored P and dS before either reads them.
      ptx::bar_sync(1 + thread / 64, 64);
      if (!hides(block.row, C::BLOCK)) {
        const int column = part * C::GRADIENT_COLUMNS;
        const int all_of_lane = of_lane - part * C::PART * C::DS_PITCH;
        add_product<C>(dv_rmem, shared + C::SECOND_SMEM + column, attention.dv - column,
                       element(C::P_SMEM + all_of_lane));
        add_product<C>(dk_rmem, shared + C::FIRST_SMEM + column, attention.d - column,
                       element(C::DS_SMEM + all_of_lane));
      }
    } else if (computes) {
      // A lane reads its own P back, and dS: in registers they would be split once for all columns,
      // which takes more of them than there are.
      store(s_rmem, C::DS_SMEM);
      add_product<C>(dv_rmem, shared + C::SECOND_SMEM + passing, attention.dv,
                     element(C::DS_SMEM + of_lane));
      store(ds_rmem, C::DS_SMEM);
      add_product<C>(dk_rmem, shared + C::FIRST_SMEM + passing, attention.d,
                     element(C::DS_SMEM + of_lane));
    } else {
      store(ds_rmem, C::DS_SMEM);  // zeros, which dQ reads
    }
    added = device::dq_block_number(params, cta, block, C::BLOCK);
    const bool waits = cta.walk.waits(block);
    if (++block.head == cta.heads) {
      block = {0, block.row - C::BLOCK};
      --blocks_left;
    }
    __syncthreads();  // dS is complete, and no warp still reads the block, which is overwritten
                      // next
    if (blocks_left > 0) start_passing();
    add_dq<C>(sums, shared, attention.d, added, turn, waits);
  }
  __syncthreads();  // all have added to dQ
  pass();

  const int thread = ptx::mov_tid_x_volatile();
  const int part = thread / 32 % C::SPLIT;
  const int warp_row = thread / 32 / C::SPLIT * C::WARP_ROWS;
  if constexpr (C::SPLIT == 2 && !C::SHARES_COLUMNS) {
    // The first of the two warps that share their keys adds up dV, the second one dK.
    const auto place = [&](int of_part) {
      return shared + (of_part == 0 ? C::FIRST_SMEM : C::SECOND_SMEM) + warp_row * C::HEAD_DIM +
             thread % 32;
    };
    const auto for_each = [&](auto& gradient_rmem, float* smem, auto&& act) {
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) act(gradient_rmem[n][i], smem + 32 * (4 * n + i));
      }
    };
    const auto put = [](float x, float* smem) { *smem = x; };
    const auto add = [](float& x, const float* smem) { x += *smem; };
    if (part == 0) {
      for_each(dk_rmem, place(1), put);
    } else {
      for_each(dv_rmem, place(0), put);
    }
    __syncthreads();  // both have written what the other one adds
    if (part == 0) {
      for_each(dv_rmem, place(0), add);
    } else {
      for_each(dk_rmem, place(1), add);
    }
  }
  const int first_column = C::SHARES_COLUMNS ? part * C::GRADIENT_COLUMNS : 0;
  if (C::SPLIT == 1 || C::SHARES_COLUMNS || part == 1)
    store_gradient<C>(dk_rmem, params.dk, cta, warp_row, first_column, attention.d, params.scale);
  if (C::SPLIT == 1 || C::SHARES_COLUMNS || part == 0)
    store_gradient<C>(dv_rmem, params.dv, cta, warp_row, first_column, attention.dv, 1.0f);
}

}  // namespace archflash::simt::tensor
