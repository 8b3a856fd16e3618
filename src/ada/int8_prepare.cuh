// Converts 16-bit Q and K to int8, with a scale for each block of SCALE_ROWS rows. The mean over
// the keys is subtracted from K first: what all keys have in common only shifts a row's scores, and
// without it more of the 8 bits describe how keys differ. The result is right for any vector in
// place of the mean, so the mean of at most INT8_MEAN_KEYS keys will do. Two kernels run:
//   mean:    one CTA for each head of K
//   values:  one CTA for each block of each head, first those of K, then those of Q. It reads the
//            block, subtracts the mean, finds the largest magnitude, and writes values and scale.
//            For Q it also writes what the mean adds to each row's scores
// Keys that no query of the batch sees, such as the unused rest of a cache, are not read and count
// as zeros. Numbers that are not finite count as zeros in means and scales. There are no atomics,
// so the same inputs give the same bits.
#pragma once

#include <cstdint>

#include "ada/params.h"
#include "common/device/attention_work.cuh"
#include "common/device/largest_of_cta.cuh"
#include "common/dtype.h"
#include "common/ptx/f32_of_half.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::ada {

constexpr int INT8_CHUNK = 8;  // neighbouring elements that a thread reads at once (16 bytes)
constexpr int INT8_MOST_COLUMNS = 256;
constexpr float LARGEST_FLOAT = 3.402823466e38f;
constexpr float LARGEST_INT8 = 127.0f;

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= LARGEST_FLOAT; }

// Element j of a chunk of eight.
template <DType DTYPE>
__device__ __forceinline__ float element(const uint4& chunk, int j) {
  const uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
  return ptx::f32_of_half<DTYPE>(words[j / 2], j % 2);
}

// The number of keys of a batch up to the last one that some query sees.
__device__ __forceinline__ int count_seen_keys(const Int8Params& params, int batch) {
  const device::Work work{
      .batch_head = batch * params.heads_q, .first_row = 0, .nq = params.nq, .nk = params.nk};
  return max(0, device::find_visible_keys(params.attention, work).last(params.nq - 1) + 1);
}

// The chunks of a block that one thread takes: one chunk of columns in every row_step-th row.
struct ChunkRows {
  int column;           // first column of the chunk
  int first, row_step;  // first row and step; a surplus thread has a `first` beyond every row

  __device__ __forceinline__ explicit ChunkRows(int columns) {
    const int per_row = columns / INT8_CHUNK;
    const int thread = threadIdx.x;
    row_step = INT8_THREADS / per_row;
    column = thread % per_row * INT8_CHUNK;
    first = thread / per_row < row_step ? thread / per_row : INT32_MAX;
  }
};

template <DType DTYPE>
__device__ __forceinline__ void find_mean(const Int8Params& params) {
  constexpr int READS = 8;  // loads that a thread has in flight
  const int batch = blockIdx.x / params.heads_kv, head = blockIdx.x % params.heads_kv;
  const int seen = count_seen_keys(params, batch);
  // The mean is that of every mean_step-th key. The step is odd, so that it does not pick only one
  // of two kinds of alternating keys.
  const int mean_step = ((seen + INT8_MEAN_KEYS - 1) / INT8_MEAN_KEYS) | 1;
  const int keys = (seen + mean_step - 1) / mean_step;
  const int64_t key_stride = mean_step * params.k_row;
  const ChunkRows rows(params.d);
  const uint16_t* k_gmem = static_cast<const uint16_t*>(params.k_gmem) + batch * params.k_batch +
                           head * params.k_head + rows.column;
  float sum[INT8_CHUNK] = {};
  for (int first = rows.first; first < keys; first += READS * rows.row_step) {
    uint4 data[READS];
#pragma unroll
    for (int i = 0; i < READS; ++i) {
      const int key = first + i * rows.row_step;
      data[i] = make_uint4(0, 0, 0, 0);
      if (key < keys) data[i] = *reinterpret_cast<const uint4*>(k_gmem + key * key_stride);
    }
#pragma unroll
    for (int i = 0; i < READS; ++i) {
#pragma unroll
      for (int j = 0; j < INT8_CHUNK; ++j) {
        const float x = element<DTYPE>(data[i], j);
        sum[j] += is_finite(x) ? x : 0.0f;
      }
    }
  }
  __shared__ float sums[INT8_THREADS * INT8_CHUNK];  // (row_step, d)
  if (rows.first < rows.row_step) {
#pragma unroll
    for (int j = 0; j < INT8_CHUNK; ++j) sums[rows.first * params.d + rows.column + j] = sum[j];
  }
  __syncthreads();  // all threads have written their sums, before they are added up
  const int column = threadIdx.x;
  if (column >= params.d) return;
  float total = 0.0f;
  for (int row = 0; row < rows.row_step; ++row) total += sums[row * params.d + column];
  const float mean = total / keys;  // NaN without keys
  params.k_mean_gmem[static_cast<int64_t>(blockIdx.x) * params.d + column] =
      is_finite(mean) ? mean : 0.0f;
}

// The block of SCALE_ROWS rows of Q or K that a CTA of the second kernel converts.
struct Int8Block {
  bool is_k;
  int batch, head, heads;
  int rows;           // rows of the head
  int block, blocks;  // number of this block in its head, and how many the head has

  __device__ __forceinline__ explicit Int8Block(const Int8Params& params) {
    is_k = blockIdx.x < params.k_ctas;
    const int index = is_k ? blockIdx.x : blockIdx.x - params.k_ctas;
    blocks = is_k ? params.k_blocks : params.q_blocks;
    heads = is_k ? params.heads_kv : params.heads_q;
    rows = is_k ? params.nk : params.nq;
    block = index % blocks;
    batch = index / blocks / heads;
    head = index / blocks % heads;
  }
};

