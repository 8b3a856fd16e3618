// Attention over a cache of latent rows (multi-head latent attention, MLA), on mma.sync, for every
// GPU from compute capability 8.0 on. A row of the cache has 512 columns that are V and belong to
// the key too, and 64 more of the key alone. With the query's parts qv (512) and q (64)
//   scores = qv V^T + q K^T,  out = softmax(scores) V
// so each row is copied to shared memory once and serves both products. V and K may also lie in two
// tensors.
//
// One CTA computes 64 rows, mostly the query heads of one position, packed. The outputs of a row
// are 512 numbers in fp32: two warps share the rows, because one warp has registers for half of
// that.
//
//     rows       warps    scores: steps of 16 columns    outputs
//     0 to 15    0, 1     even | odd                     columns 0 to 255 | 256 to 511
//     16 to 31   2, 3     even | odd                     ...
//
// A warp multiplies 18 of the 36 steps of 16 columns, and only these columns of the query, which it
// keeps in registers: 72 registers, beside 128 of outputs. The pair then adds its sums through
// shared memory. Both warps have all scores of their rows after that, and the same bits: each
// computes the softmax, whose P stays in its registers, and multiplies its own columns of V. So P,
// row maxima and row sums are never exchanged.
//
// A round for a block of 32 keys:
//   wait for rows | barrier | start the next rows | multiply scores | exchange them with the other
//   warp of the pair | softmax | multiply V
// The barrier of the CTA in each round also keeps the next scores from being written before the
// last ones were read. Shared memory: two stages of 32 rows (73,728 bytes), 16 x 32 scores of each
// warp (16,384 bytes), the CacheContext. That fits 99 KB.
#pragma once

#include <cstdint>

#include "ampere/mla_config.cuh"
#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/chunked_keys.cuh"
#include "common/math/few_rows.cuh"
#include "common/math/kv_cache.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/tile_walk.cuh"
#include "common/mma_sync/attention_fwd.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/named_barrier.cuh"

namespace archflash::ampere {

constexpr int MLA_STEP = 16;  // columns of a product of mma.sync

// What a CTA knows; it is in shared memory.
struct MlaContext : mma_sync::CacheContext {
  math::Blocks blocks;  // of keys, which it visits from the last to the first
};

// Where a warp stands. It is found anew in each round, because outputs and the query leave few
// registers.
template <class C>
struct MlaWarp {
  int lane;
  int share;                // which columns the warp has
  int warp_row;             // first row of the pair in the tile
  int first_row, last_row;  // the pair's rows, of one head or of each of its packed heads; none if
                            // last_row < first_row

