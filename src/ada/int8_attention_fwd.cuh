// Attention forward with an int8 product Q K^T, which is exact in 32 bits. The softmax, P V and the
// outputs are those of 16-bit inputs (common/mma_sync/attention_fwd.cuh), and so are the work of a
// CTA, its copies and its barriers.
//
// int8_prepare.cuh makes Q, K and their scales. It subtracts the mean over the keys from K. Each
// row of scores thus lacks one number, q.mean, which is added when the row ends ("shift").
// config.cuh has the tiles, plan.cpp the choice among them, NOTES.md the decisions.
#pragma once

#include <cstdint>

#include "ada/config.cuh"
#include "ada/int8_prepare.cuh"
#include "ada/params.h"
#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::ada {

// Scales of the exponent are clamped to this range. Below it they would count as 0, and 0 * -inf is
// NaN; above it a score could become infinite.
constexpr float SMALLEST_EXP2_SCALE = 1.17549435e-38f;
constexpr float LARGEST_EXP2_SCALE = 1.26765060e30f;  // 2^100

// What the main loop needs to know about its CTA, in shared memory.
struct Int8CtaContext {
  mma_sync::CtaContext cta;
  const KeyScale* k_scales_gmem;  // the head's first block
  const float* shifts_gmem;       // the head's first row
  float q_factor[8];              // for each warp: exp2_scale * scale of its rows of Q
  KeyScale k_scales[2];           // current and next block; each is copied together with its K
};

// S = Q K^T as the floats that WeightsOfIntegers describes.
template <class C>
__device__ __forceinline__ void multiply_int8_qk(device::Scores<C>& s_rmem,
                                                 const mma_sync::QFragments<C>& q_rmem,
                                                 uint32_t q_smem, uint32_t k_smem) {
  int32_t sums_rmem[C::M_TILES][C::STEP_KEYS / 8][4];
  mma_sync::multiply_qk<C>(sums_rmem, q_rmem, q_smem, k_smem, device::WeightsOfIntegers::ZERO_BITS);
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s_rmem[m][n][i] = __int_as_float(sums_rmem[m][n][i]);
    }
  }
}

// P from S with the scale that update_row_max returned. If that is 1, update_row_max has multiplied
// the scores already; otherwise they still contain WeightsOfIntegers::ZERO, which the base absorbs.
template <class C>
__device__ __forceinline__ void exponentiate_integers(const device::Scores<C>& s_rmem,
                                                      mma_sync::Probabilities<C>& p_rmem,
                                                      device::RowState<C>& state,
                                                      float exp2_scale) {
  if (exp2_scale == 1.0f) {
    device::exponentiate_all_scores<C>(s_rmem, p_rmem, state, exp2_scale);
    return;
  }
  float base[C::M_TILES][2];
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      base[m][r] = state.base[m][r];
      state.base[m][r] = fmaf(device::WeightsOfIntegers::ZERO, exp2_scale, base[m][r]);
    }
  }
  device::exponentiate_all_scores<C>(s_rmem, p_rmem, state, exp2_scale);
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) state.base[m][r] = base[m][r];
  }
}

