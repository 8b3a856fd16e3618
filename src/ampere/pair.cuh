// Two warps that share 16 query rows, because the outputs of a row are up to 512 numbers in fp32
// and one warp has registers for half of that (mla_fwd.cuh, wide_fwd.cuh).
//
// Each warp multiplies every second step of 16 columns of Q K^T, and only these columns of the
// query, which it keeps in registers. The two then add their sums through shared memory. Both have
// all scores of their rows after that, and the same bits: each computes the softmax, whose P stays
// in its registers, and multiplies its own half of the columns of V. So P, row maxima and row sums
// are never exchanged.
//
// C is a kernel's Config, of which this uses ROW_COLUMNS (columns of a row of Tile, the layout of
// what the scores are multiplied with), BLOCK_K, WARP_ROWS, SCORES_BYTES (of the scores of a warp)
// and Warp, the Config of what one warp multiplies and exponentiates: all scores of its rows, half
// of the columns of V.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/chunked_keys.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/quad.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/params.h"
#include "common/mma_sync/tile.cuh"
#include "common/partials.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::ampere {

constexpr int PAIR_STEP = 16;  // columns of a product of mma.sync

// Where a warp stands. It is found anew in each round, because outputs and the query leave few
// registers.
template <class C>
struct PairWarp {
  int lane;
  int share;                // which columns the warp has
  int warp_row;             // first row of the pair in the tile
  int first_row, last_row;  // the pair's rows, of one head or of each of its packed heads; none if
                            // last_row < first_row

  __device__ __forceinline__ explicit PairWarp(const mma_sync::FewRowsContext& cta) {
    const unsigned thread = ptx::mov_tid_x_volatile();
    const device::PackedHeads& packed = cta.packed_heads;
    lane = thread % 32;
    share = thread / 32 % 2;
    warp_row = thread / 64 * C::WARP_ROWS;
    first_row = cta.work.first_row + packed.row(warp_row);
    const int rows = packed.head(warp_row) < packed.count ? min(C::WARP_ROWS, packed.rows()) : 0;
    last_row = min(first_row + rows, cta.work.nq) - 1;
  }
};

// The fragments a of the columns that a warp multiplies: those of step 2 i + share in q_rmem[i].
template <class C>
using PairQuery = uint32_t[C::ROW_COLUMNS / (2 * PAIR_STEP)][4];

// A warp's part of the scores of the STEP_KEYS keys whose rows start at keys_smem: the sum over its
// steps of 16 columns, of the columns from FIRST_COLUMN on and before LAST_COLUMN.
template <class C, int FIRST_COLUMN = 0, int LAST_COLUMN = C::ROW_COLUMNS>
__device__ __forceinline__ void multiply_half_scores(device::Scores<typename C::Warp>& s_rmem,
                                                     const PairQuery<C>& q_rmem,
                                                     uint32_t keys_smem) {
  using Tile = typename C::Tile;
  const unsigned thread = ptx::mov_tid_x_volatile(), lane = thread % 32, share = thread / 32 % 2;
  // The row that this lane names to ldmatrix: chunks 2 share and 2 share + 1 are the warp's first
  // 16 columns, and its next ones are 32 further on.
  const uint32_t rows_smem =
      keys_smem + Tile::offset(lane % 8 + lane / 16 * 8, 2 * share + lane / 8 % 2);
#pragma unroll
  for (int n = 0; n < C::Warp::STEP_KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s_rmem[0][n][i] = 0.0f;
  }
#pragma unroll
  for (int step = FIRST_COLUMN / (2 * PAIR_STEP); step < LAST_COLUMN / (2 * PAIR_STEP); ++step) {
#pragma unroll
    for (int n = 0; n < C::Warp::STEP_KEYS / 8; n += 2) {
      uint32_t k_rmem[4];
      ptx::ldmatrix_x4(
          k_rmem, Tile::advance(rows_smem, 2 * step * PAIR_STEP / 8) + n * 8 * Tile::ROW_BYTES);
      ptx::mma_m16n8k16<C::DTYPE>(s_rmem[0][n], q_rmem[step], k_rmem[0], k_rmem[1]);
      ptx::mma_m16n8k16<C::DTYPE>(s_rmem[0][n + 1], q_rmem[step], k_rmem[2], k_rmem[3]);
    }
  }
}

// Adds the scores of the other warp of a pair, in place. Both warps call it, and get the same bits.
// `scores` is the CTA's part of shared memory for them.
template <class C>
__device__ __forceinline__ void add_scores_of_pair(device::Scores<typename C::Warp>& s_rmem,
                                                   unsigned char* scores) {
  const unsigned thread = ptx::mov_tid_x_volatile(), warp = thread / 32, lane = thread % 32;
  constexpr int TILES = C::Warp::STEP_KEYS / 8;
  float4* own = reinterpret_cast<float4*>(scores + warp * C::SCORES_BYTES);
  const float4* other = reinterpret_cast<float4*>(scores + (warp ^ 1) * C::SCORES_BYTES);
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const float (&s)[4] = s_rmem[0][n];
    own[n * 32 + lane] = {s[0], s[1], s[2], s[3]};
  }
  // Both warps have written before either reads. Barrier 0 is that of the CTA.
  ptx::bar_sync(1 + warp / 2, 64);
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const float4 s = other[n * 32 + lane];
    s_rmem[0][n][0] += s.x, s_rmem[0][n][1] += s.y, s_rmem[0][n][2] += s.z, s_rmem[0][n][3] += s.w;
  }
}

