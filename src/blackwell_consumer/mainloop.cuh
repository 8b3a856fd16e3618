// What the consumers of attention_fwd.cuh do with a block of keys: skip it, visit it, or, where the
// block needs no care, visit it in a loop of its own.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blackwell_consumer/params.h"
#include "blackwell_consumer/tile.cuh"
#include "blackwell_consumer/warp_context.cuh"
#include "common/device/descales.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/fp8_softmax.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/ring.cuh"
#include "common/device/visible_keys.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/tma.cuh"

namespace archflash::blackwell_consumer {

using device::release;

// The rules by which a row's base follows its maximum.
template <class C>
using Weights = std::conditional_t<C::FP8, device::WeightsE4m3, device::Weights16>;

// Hands a stage back that the warp has read by ldmatrix. The fence makes the reads come before
// TMA's next write: without it ptxas puts the arrival before the products that use what was read,
// and so before the last reads are known to be done.
__device__ __forceinline__ void release_after_reads(uint32_t barrier_smem) {
  ptx::fence_proxy_async_shared();
  release(barrier_smem);
}

// The thread's number. Kernels with few registers read it anew at each use instead of keeping it.
template <class C>
__device__ __forceinline__ unsigned thread_index() {
  if constexpr (C::CONTEXT_IN_REGISTERS) return threadIdx.x;
  return ptx::mov_tid_x_volatile();
}

// The shared-memory addresses of the rows that this lane names to ldmatrix, in Q and in a stage of
// K or V.
template <class C>
__device__ __forceinline__ uint32_t lane_q_smem(uint32_t shared_smem) {
  const unsigned thread = thread_index<C>();
  return shared_smem + C::Q_SMEM + thread / 32 * C::WARP_ROWS * C::QTile::ROW_BYTES +
         mma_sync::rows_first_offset<typename C::QTile>(thread % 32);
}
template <class C>
__device__ __forceinline__ uint32_t lane_k_smem(uint32_t shared_smem, int stage) {
  const unsigned thread = thread_index<C>();
  return shared_smem + C::K_SMEM + stage * C::KTile::BYTES +
         mma_sync::columns_first_offset<typename C::KTile>(thread % 32);
}
template <class C>
__device__ __forceinline__ uint32_t lane_v_smem(uint32_t shared_smem, int stage) {
  const unsigned thread = thread_index<C>();
  return shared_smem + C::V_SMEM + stage * C::VTile::BYTES +
         mma_sync::v_first_offset<C>(thread % 32);
}

// Passes by a block that is masked for all rows of this warp; other warps may see it. The warp
// still waits for the block: otherwise it could lap the ring and hand back a stage a phase too
// early.
template <class C>
__device__ __forceinline__ void skip_block(const Barriers<C>& barriers, RingPosition<C>& ring) {
  // mutants: few-skipped-blocks (tests/sim/tags.py)
  ptx::mbarrier_wait_parity(barriers.k_full(ring.stage()), ring.parity());
  release(barriers.k_empty(ring.stage()));
  // mutants: few-skipped-blocks
  ptx::mbarrier_wait_parity(barriers.v_full(ring.stage()), ring.parity());
  release(barriers.v_empty(ring.stage()));
  ++ring.count;
}

// Masks a warp's scores of a block.
template <class C>
__device__ __forceinline__ void mask_block(device::Scores<C>& s_rmem, const Params& params,
                                           const WarpContextOf<C>& context, int block) {
  const unsigned thread = thread_index<C>();
  const int first_key = block + thread % 4 * 2;
  if constexpr (C::CAN_SPLIT) {
    const int row_of_tile = thread / 32 * C::WARP_ROWS + thread % 32 / 4;
    const device::PackedHeads& packed = params.packed_heads;
    const int first_row = context.work.first_row;
    const int lane_rows[2] = {first_row + packed.row(row_of_tile),
                              first_row + packed.row(row_of_tile + 8)};
    device::mask_rows<C>(s_rmem, context.visible, lane_rows, first_key);
  } else {
    const int first_row = context.work.first_row + thread / 32 * C::WARP_ROWS;
    device::mask_scores<C>(s_rmem, context.visible, first_row + thread % 32 / 4, first_key);
  }
}

// Waits until the next block's K has landed.
template <class C>
__device__ __forceinline__ void wait_for_k(const Barriers<C>& barriers,
                                           const RingPosition<C>& ring) {
  ptx::mbarrier_wait_parity(barriers.k_full(ring.stage()), ring.parity());
}

// S = Q K^T of a block whose K has landed. K goes back, unless it goes back behind the maxima.
template <class C>
__device__ __forceinline__ void multiply_qk(device::Scores<C>& s_rmem, const Barriers<C>& barriers,
                                            const RingPosition<C>& ring,
                                            const mma_sync::QFragments<C>& q_rmem,
                                            uint32_t shared_smem, const ScalesOf<C>& scales) {
  const uint32_t q_smem = lane_q_smem<C>(shared_smem);
  const uint32_t k_smem = lane_k_smem<C>(shared_smem, ring.stage());
  if constexpr (C::BLOCK_SCALES) {
    multiply_scaled_qk<C>(s_rmem, q_rmem, q_smem, k_smem, scales);
  } else {
    mma_sync::multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
  }
  if constexpr (!C::RELEASES_K_LATE) release_after_reads(barriers.k_empty(ring.stage()));
}

// What comes between the maxima of a block and the use of its V: K goes back, unless it has gone
// back, and V has landed.
template <class C>
__device__ __forceinline__ void wait_for_v(const Barriers<C>& barriers,
                                           const RingPosition<C>& ring) {
  if constexpr (C::RELEASES_K_LATE) release_after_reads(barriers.k_empty(ring.stage()));
  ptx::mbarrier_wait_parity(barriers.v_full(ring.stage()), ring.parity());
}

// In place of device::RaiseLimits where update_row_max() finds them itself.
struct NoLimits {
  template <class State>
  __device__ __forceinline__ explicit NoLimits(const State&) {}
};

// One block of keys, of which this warp sees some: S = Q K^T, masks, P and O += P V.
template <class C, class State>
__device__ __forceinline__ void visit_block(const Params& params, const Barriers<C>& barriers,
                                            RingPosition<C>& ring, WarpContextOf<C>& context,
                                            State& state, device::Outputs<C>& o_rmem,
                                            const mma_sync::QFragments<C>& q_rmem,
                                            ScalesOf<C>& scales, int block, uint32_t shared_smem) {
  const AttentionParams& attention = params.attention;
  device::Scores<C> s_rmem;
  if constexpr (C::BLOCK_SCALES) {
    scales.read_v(context.key_scales, attention, block, context.visible.begin(),
                  context.visible.nk);
  }
  wait_for_k<C>(barriers, ring);
  const std::conditional_t<C::HAS_PLAIN_LOOP, device::RaiseLimits<C>, NoLimits> limits(state);
  multiply_qk<C>(s_rmem, barriers, ring, q_rmem, shared_smem, scales);
  if constexpr (C::BLOCK_SCALES)  // of the next block, so that they are there in time
    scales.read_k(context.key_scales, attention, max(block - C::BLOCK_K, 0));
  float exp2_scale = attention.exp2_scale;
  if constexpr (HAS_DESCALES<C>) {
    exp2_scale = device::descale_scores<C>(s_rmem, attention, context.key_descales,
                                           context.warp_descale, block);
  } else if (attention.transform_scores) {
    device::transform_scores<C>(s_rmem, attention.rule);
  }
  if (block < context.clear_first || block > context.clear_last)
    mask_block<C>(s_rmem, params, context, block);
  bool v_is_zero = false;
  if constexpr (HAS_DESCALES<C>) {
    if (context.key_descales.v_gmem != nullptr) {
      device::change_unit<C>(o_rmem, context.key_descales, context.warp_descale, block,
                             context.blocks.last);
      v_is_zero = context.key_descales.v(block) == 0.0f;
    }
  }
  const device::RaiseLimits<C>* known_limits = nullptr;
  if constexpr (C::HAS_PLAIN_LOOP) known_limits = &limits;
  exp2_scale =
      device::update_row_max<C, Weights<C>>(s_rmem, state, o_rmem, exp2_scale, known_limits);
  wait_for_v<C>(barriers, ring);
  const uint32_t v_smem = lane_v_smem<C>(shared_smem, ring.stage());
  const bool lacks_rows =  // of V
      block < context.visible.begin() || block + C::BLOCK_K > context.visible.nk;
  if (lacks_rows || v_is_zero) {
    const int begin = context.visible.begin();
    exponentiate_and_multiply_pv<C, true>(
        o_rmem, s_rmem, state, exp2_scale, v_smem,
        static_cast<int>(ptx::mov_tid_x_volatile() % 4 * 2) + block - begin,
        v_is_zero ? 0 : context.visible.nk - begin, scales);
  } else {
    exponentiate_and_multiply_pv<C, false>(o_rmem, s_rmem, state, exp2_scale, v_smem, 0, 0, scales);
  }
  release_after_reads(barriers.v_empty(ring.stage()));
  ++ring.count;
}

// --- plain blocks: every row of the warp sees every key, every row of V counts,
// and neither scores nor bases need care. Such a block has one branch. ---

// Copies the bases and sums of a state whose flag is of another kind.
template <class C, class To, class From>
__device__ __forceinline__ void copy_rows(To& to, const From& from) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to.base[m][r] = from.base[m][r];
      to.sum[m][r] = from.sum[m][r];
    }
  }
}

