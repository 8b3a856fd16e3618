// What the backward pass computes once for each query row before its main kernels, and what it
// sums up over all rows for the sinks.
//
// With P = exp(score - LSE) and dP = dO V^T, the gradient of a score is dS = P * (dP - delta),
// where delta = sum(dO * O) - dLSE belongs to the row. A sink is one more score whose V is 0: its
// gradient is the sum over the rows of -exp(sink - LSE) * delta.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/attention_work.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/f32_of_half.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::device {

struct RowTerms {
  float lse_log2;  // the LSE times log2(e); infinite for a row that sees no key, so that P is 0
  float delta;
};

template <DType DTYPE>
constexpr int ELEMENT_BYTES = DTYPE == DType::F32 ? 4 : 2;

// Element i of a 16-byte chunk of a row.
template <DType DTYPE>
__device__ __forceinline__ float element_of_chunk(const uint32_t (&words)[4], int i) {
  if constexpr (DTYPE == DType::F32) {
    return __uint_as_float(words[i]);
  } else {
    return ptx::f32_of_half<DTYPE>(words[i / 2], i % 2);
  }
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

// Clears memory by all threads of the grid, 16 bytes at a time.
__device__ __forceinline__ void clear_by_grid(void* gmem, int64_t bytes) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t byte = thread * 16; byte < bytes; byte += int64_t{gridDim.x} * blockDim.x * 16)
    ptx::st_global_v4_b32(static_cast<unsigned char*>(gmem) + byte, 0, 0, 0, 0);
}

// What a lane reads of its rows at a time: chunks of 16 bytes of the output and of its gradient.
template <int ROWS>
struct RowChunks {
  static constexpr int CHUNKS = 2;  // of a row
  uint4 out[ROWS][CHUNKS], dout[ROWS][CHUNKS];
};

// The RowTerms of BACKWARD_ROWS query rows of a head, a few lanes for each. A row of a packed
// tensor that belongs to no sequence has no gradient: its delta is 0, and its row of dQ is cleared
// here. Every lane asks for all that it reads before it needs any of it; meanwhile() is called in
// between.
template <DType DTYPE, class Meanwhile>
__device__ __forceinline__ void backward_rows(const BackwardParams& params,
                                              const Meanwhile& meanwhile) {
  constexpr int BYTES = ELEMENT_BYTES<DTYPE>;
  constexpr int LANES = BACKWARD_ROWS_LANES, GROUPS = BACKWARD_ROWS_THREADS / LANES;
  constexpr int ROWS = BACKWARD_ROWS / GROUPS;  // of a group of lanes
  constexpr int CHUNKS = RowChunks<ROWS>::CHUNKS;
  const AttentionParams& attention = params.attention;
  const int* cu_q = attention.cu_seqlens_q_gmem;
  const int lane = threadIdx.x % LANES;
  // Unsigned: a division takes fewer instructions.
  const auto nq = static_cast<uint32_t>(attention.nq);
  const uint32_t tiles = (nq + BACKWARD_ROWS - 1) / BACKWARD_ROWS;
  const uint32_t batch_head = blockIdx.x / tiles;
  const uint32_t batch = batch_head / static_cast<uint32_t>(attention.heads_q);
  const uint32_t head = batch_head - batch * attention.heads_q;
  const uint32_t first_row =
      (blockIdx.x - batch_head * tiles) * BACKWARD_ROWS + threadIdx.x / LANES;
  const int64_t first_index = static_cast<int64_t>(batch_head) * attention.nq + first_row;
  // Rows that belong to a sequence.
  const int begin = sequence_start(cu_q, 0, attention.nq);
  const int end =
      cu_q == nullptr ? attention.nq : sequence_start(cu_q, attention.batch, attention.nq);

  const int64_t out_start =
      batch * attention.out_batch + head * attention.out_head + first_row * attention.out_row;
  const int64_t dout_start =
      batch * params.dout_batch + head * params.dout_head + first_row * params.dout_row;
  const char* out_gmem = static_cast<const char*>(attention.out_gmem) + out_start * BYTES;
  const char* dout_gmem = static_cast<const char*>(params.dout_gmem) + dout_start * BYTES;
  const auto row_of = [&](int r) { return static_cast<int>(first_row) + r * GROUPS; };
  const auto is_owned = [&](int r) { return row_of(r) >= begin && row_of(r) < end; };
  const int chunks = attention.dv * BYTES / 16;
  const auto load = [&](int first_chunk) {
    RowChunks<ROWS> loaded;
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
      for (int c = 0; c < CHUNKS; ++c) {
        const int chunk = first_chunk + c * LANES + lane;
        const bool exists = is_owned(r) && chunk < chunks;
        const auto at = [&](const char* first_gmem, int64_t row_stride) {
          const char* row_gmem = first_gmem + r * GROUPS * BYTES * row_stride;
          return exists ? reinterpret_cast<const uint4*>(row_gmem)[chunk] : uint4{};
        };
        loaded.out[r][c] = at(out_gmem, attention.out_row);
        loaded.dout[r][c] = at(dout_gmem, params.dout_row);
      }
    }
    return loaded;
  };

  RowChunks<ROWS> loaded = load(0);
  float lse[ROWS], sums[ROWS] = {}, dlse[ROWS] = {};
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    const bool exists = row_of(r) < attention.nq;
    lse[r] = exists ? attention.lse_gmem[first_index + r * GROUPS] : 0.0f;
    if (params.dlse_gmem != nullptr && is_owned(r))
      dlse[r] = params.dlse_gmem[first_index + r * GROUPS];
  }
  meanwhile();
  for (int first_chunk = 0;;) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      if (first_chunk + c * LANES >= chunks) break;
#pragma unroll
      for (int r = 0; r < ROWS; ++r) {
        const uint4 o = loaded.out[r][c], d = loaded.dout[r][c];
        const uint32_t o_words[4] = {o.x, o.y, o.z, o.w}, d_words[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int i = 0; i < 16 / BYTES; ++i) {
          sums[r] = fmaf(element_of_chunk<DTYPE>(o_words, i), element_of_chunk<DTYPE>(d_words, i),
                         sums[r]);
        }
      }
    }
    first_chunk += CHUNKS * LANES;
    if (first_chunk >= chunks) break;
    loaded = load(first_chunk);
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2)
      sums[r] += __shfl_xor_sync(0xFFFFFFFFu, sums[r], lanes);
    if (row_of(r) >= attention.nq) continue;
    if (!is_owned(r))
      clear_gradient_row(params.dq, batch, head, row_of(r), attention.d, lane, LANES);
    if (lane != 0) continue;
    static_cast<RowTerms*>(params.terms_gmem)[first_index + r * GROUPS] = {
        lse[r] == MINUS_INFINITY ? -MINUS_INFINITY : lse[r] * LOG2_E, sums[r] - dlse[r]};
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

}  // namespace archflash::device
