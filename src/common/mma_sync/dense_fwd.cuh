// Attention forward on mma.sync for calls in which every query sees every key, whose outputs have
// the type of the inputs: no masks, packed sequences, softcap or sinks. Short sequences spend much
// of a CTA's time before its first product and behind its last one. Without those options little is
// left of both: the grid (row tiles, heads, batch) says what a CTA computes, and all of its first
// copies start at once.
//
//   the last block:     wait Q, K | barrier | start next K, V | S  P | wait V | barrier | O += P V
//   those before it:    wait K, V | barrier | start next K, V | S  P  O += P V
//
// The last block comes first, because it alone may be shorter. At most half a step of keys at its
// end is computed 16 at a time.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"
#include "common/device/kept_weights.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/dense_load.cuh"
#include "common/mma_sync/dense_step.cuh"
#include "common/mma_sync/params.h"
#include "common/mma_sync/store_rows.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

template <class C>
__device__ __forceinline__ void dense_fwd(
    const std::conditional_t<C::DROPS, DroppingParams, ManyRowsParams>& all_params) {
  using QKTile = typename C::QKTile;
  using VTile = typename C::VTile;
  using Piece = PieceOf<C>;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& params = all_params.attention;
  static_assert(sizeof(DenseContext) <= C::CONTEXT_BYTES);
  DenseContext& cta = *reinterpret_cast<DenseContext*>(shared + C::CONTEXT_SMEM);
  const uint32_t head = blockIdx.y, batch = blockIdx.z;
  const uint32_t kv_head = head / static_cast<uint32_t>(params.heads_per_kv);
  const int first_row = (gridDim.x - 1 - blockIdx.x) * C::BLOCK_Q;  // the last rows first
  const int rows = params.nq - first_row;
  const int last = (params.nk - 1) / C::BLOCK_K * C::BLOCK_K;  // first key of the last block
  const auto at = [&](const void* gmem, int64_t of_batch, int64_t of_head, uint32_t head) {
    return static_cast<const uint16_t*>(gmem) + batch * of_batch + head * of_head;
  };
  {
    const uint16_t* q_gmem = at(params.q_gmem, params.q_batch, params.q_head, head);
    const DenseContext own{at(params.k_gmem, params.k_batch, params.k_head, kv_head),
                           at(params.v_gmem, params.v_batch, params.v_head, kv_head)};
    if (threadIdx.x == 0) cta = own;
    ptx::griddepcontrol_wait();  // what comes before this call is done
    start_last_rows<C, QKTile, C::BLOCK_Q>(
        shared_smem + C::Q_SMEM, q_gmem + first_row * params.q_row, params.q_row, rows, params.d);
    start_last_rows<C, QKTile, C::BLOCK_K>(shared_smem + C::K_SMEM,
                                           own.k_gmem + last * params.k_row, params.k_row,
                                           params.nk - last, params.d);
    ptx::cp_async_commit_group();
    start_last_rows<C, VTile, C::BLOCK_K>(shared_smem + C::V_SMEM, own.v_gmem + last * params.v_row,
                                          params.v_row, params.nk - last, params.dv);
    ptx::cp_async_commit_group();
    clear_columns_of_tiles<C>(shared, params);
  }
  device::Outputs<C> o_rmem = {};
  device::RowState<C> state;
  state.large = false;
  device::clear(state);

  // With one buffer, and 16 rows for each warp, each thread keeps what it copies: there are
  // registers for it.
  constexpr bool KEEPS_LOADS = C::STAGES == 1 && C::M_TILES == 1;
  [[maybe_unused]] const auto loads_of = [&]<class Tile>(int tile_smem, const auto& rows_gmem,
                                                         int64_t row_stride) {
    if constexpr (KEEPS_LOADS) {
      return KeptLoad<C, Tile>(shared_smem + tile_smem, rows_gmem(), row_stride * 2);
    } else {
      return 0;
    }
  };
  // Starts the copy of a block into the one buffer. rows_gmem is in shared memory.
  [[maybe_unused]] const auto start_one =
      [&]<class Tile>(const auto& kept, int tile_smem, const uint16_t* const& rows_gmem,
                      int first_row, int64_t row_stride, int columns) {
        if constexpr (KEEPS_LOADS) {
          kept.start(first_row, row_stride * 2, columns);
        } else {
          start_load<C, Tile, C::BLOCK_K>(shared_smem + tile_smem, rows_gmem, first_row,
                                          row_stride * 2, columns);
        }
      };
  [[maybe_unused]] const auto k_load = loads_of.template operator()<QKTile>(
      C::K_SMEM, [&] { return at(params.k_gmem, params.k_batch, params.k_head, kv_head); },
      params.k_row);
  [[maybe_unused]] const auto v_load = loads_of.template operator()<VTile>(
      C::V_SMEM, [&] { return at(params.v_gmem, params.v_batch, params.v_head, kv_head); },
      params.v_row);
  [[maybe_unused]] const unsigned kept_thread = threadIdx.x;

  [[maybe_unused]] const auto dropout = [&] {
    if constexpr (C::DROPS) {
      return device::find_dropout(all_params.dropout, batch * params.heads_q + head);
    } else {
      return 0;
    }
  }();
  uint32_t stage_smem = shared_smem;  // K at stage_smem + K_SMEM, V at stage_smem + V_SMEM
  QFragments<C> q_rmem;
#pragma unroll 1
  for (int block = last; block >= 0; block -= C::BLOCK_K) {
    const bool first = block == last;
    // Each thread waits for its own copies: Q and K, or K and V, or with one buffer K. The barrier
    // makes those of all threads visible, and `cta`. After it no warp still reads the other stage,
    // or V of the block before.
    if (first) {
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncthreads();
    [[maybe_unused]] const uint32_t other_stage = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
    if constexpr (C::STAGES == 2) {
      if (block > 0) {
        const uint32_t next = block - C::BLOCK_K;
        start_load<C, QKTile, C::BLOCK_K>(other_stage + C::K_SMEM, cta.k_gmem, next,
                                          params.k_row * 2, params.d);
        start_load<C, VTile, C::BLOCK_K>(other_stage + C::V_SMEM, cta.v_gmem, next,
                                         params.v_row * 2, params.dv);
      }
      ptx::cp_async_commit_group();
    }
    const unsigned thread = KEEPS_LOADS ? kept_thread : ptx::mov_tid_x_volatile();
    const int warp_row = thread / 32 * C::WARP_ROWS;
    if constexpr (C::STAGES == 1) {
      if (!first) {
        start_one.template operator()<VTile>(v_load, C::V_SMEM, cta.v_gmem, block, params.v_row,
                                             params.dv);
        ptx::cp_async_commit_group();
      }
    }
    const uint32_t q_smem = shared_smem + C::Q_SMEM + warp_row * QKTile::ROW_BYTES +
                            rows_first_offset<QKTile>(thread % 32);
    const uint32_t k_smem = stage_smem + C::K_SMEM + columns_first_offset<QKTile>(thread % 32);
    const uint32_t v_smem = stage_smem + C::V_SMEM + rows_first_offset<VTile>(thread % 32);
    if (first) load_all_q<C>(q_rmem, q_smem);

    bool awaits_v = first || C::STAGES == 1;
    // Once by each warp: in the first round, or in each where one buffer is all there is. Then no
    // warp still reads K, and the next block's may come.
    const auto await_v = [&] {
      if (!awaits_v) return;
      if constexpr (C::STAGES == 2) {
        ptx::cp_async_wait_group<1>();
        __syncthreads();
      } else {
        ptx::cp_async_wait_group<0>();
        __syncthreads();
        if (block > 0) {
          start_one.template operator()<QKTile>(k_load, C::K_SMEM, cta.k_gmem, block - C::BLOCK_K,
                                                params.k_row, params.d);
        }
        ptx::cp_async_commit_group();
      }
      awaits_v = false;
    };
    const auto step = [&]<class Step>(device::RowState<Step>& step_state, int key, int keys) {
      dense_step<Step>(o_rmem, step_state, q_rmem, q_smem, k_smem + key * QKTile::ROW_BYTES,
                       v_smem + key * VTile::ROW_BYTES, keys, params.exp2_scale, await_v,
                       [&](auto& p_rmem) {
                         if constexpr (C::DROPS)
                           drop_some<C>(p_rmem, dropout, first_row + warp_row, block + key);
                       });
    };
    int keys = min(params.nk - block, C::BLOCK_K);
    if (warp_row >= rows) {  // a warp without rows skips the work, but not the barriers
      await_v();
      keys = 0;
    }
    [[maybe_unused]] const int rest = keys % C::STEP_KEYS;
    // With one buffer all of K is read before V is awaited.
    if constexpr (C::STAGES == 2 && !C::DROPS) {  // random bits are drawn for 32 keys at a time
      if (rest > 0 && rest <= C::STEP_KEYS / 2) {
        keys -= rest;
        device::RowState<Piece> piece_state;
        copy_state(piece_state, state);
#pragma unroll 1
        for (int key = (rest - 1) / 16 * 16; key >= 0; key -= 16)
          step(piece_state, keys + key, rest - key);
        copy_state(state, piece_state);
      }
    }
    if constexpr (C::STEP_KEYS == C::BLOCK_K) {
      if (keys > 0) step(state, 0, keys);
    } else {
#pragma unroll 1
      for (; keys > 0; keys -= (keys - 1) % C::STEP_KEYS + 1) {
        const int key = (keys - 1) / C::STEP_KEYS * C::STEP_KEYS;
        step(state, key, keys - key);
      }
    }
    if constexpr (C::STAGES == 2) stage_smem = other_stage;
  }

  if constexpr (C::DROPS) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o_rmem[m][n][i] *= all_params.dropout.scale;
      }
    }
  }
  const int warp_row = ptx::mov_tid_x_volatile() / 32 * C::WARP_ROWS;
  store_head_rows<C>(o_rmem, state, shared, params, batch, head, first_row + warp_row, warp_row,
                     rows - warp_row);
}

}  // namespace archflash::mma_sync
