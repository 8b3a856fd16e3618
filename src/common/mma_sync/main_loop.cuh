// The main loop of the kernels on mma.sync and cp.async: a CTA visits the key blocks that its rows
// see, from the last one (which may be shorter) back to the first. `exponentiate` makes P of Q and
// K; `multiply` adds P V to the outputs.
//   two stages: wait K, V | barrier | start next K, V | exponentiate | multiply
//   one stage:  wait K | barrier | start V | exponentiate | wait V | barrier | next K | multiply
// With key groups (device/key_groups.cuh) the first two blocks are started together, because the
// products of a warp then take less time than a copy.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/tile_walk.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/partials.h"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// Masks a warp's scores for STEP_KEYS keys from key_first on, if some row does not see them all.
template <class C>
__device__ __forceinline__ void mask_edges(device::Scores<C>& s_rmem, const ContextOf<C>& cta,
                                           int key_first) {
  const WarpRows<C> rows(cta);
  if (rows.all_see(visible_keys<C>(cta), key_first)) return;
  const unsigned lane = ptx::mov_tid_x_volatile() % 32;
  if constexpr (C::CAN_SPLIT) {
    const int warp_row = ptx::mov_tid_x_volatile() / 32 * C::WARP_ROWS;
    int lane_rows[2];
    for (int r = 0; r < 2; ++r)
      lane_rows[r] = cta.work.first_row + cta.packed_heads.row(warp_row + lane / 4 + 8 * r);
    if constexpr (C::CACHE) {
      const device::ChunkedKeys visible = visible_keys<C>(cta);
      for (int r = 0; r < 2; ++r) {
        device::mask_row<C>(s_rmem, visible.of_row(lane_rows[r]), 0, r, 0,
                            key_first + lane % 4 * 2);
      }
    } else {
      device::mask_rows<C>(s_rmem, cta.visible, lane_rows, key_first + lane % 4 * 2);
    }
  } else {
    device::mask_scores<C>(s_rmem, cta.visible, rows.first + lane / 4, key_first + lane % 4 * 2);
  }
}

// Starts the copy of the CTA's rows of Q. Those that belong to no head or no sequence become zeros.
template <class C>
__device__ __forceinline__ void start_q(uint32_t q_smem, const AttentionParams& params,
                                        const ContextOf<C>& cta) {
  using Tile = typename C::QKTile;
  const uint16_t* q_gmem =
      static_cast<const uint16_t*>(params.q_gmem) + device::find_offsets(params, cta.work).q;
  const int rows = cta.work.nq - cta.work.first_row;
  if constexpr (C::CAN_SPLIT) {
    start_rows_load<C, Tile, C::BLOCK_Q>(q_smem, params.d / C::QK_PACK, q_gmem, [&](int row) {
      const int head = cta.packed_heads.head(row), row_of_head = cta.packed_heads.row(row);
      const bool valid = head < cta.packed_heads.count && row_of_head < rows;
      return valid ? q_gmem + head * params.q_head + row_of_head * params.q_row : nullptr;
    });
  } else {
    start_ragged_load<C, Tile, C::BLOCK_Q>(q_smem, q_gmem, params.q_row, 0, rows,
                                           params.d / C::QK_PACK);
  }
}

// The walk over all blocks from the last one back to the one at `begin`. Another walk may leave
// blocks out (device/masks.cuh).
template <class C>
struct EveryBlock {
  int begin;

  __device__ __forceinline__ bool has(int block) const { return begin <= block; }
  // What is known of the block behind `block`, whether there is one, and its first key, which is
  // computed where it is used.
  __device__ __forceinline__ int look_behind(int block) const { return block; }
  __device__ __forceinline__ bool has_next(int found) const { return begin < found; }
  __device__ __forceinline__ int next(int found) const { return found - C::BLOCK_K; }
};

// The default for KeyBlocks' start_with_k, which copies nothing.
struct NothingElse {
  __device__ __forceinline__ void operator()(int) const {}
};

// The key blocks of a CTA and their copies. `cta` must be in shared memory before this is made.
// start_with_k(key) is called with each copy of K and may start a cp.async of its own, which is
// awaited together with that K.
template <class C, class StartWithK = NothingElse>
struct KeyBlocks {
  using QKTile = typename C::QKTile;
  using VTile = typename C::VTile;

