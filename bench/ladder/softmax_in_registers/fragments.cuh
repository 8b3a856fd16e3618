// Rungs 2 and 3: tensor cores behind an interface like that of WMMA. A fragment is loaded from
// shared memory and stored there as a whole, and nothing is known of which lane holds which
// element. So scores, P and outputs all lie in shared memory.
#pragma once

#include "common/ptx/mma_sync.cuh"
#include "tile.cuh"

namespace archflash::ladder {

// A fragment of 16 x 16 elements of a row-major tile: the left operand.
struct LeftFragment {
  uint32_t r[4];
  __device__ __forceinline__ void load(const uint16_t* tile, int stride) {
    const uint16_t* mine = tile + threadIdx.x % 32 / 4 * stride + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      r[i] = *reinterpret_cast<const uint32_t*>(mine + i % 2 * 8 * stride + i / 2 * 8);
  }
};

// A fragment of 16 x 8 elements: the right operand.
struct RightFragment {
  uint32_t r[2];
  // Of a tile whose rows are the columns of the operand.
  __device__ __forceinline__ void load_columns(const uint16_t* tile, int stride) {
    const uint16_t* mine = tile + threadIdx.x % 32 / 4 * stride + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) r[i] = *reinterpret_cast<const uint32_t*>(mine + 8 * i);
  }
  // Of a tile whose rows are the rows of the operand.
  __device__ __forceinline__ void load_rows(const uint16_t* tile, int stride) {
    const uint16_t* mine = tile + threadIdx.x % 4 * 2 * stride + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = mine[8 * i * stride], high = mine[(8 * i + 1) * stride];
      r[i] = low | high << 16;
    }
  }
};

// A fragment of 16 x 8 sums.
struct Sums {
  float r[4] = {};
  __device__ __forceinline__ void load(const float* tile, int stride) {
    const float* mine = tile + threadIdx.x % 32 / 4 * stride + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 pair = *reinterpret_cast<const float2*>(mine + 8 * i * stride);
      r[2 * i] = pair.x, r[2 * i + 1] = pair.y;
    }
  }
  __device__ __forceinline__ void store(float* tile, int stride) const {
    float* mine = tile + threadIdx.x % 32 / 4 * stride + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<float2*>(mine + 8 * i * stride) = make_float2(r[2 * i], r[2 * i + 1]);
  }
  __device__ __forceinline__ void add(const LeftFragment& a, const RightFragment& b) {
    ptx::mma_m16n8k16<DType::F16>(r, a.r, b.r[0], b.r[1]);
  }
};

template <class Rows>
struct Shared {
  uint16_t q[BLOCK * Rows::STRIDE], k[BLOCK * Rows::STRIDE], v[BLOCK * Rows::STRIDE];
  uint16_t p[BLOCK * Rows::STRIDE];
  float s[BLOCK * Rows::FLOAT_STRIDE], o[BLOCK * Rows::FLOAT_STRIDE];
};

// The kernel of rungs 2 and 3. copy(tile_smem, rows_gmem) copies 64 rows. All of S, P and O that a
// warp touches are its own 16 rows.
template <class Rows, class Copy>
__device__ __forceinline__ void attend_by_fragments(const Params& params, const Copy& copy) {
  constexpr int STRIDE = Rows::STRIDE, FLOAT_STRIDE = Rows::FLOAT_STRIDE;
  extern __shared__ __align__(16) unsigned char dynamic[];
  Shared<Rows>& shared = *reinterpret_cast<Shared<Rows>*>(dynamic);
  const int64_t head = head_start(params);
  const int first = first_row(), warp_row = threadIdx.x / 32 * 16;
  RowOfTwoThreads state;
  float* s_row = shared.s + state.row * FLOAT_STRIDE;
  float* o_row = shared.o + state.row * FLOAT_STRIDE;
  for (int d = state.half; d < state.half + HEAD_DIM / 2; ++d) o_row[d] = 0.0f;
  copy(shared.q, params.q_gmem + head + first * HEAD_DIM);
  for (int block = 0; block <= first; block += BLOCK) {
    __syncthreads();  // all warps have read the previous K and V, overwritten next
    copy(shared.k, params.k_gmem + head + block * HEAD_DIM);
    copy(shared.v, params.v_gmem + head + block * HEAD_DIM);
    __syncthreads();  // Q, K and V are complete, before any warp reads them
#pragma unroll 1
    for (int n = 0; n < BLOCK; n += 8) {
      Sums s;
#pragma unroll
      for (int d = 0; d < HEAD_DIM; d += 16) {
        LeftFragment q;
        RightFragment k;
        q.load(shared.q + warp_row * STRIDE + d, STRIDE);
        k.load_columns(shared.k + n * STRIDE + d, STRIDE);
        s.add(q, k);
      }
      s.store(shared.s + warp_row * FLOAT_STRIDE + n, FLOAT_STRIDE);
    }
    __syncwarp();  // the warp's scores are complete, before its threads read them
    uint16_t* p_row = shared.p + state.row * STRIDE;
    const float correction =
        state.weigh(s_row, first + state.row + 1 - block, params.exp2_scale,
                    [&](int key, float p) { p_row[key] = ptx::cvt_rn_f16_f32(p); });
    for (int d = state.half; d < state.half + HEAD_DIM / 2; ++d) o_row[d] *= correction;
    __syncwarp();  // the warp's P and rescaled outputs are complete, before fragments of them load
#pragma unroll 1
    for (int n = 0; n < HEAD_DIM; n += 8) {
      Sums o;
      o.load(shared.o + warp_row * FLOAT_STRIDE + n, FLOAT_STRIDE);
#pragma unroll
      for (int key = 0; key < BLOCK; key += 16) {
        LeftFragment p;
        RightFragment v;
        p.load(shared.p + warp_row * STRIDE + key, STRIDE);
        v.load_rows(shared.v + key * STRIDE + n, STRIDE);
        o.add(p, v);
      }
      o.store(shared.o + warp_row * FLOAT_STRIDE + n, FLOAT_STRIDE);
    }
    __syncwarp();  // the warp's outputs are complete, before its threads rescale or write them
  }
  const float factor = 1.0f / state.row_sum();
  uint16_t* row_gmem = params.out_gmem + head + (first + state.row) * HEAD_DIM;
  for (int d = state.half; d < state.half + HEAD_DIM / 2; ++d)
    row_gmem[d] = ptx::cvt_rn_f16_f32(o_row[d] * factor);
}

}  // namespace archflash::ladder
