// The gradients of attention to listed keys (key_indices), on mma.sync and cp.async, for every GPU
// from compute capability 8.0 on. Only rows of K and V that lists name are read.
//
// A CTA has up to BLOCK_Q rows that share a list, as in gather_fwd.cuh, and walks the list. dQ of
// its rows is its own and stays in registers. dK and dV of a key belong to all lists that name it:
// the CTAs add theirs to sums in fp32 (KeySums), which device::list_gradients() converts in the
// end: in any order, so that sums may have other last bits each time, or in turns (ListOrder).
//
//   wait for rows | barrier | S = Q K^T  dP = dO V^T | P, dS to shared memory | barrier
//   | dQ += dS K | dV = P^T dO, added to the sums | dK = dS^T Q, added to the sums
//
// The first barrier makes the copies and the positions of the next block visible to all threads,
// and no warp still reads P and dS of the block before, or its stage. With one stage the copies of
// the next block start behind dQ and a third barrier, with two behind the first one.
#pragma once

#include <cstdint>

#include "ampere/list_bwd_config.cuh"
#include "common/attention_params.h"
#include "common/device/backward_rows.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/key_lists.cuh"
#include "common/device/list_backward.cuh"
#include "common/device/online_softmax.cuh"
#include "common/list_backward_params.h"
#include "common/mma_sync/attention_bwd.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/st_shared.cuh"

namespace archflash::ampere {

// The positions of the keys of POSITION_BLOCKS blocks, in shared memory. An entry that no row of
// the CTA sees has position NO_KEY.
template <class C>
__device__ __forceinline__ int* positions_of(unsigned char* shared, int block) {
  return reinterpret_cast<int*>(shared + C::POSITIONS_SMEM) +
         static_cast<unsigned>(block) % C::POSITION_BLOCKS * C::BLOCK_K;
}

// Starts the copy of the rows of K and V of a block. Rows of no key become zeros.
template <class C>
__device__ __forceinline__ void start_listed_rows(uint32_t stage_smem, const int* positions,
                                                  const AttentionParams& attention,
                                                  const device::ListBackwardWork<>& cta) {
  const auto row_of = [&](const uint16_t* gmem, int64_t row_stride) {
    return [=](int number) -> const uint16_t* {
      const int position = positions[number];
      return position == device::NO_KEY ? nullptr : gmem + position * row_stride;
    };
  };
  const uint16_t* any_gmem = static_cast<const uint16_t*>(attention.q_gmem);
  mma_sync::start_rows_load<C, typename C::FirstTile, C::BLOCK_K>(
      stage_smem, attention.d, any_gmem, row_of(cta.k_gmem, attention.k_row));
  mma_sync::start_rows_load<C, typename C::SecondTile, C::BLOCK_K>(
      stage_smem + C::V_OF_STAGE, attention.dv, any_gmem, row_of(cta.v_gmem, attention.v_row));
}

// Starts the copies of Q and dO of the CTA's rows.
template <class C>
__device__ __forceinline__ void start_rows(uint32_t shared_smem, const ListBackwardParams& params,
                                           const device::ListBackwardWork<>& cta) {
  const AttentionParams& attention = params.call.attention;
  const uint16_t* any_gmem = static_cast<const uint16_t*>(attention.q_gmem);
  mma_sync::start_rows_load<C, typename C::FirstTile, C::BLOCK_Q>(
      shared_smem, attention.d, any_gmem,
      device::listing_rows(params, cta, attention.q_gmem, attention.q_batch, attention.q_head,
                           attention.q_row));
  mma_sync::start_rows_load<C, typename C::SecondTile, C::BLOCK_Q>(
      shared_smem + C::DOUT_SMEM, attention.dv, any_gmem,
      device::listing_rows(params, cta, params.call.dout_gmem, params.call.dout_batch,
                           params.call.dout_head, params.call.dout_row));
}

// The terms of a lane's rows; [m][r] is row lane/4 + 8r of row tile m.
template <class C>
using LaneTerms = device::RowTerms[C::M_TILES][2];

template <class C>
__device__ __forceinline__ void load_terms(LaneTerms<C>& terms, const ListBackwardParams& params,
                                           const device::Work& work, int warp_row, int lane) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const device::FewRow row(params.call.attention, params.packed_heads, work,
                               warp_row + 16 * m + 8 * r + lane / 4);
      terms[m][r] = {-device::MINUS_INFINITY, 0.0f};  // P is 0
      if (row.wanted) {
        terms[m][r] = static_cast<const device::RowTerms*>(
            params.call.terms_gmem)[row.lse_index(params.call.attention)];
      }
    }
  }
}

