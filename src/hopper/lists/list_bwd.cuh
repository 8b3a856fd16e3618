// The gradients of attention to listed keys (key_indices), on wgmma and cp.async, where more than
// 64 rows share a list. Only rows of K and V that lists name are read.
//
// A CTA has up to 128 rows that share a list, and walks the list. dQ of its rows is its own and
// stays in registers. dK and dV of a key belong to all lists that name it: CTAs add theirs to sums
// in fp32 (KeySums) in any order, which device::list_gradients() converts in the end, or keep them
// (KeptKeys) for a launch that adds them up in a fixed order (kept_keys.cuh). Each of two
// warpgroups has 64 of the rows; behind S and dP the first one multiplies dV of the block's keys,
// the second dK:
//
//   S, dP arrive | P, dS to shared memory | start dQ += dS K | barrier | dV = P^T dO or dK = dS^T Q
//   | wait for products and the next rows | barrier | start the next S, dP and copies | add dV, dK
//
// The first barrier makes P and dS of both warpgroups visible to the products. At the second one
// the next block's rows have landed, and no product still reads this block's, which are overwritten
// next, nor P and dS. What is added to memory, or kept there, runs beside the next S and dP.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/backward_rows.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/list_backward.cuh"
#include "common/device/uniform.cuh"
#include "common/list_backward_params.h"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/min.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/forward/products.cuh"
#include "hopper/lists/list_bwd_config.cuh"

namespace archflash::hopper {

// 64 queries by the keys of a block, in the registers of a warpgroup: queries lane/4 + 8r of a
// warp's 16, keys 8n + 2*(lane%4) + i at [n][2r + i].
template <class C>
using QueriesByKeys = float[C::BLOCK_K / 8][4];
template <class C>
using QueriesByKeys16 = uint32_t[C::BLOCK_K / 16][4];  // in 16 bits, as fragments of A
template <class C>
using GradientRows = float[C::HEAD_DIM / 8][4];  // of 64 rows: dQ, dK or, in the first ones, dV

// Starts the copy of a tile whose rows lie anywhere, eight lanes for a row of a slab: row_of(row)
// is the address of a row, null for one that becomes zeros, as columns that do not exist do.
template <class C, class Tile, class RowOf>
__device__ __forceinline__ void start_rows(uint32_t tile_smem, int columns,
                                           const uint16_t* valid_gmem, const RowOf& row_of) {
  constexpr int LANES = 8;
  const int thread = ptx::mov_tid_x_volatile();
  const int chunk = thread % LANES;
#pragma unroll
  for (int first = 0; first < Tile::ROWS; first += C::THREADS / LANES) {
    const int row = first + thread / LANES;
    const uint16_t* const row_gmem = row_of(row);
    const uint32_t row_smem = tile_smem + Tile::offset(row, chunk);
#pragma unroll
    for (int slab = 0; slab < Tile::SLABS; ++slab) {
      const int column = slab * Tile::SLAB + 8 * chunk;
      const bool exists = row_gmem != nullptr && column < columns;
      ptx::cp_async_cg_16(row_smem + slab * Tile::SLAB_BYTES,
                          exists ? row_gmem + column : valid_gmem, exists ? 16 : 0);
    }
  }
}

// What a lane knows of its two rows, lane/4 + 8r of its warp's 16.
struct LaneRows {
  device::RowTerms terms[2];
  int first[2], last[2];  // the positions that they see

  __device__ __forceinline__ LaneRows(const ListBackwardParams& params,
                                      const device::ListBackwardWork<>& cta, int warp_row,
                                      int lane) {
    const AttentionParams& attention = params.call.attention;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row_of_tile = warp_row + lane / 4 + 8 * r;
      const device::FewRow row(attention, params.packed_heads, cta.work, row_of_tile);
      terms[r] = {-device::MINUS_INFINITY, 0.0f};  // P is 0
      if (row.wanted) {
        terms[r] =
            static_cast<const device::RowTerms*>(params.call.terms_gmem)[row.lse_index(attention)];
      }
      first[r] = cta.visible.first(row.row), last[r] = cta.visible.last(row.row);
    }
  }
};

