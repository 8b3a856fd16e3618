// Attention forward on mma.sync tensor cores, for every GPU from compute capability 8.0 on: fp16 or
// bf16 inputs, fp32 scores, sums and output accumulators. Work: one CTA per (BLOCK_Q query rows,
// head, batch). It visits the visible key blocks from the last (ragged) one back to the first with
// an online softmax. A warp owns WARP_ROWS rows: scores, P and outputs never leave its registers;
// shared memory holds Q, K and V only.
// Blocks, copies and barriers: main_loop.cuh. Loads, lane maps, products: tile.cuh. Tiles, the
// choice among them and numbers: the folders that instantiate it.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/online_softmax.cuh"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/place.cuh"
#include "common/mma_sync/tile.cuh"

namespace archflash::mma_sync {

template <class C>
__device__ __forceinline__ void attention_fwd(const AttentionParams& params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(Place) <= C::PLACE_BYTES);
  Place& place = *reinterpret_cast<Place*>(shared + C::PLACE_SMEM);
  {
    math::write_rows_of_no_sequence<C::BLOCK_Q>(params, blockIdx.x, threadIdx.x, C::THREADS);
    const math::Work work = math::find_work<C::BLOCK_Q>(params, blockIdx.x);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) place = find_place(params, work);
  }
  __syncthreads();  // `place` is written

  const KeyBlocks<C> blocks(params, place, shared_smem);
  blocks.start(shared);
  math::Outputs<C> o_rmem = {};
  math::RowState<C> state;
  state.large = false;
  math::clear(state);
  blocks.visit(
      [&](Probabilities<C>& p_rmem, const QFragments<C>& q_rmem, uint32_t q_smem, uint32_t k_smem,
          int key_first) {
        const math::RaiseLimits<C> limits(state);
        math::Scores<C> s_rmem;
        multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
        if (params.transform_scores)
          math::transform_scores<C>(s_rmem, params.tanh_scale, params.softcap);
        mask_edges<C>(s_rmem, place, key_first);
        const float exp2_scale =
            math::follow_maxima<C>(s_rmem, state, o_rmem, params.exp2_scale, &limits);
        math::weigh_all_scores<C>(s_rmem, p_rmem, state, exp2_scale);
      },
      [&](const Probabilities<C>& p_rmem, uint32_t v_smem) {
        multiply_pv<C>(o_rmem, p_rmem, v_smem);
      });

  // Output rows pass through the warp's own part of Q.
  static_assert(C::VTile::ROW_BYTES <= C::QKTile::ROW_BYTES);
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  math::store_out<C, typename C::VTile>(o_rmem, state, params, place.work, warp_row,
                                        shared + C::Q_SMEM + warp_row * C::QKTile::ROW_BYTES);
}

}  // namespace archflash::mma_sync

// One entry point: its name is what plan.cpp asks for. The one parameter stays in constant memory.
#define ARCHFLASH_ATTENTION_KERNEL(NAME, CONFIG)                                     \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::AttentionParams params) {              \
    archflash::mma_sync::attention_fwd<CONFIG>(params);                              \
  }
