// The softmax of one warp whose P is e4m3, and its rows written at the end. Masks and running bases
// are those of online_softmax.cuh, with WeightsE4m3.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/math/attention_work.cuh"
#include "common/math/online_softmax.cuh"
#include "common/problem.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::math {

// The largest P of a row is 2^8 = 256: e4m3 ends at 448. The base follows before P reaches
// 256 * 2^0.75 = 431, which rounds to 416 or 448. Beyond LARGE_BASE the rounding of the base could
// carry P further, so there the base is the maximum itself and follows at once.
struct WeightsE4m3 : Weights16 {
  static constexpr float P_LOG2 = 8.0f;
  static constexpr float BASE_LAG = 0.75f;
  static constexpr float COUNTS = 0.0f;
  static constexpr float LARGE_BASE = 1 << 18;
  static constexpr float LARGE_BASE_LAG = 0.0f;
};

// Fragments a of mma.sync m16n8k32.
template <class C>
using Fp8Probabilities = uint32_t[C::M_TILES][C::STEP_KEYS / 32][4];

// S -> P = 2^(S * exp2_scale - base) for key tiles n (even) and n + 1 of row tile m, in e4m3; its
// sums in fp32. P goes to its half of the fragment of four neighbouring key tiles, which has the
// keys of which this lane has the scores: bytes 2t, 2t+1 of two key tiles in a register.
template <class C, class Flag>
__device__ __forceinline__ void weigh_key_tiles_e4m3(const Scores<C>& s_rmem, uint32_t (&p_rmem)[4],
                                                     RowState<C, Flag>& state, int m, int n,
                                                     float exp2_scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t pairs[2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float p[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        p[i] = ptx::ex2_approx_ftz(
            fmaf(s_rmem[m][n + tile][2 * r + i], exp2_scale, -state.base[m][r]));
        state.sum[m][r] += p[i];
      }
      pairs[tile] = ptx::cvt_rn_satfinite_x2_f32<DType::E4M3>(p[0], p[1]);
    }
    p_rmem[n % 4 + r] = pairs[0] | pairs[1] << 16;
  }
}

// The same for all keys.
template <class C, class Flag>
__device__ __forceinline__ void weigh_all_scores_e4m3(const Scores<C>& s_rmem,
                                                      Fp8Probabilities<C>& p_rmem,
                                                      RowState<C, Flag>& state, float exp2_scale) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; n += 2)
      weigh_key_tiles_e4m3<C>(s_rmem, p_rmem[m][n / 4], state, m, n, exp2_scale);
  }
}

// Outputs whose columns lie as multiply_pv leaves them for 8-bit V: a lane holds four neighbouring
// columns of a row in every 16, and a quad writes 32 bytes of it. warp_row counts from the CTA's
// first row.
template <class C, class Flag>
__device__ __forceinline__ void store_fp8_out(const Outputs<C>& o_rmem,
                                              const RowState<C, Flag>& state,
                                              const AttentionParams& params, DType out_dtype,
                                              const Work& work, int warp_row, float v_factor) {
  const OutRows out(params, work, warp_row);
  const int lane = threadIdx.x % 32;
  uint16_t* out_gmem = out.out_gmem(params);
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowEnd end = finish_lane_row<C>(state, m, r, out.sink);
      const float factor = end.factor * v_factor;
      const int row = 16 * m + 8 * r + lane / 4;
      if (row >= out.rows) continue;
      uint16_t* row_gmem = out_gmem + row * params.out_row + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
        if (n * 8 >= params.dv) continue;
        const float* even = &o_rmem[m][n][2 * r];
        const float* odd = &o_rmem[m][n + 1][2 * r];
        uint32_t pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float low = even[i] * factor, high = odd[i] * factor;
          pair[i] = out_dtype == DType::F16 ? ptx::cvt_rn_x2_f32<DType::F16>(low, high)
                                            : ptx::cvt_rn_x2_f32<DType::BF16>(low, high);
        }
        ptx::st_global_v2_b32(row_gmem + n * 8, pair[0], pair[1]);
      }
      if (params.lse_gmem != nullptr && lane % 4 == 0) out.store_lse(params, row, end.lse);
    }
  }
}

}  // namespace archflash::math
