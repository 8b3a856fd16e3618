// The parts of the rungs of this ladder. A rung is a struct that says which of them it takes:
// `Base` is the first rung, and every other one changes one thing more. A CTA of four warps owns
// some query rows of one head and visits its keys in blocks. A warp owns 16 or 32 of the rows,
// whose scores, P and outputs stay in registers. Inputs are fp16 with head dim 128; there is no
// mask, and lengths are multiples of 128.
#pragma once

#include <cstdint>

#include "../params.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"
#include "ldmatrix_x2.cuh"

namespace archflash::ladder {

constexpr int HEAD_DIM = 128;
constexpr int ROW_BYTES = 2 * HEAD_DIM;
constexpr int CHUNKS = ROW_BYTES / 16;  // 16-byte chunks of a row
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
constexpr unsigned FULL_WARP = 0xFFFFFFFFu;
constexpr float LOG2_E = 1.4426950408889634f;

using Params = RungParams<uint16_t>;

struct PlainRows {  // the same chunk of all rows lies in the same banks
  __device__ static constexpr int offset(int row, int chunk) {
    return ROW_BYTES * row + 16 * chunk;
  }
};
struct SwizzledRows {  // the same chunk of eight neighbouring rows lies in different banks
  __device__ static constexpr int offset(int row, int chunk) {
    return ROW_BYTES * row + 16 * (chunk ^ row % 8);
  }
};

struct Base {
  using Rows = PlainRows;
  static constexpr int ROW_TILES = 1;             // of 16 query rows that a warp owns
  static constexpr int BLOCK_K = 32;              // keys that are visited together
  static constexpr bool COPIES_ASYNC = false;     // by cp.async, while the warps compute
  static constexpr bool V_IN_PAIRS = false;       // one ldmatrix for two fragments of V
  static constexpr bool FOLDS_SCALE = false;      // scale and log2(e) in the FMA before ex2
  static constexpr bool FRAGMENTS_AHEAD = false;  // loads the next fragments before the products
};

template <class C>
constexpr int BLOCK_Q = 16 * WARPS * C::ROW_TILES;

// Shared memory: Q | K | V.
template <class C>
constexpr int K_SMEM = ROW_BYTES * BLOCK_Q<C>;
template <class C>
constexpr int V_SMEM = K_SMEM<C> + ROW_BYTES * C::BLOCK_K;

// --- global to shared memory ---

// All threads copy ROWS rows through registers, or start their copies.
template <class C, int ROWS>
__device__ __forceinline__ void load_tile(unsigned char* tile_smem, const uint16_t* rows_gmem) {
#pragma unroll 4
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    unsigned char* chunk_smem = tile_smem + C::Rows::offset(i / CHUNKS, i % CHUNKS);
    if constexpr (C::COPIES_ASYNC) {
      ptx::cp_async_cg_16(static_cast<uint32_t>(__cvta_generic_to_shared(chunk_smem)),
                          rows_gmem + 8 * i);
    } else {
      *reinterpret_cast<uint4*>(chunk_smem) = *reinterpret_cast<const uint4*>(rows_gmem + 8 * i);
    }
  }
}

// --- the state of a warp ---

// Lane l holds rows l/4 and l/4 + 8 of each row tile (index r of base and sum), and in o[m][n] of
// each row the columns 8n + 2*(l%4) and the next one.
template <class C>
struct WarpState {
  float o[C::ROW_TILES][HEAD_DIM / 8][4] = {};
  float base[C::ROW_TILES][2], sum[C::ROW_TILES][2];

  __device__ __forceinline__ WarpState() {
#pragma unroll
    for (int m = 0; m < C::ROW_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) base[m][r] = -INFINITY, sum[m][r] = 0.0f;
    }
  }
};
template <class C>
using Scores = float[C::ROW_TILES][C::BLOCK_K / 8][4];
template <class C>
using Probabilities = uint32_t[C::BLOCK_K / 16][C::ROW_TILES][4];

// --- S = Q K^T ---

template <class C>
__device__ __forceinline__ void load_q(uint32_t (&q)[C::ROW_TILES][4], uint32_t q_smem,
                                       int column) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * C::ROW_TILES;
#pragma unroll
  for (int m = 0; m < C::ROW_TILES; ++m) {
    ptx::ldmatrix_x4(
        q[m], q_smem + C::Rows::offset(warp_row + 16 * m + lane % 16, 2 * column + lane / 16));
  }
}

