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
//
// The rows of a cache of 8-bit numbers are copied as they are, and each thread converts those bytes
// that it has copied itself, exactly, to the 16-bit rows which the products read. These have one
// stage, so a round has a barrier more: no warp still reads them when they are overwritten. The two
// products of a score have descales of their own, 1 for 16 bits: their sums are multiplied by them
// before they are added. That of V multiplies the outputs again.
#pragma once

#include <cstdint>

#include "ampere/mla_config.cuh"
#include "ampere/pair.cuh"
#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/chunked_keys.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/fp8_rows.cuh"
#include "common/device/kv_cache.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/tile_walk.cuh"
#include "common/mma_sync/attention_fwd.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"

namespace archflash::ampere {

// What a CTA knows; it is in shared memory.
struct MlaContext : mma_sync::CacheContext {
  device::Blocks blocks;  // of keys, which it visits from the last to the first
};

// Reads a warp's part of the query from global memory; zeros for rows that do not exist.
template <class C>
__device__ __forceinline__ void load_query(PairQuery<C>& q_rmem, const MlaParams& params,
                                           const mma_sync::CacheContext& cta) {
  const AttentionParams& attention = params.call.attention;
  const PairWarp<C> at(cta);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const device::FewRow row(attention, cta.packed_heads, cta.work,
                             at.warp_row + at.lane / 4 + 8 * r);
    const int column = PAIR_STEP * at.share + at.lane % 4 * 2;
    const uint16_t* q_gmem = static_cast<const uint16_t*>(attention.q_gmem) +
                             row.batch * attention.q_batch + row.head * attention.q_head +
                             row.packed * attention.q_row + column;
    const uint16_t* qv_gmem = static_cast<const uint16_t*>(params.qv_gmem) +
                              row.batch * params.qv_batch + row.head * params.qv_head +
                              row.packed * params.qv_row + column;
#pragma unroll
    for (int step = 0; step < C::ROW_COLUMNS / (2 * PAIR_STEP); ++step) {
      const int of_step = 2 * PAIR_STEP * step;
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

// Starts the copy of BLOCK_K latent rows from `key` on: V first, then K. Rows that no row
// of the sequence sees become zeros. Eight neighbouring threads copy a row, 16 bytes at a time.
// Rows of 16-bit numbers go to `stage_smem`, those of 8-bit numbers to where convert_latent_rows()
// reads them.
template <class C>
__device__ __forceinline__ void start_latent_rows(uint32_t shared_smem, uint32_t stage_smem,
                                                  const AttentionParams& params, bool fp8,
                                                  const mma_sync::CacheContext& cta, int key) {
  using Tile = typename C::Tile;
  const unsigned thread = ptx::mov_tid_x_volatile();
  const int row = thread / Tile::GROUP, chunk = thread % Tile::GROUP;
  const device::ChunkedKeys visible = mma_sync::visible_keys<C>(cta);
  const bool valid = key + row >= visible.begin() && key + row < visible.nk;
  int64_t k_offset = 0, v_offset = 0;
  if (valid && cta.pages_gmem == nullptr) {
    k_offset = (key + row) * params.k_row;
    v_offset = (key + row) * params.v_row;
  } else if (valid) {
    k_offset = cta.offset(key + row, params.k_batch, params.k_row);
    v_offset = cta.offset(key + row, params.v_batch, params.v_row);
  }
  const int bytes = valid ? 16 : 0;
  const int first_byte = valid ? chunk * 16 : 0;
  const auto* v_gmem = reinterpret_cast<const unsigned char*>(cta.v_gmem) + v_offset + first_byte;
  const auto* k_gmem = reinterpret_cast<const unsigned char*>(cta.k_gmem) + k_offset + first_byte;
  uint32_t target =
      fp8 ? shared_smem + C::FP8_SMEM + thread * 16 : stage_smem + Tile::offset(row, chunk);
  constexpr int GROUP_BYTES = Tile::GROUP * 16;
  const int target_step = fp8 ? C::THREADS * 16 : GROUP_BYTES;
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM_V * 2 / GROUP_BYTES; ++i) {
    if (fp8 && i >= C::HEAD_DIM_V / GROUP_BYTES) continue;
    ptx::cp_async_cg_16(target, v_gmem + (valid ? i * GROUP_BYTES : 0), bytes);
    target += target_step;
  }
  if (!fp8 || chunk < C::HEAD_DIM / 16) ptx::cp_async_cg_16(target, k_gmem, bytes);
}

// Makes 16-bit rows, in the first stage, of the 8-bit ones that this thread has copied.
template <class C>
__device__ __forceinline__ void convert_latent_rows(unsigned char* shared, DType cache_dtype) {
  using Tile = typename C::Tile;
  const unsigned thread = ptx::mov_tid_x_volatile();
  const int row = thread / Tile::GROUP, chunk = thread % Tile::GROUP;
  const device::Fp8To16Bits<C::DTYPE> to_16_bits(cache_dtype);
  const auto* from = reinterpret_cast<const uint4*>(shared + C::FP8_SMEM) + thread;
#pragma unroll
  for (int i = 0; i < C::FP8_COPIES; ++i) {
    if (chunk + i * Tile::GROUP >= C::FP8_CHUNKS) break;
    uint4 low, high;
    to_16_bits.convert(from[i * C::THREADS], low, high);
    const int first = 2 * (chunk + i * Tile::GROUP);
    *reinterpret_cast<uint4*>(shared + Tile::offset(row, first)) = low;
    *reinterpret_cast<uint4*>(shared + Tile::offset(row, first + 1)) = high;
  }
}

// A warp's part of the scores of a block, its half of the sum over the columns.
template <class C>
__device__ __forceinline__ void multiply_latent_scores(device::Scores<typename C::Warp>& s_rmem,
                                                       const PairQuery<C>& q_rmem,
                                                       uint32_t keys_smem,
                                                       const mma_sync::CacheContext& cta) {
  multiply_half_scores<C, 0, C::HEAD_DIM_V>(s_rmem, q_rmem, keys_smem);
  device::Scores<typename C::Warp> of_k;
  multiply_half_scores<C, C::HEAD_DIM_V>(of_k, q_rmem, keys_smem);
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      s_rmem[0][n][i] = s_rmem[0][n][i] * cta.v_descale + of_k[0][n][i] * cta.k_descale;
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
    device::Work work = mma_sync::find_work<C>(call);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      const device::CacheRows rows =
          device::find_cache_rows(call.cache, work.batch_head / attention.heads_q);
      work.nk = rows.count;
      static_cast<mma_sync::CacheContext&>(cta) = mma_sync::make_cache_context<C>(call, work, rows);
      const device::ChunkedKeys visible = mma_sync::visible_keys<C>(cta);
      const int last_row = min(work.first_row + cta.packed_heads.rows(), work.nq) - 1;
      cta.blocks = device::blocks_of_share<C::BLOCK_K>(
          {visible.first(work.first_row) & -C::BLOCK_K, visible.last(last_row) & -C::BLOCK_K},
          call.partials, blockIdx.x % call.partials.splits);
    }
  }
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  const bool fp8 = call.cache_dtype != C::DTYPE;
  // Blocks of 16-bit numbers lie in the two stages in turn.
  const auto stage_of = [&](int key) {
    return shared_smem + (fp8 ? 0 : key / C::BLOCK_K % C::STAGES * C::STAGE_BYTES);
  };
  const auto start_block = [&](int key) {
    start_latent_rows<C>(shared_smem, stage_of(key), attention, fp8, cta, key);
  };
  if (cta.blocks.first <= cta.blocks.last) start_block(cta.blocks.last);
  PairQuery<C> q_rmem;
  load_query<C>(q_rmem, params, cta);
  device::Outputs<Warp> o_rmem = {};
  device::RowState<Warp> state;
  device::clear(state);
#pragma unroll 1
  for (int key = cta.blocks.last; key >= cta.blocks.first; key -= C::BLOCK_K) {
    // Each thread waits for its own copies; the barrier makes those of all threads visible. After
    // it no warp still reads the other stage or the scores of the previous block, which are
    // overwritten next.
    ptx::copies_wait_all();
    if (fp8) {
      __syncthreads();  // no warp still reads the 16-bit rows of the previous block
      convert_latent_rows<C>(shared, call.cache_dtype);
    }
    __syncthreads();
    if (key > cta.blocks.first) start_block(key - C::BLOCK_K);
    if (pair_sees<C>(cta, key)) {  // both warps of a pair, or neither
      device::Scores<Warp> s_rmem;
      multiply_latent_scores<C>(s_rmem, q_rmem, stage_of(key), cta);
      add_scores_of_pair<C>(s_rmem, shared + C::SCORES_SMEM);
      if (attention.transform_scores) device::transform_scores<Warp>(s_rmem, attention.rule);
      mask_pair_scores<C>(s_rmem, cta, key);
      device::Probabilities<Warp> p_rmem;
      exponentiate_pair_scores<Warp>(p_rmem, s_rmem, state, o_rmem, attention.exp2_scale);
      const uint32_t half_v = half_v_smem<C>(0);  // found first, or registers spill on 9.0
      mma_sync::multiply_pv<Warp>(o_rmem, p_rmem, stage_of(key) + half_v);
    }
  }
#pragma unroll
  for (int n = 0; n < Warp::HEAD_DIM_V / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o_rmem[0][n][i] *= cta.v_descale;
  }
  store_half_rows<C>(o_rmem, state, attention, call.partials, cta, C::HEAD_DIM_V);
}

}  // namespace archflash::ampere