// Sets P and dS to 0 where a row does not see a key. positions: of the lane's first key on.
template <class C>
__device__ __forceinline__ void clear_unlisted(mma_sync::BlockScores<C>& p_rmem,
                                               mma_sync::BlockScores<C>& ds_rmem,
                                               const ListBackwardParams& params,
                                               const device::ListBackwardWork<>& cta,
                                               const int* positions, int lane_row) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
    const int2 position = *reinterpret_cast<const int2*>(positions + 8 * n);
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = cta.work.first_row + params.packed_heads.row(lane_row + 16 * m + 8 * r);
        const int first = cta.visible.first(row), last = cta.visible.last(row);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = i == 0 ? position.x : position.y;
          if (key >= first && key <= last) continue;
          p_rmem[m][n][2 * r + i] = 0.0f;
          ds_rmem[m][n][2 * r + i] = 0.0f;
        }
      }
    }
  }
}

// Writes a warp's P or dS into the tile of the CTA, whose rows are queries.
template <class C>
__device__ __forceinline__ void store_tile(uint32_t tile_smem,
                                           const mma_sync::BlockScores<C>& x_rmem, int warp_row,
                                           int first_key, int lane) {
  using Tile = typename C::ScoreTile;
  const uint32_t lane_smem =
      Tile::advance(tile_smem + warp_row * Tile::ROW_BYTES + Tile::offset(lane / 4, 0),
                    first_key / 8) +
      lane % 4 * 4;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        ptx::st_shared_b32(
            Tile::advance(lane_smem, n) + (16 * m + 8 * r) * Tile::ROW_BYTES,
            ptx::cvt_rn_x2_f32<C::DTYPE>(x_rmem[m][n][2 * r], x_rmem[m][n][2 * r + 1]));
      }
    }
  }
}

// Adds to a warp's part of dQ the product of dS of its rows and K of all keys of the block.
template <class C, int COLUMN_TILES>
__device__ __forceinline__ void multiply_dq(float (&dq_rmem)[C::M_TILES][COLUMN_TILES][4],
                                            uint32_t ds_smem, uint32_t k_smem, int warp_row,
                                            int share, int lane) {
  using Scores = typename C::ScoreTile;
  using Tile = typename C::FirstTile;
  const uint32_t a_smem =
      ds_smem + warp_row * Scores::ROW_BYTES + mma_sync::rows_first_offset<Scores>(lane);
  const uint32_t b_smem =
      Tile::advance(k_smem + mma_sync::rows_first_offset<Tile>(lane), 2 * share);
#pragma unroll
  for (int key = 0; key < C::BLOCK_K; key += 16) {
    uint32_t a_rmem[C::M_TILES][4];
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m)
      ptx::ldmatrix_x4(a_rmem[m], Scores::advance(a_smem, key / 8) + m * 16 * Scores::ROW_BYTES);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n += 2) {
      uint32_t b_rmem[4];
      ptx::ldmatrix_x4_trans(b_rmem,
                             Tile::advance(b_smem, n * C::COLUMN_WARPS) + key * Tile::ROW_BYTES);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        ptx::mma_m16n8k16<C::DTYPE>(dq_rmem[m][n], a_rmem[m], b_rmem[0], b_rmem[1]);
        ptx::mma_m16n8k16<C::DTYPE>(dq_rmem[m][n + 1], a_rmem[m], b_rmem[2], b_rmem[3]);
      }
    }
  }
}