  __device__ __forceinline__ explicit MlaWarp(const mma_sync::CacheContext& cta) {
    const unsigned thread = ptx::mov_tid_x_volatile();
    const math::PackedHeads& packed = cta.packed_heads;
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
using MlaQuery = uint32_t[C::ROW_COLUMNS / (2 * MLA_STEP)][4];

// Reads a warp's part of the query from global memory; zeros for rows that do not exist.
template <class C>
__device__ __forceinline__ void load_query(MlaQuery<C>& q_rmem, const MlaParams& params,
                                           const mma_sync::CacheContext& cta) {
  const AttentionParams& attention = params.call.attention;
  const MlaWarp<C> at(cta);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const math::FewRow row(attention, cta.packed_heads, cta.work,
                           at.warp_row + at.lane / 4 + 8 * r);
    const int column = MLA_STEP * at.share + at.lane % 4 * 2;
    const uint16_t* q_gmem = static_cast<const uint16_t*>(attention.q_gmem) +
                             row.batch * attention.q_batch + row.head * attention.q_head +
                             row.packed * attention.q_row + column;
    const uint16_t* qv_gmem = static_cast<const uint16_t*>(params.qv_gmem) +
                              row.batch * params.qv_batch + row.head * params.qv_head +
                              row.packed * params.qv_row + column;
#pragma unroll
    for (int step = 0; step < C::ROW_COLUMNS / (2 * MLA_STEP); ++step) {
      const int of_step = 2 * MLA_STEP * step;
      const uint16_t* step_gmem =
          of_step < C::HEAD_DIM_V ? qv_gmem + of_step : q_gmem + of_step - C::HEAD_DIM_V;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        q_rmem[step][2 * half + r] =
            row.wanted ? *reinterpret_cast<const uint32_t*>(step_gmem + 8 * half) : 0;
      }
    }
  }
}

// Starts the copy of BLOCK_K latent rows from `key` on: V first, then K. Rows from nk on become
// zeros. Eight neighbouring threads copy a row.
template <class C>
__device__ __forceinline__ void start_latent_rows(uint32_t stage_smem,
                                                  const AttentionParams& params,
                                                  const mma_sync::CacheContext& cta, int key) {
  using Tile = typename C::Tile;
  const unsigned thread = ptx::mov_tid_x_volatile();
  const int row = thread / Tile::GROUP, chunk = thread % Tile::GROUP;
  const bool valid = key + row < cta.visible.nk;
  int64_t k_offset = 0, v_offset = 0;
  if (valid && cta.pages_gmem == nullptr) {
    k_offset = (key + row) * params.k_row;
    v_offset = (key + row) * params.v_row;
  } else if (valid) {
    k_offset = cta.offset(key + row, params.k_batch, params.k_row);
    v_offset = cta.offset(key + row, params.v_batch, params.v_row);
  }
  const int bytes = valid ? 16 : 0;
  const int column = valid ? chunk * 8 : 0;
  const uint32_t target = stage_smem + Tile::offset(row, chunk);
  constexpr int V_GROUPS = C::HEAD_DIM_V / (8 * Tile::GROUP);
#pragma unroll
  for (int group = 0; group < V_GROUPS; ++group) {
    ptx::cp_async_cg_16(target + group * Tile::GROUP * 16,
                        cta.v_gmem + v_offset + column + (valid ? group * Tile::GROUP * 8 : 0),
                        bytes);
  }
  ptx::cp_async_cg_16(target + V_GROUPS * Tile::GROUP * 16, cta.k_gmem + k_offset + column, bytes);
}

// A warp's part of the scores: the sum over its steps of 16 columns.
template <class C>
__device__ __forceinline__ void multiply_latent_scores(math::Scores<typename C::Warp>& s_rmem,
                                                       const MlaQuery<C>& q_rmem,
                                                       uint32_t stage_smem) {
  using Tile = typename C::Tile;
  const unsigned thread = ptx::mov_tid_x_volatile(), lane = thread % 32, share = thread / 32 % 2;
  // The row that this lane names to ldmatrix: chunks 2 share and 2 share + 1 are the warp's first
  // 16 columns, and its next ones are 32 further on.
  const uint32_t rows_smem =
      stage_smem + Tile::offset(lane % 8 + lane / 16 * 8, 2 * share + lane / 8 % 2);
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s_rmem[0][n][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < C::ROW_COLUMNS / (2 * MLA_STEP); ++step) {
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; n += 2) {
      uint32_t k_rmem[4];
      ptx::ldmatrix_x4(k_rmem,
                       Tile::advance(rows_smem, 2 * step * MLA_STEP / 8) + n * 8 * Tile::ROW_BYTES);
      ptx::mma_m16n8k16<C::DTYPE>(s_rmem[0][n], q_rmem[step], k_rmem[0], k_rmem[1]);
      ptx::mma_m16n8k16<C::DTYPE>(s_rmem[0][n + 1], q_rmem[step], k_rmem[2], k_rmem[3]);
    }
  }
}