  const AttentionParams& params;
  const ContextOf<C>& cta;
  uint32_t shared_smem;
  // First key of the first and of the last block that the CTA visits, because some row sees it;
  // begin > last if there is none.
  int begin, last;
  StartWithK start_with_k;

  __device__ __forceinline__ KeyBlocks(const AttentionParams& params, const ContextOf<C>& cta,
                                       uint32_t shared_smem,
                                       const StartWithK& start_with_k = StartWithK())
      : KeyBlocks(params, cta, cta, shared_smem, start_with_k) {}
  // own: what `cta` will be behind the first barrier of visit(), known to this thread already.
  __device__ __forceinline__ KeyBlocks(const AttentionParams& params, const ContextOf<C>& cta,
                                       const ContextOf<C>& own, uint32_t shared_smem,
                                       const StartWithK& start_with_k = StartWithK())
      : params(params), cta(cta), shared_smem(shared_smem), start_with_k(start_with_k) {
    const int last_row = min(own.work.first_row + rows_of_tile<C>(own), own.work.nq) - 1;
    begin = device::block_start<C::BLOCK_K>(visible_keys<C>(own).first(own.work.first_row));
    last = device::block_start<C::BLOCK_K>(visible_keys<C>(own).last(last_row));
  }

  // Visits only the blocks of one share of the keys.
  __device__ __forceinline__ void take_share(const Partials& partials, int split) {
    const device::Blocks share =
        device::blocks_of_share<C::BLOCK_K>({begin, last}, partials, split);
    begin = share.first;
    last = share.last;
  }

  __device__ __forceinline__ void start_k(int key, uint32_t stage_smem,
                                          const ContextOf<C>& known) const {
    if constexpr (C::CACHE) {
      start_cached_keys<C, QKTile>(stage_smem + C::K_SMEM, known.k_gmem, params.k_batch,
                                   params.k_row, params.d, key, known);
    } else {
      start_keys<C, QKTile>(stage_smem + C::K_SMEM, known.k_gmem, params.k_row,
                            params.d / C::QK_PACK, key, NO_BEGIN, known.visible.nk);
    }
    start_with_k(key);
  }
  __device__ __forceinline__ void start_v(int key, uint32_t stage_smem,
                                          const ContextOf<C>& known) const {
    if constexpr (C::CACHE) {
      start_cached_keys<C, VTile>(stage_smem + C::V_SMEM, known.v_gmem, params.v_batch,
                                  params.v_row, params.dv, key, known);
    } else {
      start_keys<C, VTile>(stage_smem + C::V_SMEM, known.v_gmem, params.v_row,
                           params.dv / C::V_PACK, key, known.visible.first_shift, known.visible.nk);
    }
  }

  __device__ __forceinline__ void start_k(int key, uint32_t stage_smem) const {
    start_k(key, stage_smem, cta);
  }
  __device__ __forceinline__ void start_v(int key, uint32_t stage_smem) const {
    start_v(key, stage_smem, cta);
  }

  // Starts the copies of Q and of the block visited first (with key groups, of two blocks), and
  // clears the columns that no copy writes. `shared` is the CTA's shared memory, whose address is
  // shared_smem; `own` as above.
  __device__ __forceinline__ void start(unsigned char* shared) const { start(shared, cta); }
  __device__ __forceinline__ void start(unsigned char* shared, const ContextOf<C>& own) const {
    if (begin > last) return;
    start_q<C>(shared_smem + C::Q_SMEM, params, own);
    clear_columns_of_tiles<C>(shared, params);
    start_k(last, shared_smem, own);
    if constexpr (C::V_WITH_K) start_v(last, shared_smem, own);
    if constexpr (C::KEY_GROUPS > 1) {
      ptx::cp_async_commit_group();  // visit() first waits for this much
      if (last > begin) {
        start_k(last - C::BLOCK_K, shared_smem + C::STAGE_BYTES, own);
        start_v(last - C::BLOCK_K, shared_smem + C::STAGE_BYTES, own);
      }
    }
  }

