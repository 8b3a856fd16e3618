// Rung 2: data moves 16 bytes at a time, from global memory to shared memory and from there to
// registers. Rows in shared memory are padded by 16 bytes, so that reads of the same column of
// eight rows use different banks. The rest is rung 1.
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "rung.cuh"

using namespace archflash;
using namespace archflash::ladder;

constexpr int THREADS = 256;
constexpr int SIDE = 16;   // threads along rows and along keys
constexpr int PATCH = 4;   // rows, keys and columns of a thread
constexpr int VECTOR = 8;  // bf16 in 16 bytes
constexpr int STRIDE = HEAD_DIM + VECTOR;
constexpr int P_STRIDE = BLOCK_K + 4;

__device__ __forceinline__ void load_tile(uint16_t (&tile_smem)[BLOCK_K][STRIDE],
                                          const uint16_t* rows_gmem) {
  for (int i = VECTOR * threadIdx.x; i < BLOCK_K * HEAD_DIM; i += VECTOR * THREADS) {
    *reinterpret_cast<uint4*>(&tile_smem[i / HEAD_DIM][i % HEAD_DIM]) =
        *reinterpret_cast<const uint4*>(rows_gmem + i);
  }
}

__device__ __forceinline__ void read_vector(float (&x)[VECTOR], const uint16_t* row_smem) {
  const uint4 pairs = *reinterpret_cast<const uint4*>(row_smem);
  const uint32_t words[] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
  for (int i = 0; i < VECTOR; ++i) {
    x[i] = i % 2 == 0 ? to_float(words[i / 2]) : __uint_as_float(words[i / 2] & 0xFFFF0000u);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  __shared__ alignas(16) uint16_t q_smem[BLOCK_Q][STRIDE], k_smem[BLOCK_K][STRIDE];
  __shared__ alignas(16) uint16_t v_smem[BLOCK_K][STRIDE];
  __shared__ alignas(16) float p_smem[BLOCK_Q][P_STRIDE];
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
    for (int d = 0; d < HEAD_DIM; d += VECTOR) {
      float q[PATCH][VECTOR];
#pragma unroll
      for (int i = 0; i < PATCH; ++i) read_vector(q[i], &q_smem[y + SIDE * i][d]);
#pragma unroll
      for (int j = 0; j < PATCH; ++j) {
        float k[VECTOR];
        read_vector(k, &k_smem[x + SIDE * j][d]);
#pragma unroll
        for (int i = 0; i < PATCH; ++i) {
#pragma unroll
          for (int e = 0; e < VECTOR; ++e) s[i][j] += q[i][e] * k[e];
        }
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
    for (int k = 0; k < BLOCK_K; k += 4) {
      float4 p[PATCH];
#pragma unroll
      for (int i = 0; i < PATCH; ++i)
        p[i] = *reinterpret_cast<const float4*>(&p_smem[y + SIDE * i][k]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // This thread's outputs are four neighbouring columns, so it reads those of V.
        const uint2 pairs = *reinterpret_cast<const uint2*>(&v_smem[k + e][PATCH * x]);
        const float v[PATCH] = {to_float(pairs.x), __uint_as_float(pairs.x & 0xFFFF0000u),
                                to_float(pairs.y), __uint_as_float(pairs.y & 0xFFFF0000u)};
#pragma unroll
        for (int i = 0; i < PATCH; ++i) {
          const float weight = e == 0 ? p[i].x : e == 1 ? p[i].y : e == 2 ? p[i].z : p[i].w;
#pragma unroll
          for (int j = 0; j < PATCH; ++j) o[i][j] += weight * v[j];
        }
      }
    }
    __syncwarp();  // all lanes have read P, before the next block's P overwrites it
  }
#pragma unroll
  for (int i = 0; i < PATCH; ++i) {
    for (int lane = 1; lane < SIDE; lane *= 2) sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], lane);
    const float factor = 1.0f / sum[i];
    uint16_t* out_gmem = params.out_gmem + rows + (y + SIDE * i) * HEAD_DIM + PATCH * x;
    *reinterpret_cast<uint2*>(out_gmem) =
        make_uint2(ptx::cvt_rn_x2_f32<DType::BF16>(o[i][0] * factor, o[i][1] * factor),
                   ptx::cvt_rn_x2_f32<DType::BF16>(o[i][2] * factor, o[i][3] * factor));
  }
}
