// What the rungs on mma.sync share. A warp has 16 rows, whose scores, P and outputs stay in
// registers. The parameter Rows says where the 16-byte chunks of a tile lie in shared memory; the
// rungs differ in how the chunks get there.
#pragma once

#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "rung.cuh"

namespace archflash::ladder {

constexpr int WARPS = BLOCK_Q / 16;
constexpr int THREADS = 32 * WARPS;
constexpr int CHUNKS = HEAD_DIM / 8;  // 16-byte chunks of a row

struct PlainRows {  // TMA without a swizzle: the same chunk of eight rows lies in the same banks
  static constexpr int BYTES = 2 * HEAD_DIM * BLOCK_K;
  __device__ static constexpr int offset(int row, int chunk) {
    return 2 * HEAD_DIM * row + 16 * chunk;
  }
};
struct PaddedRows {  // rows padded by one chunk
  static constexpr int BYTES = (2 * HEAD_DIM + 16) * BLOCK_K;
  __device__ static constexpr int offset(int row, int chunk) {
    return (2 * HEAD_DIM + 16) * row + 16 * chunk;
  }
};
struct SwizzledRows {  // TMA with the 128-byte swizzle; tiles start at multiples of 1024 bytes
  static constexpr int BYTES = PlainRows::BYTES;
  __device__ static constexpr int offset(int row, int chunk) {
    return 2 * HEAD_DIM * row + 16 * (chunk ^ row % 8);
  }
};

// The state of a warp. Lane l holds rows l/4 and l/4 + 8 (index r of base and sum), and in o[n] of
// each row the columns 8n + 2*(l%4) and the next one.
struct WarpState {
  uint32_t q[HEAD_DIM / 16][4];
  float o[HEAD_DIM / 8][4];
  float base[2], sum[2];
};

// Reads the warp's rows of Q into registers and clears the rest of the state.
template <class Rows>
__device__ __forceinline__ void start_rows(WarpState& state, uint32_t q_smem) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int column = 0; column < HEAD_DIM / 16; ++column) {
    ptx::ldmatrix_x4(state.q[column],
                     q_smem + Rows::offset(16 * warp + lane % 16, 2 * column + lane / 16));
  }
#pragma unroll
  for (auto& tile : state.o) tile[0] = tile[1] = tile[2] = tile[3] = 0.0f;
#pragma unroll
  for (int r = 0; r < 2; ++r) state.base[r] = -INFINITY, state.sum[r] = 0.0f;
}

// Adds a block of keys: S = Q K^T, P = 2^(S * exp2_scale - base), O += P V.
template <class Rows>
__device__ __forceinline__ void attend_block(WarpState& state, uint32_t k_smem, uint32_t v_smem,
                                             float exp2_scale) {
  const int lane = threadIdx.x % 32;
  float s[BLOCK_K / 8][4] = {};
#pragma unroll
  for (int column = 0; column < HEAD_DIM / 16; ++column) {
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; n += 2) {
      uint32_t k[4];
      ptx::ldmatrix_x4(
          k, k_smem + Rows::offset(8 * n + lane % 8 + lane / 16 * 8, 2 * column + lane / 8 % 2));
      ptx::mma_m16n8k16<DType::BF16>(s[n], state.q[column], k[0], k[1]);
      ptx::mma_m16n8k16<DType::BF16>(s[n + 1], state.q[column], k[2], k[3]);
    }
  }
  uint32_t p[BLOCK_K / 16][4];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float max = -INFINITY;
#pragma unroll
    for (const auto& tile : s) max = fmaxf(max, fmaxf(tile[2 * r], tile[2 * r + 1]));
    max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 1));
    max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 2));
    const float raised = fmaxf(state.base[r], max * exp2_scale);
    const float correction = ptx::ex2_approx_ftz(state.base[r] - raised);
    state.base[r] = raised;
    state.sum[r] *= correction;
#pragma unroll
    for (auto& tile : state.o) tile[2 * r] *= correction, tile[2 * r + 1] *= correction;
#pragma unroll
    for (int n = 0; n < BLOCK_K / 8; ++n) {
      const float low = ptx::ex2_approx_ftz(s[n][2 * r] * exp2_scale - raised);
      const float high = ptx::ex2_approx_ftz(s[n][2 * r + 1] * exp2_scale - raised);
      state.sum[r] += low + high;
      p[n / 2][n % 2 * 2 + r] = ptx::cvt_rn_x2_f32<DType::BF16>(low, high);
    }
  }
#pragma unroll
  for (int key = 0; key < BLOCK_K / 16; ++key) {
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; n += 2) {
      uint32_t v[4];
      ptx::ldmatrix_x4_trans(v, v_smem + Rows::offset(16 * key + lane % 16, n + lane / 16));
      ptx::mma_m16n8k16<DType::BF16>(state.o[n], p[key], v[0], v[1]);
      ptx::mma_m16n8k16<DType::BF16>(state.o[n + 1], p[key], v[2], v[3]);
    }
  }
}

// Divides the outputs by the row sums and writes them.
__device__ __forceinline__ void store_rows(WarpState& state, const Params& params) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = state.sum[r];
    sum += __shfl_xor_sync(FULL_WARP, sum, 1);
    sum += __shfl_xor_sync(FULL_WARP, sum, 2);
    const float factor = 1.0f / sum;
    const int row = blockIdx.x * BLOCK_Q + 16 * warp + 8 * r + lane / 4;
    uint16_t* row_gmem = params.out_gmem + head_start(params) + row * HEAD_DIM + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < HEAD_DIM / 8; ++n) {
      *reinterpret_cast<uint32_t*>(row_gmem + 8 * n) = ptx::cvt_rn_x2_f32<DType::BF16>(
          state.o[n][2 * r] * factor, state.o[n][2 * r + 1] * factor);
    }
  }
}

}  // namespace archflash::ladder