// Whether a row of the pair sees one of the BLOCK_K keys from `key` on.
template <class C>
__device__ __forceinline__ bool pair_sees(const mma_sync::CacheContext& cta, int key) {
  const PairWarp<C> at(cta);
  return at.last_row >= at.first_row && !mma_sync::visible_keys<C>(cta).hides(
                                            at.first_row, at.last_row, key, key + C::BLOCK_K - 1);
}

// Masks a warp's scores for the STEP_KEYS keys from `key` on, if some row does not see them all.
template <class C>
__device__ __forceinline__ void mask_pair_scores(device::Scores<typename C::Warp>& s_rmem,
                                                 const mma_sync::CacheContext& cta, int key) {
  const PairWarp<C> at(cta);
  const device::ChunkedKeys visible = mma_sync::visible_keys<C>(cta);
  if (!visible.masks(at.first_row, at.last_row, key, key + C::Warp::STEP_KEYS - 1)) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = cta.work.first_row + cta.packed_heads.row(at.warp_row + at.lane / 4 + 8 * r);
    device::mask_row<typename C::Warp>(s_rmem, visible.of_row(row), 0, r, 0, key + at.lane % 4 * 2);
  }
}

// P of a warp's scores, with its outputs rescaled as they require.
template <class Warp>
__device__ __forceinline__ void exponentiate_pair_scores(device::Probabilities<Warp>& p_rmem,
                                                         device::Scores<Warp>& s_rmem,
                                                         device::RowState<Warp>& state,
                                                         device::Outputs<Warp>& o_rmem,
                                                         float exp2_scale) {
  // Found anew each time, so that it takes no register in between.
  state.large =
      __any_sync(device::FULL_WARP, device::is_large<device::Weights16>(state.base[0][0]) ||
                                        device::is_large<device::Weights16>(state.base[0][1]));
  exp2_scale = device::update_row_max<Warp>(s_rmem, state, o_rmem, exp2_scale,
                                            static_cast<const device::RaiseLimits<Warp>*>(nullptr));
  device::exponentiate_all_scores<Warp>(s_rmem, p_rmem, state, exp2_scale);
}

// The row of V that this lane names to ldmatrix for its warp's half of the columns.
template <class C>
__device__ __forceinline__ uint32_t half_v_smem(uint32_t v_smem /* V of the first key */) {
  const unsigned thread = ptx::mov_tid_x_volatile();
  return v_smem + thread / 32 % 2 * C::Warp::HEAD_DIM_V * 2 +
         mma_sync::rows_first_offset<typename C::Tile>(thread % 32);
}

// Writes a warp's half of the first dv columns of its rows: to the workspace if the keys are split,
// else to the output. The first warp of a pair writes what there is one of for each row.
template <class C>
__device__ __forceinline__ void store_half_rows(const device::Outputs<typename C::Warp>& o_rmem,
                                                const device::RowState<typename C::Warp>& state,
                                                const AttentionParams& attention,
                                                const Partials& partials,
                                                const mma_sync::FewRowsContext& cta, int dv) {
  using Warp = typename C::Warp;
  const auto [lane, share, warp_row, first_row, last_row] = PairWarp<C>(cta);
  const int first_column = share * Warp::HEAD_DIM_V + lane % 4 * 2;
  const bool once = share == 0 && lane % 4 == 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const device::FewRow row(attention, cta.packed_heads, cta.work, warp_row + lane / 4 + 8 * r);
    if (partials.wanted()) {
      const float sum = device::sum_of_quad(state.sum[0][r]);
      if (!row.wanted) continue;
      const int64_t index = partials.index(blockIdx.x % partials.splits, row.lse_index(attention));
      if (once) partials.ends_gmem[index] = {state.base[0][r], sum};
      if (sum == 0.0f) continue;  // the combining kernel does not read the outputs
      float* row_gmem = partials.rows_gmem + index * dv + first_column;
#pragma unroll
      for (int n = 0; n < Warp::HEAD_DIM_V / 8; ++n) {
        if (first_column + 8 * n < dv) {
          *reinterpret_cast<float2*>(row_gmem + 8 * n) = {o_rmem[0][n][2 * r],
                                                          o_rmem[0][n][2 * r + 1]};
        }
      }
    } else {
      const device::RowEnd end =
          device::finish_lane_row<Warp>(state, 0, r, device::load_sink(attention, row.head));
      if (!row.wanted) continue;
      if (attention.lse_gmem != nullptr && once)
        attention.lse_gmem[row.lse_index(attention)] = end.lse;
      uint16_t* row_gmem = static_cast<uint16_t*>(attention.out_gmem) +
                           row.batch * attention.out_batch + row.head * attention.out_head +
                           row.packed * attention.out_row + first_column;
#pragma unroll
      for (int n = 0; n < Warp::HEAD_DIM_V / 8; ++n) {
        const float* o = &o_rmem[0][n][2 * r];
        if (first_column + 8 * n < dv) {
          *reinterpret_cast<uint32_t*>(row_gmem + 8 * n) =
              ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * end.factor, o[1] * end.factor);
        }
      }
    }
  }
}

}  // namespace archflash::ampere
