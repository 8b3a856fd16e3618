// What the backward pass computes once for each query row before its main kernels, and what it
// sums up over all rows for the sinks.
//
// With P = exp(score - LSE) and dP = dO V^T, the gradient of a score is dS = P * (dP - delta),
// where delta = sum(dO * O) - dLSE belongs to the row. A sink is one more score whose V is 0: its
// gradient is the sum over the rows of -exp(sink - LSE) * delta.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/dtype.h"
#include "common/math/attention_work.cuh"
#include "common/math/bfloat16.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::math {

struct RowTerms {
  float lse_log2;  // the LSE times log2(e); infinite for a row that sees no key, so that P is 0
  float delta;
};

template <DType DTYPE>
constexpr int ELEMENT_BYTES = DTYPE == DType::F32 ? 4 : 2;

// Element i of a 16-byte chunk of a row.
template <DType DTYPE>
__device__ __forceinline__ float element_of_chunk(const uint32_t (&words)[4], int i) {
  if constexpr (DTYPE == DType::F32) return __uint_as_float(words[i]);
  const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  if constexpr (DTYPE == DType::F16) return ptx::cvt_f32_f16(bits);
  return __uint_as_float(float_bits_of_bfloat16(bits));
}

// Writes zeros to `columns` columns of one row of a gradient; called by `lanes` threads, of which
// this is number `lane`. Nothing is to be done where gradients are added to what is there.
__device__ __forceinline__ void clear_gradient_row(const GradientParams& gradient, int batch,
                                                   int head, int64_t row, int columns, int lane,
                                                   int lanes) {
  if (gradient.accumulate) return;
  const int bytes = gradient.dtype == DType::F32 ? 4 : 2;
  const int64_t start = batch * gradient.batch + head * gradient.head + row * gradient.row;
  unsigned char* row_gmem = static_cast<unsigned char*>(gradient.gmem) + start * bytes;
  for (int chunk = lane; chunk < columns * bytes / 16; chunk += lanes)
    ptx::st_global_v4_b32(row_gmem + chunk * 16, 0, 0, 0, 0);
}

// Writes, or adds, 2 neighbouring columns of a row of a gradient, in one store.
template <DType DTYPE>
__device__ __forceinline__ void store_gradient_pair(const GradientParams& gradient, int64_t start,
                                                    float2 x) {
  if (gradient.dtype == DType::F32) {
    float2* target_gmem = reinterpret_cast<float2*>(static_cast<float*>(gradient.gmem) + start);
    if (gradient.accumulate) x.x += target_gmem->x, x.y += target_gmem->y;
    *target_gmem = x;
    return;
  }
  uint32_t* target_gmem =
      reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(gradient.gmem) + start);
  if (gradient.accumulate) {
    const uint32_t words[4] = {*target_gmem, 0, 0, 0};
    x.x += element_of_chunk<DTYPE>(words, 0);
    x.y += element_of_chunk<DTYPE>(words, 1);
  }
  *target_gmem = ptx::cvt_rn_x2_f32<DTYPE>(x.x, x.y);
}

