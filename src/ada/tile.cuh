// The products of 8-bit tiles and what stands between them: descales and the softmax whose P is
// e4m3. Loads into shared memory and the lane maps of K and Q are those of 16-bit tiles of half as
// many columns.
#pragma once

#include <cstdint>

#include "ada/params.h"
#include "common/math/attention_work.cuh"
#include "common/math/online_softmax.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/problem.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"

namespace archflash::ada {

using math::Outputs;
using math::RowState;
using math::Scores;

template <class C>
using Probabilities = uint32_t[C::M_TILES][C::STEP_KEYS / 32][4];

// S = Q K^T for STEP_KEYS keys. Lane l holds rows l/4 and l/4 + 8 of each row tile, of key tile n
// the keys 8n + 2*(l%4) and the next one.
template <class C>
__device__ __forceinline__ void multiply_qk(
    Scores<C>& s_rmem,
    const uint32_t (&all_q_rmem)[C::Q_IN_REGISTERS ? C::HEAD_DIM / 32 : 1][C::M_TILES][4],
    uint32_t q_smem /* this lane's row */, uint32_t k_smem /* this lane's row */) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s_rmem[m][n][i] = 0.0f;
    }
  }
#pragma unroll
  for (int pair = 0; pair < C::HEAD_DIM / 2; pair += 16) {
    uint32_t q_rmem[C::M_TILES][4];
    if constexpr (C::Q_IN_REGISTERS) {
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q_rmem[m][i] = all_q_rmem[pair / 16][m][i];
      }
    } else {
      mma_sync::load_q<C>(q_rmem, q_smem, pair);
    }
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; n += 2) {
      uint32_t k_rmem[4];
      ptx::ldmatrix_x4(k_rmem, C::QKTile::advance(k_smem, pair / 8) + n * 8 * C::QKTile::ROW_BYTES);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        ptx::mma_m16n8k32<C::DTYPE, C::DTYPE>(s_rmem[m][n], q_rmem[m], k_rmem[0], k_rmem[1]);
        ptx::mma_m16n8k32<C::DTYPE, C::DTYPE>(s_rmem[m][n + 1], q_rmem[m], k_rmem[2], k_rmem[3]);
      }
    }
  }
}

// O += P V for STEP_KEYS keys, without a transposed V: ldmatrix.trans of pairs of bytes gives lane
// (g, t) the columns 2g and 2g+1 of the keys 2t, 2t+1 of each of four key tiles, and one byte
// permutation for each register of b sorts them by column.
//   keys     4t to 4t+3 (and 4t+16 to 4t+19) of mma.sync are 2t, 2t+1, 2t+8, 2t+9 (and 16 more):
//            just those of which this lane has the scores, so that P is its fragment a as it is
//   columns  0 to 7 of mma.sync are the even ones of 16 (o_rmem[m][n], n even) or the odd ones, so
//            that of a row and 16 columns a lane holds 4t to 4t+3
template <class C>
__device__ __forceinline__ void multiply_pv(Outputs<C>& o_rmem, const Probabilities<C>& p_rmem,
                                            uint32_t v_smem /* this lane's row */) {
  constexpr uint32_t EVEN_BYTES = 0x6420, ODD_BYTES = 0x7531;
#pragma unroll
  for (int key = 0; key < C::STEP_KEYS; key += 32) {
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
      uint32_t v_rmem[4];
      ptx::ldmatrix_x4_trans(v_rmem, C::VTile::advance(v_smem, n / 2) + key * C::VTile::ROW_BYTES);
      const uint32_t even[2] = {__byte_perm(v_rmem[0], v_rmem[1], EVEN_BYTES),
                                __byte_perm(v_rmem[2], v_rmem[3], EVEN_BYTES)};
      const uint32_t odd[2] = {__byte_perm(v_rmem[0], v_rmem[1], ODD_BYTES),
                               __byte_perm(v_rmem[2], v_rmem[3], ODD_BYTES)};
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        ptx::mma_m16n8k32<DType::E4M3, C::DTYPE>(o_rmem[m][n], p_rmem[m][key / 32], even[0],
                                                 even[1]);
        ptx::mma_m16n8k32<DType::E4M3, C::DTYPE>(o_rmem[m][n + 1], p_rmem[m][key / 32], odd[0],
                                                 odd[1]);
      }
    }
  }
}

