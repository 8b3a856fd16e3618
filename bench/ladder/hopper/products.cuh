// What all rungs of this ladder share: tiles, products by wgmma, and the softmax. A warpgroup of
// four warps owns 64 query rows of one head, whose scores, P and outputs stay in its registers.
// Inputs are fp16 with head dim 128; there is no mask, and lengths are multiples of 128.
#pragma once

#include <cstdint>

#include "../params.cuh"
#include "common/device/slab_tile.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

namespace archflash::ladder {

constexpr int HEAD_DIM = 128;
constexpr int WARPGROUP = 128;  // threads
constexpr int GROUP_ROWS = 64;  // query rows of a warpgroup
constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

using Params = RungParams<uint16_t>;

// A tile of ROWS rows: two slabs of 64 columns with the 128-byte swizzle, as TMA writes them and
// wgmma reads them.
template <int ROWS>
using Tile = device::SlabTile<HEAD_DIM, ROWS>;

__device__ __forceinline__ int64_t head_start(const Params& params) {
  return static_cast<int64_t>(blockIdx.y) * params.n * HEAD_DIM;
}
__device__ __forceinline__ uint32_t address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// The shared-memory descriptor of wgmma (PTX ISA, "Matrix Descriptor Format"): bits 0 to 13 are
// address >> 4, 16 to 29 the leading offset >> 4 (from one slab to the next, where a row of the
// tile holds the columns of B), 32 to 45 the step to the next eight rows >> 4, 62 and 63 the
// swizzle.
template <class T>
__device__ __forceinline__ ptx::WgmmaDescriptor describe(uint32_t smem, int leading_bytes) {
  constexpr uint32_t SWIZZLE_128 = 1u << 30;
  return {(smem & 0x3FFFF) >> 4 | static_cast<uint32_t>(leading_bytes >> 4) << 16,
          static_cast<uint32_t>(8 * T::ROW_BYTES >> 4) | SWIZZLE_128};
}
__device__ __forceinline__ ptx::WgmmaDescriptor advance(ptx::WgmmaDescriptor from, int bytes) {
  return {from.low + static_cast<uint32_t>(bytes >> 4), from.high};
}
template <class T>
__device__ constexpr int column_bytes(int column) {
  return column / T::SLAB * T::SLAB_BYTES + column % T::SLAB * 2;
}

// The registers of a thread: in each tile of 8 columns the columns 2*(l%4) and the next one of row
// l/4, then of row l/4 + 8 of its warp's 16 rows (l is the lane).
template <int KEYS>
struct Rows {
  float s[KEYS / 2];
  uint32_t p[KEYS / 16][4];
  float o[HEAD_DIM / 2] = {};
  float base[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

  // Starts S = Q K^T for the rows of Q at q_smem, in a tile of Q_ROWS rows.
  template <int Q_ROWS>
  __device__ __forceinline__ void start_qk(uint32_t q_smem, uint32_t k_smem) {
    const auto q = describe<Tile<Q_ROWS>>(q_smem, 16), k = describe<Tile<KEYS>>(k_smem, 16);
    ptx::registers_change<KEYS / 2>(s);
    ptx::wgmma_fence();  // the last uses of the scores come before the product
#pragma unroll
    for (int column = 0; column < HEAD_DIM; column += 16) {
      ptx::Wgmma<DType::F16, KEYS>::ss(s, advance(q, column_bytes<Tile<Q_ROWS>>(column)),
                                       advance(k, column_bytes<Tile<KEYS>>(column)), column > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Starts O += P V.
  __device__ __forceinline__ void start_pv(uint32_t v_smem) {
    const auto v = describe<Tile<KEYS>>(v_smem, Tile<KEYS>::SLAB_BYTES);
    ptx::registers_change<HEAD_DIM / 2>(o);
    ptx::wgmma_fence();  // the last uses of P and the outputs come before the product
#pragma unroll
    for (int key = 0; key < KEYS / 16; ++key)
      ptx::Wgmma<DType::F16, HEAD_DIM>::rs(o, p[key], advance(v, 16 * key * Tile<KEYS>::ROW_BYTES),
                                           1);
    ptx::wgmma_commit_group();
  }

  // Waits until at most PENDING of the products are unfinished.
  template <int PENDING>
  __device__ __forceinline__ void wait() {
    ptx::wgmma_wait_group<PENDING>();
    ptx::registers_change<KEYS / 2>(s);
    if constexpr (PENDING == 0) {
      ptx::registers_change<HEAD_DIM / 2>(o);
      ptx::registers_change<KEYS / 4>(&p[0][0]);
    }
  }

  // Scores become weights 2^(S * exp2_scale - base), still in fp32. `corrections` are the factors
  // of the earlier outputs.
  __device__ __forceinline__ void exponentiate(float exp2_scale, float (&corrections)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = -INFINITY;
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
        max = fmaxf(max, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
      max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 1));
      max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 2));
      const float raised = fmaxf(base[r], max * exp2_scale);
      corrections[r] = ptx::ex2_approx_ftz(base[r] - raised);
      base[r] = raised;
      sum[r] *= corrections[r];
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = s[4 * n + 2 * r + i];
          x = ptx::ex2_approx_ftz(x * exp2_scale - raised);
          sum[r] += x;
        }
      }
    }
    ptx::registers_change<KEYS / 2>(s);  // all exponentials come before the next wait
  }
  __device__ __forceinline__ void rescale(const float (&corrections)[2]) {
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; ++i) o[i] *= corrections[i / 2 % 2];
  }
  // Rounds the weights to P.
  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        p[n / 2][n % 2 * 2 + r] =
            ptx::cvt_rn_x2_f32<DType::F16>(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]);
    }
  }
  __device__ __forceinline__ void softmax(float exp2_scale) {
    float corrections[2];
    exponentiate(exp2_scale, corrections);
    rescale(corrections);
    pack();
  }

  // Divides the outputs by the row sums and writes them; out_gmem is the warpgroup's first row.
  __device__ __forceinline__ void store(uint16_t* out_gmem) const {
    const int lane = threadIdx.x % 32, row = threadIdx.x % WARPGROUP / 32 * 16 + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r];
      total += __shfl_xor_sync(FULL_WARP, total, 1);
      total += __shfl_xor_sync(FULL_WARP, total, 2);
      const float factor = 1.0f / total;
      uint16_t* row_gmem = out_gmem + (row + 8 * r) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        *reinterpret_cast<uint32_t*>(row_gmem + 8 * n) = ptx::cvt_rn_x2_f32<DType::F16>(
            o[4 * n + 2 * r] * factor, o[4 * n + 2 * r + 1] * factor);
      }
    }
  }
};

}  // namespace archflash::ladder