// The fragments of keys 8n to 8n + 15.
template <class C>
__device__ __forceinline__ void load_k(uint32_t (&k)[4], uint32_t k_smem, int column, int n) {
  const int lane = threadIdx.x % 32;
  ptx::ldmatrix_x4(
      k, k_smem + C::Rows::offset(8 * n + lane % 8 + lane / 16 * 8, 2 * column + lane / 8 % 2));
}

template <class C>
__device__ __forceinline__ void multiply_q_k(Scores<C>& s, uint32_t q_smem, uint32_t k_smem) {
  constexpr int BUFFERS = C::FRAGMENTS_AHEAD ? 2 : 1;
  constexpr int PAIRS = C::BLOCK_K / 16, STEPS = HEAD_DIM / 16 * PAIRS;
  uint32_t q[BUFFERS][C::ROW_TILES][4], k[BUFFERS][4];
  const auto load = [&](int step) {
    const int column = step / PAIRS;
    if (step % PAIRS == 0) load_q<C>(q[column % BUFFERS], q_smem, column);
    load_k<C>(k[step % BUFFERS], k_smem, column, step % PAIRS * 2);
  };
  if constexpr (C::FRAGMENTS_AHEAD) load(0);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if constexpr (!C::FRAGMENTS_AHEAD) load(step);
    if (C::FRAGMENTS_AHEAD && step + 1 < STEPS) load(step + 1);
    const auto& q_now = q[step / PAIRS % BUFFERS];
    const auto& k_now = k[step % BUFFERS];
    const int n = step % PAIRS * 2;
#pragma unroll
    for (int m = 0; m < C::ROW_TILES; ++m) {
      ptx::mma_m16n8k16<DType::F16>(s[m][n], q_now[m], k_now[0], k_now[1]);
      ptx::mma_m16n8k16<DType::F16>(s[m][n + 1], q_now[m], k_now[2], k_now[3]);
    }
  }
}

// --- P = e^(S * scale - base) ---

template <class C>
__device__ __forceinline__ void make_p(WarpState<C>& state, Probabilities<C>& p, Scores<C>& s,
                                       const Params& params) {
  // A power of e costs a product with log2(e). Folding the scale into that product leaves one FMA
  // for each score; the bases are then in units of log2.
  const float to_base = C::FOLDS_SCALE ? params.exp2_scale : 1.0f;
  const auto weight = [&](float score, float base) {
    return ptx::ex2_approx_ftz(C::FOLDS_SCALE ? score * to_base - base : (score - base) * LOG2_E);
  };
#pragma unroll
  for (int m = 0; m < C::ROW_TILES; ++m) {
    if constexpr (!C::FOLDS_SCALE) {
#pragma unroll
      for (auto& tile : s[m]) {
#pragma unroll
        for (float& score : tile) score *= params.scale;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = -INFINITY;
#pragma unroll
      for (const auto& tile : s[m]) max = fmaxf(max, fmaxf(tile[2 * r], tile[2 * r + 1]));
      max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 1));
      max = fmaxf(max, __shfl_xor_sync(FULL_WARP, max, 2));
      const float raised = fmaxf(state.base[m][r], max * to_base);
      const float fall = state.base[m][r] - raised;
      const float correction = ptx::ex2_approx_ftz(C::FOLDS_SCALE ? fall : fall * LOG2_E);
      state.base[m][r] = raised;
      state.sum[m][r] *= correction;
#pragma unroll
      for (auto& tile : state.o[m]) tile[2 * r] *= correction, tile[2 * r + 1] *= correction;
#pragma unroll
      for (int n = 0; n < C::BLOCK_K / 8; ++n) {
        const float low = weight(s[m][n][2 * r], raised);
        const float high = weight(s[m][n][2 * r + 1], raised);
        state.sum[m][r] += low + high;
        p[n / 2][m][n % 2 * 2 + r] = ptx::cvt_rn_x2_f32<DType::F16>(low, high);
      }
    }
  }
}

// --- O += P V ---

// The fragments of 16 keys from 16 * key on, for columns 8n to 8n + 15.
template <class C>
__device__ __forceinline__ void load_v(uint32_t (&v)[4], uint32_t v_smem, int key, int n) {
  const int lane = threadIdx.x % 32, row = 16 * key + lane % 16;
  if constexpr (C::V_IN_PAIRS) {
    ptx::ldmatrix_x4_trans(v, v_smem + C::Rows::offset(row, n + lane / 16));
  } else {
    ldmatrix_x2_trans(v[0], v[1], v_smem + C::Rows::offset(row, n));
    ldmatrix_x2_trans(v[2], v[3], v_smem + C::Rows::offset(row, n + 1));
  }
}

