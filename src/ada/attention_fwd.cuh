// Attention forward on 8-bit tensor cores: e4m3 or e5m2 inputs with descales, fp32 scores, sums and
// output accumulators, P in e4m3, fp16 or bf16 outputs. Work, order and overlap are those of
// common/mma_sync/attention_fwd.cuh: one CTA per (BLOCK_Q query rows, head, batch), visible key
// blocks from the last to the first, no roles.
// Descales: common/math/descales.cuh. P: common/math/fp8_softmax.cuh. Products, lane maps:
// common/mma_sync/tile.cuh. Tiles: config.cuh. Choice of tile: plan.cpp. Numbers: NOTES.md.
#pragma once

#include <cstdint>

#include "ada/config.cuh"
#include "ada/params.h"
#include "common/math/attention_work.cuh"
#include "common/math/descales.cuh"
#include "common/math/fp8_softmax.cuh"
#include "common/math/online_softmax.cuh"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/place.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::ada {

constexpr int MOST_WARPS = 8;

// What the main loop needs to know of its CTA, in shared memory.
struct ScaledPlace {
  mma_sync::Place place;
  math::KeyDescales of_keys;
  math::WarpDescale of_warp[MOST_WARPS];
};

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& all_params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& params = all_params.attention;
  static_assert(C::WARPS <= MOST_WARPS && sizeof(ScaledPlace) <= C::PLACE_BYTES);
  ScaledPlace& scaled = *reinterpret_cast<ScaledPlace*>(shared + C::PLACE_SMEM);
  {
    // Reads the thread's index anew, so that it takes no register for the rest of the kernel.
    math::write_rows_of_no_sequence<C::BLOCK_Q>(params, blockIdx.x, ptx::mov_tid_x_volatile(),
                                                C::THREADS);
    const math::Work work = math::find_work<C::BLOCK_Q>(params, blockIdx.x);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      scaled.place = mma_sync::find_place(params, work);
      scaled.of_keys = math::find_key_descales(all_params.descales, params, work);
    }
    const int warp = threadIdx.x;  // one thread for each
    if (warp < C::WARPS) {
      scaled.of_warp[warp] = math::find_warp_descale(all_params.descales, params, work,
                                                     work.first_row + warp * C::WARP_ROWS);
    }
  }
  __syncthreads();  // `scaled` is written

  // Found anew where it is used: registers are few.
  const auto of_warp = [&]() -> math::WarpDescale& {
    return scaled.of_warp[ptx::mov_tid_x_volatile() / 32];
  };

  const mma_sync::KeyBlocks<C> blocks(params, scaled.place, shared_smem);
  blocks.start(shared);
  math::Outputs<C> o_rmem = {};
  math::RowState<C> state;
  state.large = false;
  math::clear(state);
  blocks.visit(
      [&](mma_sync::Probabilities<C>& p_rmem, const mma_sync::QFragments<C>& q_rmem,
          uint32_t q_smem, uint32_t k_smem, int key_first) {
        math::Scores<C> s_rmem;
        mma_sync::multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
        float exp2_scale =
            math::descale_scores<C>(s_rmem, params, scaled.of_keys, of_warp(), key_first);
        mma_sync::mask_edges<C>(s_rmem, scaled.place, key_first);
        const bool v_by_block = scaled.of_keys.v_gmem != nullptr;
        if (v_by_block)
          math::change_unit<C>(o_rmem, scaled.of_keys, of_warp(), key_first, blocks.last);
        exp2_scale =
            math::follow_maxima<C, math::WeightsE4m3>(s_rmem, state, o_rmem, exp2_scale, nullptr);
        math::weigh_all_scores_e4m3<C>(s_rmem, p_rmem, state, exp2_scale);
        if (v_by_block && scaled.of_keys.v(key_first) == 0.0f) {
#pragma unroll
          for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
            for (int i = 0; i < C::STEP_KEYS / 8; ++i) p_rmem[m][i / 4][i % 4] = 0;
          }
        }
      },
      [&](const mma_sync::Probabilities<C>& p_rmem, uint32_t v_smem) {
        mma_sync::multiply_pv<C>(o_rmem, p_rmem, v_smem);
      });

  __syncwarp();  // a lane wrote the last unit
  const int warp = threadIdx.x / 32;
  math::store_fp8_out<C>(o_rmem, state, params, all_params.out_dtype, scaled.place.work,
                         warp * C::WARP_ROWS, scaled.of_warp[warp].v);
}

}  // namespace archflash::ada

// One entry point: its name is what plan.cpp asks for. The one parameter stays in constant memory.
#define ARCHFLASH_ADA_FP8_KERNEL(NAME, CONFIG)                                       \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::ada::Params params) {                  \
    archflash::ada::attention_fwd<CONFIG>(params);                                   \
  }