// Adds the scores of the other warp of a pair, in place. Both warps call it, and get the same bits.
template <class C>
__device__ __forceinline__ void add_scores_of_pair(math::Scores<typename C::Warp>& s_rmem,
                                                   unsigned char* scores) {
  const unsigned thread = ptx::mov_tid_x_volatile(), warp = thread / 32, lane = thread % 32;
  constexpr int TILES = C::BLOCK_K / 8;
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
__device__ __forceinline__ bool mla_sees(const mma_sync::CacheContext& cta, int key) {
  const MlaWarp<C> at(cta);
  return at.last_row >= at.first_row && !mma_sync::visible_keys<C>(cta).hides(
                                            at.first_row, at.last_row, key, key + C::BLOCK_K - 1);
}

// Masks a warp's scores for the keys from `key` on, if some row does not see them all.
template <class C>
__device__ __forceinline__ void mask_latent_scores(math::Scores<typename C::Warp>& s_rmem,
                                                   const mma_sync::CacheContext& cta, int key) {
  const MlaWarp<C> at(cta);
  const math::ChunkedKeys visible = mma_sync::visible_keys<C>(cta);
  if (!visible.masks(at.first_row, at.last_row, key, key + C::BLOCK_K - 1)) return;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = cta.work.first_row + cta.packed_heads.row(at.warp_row + at.lane / 4 + 8 * r);
    math::mask_row<typename C::Warp>(s_rmem, visible.of_row(row), 0, r, 0, key + at.lane % 4 * 2);
  }
}