  // Visits all blocks. For each step of STEP_KEYS keys of which a warp's rows see any, the warp
  // calls
  //   exponentiate(p_rmem, q_rmem, q_smem, k_smem, key_first)  makes P of Q and K
  //   multiply(p_rmem, v_smem)                                 adds P V to the outputs
  // where q_smem, k_smem and v_smem are the rows that this lane names to ldmatrix, and key_first is
  // the first key of the step. Between is what one leaves to the other, P or what it is made of.
  template <class Between = Probabilities<C>, class Exponentiate, class Multiply>
  __device__ __forceinline__ void visit(const Exponentiate& exponentiate,
                                        const Multiply& multiply) const {
    visit<Between>(
        EveryBlock<C>{begin},
        [&](Between&, int key_first) {
          return WarpRows<C>(cta).any_sees(visible_keys<C>(cta), key_first);
        },
        exponentiate, multiply);
  }

  // Visits the blocks from the one at `last` on, in the order of a walk. sees(p_rmem, key_first)
  // says whether the warp computes a step; what it finds for the others goes into p_rmem.
  template <class Between, class Walk, class Sees, class Exponentiate, class Multiply>
  __device__ __forceinline__ void visit(const Walk& walk, const Sees& sees,
                                        const Exponentiate& exponentiate,
                                        const Multiply& multiply) const;
};

template <class C, class StartWithK>
template <class Between, class Walk, class Sees, class Exponentiate, class Multiply>
__device__ __forceinline__ void KeyBlocks<C, StartWithK>::visit(const Walk& walk, const Sees& sees,
                                                                const Exponentiate& exponentiate,
                                                                const Multiply& multiply) const {
  // The current stage's K is at stage_smem + K_SMEM, its V at stage_smem + V_SMEM.
  uint32_t stage_smem = shared_smem;
  QFragments<C> q_rmem;
#pragma unroll 1
  for (int block = last; walk.has(block);) {
    int found;  // of the block that comes next
    // Each thread waits for its own copies: K, with two stages also V, and Q in the first round.
    // The barrier makes the copies of all threads visible. After it no warp still reads the
    // previous block, whose buffers are overwritten next.
    const bool has_started_next = C::KEY_GROUPS > 1 && block == last;
    if (has_started_next) {  // the next block's copies may still be under way
      ptx::cp_async_wait_group<0>();
    } else {
      ptx::copies_wait_all();
    }
    __syncthreads();
    if constexpr (C::STAGES == 2) {
      const uint32_t other_stage = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
      found = walk.look_behind(block);
      if (walk.has_next(found) && !has_started_next) {
        start_k(walk.next(found), other_stage);
        start_v(walk.next(found), other_stage);
      }
    } else if (!C::V_WITH_K || block != last) {
      start_v(block, stage_smem);
    }
    const unsigned thread = ptx::mov_tid_x_volatile();
    const int warp_row = device::warp_first_row<C>(thread);
    const uint32_t q_smem = shared_smem + C::Q_SMEM + warp_row * QKTile::ROW_BYTES +
                            rows_first_offset<QKTile>(thread % 32);
    const uint32_t k_smem = stage_smem + C::K_SMEM + columns_first_offset<QKTile>(thread % 32);
    const uint32_t v_smem = stage_smem + C::V_SMEM + v_first_offset<C>(thread % 32);
    if (block == last) load_all_q<C>(q_rmem, q_smem);

    // A warp takes all steps, or the one of its group.
    const int group_step = C::KEY_GROUPS > 1 ? device::key_group<C>(thread) * C::STEP_KEYS : 0;
    const int first_step = C::KEY_GROUPS > 1 ? group_step : C::BLOCK_K - C::STEP_KEYS;
#pragma unroll 1
    for (int step = first_step; step >= group_step; step -= C::STEP_KEYS) {
      const int key_first = block + step;
      // A warp that sees none of these keys skips the work, but not the barriers.
      Between p_rmem;
      const bool computes = sees(p_rmem, key_first);
      if (computes)
        exponentiate(p_rmem, q_rmem, q_smem, k_smem + step * QKTile::ROW_BYTES, key_first);
      if constexpr (C::STAGES == 1) {
        // After the barrier V has arrived from all threads, and no warp still reads K, which the
        // next block's K overwrites.
        ptx::copies_wait_all();
        __syncthreads();
        found = walk.look_behind(block);
        if (walk.has_next(found)) start_k(walk.next(found), stage_smem);
      }
      if (computes) multiply(p_rmem, v_smem + step * VTile::ROW_BYTES);
    }
    if constexpr (C::STAGES == 2) stage_smem = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
    block = walk.next(found);
  }
}

}  // namespace archflash::mma_sync