// Adds to the sums of a block's keys the product of P or dS, transposed, and dO or Q, all rows of
// the CTA: of a warp's keys, and of its share of the columns. positions: of the warp's keys.
template <class C, class Tile>
__device__ __forceinline__ void add_to_keys(float* sums_gmem, int columns, const int* positions,
                                            uint32_t scores_smem, uint32_t rows_smem, int first_key,
                                            int share, int lane) {
  using Scores = typename C::ScoreTile;
  constexpr int PAIRS = Tile::COLUMNS / 16 / C::SUM_WARPS;            // of column tiles
  constexpr int STEP = PAIRS % C::SUM_PAIRS == 0 ? C::SUM_PAIRS : 1;  // pairs at a time
  constexpr int M_TILES = C::SUM_KEYS / 16;
  const uint32_t a_smem =
      Scores::advance(scores_smem + mma_sync::columns_first_offset<Scores>(lane), first_key / 8);
  const uint32_t b_smem =
      Tile::advance(rows_smem + mma_sync::rows_first_offset<Tile>(lane), 2 * share);
#pragma unroll
  for (int pair = 0; pair < PAIRS; pair += STEP) {
    if (16 * (pair * C::SUM_WARPS + share) >= columns) break;
    float x_rmem[M_TILES][2 * STEP][4] = {};
#pragma unroll
    for (int row = 0; row < C::BLOCK_Q; row += 16) {
      uint32_t a_rmem[M_TILES][4];
#pragma unroll
      for (int m = 0; m < M_TILES; ++m)
        ptx::ldmatrix_x4_trans(a_rmem[m], Scores::advance(a_smem, m * 2) + row * Scores::ROW_BYTES);
#pragma unroll
      for (int n = 0; n < STEP; ++n) {
        uint32_t b_rmem[4];
        ptx::ldmatrix_x4_trans(
            b_rmem, Tile::advance(b_smem, 2 * (pair + n) * C::SUM_WARPS) + row * Tile::ROW_BYTES);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m) {
          ptx::mma_m16n8k16<C::DTYPE>(x_rmem[m][2 * n], a_rmem[m], b_rmem[0], b_rmem[1]);
          ptx::mma_m16n8k16<C::DTYPE>(x_rmem[m][2 * n + 1], a_rmem[m], b_rmem[2], b_rmem[3]);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int position = positions[16 * m + 8 * r + lane / 4];
        if (position == device::NO_KEY) continue;
        float* row_gmem =
            sums_gmem + static_cast<int64_t>(position) * columns + device::list_sum_place(lane);
#pragma unroll
        for (int n = 0; n < STEP; ++n) {
          const int column = 16 * ((pair + n) * C::SUM_WARPS + share);
          if (column >= columns) continue;
          const float* x = &x_rmem[m][2 * n][2 * r];
          const float* y = &x_rmem[m][2 * n + 1][2 * r];
          device::add_four(row_gmem + column, x[0], x[1], y[0], y[1]);
        }
      }
    }
  }
}