// Turns the scores into P, and dP into dS = P * (dP - delta), the gradient of the score before its
// scale; both are 0 where a row does not see a key. positions: of the lane's first key on.
template <class C, bool CAPPED>
__device__ __forceinline__ void differentiate_listed(QueriesByKeys<C>& s_rmem,
                                                     QueriesByKeys<C>& dp_rmem,
                                                     const AttentionParams& attention,
                                                     const LaneRows& rows, const int* positions) {
  const float uncap = CAPPED ? 1.0f / attention.rule.softcap : 0.0f;
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; ++n) {
    const int2 two = *reinterpret_cast<const int2*>(positions + 8 * n);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float &s = s_rmem[n][2 * r + i], &dp = dp_rmem[n][2 * r + i];
        // P is at most 1. The LSE of huge scores is rounded, which must not make P infinite.
        const float exponent = fmaf(s, attention.exp2_scale, -rows.terms[r].lse_log2);
        const float p = ptx::ex2_approx_ftz(ptx::min_nan(exponent, 0.0f));
        dp = p * (dp - rows.terms[r].delta);
        if constexpr (CAPPED) {  // the derivative of c * tanh(x / c) is 1 - tanh(x / c)^2
          const float tanh = s * uncap;
          dp *= fmaf(-tanh, tanh, 1.0f);
        }
        s = p;
        // Selecting (not multiplying) makes the old value irrelevant, even if it was NaN.
        const int position = i == 0 ? two.x : two.y;
        if (position < rows.first[r] || position > rows.last[r]) s = dp = 0.0f;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void round_listed(QueriesByKeys16<C>& rounded_rmem,
                                             const QueriesByKeys<C>& x_rmem) {
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rounded_rmem[n / 2][n % 2 * 2 + r] =
          ptx::cvt_rn_x2_f32<C::DTYPE>(x_rmem[n][2 * r], x_rmem[n][2 * r + 1]);
    }
  }
}

// Writes P or dS of a warp's 16 queries to their columns of a tile, in which a key has a row.
template <class C>
__device__ __forceinline__ void store_by_keys(uint32_t tile_smem, const QueriesByKeys16<C>& x_rmem,
                                              int warp, int lane) {
  using Tile = typename C::ScoreTile;
  // Lanes 8j to 8j + 7 name the rows of matrix j of a fragment: queries 8 * (j % 2) to + 7, keys
  // 8 * (j / 2) to + 7 of 16.
  const uint32_t first_smem =
      tile_smem + Tile::offset(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
  for (int i = 0; i < C::BLOCK_K / 16; ++i)
    ptx::stmatrix_x4_trans(first_smem + 16 * i * Tile::ROW_BYTES, x_rmem[i]);
}

// Starts S = Q K^T, or dP = dO V^T, for the rows of a warpgroup.
template <class C, class RowTile, class KeyTile>
__device__ __forceinline__ void start_queries_by_keys(QueriesByKeys<C>& x_rmem, uint32_t rows_smem,
                                                      uint32_t keys_smem, int group) {
  const ptx::WgmmaDescriptor a =
      describe_tile<RowTile>(rows_smem + group * C::GROUP_ROWS * RowTile::ROW_BYTES, 16);
  const ptx::WgmmaDescriptor b = describe_tile<KeyTile>(keys_smem, 16);
#pragma unroll
  for (int i = 0; i < RowTile::COLUMNS / 16; ++i) {
    ptx::Wgmma<C::DTYPE, C::BLOCK_K>::ss(&x_rmem[0][0], advance(a, column_step<RowTile>(i)),
                                         advance(b, column_step<KeyTile>(i)), i != 0);
  }
}

// The descriptor of a tile whose rows a product sums over.
template <class Tile>
__device__ __forceinline__ ptx::WgmmaDescriptor describe_summed_rows(uint32_t tile_smem) {
  return describe_tile<Tile>(tile_smem, Tile::SLABS > 1 ? Tile::SLAB_BYTES : 0);
}

// Starts dQ += dS K for the rows of a warpgroup.
template <class C>
__device__ __forceinline__ void start_listed_dq(GradientRows<C>& dq_rmem,
                                                const QueriesByKeys16<C>& ds_rmem,
                                                uint32_t k_smem) {
  using Tile = typename C::KTile;
  const ptx::WgmmaDescriptor k = describe_summed_rows<Tile>(k_smem);
#pragma unroll
  for (int i = 0; i < C::BLOCK_K / 16; ++i) {
    ptx::Wgmma<C::DTYPE, C::HEAD_DIM>::rs(&dq_rmem[0][0], ds_rmem[i],
                                          advance(k, 16 * i * Tile::ROW_BYTES), 1);
  }
}

// Starts dV = P^T dO, or dK = dS^T Q, of the keys of a block.
template <class C, class RowTile>
__device__ __forceinline__ void start_of_keys(GradientRows<C>& sums_rmem, uint32_t scores_smem,
                                              uint32_t rows_smem) {
  using ScoreTile = typename C::ScoreTile;
  const ptx::WgmmaDescriptor a = describe_tile<ScoreTile>(scores_smem, 16);
  const ptx::WgmmaDescriptor b = describe_summed_rows<RowTile>(rows_smem);
#pragma unroll
  for (int i = 0; i < C::BLOCK_Q / 16; ++i) {
    ptx::Wgmma<C::DTYPE, RowTile::COLUMNS>::template ss<true>(
        &sums_rmem[0][0], advance(a, column_step<ScoreTile>(i)),
        advance(b, 16 * i * RowTile::ROW_BYTES), i != 0);
  }
}

// Adds a warp's part of dK or dV to the sums. positions: of the block's keys.
template <class C>
__device__ __forceinline__ void add_to_sums(float* sums_gmem, int columns, const int* positions,
                                            const GradientRows<C>& x_rmem, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int position = positions[warp % 4 * 16 + lane / 4 + 8 * r];
    if (position == device::NO_KEY) continue;
    float* const row_gmem =
        sums_gmem + static_cast<int64_t>(position) * columns + device::list_sum_place(lane);
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM / 8; n += 2) {
      if (8 * n >= columns) break;
      const float *x = &x_rmem[n][2 * r], *y = &x_rmem[n + 1][2 * r];
      device::add_four(row_gmem + 8 * n, x[0], x[1], y[0], y[1]);
    }
  }
}

