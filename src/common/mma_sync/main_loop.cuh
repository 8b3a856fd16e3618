// What every kernel on mma.sync and cp.async does around its products: a CTA visits the visible key
// blocks of its rows from the last (ragged) one back to the first.
//   two stages:  wait K, V | barrier | start the next K, V | weigh, multiply
//   one stage:   wait K | barrier | start V | weigh
//                wait V | barrier | start next K | multiply
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/math/online_softmax.cuh"
#include "common/mma_sync/place.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// Masks the scores of a warp's step where an edge goes through them.
template <class C>
__device__ __forceinline__ void mask_edges(math::Scores<C>& s_rmem, const Place& place,
                                           int key_first) {
  const WarpRows<C> rows(place);
  if (rows.all_see(place.visible, key_first)) return;
  const int lane = ptx::mov_tid_x_volatile() % 32;
  math::mask_scores<C>(s_rmem, place.visible, rows.first + lane / 4, key_first + lane % 4 * 2);
}

struct NothingElse {
  __device__ __forceinline__ void operator()(int) const {}
};

// The key blocks of a CTA, and their copies. Made once its place is in shared memory. With the copy
// of a block's K goes what start_with_k(key) starts: it lands with it.
template <class C, class StartWithK = NothingElse>
struct KeyBlocks {
  using QKTile = typename C::QKTile;
  using VTile = typename C::VTile;

  const AttentionParams& params;
  const Place& place;
  uint32_t shared_smem;
  // First keys of the first and of the last block with a visible key. None: last before first.
  int begin, last;
  StartWithK start_with_k;

  __device__ __forceinline__ KeyBlocks(const AttentionParams& params, const Place& place,
                                       uint32_t shared_smem,
                                       const StartWithK& start_with_k = StartWithK())
      : params(params), place(place), shared_smem(shared_smem), start_with_k(start_with_k) {
    const int last_row = min(place.work.first_row + C::BLOCK_Q, place.work.nq) - 1;
    begin = place.visible.first(place.work.first_row) & -C::BLOCK_K;
    last = place.visible.last(last_row) & -C::BLOCK_K;
  }

  __device__ __forceinline__ void start_k(int key, uint32_t stage_smem) const {
    start_keys<C, QKTile>(stage_smem + C::K_SMEM, place.k_gmem, params.k_row, params.d / C::QK_PACK,
                          key, place.visible.nk);
    start_with_k(key);
  }
  __device__ __forceinline__ void start_v(int key, uint32_t stage_smem) const {
    start_keys<C, VTile>(stage_smem + C::V_SMEM, place.v_gmem, params.v_row, params.dv / C::V_PACK,
                         key, place.visible.nk);
  }

  // Q and the first block. `shared`: what shared_smem is the address of.
  __device__ __forceinline__ void start(unsigned char* shared) const {
    if (begin > last) return;
    const uint16_t* q_gmem =
        static_cast<const uint16_t*>(params.q_gmem) + math::find_offsets(params, place.work).q;
    start_ragged_load<C, QKTile, C::BLOCK_Q>(shared_smem + C::Q_SMEM, q_gmem, params.q_row,
                                             place.work.nq - place.work.first_row,
                                             params.d / C::QK_PACK);
    clear_columns<C, QKTile>(shared + C::Q_SMEM, C::BLOCK_Q, params.d / C::QK_PACK);
#pragma unroll
    for (int stage = 0; stage < C::STAGES; ++stage) {
      unsigned char* stage_start = shared + stage * C::STAGE_BYTES;
      clear_columns<C, QKTile>(stage_start + C::K_SMEM, C::BLOCK_K, params.d / C::QK_PACK);
      clear_columns<C, VTile>(stage_start + C::V_SMEM, C::BLOCK_K, params.dv / C::V_PACK);
    }
    start_k(last, shared_smem);
    if constexpr (C::STAGES == 2) start_v(last, shared_smem);
  }

  // For each step of STEP_KEYS keys of which a warp's rows see any:
  //   weigh(p_rmem, q_rmem, q_smem, k_smem, key_first)  makes P of Q and K
  //   multiply(p_rmem, v_smem)                          adds P V to the outputs
  // with this lane's rows for ldmatrix and the first key of the step.
  template <class Weigh, class Multiply>
  __device__ __forceinline__ void visit(const Weigh& weigh, const Multiply& multiply) const;
};

template <class C, class StartWithK>
template <class Weigh, class Multiply>
__device__ __forceinline__ void KeyBlocks<C, StartWithK>::visit(const Weigh& weigh,
                                                                const Multiply& multiply) const {
  uint32_t stage_smem = shared_smem;  // of this block: what the offsets K_SMEM and V_SMEM start at
  QFragments<C> q_rmem;
#pragma unroll 1
  for (int block = last; block >= begin; block -= C::BLOCK_K) {
    // K (and at first Q; with two stages V) of all threads has landed; all warps are done with the
    // block before.
    ptx::copies_wait_all();
    __syncthreads();
    if constexpr (C::STAGES == 2) {
      const uint32_t other_stage = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
      if (block > begin) {
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
    const uint32_t v_smem = stage_smem + C::V_SMEM + v_first_offset<C>(thread % 32);
    if constexpr (C::Q_IN_REGISTERS) {
      if (block == last) {
#pragma unroll
        for (int column = 0; column < QKTile::COLUMNS; column += 16)
          load_q<C>(q_rmem[column / 16], q_smem, column);
      }
    }

#pragma unroll 1
    for (int step = C::BLOCK_K - C::STEP_KEYS; step >= 0; step -= C::STEP_KEYS) {
      const int key_first = block + step;
      // Whether the warp has rows, and one of them sees one of these keys.
      const bool computes = WarpRows<C>(place).any_sees(place.visible, key_first);
      Probabilities<C> p_rmem;
      if (computes) weigh(p_rmem, q_rmem, q_smem, k_smem + step * QKTile::ROW_BYTES, key_first);
      if constexpr (C::STAGES == 1) {
        // V of all threads has landed; all warps are done with K: the next may overwrite it.
        ptx::copies_wait_all();
        __syncthreads();
        if (block > begin) start_k(block - C::BLOCK_K, stage_smem);
      }
      if (computes) multiply(p_rmem, v_smem + step * VTile::ROW_BYTES);
    }
    if constexpr (C::STAGES == 2) stage_smem = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
  }
}

}  // namespace archflash::mma_sync
