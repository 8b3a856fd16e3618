// The softmax and P V of approximate="int8_pv", in 8 bits.
//
// A key's row of V has a scale, which is made part of its P: elements are rounded by how much they
// contribute. A step of keys has a P of its own: the largest of a row is 255, whatever the
// row has elsewhere. The products are exact integers, and become part of the fp32 outputs after
// each step, times what 255 stands for.
#pragma once

#include <cstdint>

#include "common/device/online_softmax.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/fma_x2.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync_u8.cuh"

namespace archflash::ampere {

// C with another type of P, V and outputs.
template <class C, DType T>
struct WithDType : C {
  static constexpr DType DTYPE = T;
};
template <class C>
using Fp16Weights = WithDType<C, DType::F16>;

// P of a step in 8 bits, as mma.sync reads them. The largest of a row is 255 there, which
// stands for 255 * unit.
template <class C>
struct Probabilities8 {
  mma_sync::Probabilities<C> p_rmem;
  float units[C::M_TILES][2];
};

// P of a step of keys in 8 bits, each times the scale of its key's V. A score is s_rmem * scale +
// shift of its row, a logarithm to base 2; the scale is positive. Bases are those of these
// products: they rise where a row's largest one exceeds one by more than 2^8. `stage`: shared
// memory, where the scales are.
template <class C, class RowOf>
__device__ __forceinline__ void exponentiate_in_8_bits(
    device::Scores<C>& s_rmem, Probabilities8<C>& p8, device::RowState<Fp16Weights<C>>& state,
    device::Outputs<C>& o_rmem, const unsigned char* stage, const RowOf& row_of) {
  const float* logs_smem = reinterpret_cast<const float*>(stage + C::SCALES_SMEM) + C::BLOCK_K +
                           ptx::mov_tid_x_volatile() % 4 * 2;
  const float* inverses_smem = logs_smem + C::BLOCK_K;
#pragma unroll
  for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
    const float2 logs = *reinterpret_cast<const float2*>(&logs_smem[8 * n]);
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = row_of(m, r).scale;
        float (&s)[4] = s_rmem[m][n];
        s[2 * r] = fmaf(s[2 * r], scale, logs.x);
        s[2 * r + 1] = fmaf(s[2 * r + 1], scale, logs.y);
      }
    }
  }
  float top[C::M_TILES][2];  // the largest of each row, finite
  bool raises = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float most = s_rmem[m][0][2 * r];
#pragma unroll
      for (int n = 0; n < C::STEP_KEYS / 8; ++n)
        most = fmaxf(most, fmaxf(s_rmem[m][n][2 * r], s_rmem[m][n][2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(device::FULL_WARP, most, 1));
      most = fmaxf(most, __shfl_xor_sync(device::FULL_WARP, most, 2));
      top[m][r] = fmaxf(most, device::LOWEST);
      raises |= top[m][r] + row_of(m, r).shift > state.base[m][r] + device::Weights16::BASE_LAG;
    }
  }
  if (__any_sync(device::FULL_WARP, raises)) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float base = fmaxf(state.base[m][r], top[m][r] + row_of(m, r).shift);
        const float correction = ptx::ex2_approx_ftz(state.base[m][r] - base);
        state.base[m][r] = base;
        state.sum[m][r] *= correction;
#pragma unroll
        for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
          o_rmem[m][n][2 * r] *= correction;
          o_rmem[m][n][2 * r + 1] *= correction;
        }
      }
    }
  }
  float sums[C::M_TILES][2] = {};
#pragma unroll
  for (int n = 0; n < C::STEP_KEYS / 8; n += 2) {
    uint32_t pairs[C::M_TILES][2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 inverses = *reinterpret_cast<const float2*>(&inverses_smem[8 * (n + half)]);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float* s = &s_rmem[m][n + half][2 * r];
          const float p[2] = {ptx::ex2_approx_ftz(s[0] - top[m][r]),
                              ptx::ex2_approx_ftz(s[1] - top[m][r])};
          sums[m][r] = fmaf(p[0], inverses.x, sums[m][r]);
          sums[m][r] = fmaf(p[1], inverses.y, sums[m][r]);
          // 255 p + 1024 has 255 p, rounded to an integer, in its lowest byte.
          constexpr uint32_t TWICE_255 = 0x5BF85BF8, TWICE_1024 = 0x64006400;
          pairs[m][r][half] = ptx::fma_rn_x2<DType::F16>(ptx::cvt_rn_x2_f32<DType::F16>(p[0], p[1]),
                                                         TWICE_255, TWICE_1024);
        }
      }
    }
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        p8.p_rmem[m][n / 4][n % 4 / 2 * 2 + r] =
            __byte_perm(pairs[m][r][0], pairs[m][r][1], 0x6420);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float unit = ptx::ex2_approx_ftz(top[m][r] + row_of(m, r).shift - state.base[m][r]);
      state.sum[m][r] = fmaf(sums[m][r], unit, state.sum[m][r]);
      p8.units[m][r] = unit * (1.0f / 255);
    }
  }
}

// O += P V for STEP_KEYS keys in 8 bits: integers, which become floats as those of Q K^T do.
template <class C>
__device__ __forceinline__ void multiply_pv_int8(device::Outputs<C>& o_rmem,
                                                 const Probabilities8<C>& p8,
                                                 uint32_t v_smem /* this lane's row */,
                                                 const int32_t* zero_smem) {
  using Zero = device::WeightsOfIntegers;
  const int4 zero = *reinterpret_cast<const int4*>(zero_smem);
  int32_t zero_rmem[4] = {zero.x, zero.y, zero.z, zero.w};
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
    // A barrier for the assembler, which otherwise reads more of V ahead than registers hold.
    if (C::HEAD_DIM_V > 64 && n % 4 == 0) __syncwarp();
    int32_t sums_rmem[C::M_TILES][2][4];
#pragma unroll
    for (int key = 0; key < C::STEP_KEYS; key += 32) {
      uint32_t v_rmem[4];
      ptx::ldmatrix_x4_trans(v_rmem, C::VTile::advance(v_smem, n / 2) + key * C::VTile::ROW_BYTES);
      const mma_sync::Fp8VFragments v(v_rmem);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        const uint32_t (&p_rmem)[4] = p8.p_rmem[m][key / 32];
        int32_t (&even)[4] = sums_rmem[m][0], (&odd)[4] = sums_rmem[m][1];
        ptx::mma_m16n8k32_u8_s8(even, p_rmem, v.even[0], v.even[1], key == 0 ? zero_rmem : even);
        ptx::mma_m16n8k32_u8_s8(odd, p_rmem, v.odd[0], v.odd[1], key == 0 ? zero_rmem : odd);
      }
    }
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float sum = __int_as_float(sums_rmem[m][half][i]) - Zero::ZERO;
          o_rmem[m][n + half][i] = fmaf(sum, p8.units[m][i / 2], o_rmem[m][n + half][i]);
        }
      }
    }
  }
}

}  // namespace archflash::ampere