// Sets the scores of keys with numbers that are not finite to NaN, as 16-bit products would.
template <class C>
__device__ __forceinline__ void spoil_nonfinite_keys(device::Scores<C>& s_rmem,
                                                     const KeyScale& k_scale) {
  const int first_key = ptx::mov_tid_x_volatile() % 4 * 2;  // this lane's first key in a key tile
#pragma unroll
  for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
    const uint32_t keys = k_scale.nonfinite[n / 4] >> (n % 4 * 8 + first_key);
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (keys >> (i % 2) & 1) s_rmem[m][n][i] = __uint_as_float(0x7FFFFFFFu);
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void int8_attention_fwd(const Int8Params& all_params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& params = all_params.attention;
  static_assert(C::WARPS <= 8 && sizeof(Int8CtaContext) <= C::CONTEXT_BYTES);
  Int8CtaContext& context = *reinterpret_cast<Int8CtaContext*>(shared + C::CONTEXT_SMEM);
  {
    const device::Work work = device::find_work<C::BLOCK_Q>(params, blockIdx.x);
    const int batch = work.batch_head / params.heads_q;
    const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
    if (threadIdx.x == 0) {
      context.cta = mma_sync::make_cta_context(params, work);
      const int64_t blocks_before =
          static_cast<int64_t>(batch * all_params.heads_kv + kv_head) * all_params.k_blocks;
      context.k_scales_gmem = all_params.k_scales_gmem + blocks_before;
      context.shifts_gmem =
          all_params.shifts_gmem + static_cast<int64_t>(work.batch_head) * params.nq;
    }
    const int warp = threadIdx.x;  // thread i finds the factor of warp i
    if (warp < C::WARPS) {
      const int row = min(work.first_row + warp * C::WARP_ROWS, work.nq - 1);
      const int64_t block =
          static_cast<int64_t>(work.batch_head) * all_params.q_blocks + row / SCALE_ROWS;
      context.q_factor[warp] = params.exp2_scale * all_params.q_scales_gmem[block];
    }
  }
  __syncthreads();  // `context` is complete, before any thread reads it
  const auto start_scale = [&](int key) {
    if (ptx::mov_tid_x_volatile() != 0) return;
    const int block = key / SCALE_ROWS;
    ptx::cp_async_cg_16(
        static_cast<uint32_t>(__cvta_generic_to_shared(&context.k_scales[block % 2])),
        context.k_scales_gmem + block);
  };
  const mma_sync::KeyBlocks<C, decltype(start_scale)> blocks(params, context.cta, shared_smem,
                                                             start_scale);
  blocks.start(shared);
  device::Outputs<C> o_rmem = {};
  device::RowState<C> state;
  state.large = false;
  device::clear(state);
  blocks.visit(
      [&](mma_sync::Probabilities<C>& p_rmem, const mma_sync::QFragments<C>& q_rmem,
          uint32_t q_smem, uint32_t k_smem, int key_first) {
        const device::RaiseLimits<C> limits(state);
        device::Scores<C> s_rmem;
        multiply_int8_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
        const KeyScale& k_scale = context.k_scales[key_first / SCALE_ROWS % 2];
        if (k_scale.any_nonfinite != 0) spoil_nonfinite_keys<C>(s_rmem, k_scale);
        float exp2_scale = context.q_factor[ptx::mov_tid_x_volatile() / 32] * k_scale.scale;
        exp2_scale = fminf(fmaxf(exp2_scale, SMALLEST_EXP2_SCALE), LARGEST_EXP2_SCALE);
        mma_sync::mask_edges<C>(s_rmem, context.cta, key_first);
        exp2_scale = device::update_row_max<C, device::WeightsOfIntegers>(s_rmem, state, o_rmem,
                                                                          exp2_scale, &limits);
        exponentiate_integers<C>(s_rmem, p_rmem, state, exp2_scale);
      },
      [&](const mma_sync::Probabilities<C>& p_rmem, uint32_t v_smem) {
        mma_sync::multiply_pv<C>(o_rmem, p_rmem, v_smem);
      });

  // Adds to each row's base what the mean of K adds to its scores. It is NaN if the row of Q was
  // not finite, which makes the whole output row NaN.
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  const int lane_row = context.cta.work.first_row + warp_row + threadIdx.x % 32 / 4;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = lane_row + 16 * m + 8 * r;
      if (row < context.cta.work.nq)
        state.base[m][r] = fmaf(context.shifts_gmem[row], device::LOG2_E, state.base[m][r]);
    }
  }
  // Output rows are longer than rows of int8 Q, so they are staged in the space of Q, K and V.
  static_assert(C::BLOCK_Q * C::VTile::ROW_BYTES <= C::CONTEXT_SMEM);
  __syncthreads();  // no warp reads Q, K or V any more, before any warp overwrites them
  device::store_out<C, typename C::VTile>(o_rmem, state, params, context.cta.work, warp_row,
                                          shared + warp_row * C::VTile::ROW_BYTES);
}

}  // namespace archflash::ada