// Raises the bases of a warp's rows if the scores of a plain block require it. Returns the scale
// for exponentiate_and_multiply_pv(). `limits` are those of `state`. If a base becomes large,
// `first` becomes INT32_MAX: no block behind this one is plain.
template <class C, class State>
__device__ __forceinline__ float follow_plain_maxima(device::Scores<C>& s_rmem, State& state,
                                                     device::Outputs<C>& o_rmem, float exp2_scale,
                                                     const device::RaiseLimits<C>& limits,
                                                     int& first) {
  float lane_max[C::M_TILES][2];
  device::find_lane_maxima<C, Weights<C>>(s_rmem, lane_max);
  if (!device::any_exceeds<C>(lane_max, exp2_scale, 0.0f, limits.rmem)) return exp2_scale;
  device::RowState<C> raised;  // its flag is in a register; that of `state` may be in shared memory
  copy_rows<C>(raised, state);
  device::raise_bases<C, Weights<C>>(lane_max, raised, o_rmem, exp2_scale,
                                     [](int, int) { return true; });
  copy_rows<C>(state, raised);
  if (!raised.large) return exp2_scale;
  // mutants: flag-is-read-later
  state.large = true;
  first = INT32_MAX;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i)  // the reason is in device::update_row_max()
        s_rmem[m][n][i] = __fmul_rn(s_rmem[m][n][i], exp2_scale);
    }
  }
  return 1.0f;
}