// Writes a warp's half of the columns of its rows: to the workspace if the keys are split, else to
// the output. The first warp of a pair writes what there is one of for each row.
template <class C>
__device__ __forceinline__ void store_half_rows(const math::Outputs<typename C::Warp>& o_rmem,
                                                const math::RowState<typename C::Warp>& state,
                                                const mma_sync::CacheParams& params,
                                                const mma_sync::CacheContext& cta) {
  using Warp = typename C::Warp;
  const AttentionParams& attention = params.attention;
  const Partials& partials = params.partials;
  const auto [lane, share, warp_row, first_row, last_row] = MlaWarp<C>(cta);
  const int first_column = share * Warp::HEAD_DIM_V + lane % 4 * 2;
  const bool once = share == 0 && lane % 4 == 0;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const math::FewRow row(attention, cta.packed_heads, cta.work, warp_row + lane / 4 + 8 * r);
    if (partials.wanted()) {
      float sum = state.sum[0][r];
      sum += __shfl_xor_sync(math::FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(math::FULL_WARP, sum, 2);
      if (!row.wanted) continue;
      const int64_t index = partials.index(blockIdx.x % partials.splits, row.lse_index(attention));
      if (once) partials.ends_gmem[index] = {state.base[0][r], sum};
      if (sum == 0.0f) continue;  // the combining kernel does not read the outputs
      float* row_gmem = partials.rows_gmem + index * C::HEAD_DIM_V + first_column;
#pragma unroll
      for (int n = 0; n < Warp::HEAD_DIM_V / 8; ++n) {
        *reinterpret_cast<float2*>(row_gmem + 8 * n) = {o_rmem[0][n][2 * r],
                                                        o_rmem[0][n][2 * r + 1]};
      }
    } else {
      const math::RowEnd end =
          math::finish_lane_row<Warp>(state, 0, r, math::load_sink(attention, row.head));
      if (!row.wanted) continue;
      if (attention.lse_gmem != nullptr && once)
        attention.lse_gmem[row.lse_index(attention)] = end.lse;
      uint16_t* row_gmem = static_cast<uint16_t*>(attention.out_gmem) +
                           row.batch * attention.out_batch + row.head * attention.out_head +
                           row.packed * attention.out_row + first_column;
#pragma unroll
      for (int n = 0; n < Warp::HEAD_DIM_V / 8; ++n) {
        const float* o = &o_rmem[0][n][2 * r];
        *reinterpret_cast<uint32_t*>(row_gmem + 8 * n) =
            ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * end.factor, o[1] * end.factor);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void mla_fwd(const MlaParams& params) {
  using Warp = typename C::Warp;
  using Tile = typename C::Tile;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const mma_sync::CacheParams& call = params.call;
  const AttentionParams& attention = call.attention;
  static_assert(sizeof(MlaContext) <= C::CONTEXT_BYTES);
  MlaContext& cta = *reinterpret_cast<MlaContext*>(shared + C::CONTEXT_SMEM);
  {
    math::Work work = mma_sync::find_work<C>(call);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      const math::CacheRows rows =
          math::find_cache_rows(call.cache, work.batch_head / attention.heads_q);
      work.nk = rows.count;
      static_cast<mma_sync::CacheContext&>(cta) = mma_sync::make_cache_context<C>(call, work, rows);
      const math::ChunkedKeys visible = mma_sync::visible_keys<C>(cta);
      const int last_row = min(work.first_row + cta.packed_heads.rows(), work.nq) - 1;
      cta.blocks = math::blocks_of_share<C::BLOCK_K>(
          {visible.first(work.first_row) & -C::BLOCK_K, visible.last(last_row) & -C::BLOCK_K},
          call.partials, blockIdx.x % call.partials.splits);
    }
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  // Blocks lie in the two stages in turn.
  const auto stage_of = [&](int key) {
    return shared_smem + key / C::BLOCK_K % C::STAGES * C::STAGE_BYTES;
  };
  if (cta.blocks.first <= cta.blocks.last)
    start_latent_rows<C>(stage_of(cta.blocks.last), attention, cta, cta.blocks.last);
  MlaQuery<C> q_rmem;
  load_query<C>(q_rmem, params, cta);
  math::Outputs<Warp> o_rmem = {};
  math::RowState<Warp> state;
  math::clear(state);
#pragma unroll 1
  for (int key = cta.blocks.last; key >= cta.blocks.first; key -= C::BLOCK_K) {
    // Each thread waits for its own copies; the barrier makes those of all threads visible. After
    // it no warp still reads the other stage or the scores of the previous block, which are
    // overwritten next.
    ptx::copies_wait_all();
    __syncthreads();
    if (key > cta.blocks.first) {
      const int next = key - C::BLOCK_K;
      start_latent_rows<C>(stage_of(next), attention, cta, next);
    }
    if (mla_sees<C>(cta, key)) {  // both warps of a pair, or neither
      math::Scores<Warp> s_rmem;
      multiply_latent_scores<C>(s_rmem, q_rmem, stage_of(key));
      add_scores_of_pair<C>(s_rmem, shared + C::SCORES_SMEM);
      if (attention.transform_scores)
        math::transform_scores<Warp>(s_rmem, attention.tanh_scale, attention.softcap);
      mask_latent_scores<C>(s_rmem, cta, key);
      // Found anew in each round, so that it takes no register between them.
      state.large =
          __any_sync(math::FULL_WARP, math::is_large<math::Weights16>(state.base[0][0]) ||
                                          math::is_large<math::Weights16>(state.base[0][1]));
      const float exp2_scale =
          math::follow_maxima<Warp>(s_rmem, state, o_rmem, attention.exp2_scale,
                                    static_cast<const math::RaiseLimits<Warp>*>(nullptr));
      math::Probabilities<Warp> p_rmem;
      math::weigh_all_scores<Warp>(s_rmem, p_rmem, state, exp2_scale);
      const unsigned thread = ptx::mov_tid_x_volatile();
      mma_sync::multiply_pv<Warp>(o_rmem, p_rmem,
                                  stage_of(key) + thread / 32 % 2 * Warp::HEAD_DIM_V * 2 +
                                      mma_sync::rows_first_offset<Tile>(thread % 32));
    }
  }
  store_half_rows<C>(o_rmem, state, call, cta);
}

}  // namespace archflash::ampere

// Defines an entry point. plan.cpp launches it by NAME.
#define ARCHFLASH_MLA_KERNEL(NAME, CONFIG)                                           \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::ampere::MlaParams params) {            \
    archflash::ampere::mla_fwd<CONFIG>(params);                                      \
  }