// Keeps a warp's part of dK or dV, zeros for a key that no row sees. kept_gmem: dK or dV of the
// block's first entry; entries: of the list from there on. A lane keeps what it has of 32 columns
// together: device::kept_column() says which.
template <class C>
__device__ __forceinline__ void keep_rows(unsigned char* kept_gmem, int row_bytes, int columns,
                                          int entries, const int* positions,
                                          const GradientRows<C>& x_rmem, int warp, int lane) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int entry = warp % 4 * 16 + lane / 4 + 8 * r;
    if (entry >= entries) continue;
    const bool is_seen = positions[entry] != device::NO_KEY;
    unsigned char* const row_gmem = kept_gmem + entry * row_bytes + lane % 4 * 16;
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM / 8; n += 4) {
      if (8 * n >= columns) break;
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(x_rmem[n + i][2 * r], x_rmem[n + i][2 * r + 1]);
        if (!is_seen) words[i] = 0;  // not a product with 0: a row may hold NaN
      }
      ptx::st_global_v4_b32(row_gmem + 16 * n, words[0], words[1], words[2], words[3]);
    }
  }
}

// Writes, or adds, dQ of a warp's rows.
template <class C>
__device__ __forceinline__ void store_listed_dq(const GradientRows<C>& dq_rmem,
                                                const ListBackwardParams& params,
                                                const device::Work& work, int warp, int lane) {
  const GradientParams& dq = params.call.dq;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const device::FewRow row(params.call.attention, params.packed_heads, work,
                             warp * 16 + lane / 4 + 8 * r);
    if (!row.wanted) continue;
    const int64_t start = row.batch * dq.batch + row.head * dq.head + row.packed * dq.row;
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      if (column >= params.call.attention.d) continue;
      const float* x = &dq_rmem[n][2 * r];
      device::store_gradient_pair<C::DTYPE>(dq, start + column,
                                            {x[0] * params.call.scale, x[1] * params.call.scale});
    }
  }
}

