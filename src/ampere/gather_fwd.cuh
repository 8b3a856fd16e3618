// Attention to listed keys (key_indices), on mma.sync and cp.async, for every GPU from compute
// capability 8.0 on and head dimensions up to 256. Rows of K and V lie anywhere; each is copied by
// itself.
//
// A CTA computes rows that share a list: the query heads of one position that share a head of K,
// packed, or with a list for 64 rows those rows too. So each row of K and V that is gathered serves
// up to 64 query rows. All warps copy the rows of a block. Warp w multiplies 16 of the query rows,
// those of number w % row_warps, with every (WARPS / row_warps)-th step of the block's keys: where
// a list has few rows, warps share out the keys. What they have found is added in the end.
//
// A round for a block of BLOCK_K entries of the list:
//   wait for rows | barrier | leave where rows lie that come later | start the next rows | products
// The barrier makes the copies, and the places of the next block, visible to all threads; and no
// warp still reads the block before, whose stage and whose places are overwritten next.
#pragma once

#include <cstdint>

#include "ampere/gather_config.cuh"
#include "ampere/gathered_keys.cuh"
#include "common/attention_params.h"
#include "common/device/few_rows.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"

namespace archflash::ampere {

// Reads the fragments a of a warp's 16 rows; zeros for rows and columns that do not exist.
template <class C>
__device__ __forceinline__ void load_gather_query(mma_sync::QFragments<typename C::Warp>& q_rmem,
                                                  const AttentionParams& params,
                                                  const GatherContext& cta, int warp_row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const device::FewRow row(params, cta.packed_heads, cta.work, warp_row + lane / 4 + 8 * r);
    const uint16_t* q_gmem = static_cast<const uint16_t*>(params.q_gmem) +
                             row.batch * params.q_batch + row.head * params.q_head +
                             row.packed * params.q_row;
#pragma unroll
    for (int step = 0; step < C::HEAD_DIM / 16; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = 16 * step + 8 * half + lane % 4 * 2;
        const bool exists = row.wanted && column < params.d;
        q_rmem[step][0][2 * half + r] =
            exists ? *reinterpret_cast<const uint32_t*>(q_gmem + column) : 0;
      }
    }
  }
}

// Starts the copy of all rows of the query to shared memory, where they do not go to registers.
template <class C>
__device__ __forceinline__ void start_gather_query(uint32_t q_smem, const AttentionParams& params,
                                                   const GatherContext& cta) {
  const uint16_t* q_gmem = static_cast<const uint16_t*>(params.q_gmem);
  mma_sync::start_rows_load<C, typename C::Tile, C::BLOCK_Q>(
      q_smem, params.d, q_gmem, [&](int row_of_tile) -> const uint16_t* {
        const device::FewRow row(params, cta.packed_heads, cta.work, row_of_tile);
        if (!row.wanted) return nullptr;
        return q_gmem + row.batch * params.q_batch + row.head * params.q_head +
               row.packed * params.q_row;
      });
}

// Starts the copy of the rows of K and V of a block into its stage. Rows of no key become zeros.
template <class C>
__device__ __forceinline__ void start_gathered_rows(uint32_t stage_smem,
                                                    const AttentionParams& params,
                                                    const GatherContext& cta,
                                                    const Places<C>& places, int block) {
  const auto start = [&](uint32_t tile_smem, const uint16_t* head_gmem, int64_t block_stride,
                         int64_t row_stride, int columns) {
    mma_sync::start_rows_load<C, typename C::Tile, C::BLOCK_K>(
        tile_smem, columns, static_cast<const uint16_t*>(params.q_gmem),
        [&](int number) -> const uint16_t* {
          const device::KeyPlace key = places.load(block, number);
          if (key.position == device::NO_KEY) return nullptr;
          return head_gmem + key.block * block_stride + key.row * row_stride;
        });
  };
  start(stage_smem, cta.k_gmem, params.k_batch, params.k_row, params.d);
  start(stage_smem + C::K_BYTES, cta.v_gmem, params.v_batch, params.v_row, params.dv);
}