// CHUNKS is the most chunks that a thread takes.
template <DType DTYPE, int CHUNKS>
__device__ __forceinline__ void make_int8(const Int8Params& params) {
  __shared__ float mean[INT8_MOST_COLUMNS];
  __shared__ float dots[SCALE_ROWS][INT8_MOST_COLUMNS / INT8_CHUNK + 1];  // by row and chunk
  __shared__ uint32_t odd[SCALE_ROWS];  // rows with a number that is not finite
  const Int8Block at(params);
  const int thread = threadIdx.x;
  const ChunkRows chunks(params.d);
  const int first_row = at.block * SCALE_ROWS;
  const int rows = min(SCALE_ROWS, at.rows - first_row);
  // Rows that are read; the rest are written as zeros.
  const int seen = at.is_k ? min(rows, count_seen_keys(params, at.batch) - first_row) : rows;
  const uint16_t* x_gmem = static_cast<const uint16_t*>(at.is_k ? params.k_gmem : params.q_gmem) +
                           at.batch * (at.is_k ? params.k_batch : params.q_batch) +
                           at.head * (at.is_k ? params.k_head : params.q_head) + chunks.column;
  const int64_t row_stride = at.is_k ? params.k_row : params.q_row;
  uint4 data[CHUNKS];
  int row = chunks.first;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i, row += row < rows ? chunks.row_step : 0) {
    data[i] = make_uint4(0, 0, 0, 0);
    if (row < seen)
      data[i] = *reinterpret_cast<const uint4*>(x_gmem + (first_row + row) * row_stride);
  }

  if (thread < params.d) {
    const int kv_head = at.is_k ? at.head : at.head / (params.heads_q / params.heads_kv);
    const int64_t index = static_cast<int64_t>(at.batch) * params.heads_kv + kv_head;
    mean[thread] = params.nk == 0 ? 0.0f : params.k_mean_gmem[index * params.d + thread];
  }
  if (thread < SCALE_ROWS) odd[thread] = 0;
  // The mean is complete and `odd` is cleared, before any thread reads the one or sets the other.
  __syncthreads();

  // Element j of chunk i, minus the mean if it is of K. Numbers that are not finite give 0.
  const auto value = [&](int i, int j) {
    const float x = element<DTYPE>(data[i], j);
    const float less = at.is_k ? x - mean[chunks.column + j] : x;
    return is_finite(x) ? fminf(fmaxf(less, -LARGEST_FLOAT), LARGEST_FLOAT) : 0.0f;
  };
  float largest = 0.0f;
  row = chunks.first;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i, row += row < rows ? chunks.row_step : 0) {
    if (row >= seen) continue;
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < INT8_CHUNK; ++j) {
      const float x = value(i, j);
      largest = fmaxf(largest, fabsf(x));
      dot = fmaf(x, mean[chunks.column + j], dot);
      if (!is_finite(element<DTYPE>(data[i], j))) odd[row] = 1;
    }
    if (!at.is_k) dots[row][chunks.column / INT8_CHUNK] = dot;
  }
  // The barrier inside largest_of_cta also completes `odd` and `dots`, which are read below.
  largest = device::largest_of_cta<INT8_THREADS>(largest);
  constexpr float SMALLEST_NORMAL = 1.17549435e-38f;  // its reciprocal is finite
  const float scale = largest == 0.0f ? 1.0f : fmaxf(largest / LARGEST_INT8, SMALLEST_NORMAL);
  const float factor = 1.0f / scale;

  const int64_t head_index = static_cast<int64_t>(at.batch) * at.heads + at.head;
  int8_t* values_gmem = (at.is_k ? params.k_values_gmem : params.q_values_gmem) +
                        (head_index * at.rows + first_row) * params.columns + chunks.column;
  row = chunks.first;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i, row += row < rows ? chunks.row_step : 0) {
    if (row >= rows) continue;
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < INT8_CHUNK; ++j) {
      const float x = row < seen ? value(i, j) * factor : 0.0f;
      const uint32_t byte = static_cast<uint32_t>(__float2int_rn(x)) & 0xFFu;
      words[j / 4] |= byte << (j % 4 * 8);
    }
    ptx::st_global_v2_b32(values_gmem + row * params.columns, words[0], words[1]);
    // Stored rows are multiples of 16 bytes: the thread of the last chunk writes the padding.
    if (chunks.column + INT8_CHUNK == params.d && params.columns != params.d)
      ptx::st_global_v2_b32(values_gmem + row * params.columns + INT8_CHUNK, 0, 0);
  }

  if (at.is_k) {
    const bool here = thread < SCALE_ROWS && odd[thread] != 0;
    const uint32_t keys = __ballot_sync(0xFFFFFFFFu, here);
    const int any = __syncthreads_or(here);
    KeyScale& written = params.k_scales_gmem[head_index * at.blocks + at.block];
    if (thread < SCALE_ROWS && thread % 32 == 0) written.nonfinite[thread / 32] = keys;
    if (thread == 0) {
      written.scale = scale;
      written.any_nonfinite = any;
    }
  } else {
    if (thread == 0) params.q_scales_gmem[head_index * at.blocks + at.block] = scale;
    if (thread < rows) {
      float dot = 0.0f;
      for (int chunk = 0; chunk < params.d / INT8_CHUNK; ++chunk) dot += dots[thread][chunk];
      params.shifts_gmem[head_index * at.rows + first_row + thread] =
          odd[thread] ? __uint_as_float(0x7FFFFFFFu) : dot * params.scale;
    }
  }
}

}  // namespace archflash::ada
