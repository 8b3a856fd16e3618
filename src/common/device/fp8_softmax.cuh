// The parts of a warp's online softmax that differ when P is e4m3: its weights, and the output rows
// written at the end. Masks and running bases are in online_softmax.cuh, used with WeightsE4m3.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::device {

// Raising the base makes the largest P of a row 2^8 = 256; the largest number of e4m3 is 448. Until
// the next raise P may grow to 256 * 2^0.75 = 431, which rounds to 416 or 448, so P never
// saturates. Beyond LARGE_BASE the rounding error of the base could add to that. There the base is
// the maximum itself, P is at most 1, and every rise raises the base.
struct WeightsE4m3 : Weights16 {
  static constexpr float P_LOG2 = 8.0f;
  static constexpr float BASE_LAG = 0.75f;
  static constexpr float RAISE_FRACTION = 0.0f;
  static constexpr float LARGE_BASE = 1 << 18;
  static constexpr float LARGE_BASE_LAG = 0.0f;
};

// Fragments a of mma.sync m16n8k32.
template <class C>
using Fp8Probabilities = uint32_t[C::M_TILES][C::STEP_KEYS / 32][4];

// P = 2^(S * exp2_scale - base) for key tiles n (even) and n + 1 of row tile m. P is stored in
// e4m3; its sum is kept in fp32. P fills its half of the fragment a that four neighbouring key
// tiles share. A register has the keys 2t and 2t+1 (t = lane % 4) of two key tiles; see
// mma_sync::Fp8VFragments.
template <class C, class Flag>
__device__ __forceinline__ void exponentiate_key_tiles_e4m3(const Scores<C>& s_rmem,
                                                            uint32_t (&p_rmem)[4],
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

// P = 2^(S * exp2_scale - base) in e4m3 for all row tiles and STEP_KEYS keys.
template <class C, class Flag>
__device__ __forceinline__ void exponentiate_all_scores_e4m3(const Scores<C>& s_rmem,
                                                             Fp8Probabilities<C>& p_rmem,
                                                             RowState<C, Flag>& state,
                                                             float exp2_scale) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; n += 2)
      exponentiate_key_tiles_e4m3<C>(s_rmem, p_rmem[m][n / 4], state, m, n, exp2_scale);
  }
}

// Divides the outputs by the row sums, multiplies them by v_factor and writes them, and the LSE
// where it is asked for. The outputs are as multiply_pv leaves them for 8-bit V: of every 16
// columns of a row, a lane holds four neighbouring ones. The four lanes of a row write 32 bytes at
// a time. warp_row is the warp's first row, counted from the CTA's first row. The outputs are the
// columns from first_column on; the LSE goes with the first ones.
template <class C, class Flag>
__device__ __forceinline__ void store_fp8_out(const Outputs<C>& o_rmem,
                                              const RowState<C, Flag>& state,
                                              const AttentionParams& params, DType out_dtype,
                                              const Work& work, int warp_row, float v_factor,
                                              int first_column = 0) {
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
      uint16_t* row_gmem = out_gmem + row * params.out_row + first_column + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
        if (first_column + n * 8 >= params.dv) continue;
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
      if (params.lse_gmem != nullptr && lane % 4 == 0 && first_column == 0)
        out.store_lse(params, row, end.lse);
    }
  }
}

}  // namespace archflash::device