template <class C>
__device__ __forceinline__ void list_bwd(const ListBackwardParams& params) {
  using QTile = typename C::QTile;
  using DoutTile = typename C::DoutTile;
  using KTile = typename C::KTile;
  using VTile = typename C::VTile;
  extern __shared__ __align__(1024) unsigned char shared[];  // a slab starts where its swizzle does
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(device::ListBackwardWork<>) <= C::CONTEXT_BYTES);
  auto& cta = *reinterpret_cast<device::ListBackwardWork<>*>(shared + C::CONTEXT_SMEM);
  const AttentionParams& attention = params.call.attention;
  const uint16_t* const any_gmem = static_cast<const uint16_t*>(attention.q_gmem);
  if constexpr (C::KEEPS) {
    const int tile = static_cast<int>(blockIdx.x) + params.kept.first_tile;
    const device::Work work =
        device::find_list_work(attention, params.lists, params.packed_heads, tile);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) cta = device::find_list_backward_work(params, work, 0);
    ptx::griddepcontrol_wait();  // terms are written, lists sorted
  } else {
    const device::TileInOrder tile(params.order);
    const device::Work work =
        device::find_list_work(attention, params.lists, params.packed_heads, tile.index);
    if (work.first_row < 0) return device::pass_turns(params.order);
    if (threadIdx.x == 0) cta = device::find_list_backward_work(params, work, tile.chain);
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it
  device::find_rows_that_see<C::THREADS>(cta, params.packed_heads.rows());

  // The positions of the keys of a block; an entry that no row of the CTA sees has NO_KEY.
  const auto positions_of = [&](int block) {
    return reinterpret_cast<int*>(shared + C::POSITIONS_SMEM) +
           static_cast<unsigned>(block) % C::POSITION_BLOCKS * C::BLOCK_K;
  };
  const int blocks = (cta.list.count + C::BLOCK_K - 1) / C::BLOCK_K;
  const bool looks_up = threadIdx.x < C::BLOCK_K;
  int next_position = device::NO_KEY;  // of block + 2
  if (looks_up) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      positions_of(i)[threadIdx.x] = device::find_listed_position<C::BLOCK_K>(cta.list, i);
    next_position = device::find_listed_position<C::BLOCK_K>(cta.list, 2);
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = device::uniform(static_cast<int>(threadIdx.x) / 128);
  const LaneRows rows(params, cta, 16 * warp, lane);
  const auto stage_of = [&](int block) {
    return shared_smem + C::STAGES_SMEM + block % C::STAGES * C::STAGE_BYTES;
  };
  const auto start_block = [&](int block) {
    if (block >= blocks) return;
    const int* const positions = positions_of(block);
    const auto row_of = [&](const uint16_t* gmem, int64_t row_stride) {
      return [=](int number) -> const uint16_t* {
        const int position = positions[number];
        return position == device::NO_KEY ? nullptr : gmem + position * row_stride;
      };
    };
    start_rows<C, KTile>(stage_of(block), attention.d, any_gmem,
                         row_of(cta.k_gmem, attention.k_row));
    start_rows<C, VTile>(stage_of(block) + KTile::BYTES, attention.dv, any_gmem,
                         row_of(cta.v_gmem, attention.v_row));
  };
  const auto wait_for_copies = [&] {
    ptx::copies_wait_all();
    ptx::fence_proxy_async_shared();  // before products read what threads have copied
    __syncthreads();
  };
  QueriesByKeys<C> s_rmem, dp_rmem;
  constexpr int SCORES = C::BLOCK_K / 2, GRADIENTS = C::HEAD_DIM / 2;  // registers
  const auto scores_change = [&] {
    ptx::registers_change<SCORES>(&s_rmem[0][0]);
    ptx::registers_change<SCORES>(&dp_rmem[0][0]);
  };
  const auto start_scores = [&](int block) {
    scores_change();
    ptx::wgmma_fence();
    start_queries_by_keys<C, QTile, KTile>(s_rmem, shared_smem, stage_of(block), group);
    start_queries_by_keys<C, DoutTile, VTile>(dp_rmem, shared_smem + C::DOUT_SMEM,
                                              stage_of(block) + KTile::BYTES, group);
    ptx::wgmma_commit_group();
  };

  // Kernels that keep nothing could take turns. No plan asks for that, but ptxas needs the code at
  // D=192, for registers (C7511).
  device::ListTurns<C::BLOCK_K, uint16_t> turns(cta, params.order, C::THREADS / 2);
  GradientRows<C> dq_rmem = {};
  // The positions of the first two blocks, and which rows see a key, are known to all.
  __syncthreads();
  if (blocks > 0) {
    start_rows<C, QTile>(shared_smem, attention.d, any_gmem,
                         device::listing_rows(params, cta, attention.q_gmem, attention.q_batch,
                                              attention.q_head, attention.q_row));
    start_rows<C, DoutTile>(
        shared_smem + C::DOUT_SMEM, attention.dv, any_gmem,
        device::listing_rows(params, cta, params.call.dout_gmem, params.call.dout_batch,
                             params.call.dout_head, params.call.dout_row));
    start_block(0);
    wait_for_copies();
    start_block(1);
    start_scores(0);
    GradientRows<C> sums_rmem;  // dV of the block's keys, or dK
    float* const sums_gmem = group == 0 ? cta.dv_gmem : cta.dk_gmem;
    const int columns = group == 0 ? params.sums.dv_columns : params.sums.dk_columns;
    if constexpr (C::KEEPS) __syncwarp();
    const int row_bytes = 2 * (params.sums.dk_columns + params.sums.dv_columns);
    unsigned char* kept_gmem = static_cast<unsigned char*>(params.kept.rows_gmem) +
                               int64_t{blockIdx.x} * params.lists.topk * row_bytes +
                               (group == 0 ? 2 * params.sums.dk_columns : 0);
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      ptx::wgmma_wait_group<0>();
      scores_change();
      const int* const lane_positions = positions_of(block) + lane % 4 * 2;
      if (attention.transform_scores) {
#pragma unroll
        for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s_rmem[n][i] = attention.rule.score(s_rmem[n][i]);
        }
      }
      if (attention.transform_scores && attention.rule.softcap != 0.0f)
        differentiate_listed<C, true>(s_rmem, dp_rmem, attention, rows, lane_positions);
      else
        differentiate_listed<C, false>(s_rmem, dp_rmem, attention, rows, lane_positions);
      QueriesByKeys16<C> p_rmem, ds_rmem;
      round_listed<C>(p_rmem, s_rmem);
      round_listed<C>(ds_rmem, dp_rmem);
      store_by_keys<C>(shared_smem + C::P_SMEM, p_rmem, warp, lane);
      store_by_keys<C>(shared_smem + C::DS_SMEM, ds_rmem, warp, lane);

      ptx::registers_change<GRADIENTS>(&dq_rmem[0][0]);
      ptx::registers_change<C::BLOCK_K / 4>(&ds_rmem[0][0]);
      ptx::wgmma_fence();
      start_listed_dq<C>(dq_rmem, ds_rmem, stage_of(block));
      ptx::wgmma_commit_group();
      ptx::fence_proxy_async_shared();  // before products read P and dS
      __syncthreads();
      ptx::registers_change<GRADIENTS>(&sums_rmem[0][0]);
      ptx::wgmma_fence();
      if (group == 0)
        start_of_keys<C, DoutTile>(sums_rmem, shared_smem + C::P_SMEM, shared_smem + C::DOUT_SMEM);
      else
        start_of_keys<C, QTile>(sums_rmem, shared_smem + C::DS_SMEM, shared_smem);
      ptx::wgmma_commit_group();
      if (looks_up) {
        positions_of(block + 2)[threadIdx.x] = next_position;
        next_position = device::find_listed_position<C::BLOCK_K>(cta.list, block + 3);
      }
      if constexpr (C::KEEPS) {
        __syncwarp();  // it helps ptxas, too
      } else {
        turns.take(block);  // beside the products
      }
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<GRADIENTS>(&dq_rmem[0][0]);
      ptx::registers_change<GRADIENTS>(&sums_rmem[0][0]);
      wait_for_copies();
      // Behind the last block its own scores once more, which nobody reads: with a branch around
      // these products ptxas would wait for them.
      const int next = min(block + 1, blocks - 1);
      if (C::ADDS_LATE) start_scores(next);
      start_block(block + 2);
      if constexpr (C::KEEPS) {
        keep_rows<C>(kept_gmem, row_bytes, columns, cta.list.count - block * C::BLOCK_K,
                     positions_of(block), sums_rmem, warp, lane);
        kept_gmem += C::BLOCK_K * row_bytes;
      } else {
        add_to_sums<C>(sums_gmem, columns, positions_of(block), sums_rmem, warp, lane);
      }
      if (!C::ADDS_LATE) start_scores(next);
    }
    ptx::wgmma_wait_group<0>();
  }
  if constexpr (!C::KEEPS) {
    if (params.order.left_gmem != nullptr) {
      __syncthreads();  // all additions are made
      turns.end();
    }
  }
  ptx::copies_wait_all();  // a thread may not end before its copies
  store_listed_dq<C>(dq_rmem, params, cta.work, warp, lane);
}

}  // namespace archflash::hopper