// Writes, or adds, 8 neighbouring columns of a row of a gradient.
template <DType DTYPE>
__device__ __forceinline__ void store_gradient_chunk(const GradientParams& gradient, int64_t start,
                                                     float (&x)[8]) {
  if (gradient.dtype == DType::F32) {
    float* gmem = static_cast<float*>(gradient.gmem) + start;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float4* chunk_gmem = reinterpret_cast<float4*>(gmem) + half;
      float4 y = {x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]};
      if (gradient.accumulate) {
        const float4 old = *chunk_gmem;
        y.x += old.x, y.y += old.y, y.z += old.z, y.w += old.w;
      }
      *chunk_gmem = y;
    }
    return;
  }
  uint16_t* gmem = static_cast<uint16_t*>(gradient.gmem) + start;
  if (gradient.accumulate) {
    const uint4 old = *reinterpret_cast<const uint4*>(gmem);
    const uint32_t words[4] = {old.x, old.y, old.z, old.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += element_of_chunk<DTYPE>(words, i);
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = ptx::cvt_rn_x2_f32<DTYPE>(x[2 * i], x[2 * i + 1]);
  ptx::st_global_v4_b32(gmem, words[0], words[1], words[2], words[3]);
}

// The RowTerms of all query rows, a few lanes for each. A row of a packed tensor that belongs to no
// sequence has no gradient: its delta is 0, and its row of dQ is cleared here.
template <DType DTYPE>
__device__ __forceinline__ void backward_rows(const BackwardParams& params) {
  constexpr int LANES = BACKWARD_ROWS_LANES, ROWS = BACKWARD_ROWS_THREADS / LANES;
  const AttentionParams& attention = params.attention;
  const int lane = threadIdx.x % LANES;
  const int64_t batches = attention.cu_seqlens_q_gmem == nullptr ? attention.batch : 1;
  const int64_t rows = batches * attention.heads_q * attention.nq;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * ROWS + threadIdx.x / LANES;
  const bool exists = index < rows;  // lanes without a row take part in the exchange all the same
  const int batch_head = exists ? static_cast<int>(index / attention.nq) : 0;
  const int row =
      exists ? static_cast<int>(index - batch_head * static_cast<int64_t>(attention.nq)) : 0;
  const int batch = batch_head / attention.heads_q, head = batch_head % attention.heads_q;

  bool owned = exists;
  if (attention.cu_seqlens_q_gmem != nullptr) {
    owned = owned && row >= sequence_start(attention.cu_seqlens_q_gmem, 0, attention.nq) &&
            row < sequence_start(attention.cu_seqlens_q_gmem, attention.batch, attention.nq);
  }
  float sum = 0.0f;
  if (owned) {
    constexpr int BYTES = ELEMENT_BYTES<DTYPE>;
    const char* out_gmem =
        static_cast<const char*>(attention.out_gmem) +
        (batch * attention.out_batch + head * attention.out_head + row * attention.out_row) * BYTES;
    const char* dout_gmem =
        static_cast<const char*>(params.dout_gmem) +
        (batch * params.dout_batch + head * params.dout_head + row * params.dout_row) * BYTES;
#pragma unroll 2
    for (int chunk = lane; chunk < attention.dv * BYTES / 16; chunk += LANES) {
      const uint4 o = reinterpret_cast<const uint4*>(out_gmem)[chunk];
      const uint4 d = reinterpret_cast<const uint4*>(dout_gmem)[chunk];
      const uint32_t o_words[4] = {o.x, o.y, o.z, o.w}, d_words[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
      for (int i = 0; i < 16 / BYTES; ++i)
        sum = fmaf(element_of_chunk<DTYPE>(o_words, i), element_of_chunk<DTYPE>(d_words, i), sum);
    }
  }
#pragma unroll
  for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  if (!exists) return;
  if (!owned) {
    clear_gradient_row(params.dq, batch, head, row, attention.d, lane, LANES);
  } else if (params.dlse_gmem != nullptr) {
    sum -= params.dlse_gmem[index];
  }
  if (lane == 0) {
    const float lse = attention.lse_gmem[index];
    static_cast<RowTerms*>(params.terms_gmem)[index] = {
        lse == MINUS_INFINITY ? -MINUS_INFINITY : lse * LOG2_E, sum};
  }
}

// The gradient of one head's sink: one CTA for each head, which adds up in an order that never
// changes.
__device__ __forceinline__ void backward_sinks(const BackwardParams& params) {
  __shared__ float of_warp[BACKWARD_SINKS_THREADS / 32];
  const AttentionParams& attention = params.attention;
  const int head = blockIdx.x;
  const float sink = load_sink(attention, head);
  const int batches = attention.cu_seqlens_q_gmem == nullptr ? attention.batch : 1;
  float sum = 0.0f;
  for (int batch = 0; batch < batches; ++batch) {
    const RowTerms* terms_gmem =
        static_cast<const RowTerms*>(params.terms_gmem) +
        (static_cast<int64_t>(batch) * attention.heads_q + head) * attention.nq;
    for (int row = threadIdx.x; row < attention.nq; row += BACKWARD_SINKS_THREADS) {
      const RowTerms terms = terms_gmem[row];
      // An infinite sink takes the whole weight. Without the comparison, inf - inf would be NaN.
      const float weight =
          sink == -MINUS_INFINITY ? 1.0f : ptx::ex2_approx_ftz(fmaf(sink, LOG2_E, -terms.lse_log2));
      sum = fmaf(-weight, terms.delta, sum);
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
  __syncthreads();  // every warp has written its sum, before thread 0 reads them
  if (threadIdx.x != 0) return;
  float total = 0.0f;
  for (int warp = 0; warp < BACKWARD_SINKS_THREADS / 32; ++warp) total += of_warp[warp];
  params.dsinks_gmem[head] = total;
}

}  // namespace archflash::math

// Define entry points, which plan_backward.cpp of a folder launches by NAME.
#define ARCHFLASH_BACKWARD_ROWS_KERNEL(NAME, DTYPE)                              \
  extern "C" __global__ void __launch_bounds__(archflash::BACKWARD_ROWS_THREADS) \
      NAME(const __grid_constant__ archflash::BackwardParams params) {           \
    archflash::math::backward_rows<DTYPE>(params);                               \
  }
#define ARCHFLASH_BACKWARD_SINKS_KERNEL(NAME)                                     \
  extern "C" __global__ void __launch_bounds__(archflash::BACKWARD_SINKS_THREADS) \
      NAME(const __grid_constant__ archflash::BackwardParams params) {            \
    archflash::math::backward_sinks(params);                                      \
  }
