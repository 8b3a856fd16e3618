// Rung 1: tiles in shared memory, products on CUDA cores. The 256 threads form a grid of 16 x 16.
// Each has a 4 x 4 patch of the scores (every 16th row and key) and of the outputs.
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "rung.cuh"

using namespace archflash;
using namespace archflash::ladder;

constexpr int THREADS = 256;
constexpr int SIDE = 16;  // threads along rows and along keys
constexpr int PATCH = 4;  // rows, keys and columns of a thread

__device__ __forceinline__ void load_tile(uint16_t (&tile_smem)[BLOCK_K][HEAD_DIM],
                                          const uint16_t* rows_gmem) {
  for (int i = threadIdx.x; i < BLOCK_K * HEAD_DIM; i += THREADS)
    tile_smem[i / HEAD_DIM][i % HEAD_DIM] = rows_gmem[i];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  __shared__ uint16_t q_smem[BLOCK_Q][HEAD_DIM], k_smem[BLOCK_K][HEAD_DIM];
  __shared__ uint16_t v_smem[BLOCK_K][HEAD_DIM];
  __shared__ float p_smem[BLOCK_Q][BLOCK_K];
  const int x = threadIdx.x % SIDE, y = threadIdx.x / SIDE;
  const int64_t head = head_start(params);
  const int64_t rows = head + blockIdx.x * BLOCK_Q * HEAD_DIM;
  load_tile(q_smem, params.q_gmem + rows);

  float o[PATCH][PATCH] = {}, base[PATCH], sum[PATCH] = {};
#pragma unroll
  for (float& b : base) b = -INFINITY;
  for (int key = 0; key < params.n; key += BLOCK_K) {
    __syncthreads();  // all threads have read K and V of the previous block, overwritten below
    load_tile(k_smem, params.k_gmem + head + key * HEAD_DIM);
    load_tile(v_smem, params.v_gmem + head + key * HEAD_DIM);
    __syncthreads();  // Q, K and V are complete, before any thread reads them

    float s[PATCH][PATCH] = {};
    for (int d = 0; d < HEAD_DIM; ++d) {
#pragma unroll
      for (int i = 0; i < PATCH; ++i) {
#pragma unroll
        for (int j = 0; j < PATCH; ++j)
          s[i][j] += to_float(q_smem[y + SIDE * i][d]) * to_float(k_smem[x + SIDE * j][d]);
      }
    }
#pragma unroll
    for (int i = 0; i < PATCH; ++i) {
      float max = fmaxf(fmaxf(s[i][0], s[i][1]), fmaxf(s[i][2], s[i][3]));
      for (int lane = 1; lane < SIDE; lane *= 2)
        max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, lane));
      const float raised = fmaxf(base[i], max * params.exp2_scale);
      const float correction = ptx::ex2_approx_ftz(base[i] - raised);
      base[i] = raised;
      sum[i] *= correction;
#pragma unroll
      for (int j = 0; j < PATCH; ++j) {
        o[i][j] *= correction;
        const float p = ptx::ex2_approx_ftz(s[i][j] * params.exp2_scale - raised);
        sum[i] += p;
        p_smem[y + SIDE * i][x + SIDE * j] = p;
      }
    }
    __syncwarp();  // the warp's rows of P are complete; no other warp reads them
    for (int k = 0; k < BLOCK_K; ++k) {
#pragma unroll
      for (int i = 0; i < PATCH; ++i) {
#pragma unroll
        for (int j = 0; j < PATCH; ++j)
          o[i][j] += p_smem[y + SIDE * i][k] * to_float(v_smem[k][x + SIDE * j]);
      }
    }
    __syncwarp();  // all lanes have read P, before the next block's P overwrites it
  }
#pragma unroll
  for (int i = 0; i < PATCH; ++i) {
    for (int lane = 1; lane < SIDE; lane *= 2) sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], lane);
#pragma unroll
    for (int j = 0; j < PATCH; ++j) {
      params.out_gmem[rows + (y + SIDE * i) * HEAD_DIM + x + SIDE * j] =
          ptx::cvt_rn_x2_f32<DType::BF16>(o[i][j] / sum[i], 0.0f);
    }
  }
}
