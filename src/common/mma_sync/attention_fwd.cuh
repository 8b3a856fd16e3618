// Attention forward on mma.sync tensor cores, for every GPU from compute capability 8.0 on: fp16 or
// bf16 inputs, fp32 scores, sums and output accumulators. Work: one CTA per (BLOCK_Q query rows,
// head, batch). It visits the visible key blocks from the last (ragged) one back to the first with
// an online softmax. A warp owns WARP_ROWS rows: scores, P and outputs never leave its registers;
// shared memory holds Q, K and V only.
//   two stages:  wait K, V | barrier | start the next K, V | S = Q K^T, softmax, O += P V
//   one stage:   wait K | barrier | start V | S = Q K^T, softmax
//                wait V | barrier | start next K | O += P V
// Loads, lane maps, products: tile.cuh. Tiles, the choice among them and numbers: the folders that
// instantiate it.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/visible_keys.cuh"
#include "common/mma_sync/place.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

using math::Outputs;
using math::Probabilities;
using math::RowState;
using math::Scores;

template <class C>
__device__ __forceinline__ void attention_fwd(const AttentionParams& params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  using QKTile = typename C::QKTile;
  using VTile = typename C::VTile;

  static_assert(sizeof(Place) <= C::PLACE_BYTES);
  Place& place = *reinterpret_cast<Place*>(shared + C::PLACE_SMEM);
  {
    const math::Work work = math::find_work<C::BLOCK_Q>(params, blockIdx.x);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      const math::Offsets offsets = math::find_offsets(params, work);
      place = {static_cast<const uint16_t*>(params.k_gmem) + offsets.k,
               static_cast<const uint16_t*>(params.v_gmem) + offsets.v, work,
               math::find_visible_keys(params, work)};
    }
  }
  __syncthreads();  // `place` is written
  const int last_row = min(place.work.first_row + C::BLOCK_Q, place.work.nq) - 1;
  // First keys of the first and of the last block with a visible key. None: last before first.
  const int blocks_begin = place.visible.first(place.work.first_row) & -C::BLOCK_K;
  const int blocks_last = place.visible.last(last_row) & -C::BLOCK_K;
  const auto start_k = [&](int key, uint32_t stage_smem) {
    start_keys<C, QKTile>(stage_smem + C::K_SMEM, place.k_gmem, params.k_row, params.d, key,
                          place.visible.nk);
  };
  const auto start_v = [&](int key, uint32_t stage_smem) {
    start_keys<C, VTile>(stage_smem + C::V_SMEM, place.v_gmem, params.v_row, params.dv, key,
                         place.visible.nk);
  };

  uint32_t stage_smem = shared_smem;  // of this block: what the offsets K_SMEM and V_SMEM start at
  if (blocks_begin <= blocks_last) {
    const uint16_t* q_gmem =
        static_cast<const uint16_t*>(params.q_gmem) + math::find_offsets(params, place.work).q;
    start_ragged_load<C, QKTile, C::BLOCK_Q>(shared_smem + C::Q_SMEM, q_gmem, params.q_row,
                                             place.work.nq - place.work.first_row, params.d);
    clear_columns<C, QKTile>(shared + C::Q_SMEM, C::BLOCK_Q, params.d);
#pragma unroll
    for (int stage = 0; stage < C::STAGES; ++stage) {
      unsigned char* stage_start = shared + stage * C::STAGE_BYTES;
      clear_columns<C, QKTile>(stage_start + C::K_SMEM, C::BLOCK_K, params.d);
      clear_columns<C, VTile>(stage_start + C::V_SMEM, C::BLOCK_K, params.dv);
    }
    start_k(blocks_last, stage_smem);
    if constexpr (C::STAGES == 2) start_v(blocks_last, stage_smem);
  }

  uint32_t q_rmem[C::Q_IN_REGISTERS ? C::HEAD_DIM / 16 : 1][C::M_TILES][4];
  Outputs<C> o_rmem = {};
  RowState<C> state;
  state.large = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.base[m][r] = math::LOWEST;  // finite: no inf - inf in a row that has seen no key
      state.sum[m][r] = 0.0f;
    }
  }

#pragma unroll 1
  for (int block = blocks_last; block >= blocks_begin; block -= C::BLOCK_K) {
    // K (and at first Q; with two stages V) of all threads has landed; all warps are done with the
    // block before.
    ptx::copies_wait_all();
    __syncthreads();
    if constexpr (C::STAGES == 2) {
      const uint32_t other_stage = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
      if (block > blocks_begin) {
        start_k(block - C::BLOCK_K, other_stage);
        start_v(block - C::BLOCK_K, other_stage);
      }
    } else {
      start_v(block, stage_smem);
    }
    const int thread = ptx::mov_tid_x_volatile();
    const int warp_row = thread / 32 * C::WARP_ROWS;
    const uint32_t q_smem = shared_smem + C::Q_SMEM + warp_row * QKTile::ROW_BYTES +
                            rows_first_offset<QKTile>(thread % 32);
    const uint32_t k_smem = stage_smem + C::K_SMEM + columns_first_offset<QKTile>(thread % 32);
    const uint32_t v_smem = stage_smem + C::V_SMEM + rows_first_offset<VTile>(thread % 32);
    if constexpr (C::Q_IN_REGISTERS) {
      if (block == blocks_last) {
#pragma unroll
        for (int column = 0; column < C::HEAD_DIM; column += 16)
          load_q<C>(q_rmem[column / 16], q_smem, column);
      }
    }

#pragma unroll 1
    for (int step = C::BLOCK_K - C::STEP_KEYS; step >= 0; step -= C::STEP_KEYS) {
      const int key_first = block + step;
      // Whether the warp has rows, and one of them sees one of these keys.
      const bool computes = WarpRows<C>(place).any_sees(place.visible, key_first);
      Probabilities<C> p_rmem;
      if (computes) {
        Scores<C> s_rmem;
        multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem + step * QKTile::ROW_BYTES);
        if (params.transform_scores) math::transform_scores<C>(s_rmem, params);
        const WarpRows<C> rows(place);
        if (!rows.all_see(place.visible, key_first)) {
          const int lane = ptx::mov_tid_x_volatile() % 32;
          math::mask_scores<C>(s_rmem, place.visible, rows.first + lane / 4,
                               key_first + lane % 4 * 2);
        }
        const float exp2_scale = math::follow_maxima<C>(s_rmem, state, o_rmem, params.exp2_scale);
        math::weigh_all_scores<C>(s_rmem, p_rmem, state, exp2_scale);
      }
      if constexpr (C::STAGES == 1) {
        // V of all threads has landed; all warps are done with K: the next may overwrite it.
        ptx::copies_wait_all();
        __syncthreads();
        if (block > blocks_begin) start_k(block - C::BLOCK_K, stage_smem);
      }
      if (computes) multiply_pv<C>(o_rmem, p_rmem, v_smem + step * VTile::ROW_BYTES);
    }
    if constexpr (C::STAGES == 2) stage_smem = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
  }
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  math::store_out<C, VTile>(o_rmem, state, params, place.work, warp_row,
                            shared + C::Q_SMEM + warp_row * QKTile::ROW_BYTES);
}

}  // namespace archflash::mma_sync

// One entry point: its name is what plan.cpp asks for. The one parameter stays in constant memory.
#define ARCHFLASH_ATTENTION_KERNEL(NAME, CONFIG)                                     \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::AttentionParams params) {              \
    archflash::mma_sync::attention_fwd<CONFIG>(params);                              \
  }