template <class C>
__device__ __forceinline__ void multiply_p_v(WarpState<C>& state, const Probabilities<C>& p,
                                             uint32_t v_smem) {
  constexpr int BUFFERS = C::FRAGMENTS_AHEAD ? 2 : 1;
  constexpr int PAIRS = HEAD_DIM / 16, STEPS = C::BLOCK_K / 16 * PAIRS;
  uint32_t v[BUFFERS][4];
  const auto load = [&](int step) {
    load_v<C>(v[step % BUFFERS], v_smem, step / PAIRS, step % PAIRS * 2);
  };
  if constexpr (C::FRAGMENTS_AHEAD) load(0);
#pragma unroll
  for (int step = 0; step < STEPS; ++step) {
    if constexpr (!C::FRAGMENTS_AHEAD) load(step);
    if (C::FRAGMENTS_AHEAD && step + 1 < STEPS) load(step + 1);
    const auto& v_now = v[step % BUFFERS];
    const int n = step % PAIRS * 2;
#pragma unroll
    for (int m = 0; m < C::ROW_TILES; ++m) {
      ptx::mma_m16n8k16<DType::F16>(state.o[m][n], p[step / PAIRS][m], v_now[0], v_now[1]);
      ptx::mma_m16n8k16<DType::F16>(state.o[m][n + 1], p[step / PAIRS][m], v_now[2], v_now[3]);
    }
  }
}

// Divides the outputs by the row sums and writes them.
template <class C>
__device__ __forceinline__ void store_rows(WarpState<C>& state, uint16_t* out_gmem) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * C::ROW_TILES;
#pragma unroll
  for (int m = 0; m < C::ROW_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = state.sum[m][r];
      sum += __shfl_xor_sync(FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(FULL_WARP, sum, 2);
      const float factor = 1.0f / sum;
      const int row = warp_row + 16 * m + 8 * r + lane / 4;
      uint16_t* row_gmem = out_gmem + row * HEAD_DIM + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < HEAD_DIM / 8; ++n) {
        *reinterpret_cast<uint32_t*>(row_gmem + 8 * n) = ptx::cvt_rn_x2_f32<DType::F16>(
            state.o[m][n][2 * r] * factor, state.o[m][n][2 * r + 1] * factor);
      }
    }
  }
}

// --- the kernel ---

template <class C>
__device__ __forceinline__ void attend(const Params& params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t q_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t k_smem = q_smem + K_SMEM<C>, v_smem = q_smem + V_SMEM<C>;
  const int64_t head = static_cast<int64_t>(blockIdx.y) * params.n * HEAD_DIM;
  const int64_t rows = head + static_cast<int64_t>(blockIdx.x) * BLOCK_Q<C> * HEAD_DIM;
  const auto load_k_block = [&](int key) {
    load_tile<C, C::BLOCK_K>(shared + K_SMEM<C>, params.k_gmem + head + key * HEAD_DIM);
  };
  const auto load_v_block = [&](int key) {
    load_tile<C, C::BLOCK_K>(shared + V_SMEM<C>, params.v_gmem + head + key * HEAD_DIM);
  };

  WarpState<C> state;
  load_tile<C, BLOCK_Q<C>>(shared, params.q_gmem + rows);
  if constexpr (C::COPIES_ASYNC) load_k_block(0);
#pragma unroll 1
  for (int key = 0; key < params.n; key += C::BLOCK_K) {
    if constexpr (C::COPIES_ASYNC) {
      ptx::copies_wait_all();  // this thread's copies of K, and of Q in the first round
      __syncthreads();         // all copies of K are complete; all warps have read the previous V
      load_v_block(key);
    } else {
      __syncthreads();  // all warps have read the previous K and V, which are overwritten next
      load_k_block(key);
      load_v_block(key);
      __syncthreads();  // Q, K and V are complete, before any warp reads them
    }
    Scores<C> s = {};
    multiply_q_k<C>(s, q_smem, k_smem);
    Probabilities<C> p;
    make_p<C>(state, p, s, params);
    if constexpr (C::COPIES_ASYNC) {
      ptx::copies_wait_all();  // this thread's copies of V
      __syncthreads();         // all copies of V are complete; all warps have read K
      if (key + C::BLOCK_K < params.n) load_k_block(key + C::BLOCK_K);
    }
    multiply_p_v<C>(state, p, v_smem);
  }
  store_rows<C>(state, params.out_gmem + rows);
}

}  // namespace archflash::ladder