// visit_block() for the blocks from `block` down to `first`, all of them plain. It stops early if a
// base becomes large. `block` is then the next one to visit.
template <class C, class State>
__device__ __forceinline__ void visit_plain_blocks(const Params& params,
                                                   const Barriers<C>& barriers,
                                                   RingPosition<C>& ring, State& state,
                                                   device::Outputs<C>& o_rmem,
                                                   const mma_sync::QFragments<C>& q_rmem,
                                                   int& block, int first, uint32_t shared_smem) {
  if constexpr (C::WAITS_AHEAD) wait_for_k<C>(barriers, ring);
#pragma unroll 1
  do {
    device::Scores<C> s_rmem;
    if constexpr (!C::WAITS_AHEAD) wait_for_k<C>(barriers, ring);
    const device::RaiseLimits<C> limits(state);
    multiply_qk<C>(s_rmem, barriers, ring, q_rmem, shared_smem, {});
    const float scale =
        follow_plain_maxima<C>(s_rmem, state, o_rmem, params.attention.exp2_scale, limits, first);
    wait_for_v<C>(barriers, ring);
    exponentiate_and_multiply_pv<C, false>(o_rmem, s_rmem, state, scale,
                                           lane_v_smem<C>(shared_smem, ring.stage()), 0, 0, {});
    const uint32_t stage = ring.stage();
    ++ring.count;
    block -= C::BLOCK_K;
    if constexpr (C::WAITS_AHEAD) {
      // The producer starts K of a block before it waits for the stage of V that this warp holds.
      if (block >= first) wait_for_k<C>(barriers, ring);
    }
    release_after_reads(barriers.v_empty(stage));
  } while (block >= first);
}

}  // namespace archflash::blackwell_consumer