// Adds what the warps with the same rows have found to the first of them, through shared memory,
// which holds nothing that is still read. All threads call it.
template <class C>
__device__ __forceinline__ void add_key_groups(unsigned char* shared, int row_warps, int groups,
                                               device::Outputs<typename C::Warp>& o_rmem,
                                               device::RowState<typename C::Warp>& state) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = warp / row_warps;
  constexpr int TILES = C::HEAD_DIM_V / 8;
  // Numbers of a warp lie lane by lane.
  float* const all = reinterpret_cast<float*>(shared) + lane;
  if (group > 0 && group < groups) {
    float* own = all + (warp - row_warps) * C::WARP_FLOATS;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) own[32 * (4 * n + i)] = o_rmem[0][n][i];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      own[32 * (4 * TILES + r)] = state.base[0][r];
      own[32 * (4 * TILES + 2 + r)] = state.sum[0][r];
    }
  }
  __syncthreads();  // all other groups have written, before the first one reads
  if (group > 0) return;
  for (int other = 1; other < groups; ++other) {
    const float* x = all + (warp + (other - 1) * row_warps) * C::WARP_FLOATS;
    float own_weight[2], weight[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base_of_other = x[32 * (4 * TILES + r)];
      const float base = fmaxf(state.base[0][r], base_of_other);
      own_weight[r] = ptx::ex2_approx_ftz(state.base[0][r] - base);
      weight[r] = ptx::ex2_approx_ftz(base_of_other - base);
      state.base[0][r] = base;
      state.sum[0][r] =
          fmaf(state.sum[0][r], own_weight[r], x[32 * (4 * TILES + 2 + r)] * weight[r]);
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        o_rmem[0][n][i] =
            fmaf(o_rmem[0][n][i], own_weight[i / 2], x[32 * (4 * n + i)] * weight[i / 2]);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void gather_fwd(const GatherParams& params) {
  using Warp = typename C::Warp;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const mma_sync::CacheParams& call = params.call;
  const AttentionParams& attention = call.attention;
  GatherContext& cta = *reinterpret_cast<GatherContext*>(shared + C::CONTEXT_SMEM);
  {
    const device::Work work = device::find_list_work(attention, params.lists, call.packed_heads,
                                                     blockIdx.x / call.partials.splits);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) cta = make_gather_context<C, 2>(call, params.lists, work);
  }
#pragma unroll 1
  for (int stage = 0; stage < C::STAGES; ++stage) {
    unsigned char* k = shared + stage * C::STAGE_BYTES;
    mma_sync::clear_columns<C, typename C::Tile>(k, C::BLOCK_K, attention.d);
    mma_sync::clear_columns<C, typename C::Tile>(k + C::K_BYTES, C::BLOCK_K, attention.dv);
  }
  if (!C::Q_IN_REGISTERS)
    mma_sync::clear_columns<C, typename C::Tile>(shared + C::Q_SMEM, C::BLOCK_Q, attention.d);
  __syncthreads();  // thread 0 has written `cta`, before the other threads read it

  const Places<C> places{reinterpret_cast<int*>(shared + C::PLACES_SMEM)};
  Lookup<C> lookup(cta, call.cache, places);
  __syncthreads();  // the places of the first block are known to all
  const int first = cta.share.first, last = cta.share.last;
  const auto stage_of = [&](int block) { return number_of<C>(block) % C::STAGES * C::STAGE_BYTES; };
  const auto start_block = [&](int block) {
    start_gathered_rows<C>(shared_smem + stage_of(block), attention, cta, places, block);
  };
  if (first <= last) start_block(first);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % params.row_warps * C::WARP_ROWS, group = warp / params.row_warps;
  const int groups = min(C::WARPS / params.row_warps, C::STEPS);
  mma_sync::QFragments<Warp> q_rmem;
  if constexpr (C::Q_IN_REGISTERS) {
    load_gather_query<C>(q_rmem, attention, cta, warp_row);
  } else {
    start_gather_query<C>(shared_smem + C::Q_SMEM, attention, cta);
  }
  const uint32_t q_lane = shared_smem + C::Q_SMEM + warp_row * C::Tile::ROW_BYTES +
                          mma_sync::rows_first_offset<typename C::Tile>(lane);
  device::Outputs<Warp> o_rmem = {};
  device::RowState<Warp> state;
  state.large = false;
  device::clear(state);
  const uint32_t k_lane = shared_smem + mma_sync::columns_first_offset<typename C::Tile>(lane);
  const uint32_t v_lane =
      shared_smem + C::K_BYTES + mma_sync::rows_first_offset<typename C::Tile>(lane);
#pragma unroll 1
  for (int block = first; block <= last; block += C::BLOCK_K) {
    const bool looks_up = threadIdx.x < C::BLOCK_K;
    device::KeyPlace found{};
    if (looks_up) {
      found = lookup.find(lookup.next_entry);
      lookup.next_entry = lookup.load(block + 3 * C::BLOCK_K);
    }
    ptx::copies_wait_all();
    __syncthreads();  // see above
    if (looks_up) lookup.store(block + 2 * C::BLOCK_K, found);
    if (block < last) start_block(block + C::BLOCK_K);
    if (group >= groups) continue;
#pragma unroll 1
    for (int step = group; step < C::STEPS; step += groups) {
      const int key = step * C::STEP_KEYS;
      const uint32_t rows = stage_of(block) + key * C::Tile::ROW_BYTES;
      device::Scores<Warp> s_rmem;
      mma_sync::multiply_qk<Warp>(s_rmem, q_rmem, q_lane, k_lane + rows);
      if (attention.transform_scores) device::transform_scores<Warp>(s_rmem, attention.rule);
      int rows_of_lane[2];
#pragma unroll
      for (int r = 0; r < 2; ++r)
        rows_of_lane[r] = cta.work.first_row + cta.packed_heads.row(warp_row + lane / 4 + 8 * r);
      mask_gathered<C, Warp>(s_rmem, places, cta.visible, rows_of_lane, block, key);
      const float exp2_scale =
          device::update_row_max<Warp>(s_rmem, state, o_rmem, attention.exp2_scale,
                                       static_cast<const device::RaiseLimits<Warp>*>(nullptr));
      device::Probabilities<Warp> p_rmem;
      device::exponentiate_all_scores<Warp>(s_rmem, p_rmem, state, exp2_scale);
      mma_sync::multiply_pv<Warp>(o_rmem, p_rmem, v_lane + rows);
    }
  }
  ptx::copies_wait_all();  // of a query without keys
  __syncthreads();         // no warp still reads the stages, which hold outputs from here on
  add_key_groups<C>(shared, params.row_warps, groups, o_rmem, state);
  if (group > 0) return;
  if (call.partials.wanted()) {
    device::store_partials<Warp>(o_rmem, state, attention, call.partials, call.packed_heads,
                                 cta.work, blockIdx.x % call.partials.splits, warp_row);
  } else {
    device::store_packed_out<Warp>(o_rmem, state, attention, call.packed_heads, cta.work, warp_row);
  }
}

}  // namespace archflash::ampere
