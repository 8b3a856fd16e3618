// MXFP8: the products of 8-bit numbers with a scale for each 32 of them along the sum, columns of q
// and k and keys of v, by mma.sync with block scales. P has scales of 1.
//
// Scales are bytes, ue8m0, that lanes read from global memory, one in a register. Lane 4g + t has
// those of column g of each tile n of B with n % 4 == t, and the product of such a tile takes them
// from the lanes with that t. A scale of what is no part of the tensors is 1: the zeros that TMA
// puts there would be NaN times a scale of NaN.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blackwell_consumer/config.cuh"
#include "common/attention_params.h"
#include "common/block_scales.h"
#include "common/descales.h"
#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_block_scaled.cuh"

namespace archflash::blackwell_consumer {

constexpr uint32_t SCALE_ONE = 0x7F;

// Where the scales of a head of k and of v lie.
struct KeyScales {
  const unsigned char *k_gmem, *v_gmem;
  int64_t k_row, v_group;  // bytes from one key to the next, and from 32 keys to the next
};

__device__ __forceinline__ const unsigned char* scales_of_head(const Descale& scales, int batch,
                                                               int head) {
  return reinterpret_cast<const unsigned char*>(scales.gmem) + batch * scales.batch +
         head * scales.head;
}

__device__ __forceinline__ KeyScales find_key_scales(const Descales& scales,
                                                     const AttentionParams& params,
                                                     const device::Work& work) {
  const int batch = work.batch_head / params.heads_q;
  const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
  return {scales_of_head(scales.k, batch, kv_head), scales_of_head(scales.v, batch, kv_head),
          scales.k.block, scales.v.block};
}

// The scales of a row of q or k.
template <int STEPS>
__device__ __forceinline__ void read_row_scales(uint32_t (&scales)[STEPS],
                                                const unsigned char* row_gmem, int d) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    scales[step] = step * SCALED_NUMBERS < d ? row_gmem[step] : SCALE_ONE;
}

// The scales that a lane holds of its warp's rows of Q and of a block of K and V.
template <class C>
struct Scales {
  static constexpr int STEPS = C::HEAD_DIM / SCALED_NUMBERS;
  static constexpr int GROUPS = C::BLOCK_K / SCALED_NUMBERS;
  uint32_t q[C::M_TILES][STEPS];           // lanes 4g and 4g + 1: of rows g and g + 8
  uint32_t k[C::BLOCK_K / 32][STEPS];      // of keys 32i + 8t + g
  uint32_t v[GROUPS][C::HEAD_DIM_V / 32];  // of the keys of a group

  __device__ __forceinline__ void read_q(const Descales& scales, const AttentionParams& params,
                                         const device::Work& work, int warp_row) {
    const int batch = work.batch_head / params.heads_q, head = work.batch_head % params.heads_q;
    const unsigned char* head_gmem = scales_of_head(scales.q, batch, head);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
      const int row = work.first_row + warp_row + 16 * m + lane % 2 * 8 + lane / 4;
      read_row_scales(q[m], head_gmem + min(row, work.nq - 1) * scales.q.block, params.d);
    }
  }

  // The rows of keys behind the last one are those of the last one: their scores are masked.
  __device__ __forceinline__ void read_k(const KeyScales& scales, const AttentionParams& params,
                                         int block) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < C::BLOCK_K / 32; ++i) {
      const int key = min(block + 32 * i + lane % 4 * 8 + lane / 4, params.nk - 1);
      read_row_scales(k[i], scales.k_gmem + key * scales.k_row, params.d);
    }
  }

  // Even tiles of outputs have the even ones of every 16 columns of V, odd tiles have the odd
  // ones (mma_sync::Fp8VFragments). Groups without a key from `begin` to `end` - 1 count as zeros.
  __device__ __forceinline__ void read_v(const KeyScales& scales, const AttentionParams& params,
                                         int block, int begin, int end) {
    const int lane = threadIdx.x % 32;
    const int first_column = lane % 4 / 2 * 16 + lane / 4 * 2 + lane % 2;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      const int key = block + group * SCALED_NUMBERS;
      const bool counts = key < end && key + SCALED_NUMBERS > begin;
      const unsigned char* group_gmem = scales.v_gmem + key / SCALED_NUMBERS * scales.v_group;
#pragma unroll
      for (int i = 0; i < C::HEAD_DIM_V / 32; ++i) {
        const int column = 32 * i + first_column;
        v[group][i] = counts && column < params.dv ? group_gmem[column] : SCALE_ONE;
      }
    }
  }
};