// Softcap, or a scale that cannot be folded into the exponential: as math::transform_scores.
template <class C>
__device__ __forceinline__ void transform_scores(Scores<C>& s_rmem, float tanh_scale,
                                                 float softcap) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s_rmem[m][n][i] * tanh_scale;
        const float power = ptx::ex2_approx_ftz(x * (2 * math::LOG2_E));
        const float tanh = fmaf(-2.0f, ptx::rcp_approx_ftz(1.0f + power), 1.0f);
        s_rmem[m][n][i] = softcap == 0.0f ? x : softcap * tanh;
      }
    }
  }
}

// Moves the bases of a warp's rows up to their maxima, and sums and outputs with them.
template <class C>
__device__ __forceinline__ void raise_fp8_bases(const float (&lane_max)[C::M_TILES][2],
                                                RowState<C>& state, Outputs<C>& o_rmem,
                                                float exp2_scale) {
  bool large = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_max = lane_max[m][r];
      row_max = fmaxf(row_max, __shfl_xor_sync(math::FULL_WARP, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(math::FULL_WARP, row_max, 2));
      float base = __fmul_rn(row_max, exp2_scale);
      if (fabsf(base) <= C::LARGE_BASE) base -= C::P_LOG2;
      base = fmaxf(state.base[m][r], base);
      const float correction = ptx::ex2_approx_ftz(state.base[m][r] - base);
      state.base[m][r] = base;
      state.sum[m][r] *= correction;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        o_rmem[m][n][2 * r] *= correction;
        o_rmem[m][n][2 * r + 1] *= correction;
      }
      large |= fabsf(base) > C::LARGE_BASE - C::P_LOG2 && base != math::LOWEST;
    }
  }
  state.large = __any_sync(math::FULL_WARP, large);
}

// S -> P = 2^(S * exp2_scale - base), in e4m3; its sums in fp32.
template <class C>
__device__ __forceinline__ void weigh_scores(Scores<C>& s_rmem, Probabilities<C>& p_rmem,
                                             RowState<C>& state, Outputs<C>& o_rmem,
                                             float exp2_scale) {
  // Beyond LARGE_BASE a base is the rounded maximum itself, and no score may pass it.
  const float lag = state.large ? 0.0f : C::P_LOG2 + C::BASE_LAG;
  float lane_max[C::M_TILES][2];
  bool rises = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = s_rmem[m][0][2 * r];
#pragma unroll
      for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
        max = fmaxf(max, fmaxf(s_rmem[m][n][2 * r], s_rmem[m][n][2 * r + 1]));
      }
      lane_max[m][r] = max;
      rises |= fmaf(max, exp2_scale, -lag) > state.base[m][r];
    }
  }
  if (__any_sync(math::FULL_WARP, rises)) raise_fp8_bases<C>(lane_max, state, o_rmem, exp2_scale);

  // Scores beyond LARGE_BASE are rounded as the base was before base is subtracted: the largest of
  // a row meets its own base and gives 1.
  if (state.large) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s_rmem[m][n][i] = __fmul_rn(s_rmem[m][n][i], exp2_scale);
      }
    }
    exp2_scale = 1.0f;
  }
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float p =
            ptx::ex2_approx_ftz(fmaf(s_rmem[m][n][i], exp2_scale, -state.base[m][i / 2]));
        s_rmem[m][n][i] = p;
        state.sum[m][i / 2] += p;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; n += 2) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* p0 = &s_rmem[m][n][2 * r];
        const float* p1 = &s_rmem[m][n + 1][2 * r];
        const uint32_t low = ptx::cvt_rn_satfinite_x2_f32<DType::E4M3>(p0[0], p0[1]);
        const uint32_t high = ptx::cvt_rn_satfinite_x2_f32<DType::E4M3>(p1[0], p1[1]);
        p_rmem[m][n / 4][n % 4 + r] = low | high << 16;
      }
    }
  }
}

}  // namespace archflash::ada
