// Attention forward on 8-bit tensor cores. Inputs are e4m3 or e5m2 with descales, scores, sums and
// output accumulators are fp32, P is e4m3, outputs are fp16 or bf16.
//
// One CTA computes BLOCK_Q query rows of one head and visits the key blocks that its rows see, from
// the last one back to the first. There are no roles; copies and barriers are those of
// common/mma_sync/main_loop.cuh.
//
// common/device/descales.cuh has the descales, common/device/fp8_softmax.cuh P,
// common/mma_sync/tile.cuh the lane maps and Q K^T, tile.cuh P V, config.cuh the tiles, plan.cpp
// the choice among them, NOTES.md the measurements.
#pragma once

#include <cstdint>

#include "ada/config.cuh"
#include "ada/params.h"
#include "ada/tile.cuh"
#include "common/device/attention_work.cuh"
#include "common/device/descales.cuh"
#include "common/device/fp8_softmax.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::ada {

constexpr int MOST_WARPS = 8;

// What the main loop needs to know about its CTA, in shared memory.
struct Fp8CtaContext {
  mma_sync::CtaContext cta;
  device::KeyDescales key_descales;
  device::WarpDescale warp_descales[MOST_WARPS];
};

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& all_params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& params = all_params.attention;
  static_assert(C::WARPS <= MOST_WARPS && sizeof(Fp8CtaContext) <= C::CONTEXT_BYTES);
  Fp8CtaContext& context = *reinterpret_cast<Fp8CtaContext*>(shared + C::CONTEXT_SMEM);
  {
    // The volatile read keeps the thread index from taking a register for the rest of the kernel.
    device::write_rows_of_no_sequence<C::BLOCK_Q>(params, blockIdx.x, ptx::mov_tid_x_volatile(),
                                                  C::THREADS);
    const device::Work work = device::find_work<C::BLOCK_Q>(params, blockIdx.x);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      context.cta = mma_sync::make_cta_context(params, work);
      context.key_descales = device::find_key_descales(all_params.descales, params, work);
    }
    const int warp = threadIdx.x;  // thread i finds the descales of warp i
    if (warp < C::WARPS) {
      context.warp_descales[warp] = device::find_warp_descale(all_params.descales, params, work,
                                                              work.first_row + warp * C::WARP_ROWS);
    }
  }
  __syncthreads();  // `context` is complete, before any thread reads it

  // The descales of this thread's warp. The address is computed at each use to save a register.
  const auto warp_descale = [&]() -> device::WarpDescale& {
    return context.warp_descales[ptx::mov_tid_x_volatile() / 32];
  };

  const mma_sync::KeyBlocks<C> blocks(params, context.cta, shared_smem);
  blocks.start(shared);
  device::Outputs<C> o_rmem = {};
  device::RowState<C> state;
  state.large = false;
  device::clear(state);
  blocks.visit(
      [&](mma_sync::Probabilities<C>& p_rmem, const mma_sync::QFragments<C>& q_rmem,
          uint32_t q_smem, uint32_t k_smem, int key_first) {
        device::Scores<C> s_rmem;
        mma_sync::multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
        float exp2_scale = device::descale_scores<C>(s_rmem, params, context.key_descales,
                                                     warp_descale(), key_first);
        mma_sync::mask_edges<C>(s_rmem, context.cta, key_first);
        const bool v_by_block = context.key_descales.v_gmem != nullptr;
        if (v_by_block)
          device::change_unit<C>(o_rmem, context.key_descales, warp_descale(), key_first,
                                 blocks.last);
        exp2_scale = device::update_row_max<C, device::WeightsE4m3>(s_rmem, state, o_rmem,
                                                                    exp2_scale, nullptr);
        device::exponentiate_all_scores_e4m3<C>(s_rmem, p_rmem, state, exp2_scale);
        // A descale of 0 makes all V of this block 0, whatever is stored, so P must be 0: the unit
        // of the outputs is not 0.
        if (v_by_block && context.key_descales.v(key_first) == 0.0f) {
#pragma unroll
          for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
            for (int i = 0; i < C::STEP_KEYS / 8; ++i) p_rmem[m][i / 4][i % 4] = 0;
          }
        }
      },
      [&](const mma_sync::Probabilities<C>& p_rmem, uint32_t v_smem) {
        multiply_pv<C>(o_rmem, p_rmem, v_smem);
      });

  __syncwarp();  // lane 0 has written the unit of the outputs (change_unit), before all read it
  const int warp = threadIdx.x / 32;
  device::store_fp8_out<C>(o_rmem, state, params, all_params.out_dtype, context.cta.work,
                           warp * C::WARP_ROWS, context.warp_descales[warp].v);
}

}  // namespace archflash::ada
