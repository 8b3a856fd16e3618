// Rungs 4 to 6: ldmatrix loads fragments whose layout is known (common/ptx/mma_sync.cuh), so that Q
// and the outputs stay in registers.
#pragma once

#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "tile.cuh"

namespace archflash::ladder {

using Rows = PaddedRows;
using Fragments = uint32_t[HEAD_DIM / 16][4];  // 16 rows of Q, or of P
// Lane l holds in each tile of 8 columns the columns 2*(l%4) and the next one of row l/4, then of
// row l/4 + 8.
using Sums = float[HEAD_DIM / 8][4];

__device__ __forceinline__ uint32_t address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// The warp's 16 rows of a tile.
__device__ __forceinline__ void load_rows(Fragments& a, const uint16_t* tile) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; ++i)
    ptx::ldmatrix_x4(a[i], address(tile + row * Rows::STRIDE + 16 * i + lane / 16 * 8));
}

// s += Q K^T
__device__ __forceinline__ void multiply_q_k(Sums& s, const Fragments& q, const uint16_t* k_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; ++i) {
#pragma unroll
    for (int n = 0; n < BLOCK / 8; n += 2) {
      uint32_t k[4];
      const int row = 8 * n + lane % 8 + lane / 16 * 8;
      ptx::ldmatrix_x4(k, address(k_tile + row * Rows::STRIDE + 16 * i + lane / 8 % 2 * 8));
      ptx::mma_m16n8k16<DType::F16>(s[n], q[i], k[0], k[1]);
      ptx::mma_m16n8k16<DType::F16>(s[n + 1], q[i], k[2], k[3]);
    }
  }
}

// o += P V
__device__ __forceinline__ void multiply_p_v(Sums& o, const Fragments& p, const uint16_t* v_tile) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < BLOCK / 16; ++i) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 2) {
      uint32_t v[4];
      const int row = 16 * i + lane % 16;
      ptx::ldmatrix_x4_trans(v, address(v_tile + row * Rows::STRIDE + 8 * n + lane / 16 * 8));
      ptx::mma_m16n8k16<DType::F16>(o[n], p[i], v[0], v[1]);
      ptx::mma_m16n8k16<DType::F16>(o[n + 1], p[i], v[2], v[3]);
    }
  }
}

// Writes outputs, with one factor for each of the lane's two rows.
__device__ __forceinline__ void store_rows(const Sums& o, const float (&factor)[2],
                                           uint16_t* out_gmem) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint16_t* row_gmem = out_gmem + (row + 8 * r) * HEAD_DIM + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      *reinterpret_cast<uint32_t*>(row_gmem + 8 * n) =
          ptx::cvt_rn_x2_f32<DType::F16>(o[n][2 * r] * factor[r], o[n][2 * r + 1] * factor[r]);
    }
  }
}

// The softmax of one block, when scores are in registers.
struct RowsInRegisters {
  float base[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

  // Masks the keys behind each row; `visible` are those of the lane's first row.
  __device__ __forceinline__ static void mask(Sums& s, int visible) {
#pragma unroll
    for (int n = 0; n < BLOCK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = 8 * n + threadIdx.x % 4 * 2 + i % 2;
        if (key >= visible + i / 2 * 8) s[n][i] = -INFINITY;
      }
    }
  }

  // The largest score of a row of the block; r is 0 or 1.
  __device__ __forceinline__ static float largest(const Sums& s, int r) {
    float max = -INFINITY;
#pragma unroll
    for (const auto& tile : s) max = fmaxf(max, fmaxf(tile[2 * r], tile[2 * r + 1]));
    max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 1));
    return fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 2));
  }

  // Makes P of a row's scores, and returns its sum over the lane's keys.
  __device__ __forceinline__ static float exponentiate(Fragments& p, const Sums& s, int r,
                                                       float of_base, float exp2_scale) {
    float total = 0.0f;
#pragma unroll
    for (int n = 0; n < BLOCK / 8; ++n) {
      const float low = ptx::ex2_approx_ftz(s[n][2 * r] * exp2_scale - of_base);
      const float high = ptx::ex2_approx_ftz(s[n][2 * r + 1] * exp2_scale - of_base);
      total += low + high;
      p[n / 2][n % 2 * 2 + r] = ptx::cvt_rn_x2_f32<DType::F16>(low, high);
    }
    return total;
  }

  __device__ __forceinline__ void invert(float (&factor)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[r] + __shfl_xor_sync(FULL_WARP, sum[r], 1);
      total += __shfl_xor_sync(FULL_WARP, total, 2);
      factor[r] = 1.0f / total;
    }
  }
};

struct Shared {
  uint16_t q[BLOCK * Rows::STRIDE], k[BLOCK * Rows::STRIDE], v[BLOCK * Rows::STRIDE];
};

// The loop of rungs 5 and 6, where scores stay in registers: step(state, o, s, v_tile) adds a block
// whose scores are s.
template <class Step>
__device__ __forceinline__ void attend_in_registers(const Params& params, const Step& step) {
  extern __shared__ __align__(16) unsigned char dynamic[];
  Shared& shared = *reinterpret_cast<Shared*>(dynamic);
  const int64_t head = head_start(params);
  const int first = first_row();
  const int lane_row = first + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  copy_chunks<Rows>(shared.q, params.q_gmem + head + first * HEAD_DIM);
  __syncthreads();  // Q is complete, before any warp reads it
  Fragments q;
  load_rows(q, shared.q);
  RowsInRegisters state;
  Sums o = {};
#pragma unroll 1
  for (int block = 0; block <= first; block += BLOCK) {
    __syncthreads();  // all warps have read the previous K and V, overwritten next
    copy_chunks<Rows>(shared.k, params.k_gmem + head + block * HEAD_DIM);
    copy_chunks<Rows>(shared.v, params.v_gmem + head + block * HEAD_DIM);
    __syncthreads();  // K and V are complete, before any warp reads them
    Sums s = {};
    multiply_q_k(s, q, shared.k);
    if (block == first) RowsInRegisters::mask(s, lane_row + 1 - block);
    step(state, o, s, shared.v);
  }
  float factor[2];
  state.invert(factor);
  store_rows(o, factor, params.out_gmem + head + first * HEAD_DIM);
}

}  // namespace archflash::ladder