struct NoScales {};
template <class C>
using ScalesOf = std::conditional_t<C::BLOCK_SCALES, Scales<C>, NoScales>;

// d0 += a b0 and d1 += a b1 for two neighbouring tiles of columns, n (even) and n + 1.
template <DType A, DType B>
__device__ __forceinline__ void multiply_scaled_tiles(float (&d0)[4], float (&d1)[4],
                                                      const uint32_t (&a)[4],
                                                      const uint32_t (&b0)[2],
                                                      const uint32_t (&b1)[2], uint32_t scale_a,
                                                      uint32_t scale_b, int n) {
  if (n % 4 == 0) {
    ptx::mma_mxf8_m16n8k32<A, B, ptx::ScalePlace{.b_lane = 0}>(d0, a, b0[0], b0[1], scale_a,
                                                               scale_b);
    ptx::mma_mxf8_m16n8k32<A, B, ptx::ScalePlace{.b_lane = 1}>(d1, a, b1[0], b1[1], scale_a,
                                                               scale_b);
  } else {
    ptx::mma_mxf8_m16n8k32<A, B, ptx::ScalePlace{.b_lane = 2}>(d0, a, b0[0], b0[1], scale_a,
                                                               scale_b);
    ptx::mma_mxf8_m16n8k32<A, B, ptx::ScalePlace{.b_lane = 3}>(d1, a, b1[0], b1[1], scale_a,
                                                               scale_b);
  }
}

// mma_sync::multiply_qk() with scales.
template <class C>
__device__ __forceinline__ void multiply_scaled_qk(device::Scores<C>& s_rmem,
                                                   const mma_sync::QFragments<C>& all_q_rmem,
                                                   uint32_t q_smem /* this lane's row */,
                                                   uint32_t k_smem /* this lane's row */,
                                                   const Scales<C>& scales) {
  static_assert(!C::Q_IN_REGISTERS);
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s_rmem[m][n][i] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < Scales<C>::STEPS; ++step) {
    uint32_t q_rmem[C::M_TILES][4];
    mma_sync::load_q<C>(q_rmem, q_smem, 16 * step);
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; n += 2) {
      uint32_t k_rmem[4];
      ptx::ldmatrix_x4(k_rmem, C::KTile::advance(k_smem, 2 * step) + n * 8 * C::KTile::ROW_BYTES);
      const uint32_t first[2] = {k_rmem[0], k_rmem[1]}, second[2] = {k_rmem[2], k_rmem[3]};
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        multiply_scaled_tiles<C::DTYPE, C::DTYPE>(s_rmem[m][n], s_rmem[m][n + 1], q_rmem[m], first,
                                                  second, scales.q[m][step], scales.k[n / 4][step],
                                                  n);
      }
    }
  }
}

// mma_sync::multiply_pv_group() with scales.
template <class C, class Correct>
__device__ __forceinline__ void multiply_scaled_pv_group(device::Outputs<C>& o_rmem,
                                                         const uint32_t (&p_rmem)[C::M_TILES][4],
                                                         uint32_t v_smem /* this lane's row */,
                                                         int key, const Correct& correct,
                                                         const Scales<C>& scales) {
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
    uint32_t v_rmem[4];
    ptx::ldmatrix_x4_trans(v_rmem,
                           C::VTile::advance(v_smem, n / C::V_PACK) + key * C::VTile::ROW_BYTES);
    correct(v_rmem);
    const mma_sync::Fp8VFragments v(v_rmem);
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
      multiply_scaled_tiles<DType::E4M3, C::DTYPE>(o_rmem[m][n], o_rmem[m][n + 1], p_rmem[m],
                                                   v.even, v.odd, SCALE_ONE,
                                                   scales.v[key / SCALED_NUMBERS][n / 4], n);
    }
  }
}

}  // namespace archflash::blackwell_consumer