// Writes, or adds, a warp's part of dQ.
template <class C, int COLUMN_TILES>
__device__ __forceinline__ void store_dq(const float (&dq_rmem)[C::M_TILES][COLUMN_TILES][4],
                                         const ListBackwardParams& params, const device::Work& work,
                                         int warp_row, int share, int lane) {
  const GradientParams& dq = params.call.dq;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const device::FewRow row(params.call.attention, params.packed_heads, work,
                               warp_row + 16 * m + 8 * r + lane / 4);
      if (!row.wanted) continue;
      const int64_t start = row.batch * dq.batch + row.head * dq.head + row.packed * dq.row;
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; ++n) {
        const int column = 16 * (n / 2 * C::COLUMN_WARPS + share) + n % 2 * 8 + lane % 4 * 2;
        if (column >= params.call.attention.d) continue;
        const float* x = &dq_rmem[m][n][2 * r];
        device::store_gradient_pair<C::DTYPE>(dq, start + column,
                                              {x[0] * params.call.scale, x[1] * params.call.scale});
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void list_bwd(const ListBackwardParams& params) {
  using FirstTile = typename C::FirstTile;
  using SecondTile = typename C::SecondTile;
  using ScoreTile = typename C::ScoreTile;
  using FirstProduct = mma_sync::BackwardProduct<C, FirstTile>;
  using SecondProduct = mma_sync::BackwardProduct<C, SecondTile>;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(device::ListBackwardWork<>) <= C::CONTEXT_BYTES);
  device::ListBackwardWork<>& cta =
      *reinterpret_cast<device::ListBackwardWork<>*>(shared + C::CONTEXT_SMEM);
  const AttentionParams& attention = params.call.attention;
  {
    const device::TileInOrder tile(params.order);
    const device::Work work =
        device::find_list_work(attention, params.lists, params.packed_heads, tile.index);
    if (work.first_row < 0) return device::pass_turns(params.order);
    if (threadIdx.x == 0) cta = device::find_list_backward_work(params, work, tile.chain);
  }
  mma_sync::clear_columns<C, FirstTile>(shared, C::BLOCK_Q, attention.d);
  mma_sync::clear_columns<C, SecondTile>(shared + C::DOUT_SMEM, C::BLOCK_Q, attention.dv);
#pragma unroll 1
  for (int stage = 0; stage < C::STAGES; ++stage) {
    unsigned char* k = shared + C::STAGES_SMEM + stage * C::STAGE_BYTES;
    mma_sync::clear_columns<C, FirstTile>(k, C::BLOCK_K, attention.d);
    mma_sync::clear_columns<C, SecondTile>(k + C::V_OF_STAGE, C::BLOCK_K, attention.dv);
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it
  device::find_rows_that_see<C::THREADS>(cta, params.packed_heads.rows());

  const int blocks = (cta.list.count + C::BLOCK_K - 1) / C::BLOCK_K;
  const bool looks_up = threadIdx.x < C::BLOCK_K;
  int next_position = device::NO_KEY;  // of block + 2
  if (looks_up) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      positions_of<C>(shared, i)[threadIdx.x] =
          device::find_listed_position<C::BLOCK_K>(cta.list, i);
    next_position = device::find_listed_position<C::BLOCK_K>(cta.list, 2);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / C::COLUMN_WARPS * C::WARP_ROWS;
  const int share = warp % C::COLUMN_WARPS;  // of the keys of S and dP, of the columns of dQ
  LaneTerms<C> terms;
  load_terms<C>(terms, params, cta.work, warp_row, lane);
  const auto start_block = [&](int block) {
    start_listed_rows<C>(shared_smem + C::STAGES_SMEM + block % C::STAGES * C::STAGE_BYTES,
                         positions_of<C>(shared, block), attention, cta);
  };
  __syncthreads();  // the positions of the first block, and which rows see a key, are known to all
  if (blocks > 0) {
    start_rows<C>(shared_smem, params, cta);
    start_block(0);
  }

  device::ListTurns<C::BLOCK_K, uint16_t> turns(cta, params.order, C::THREADS / 2);
  constexpr int DQ_TILES = C::HEAD_DIM / 8 / C::COLUMN_WARPS;
  float dq_rmem[C::M_TILES][DQ_TILES][4] = {};
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    ptx::copies_wait_all();
    __syncthreads();  // see above
    if (looks_up) {
      positions_of<C>(shared, block + 2)[threadIdx.x] = next_position;
      next_position = device::find_listed_position<C::BLOCK_K>(cta.list, block + 3);
    }
    if (C::STAGES > 1 && block + 1 < blocks) start_block(block + 1);
    turns.take(block);
    const uint32_t k_smem = shared_smem + C::STAGES_SMEM + block % C::STAGES * C::STAGE_BYTES;
    const uint32_t v_smem = k_smem + C::V_OF_STAGE;
    const int* const positions = positions_of<C>(shared, block);
    {
      const int first_key = share * C::BLOCK;
      const uint32_t unused[1][C::M_TILES][4] = {};  // Q and dO are read from shared memory
      mma_sync::BlockScores<C> s_rmem, dp_rmem;
      mma_sync::multiply_qk<FirstProduct>(s_rmem, unused,
                                          shared_smem + warp_row * FirstTile::ROW_BYTES +
                                              mma_sync::rows_first_offset<FirstTile>(lane),
                                          k_smem + first_key * FirstTile::ROW_BYTES +
                                              mma_sync::columns_first_offset<FirstTile>(lane));
      if (attention.transform_scores)
        device::transform_scores<FirstProduct>(s_rmem, attention.rule);
      mma_sync::multiply_qk<SecondProduct>(dp_rmem, unused,
                                           shared_smem + C::DOUT_SMEM +
                                               warp_row * SecondTile::ROW_BYTES +
                                               mma_sync::rows_first_offset<SecondTile>(lane),
                                           v_smem + first_key * SecondTile::ROW_BYTES +
                                               mma_sync::columns_first_offset<SecondTile>(lane));
      mma_sync::exponentiate_backward<C>(s_rmem, dp_rmem, attention,
                                         [&](int m, int, int r, int) { return terms[m][r]; });
      clear_unlisted<C>(s_rmem, dp_rmem, params, cta, positions + first_key + lane % 4 * 2,
                        warp_row + lane / 4);
      store_tile<C>(shared_smem + C::P_SMEM, s_rmem, warp_row, first_key, lane);
      store_tile<C>(shared_smem + C::DS_SMEM, dp_rmem, warp_row, first_key, lane);
    }
    __syncthreads();  // P and dS of all warps are written, before they are read
    multiply_dq<C>(dq_rmem, shared_smem + C::DS_SMEM, k_smem, warp_row, share, lane);
    if (C::STAGES == 1) {
      __syncthreads();  // no warp still reads K and V, which are overwritten next
      if (block + 1 < blocks) start_block(block + 1);
    }
    const int first_key = warp / C::SUM_WARPS * C::SUM_KEYS, sum_share = warp % C::SUM_WARPS;
    add_to_keys<C, SecondTile>(cta.dv_gmem, params.sums.dv_columns, positions + first_key,
                               shared_smem + C::P_SMEM, shared_smem + C::DOUT_SMEM, first_key,
                               sum_share, lane);
    add_to_keys<C, FirstTile>(cta.dk_gmem, params.sums.dk_columns, positions + first_key,
                              shared_smem + C::DS_SMEM, shared_smem, first_key, sum_share, lane);
  }
  if (params.order.left_gmem != nullptr) {
    __syncthreads();  // all additions are made
    turns.end();
  }
  store_dq<C>(dq_rmem, params, cta.work, warp_row, share, lane);
}

}  // namespace archflash::ampere
