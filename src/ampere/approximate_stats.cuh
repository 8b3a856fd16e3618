// The first of the two kernels that convert inputs for approximate= (approximate_inputs.cuh): the
// magnitudes of V, and the means and scales of columns.
#pragma once

#include <cstdint>

#include "ampere/approximate_chunks.cuh"
#include "ampere/approximate_params.h"
#include "common/device/largest_of_cta.cuh"

namespace archflash::ampere {

// Finds the columns of V that a CTA's group has, for int8: the mean of what keys have there, and
// the scale by which what they differ from it fills 8 bits. Two neighbouring threads read a row.
__device__ __forceinline__ void find_v_columns(const ConvertParams& params, const SeenKeys& seen,
                                               int batch, int head, int group) {
  const ApproximateInputs& inputs = params.inputs;
  constexpr int CHUNKS = V_GROUP / CHUNK, ROWS_PER_STEP = CONVERT_THREADS / CHUNKS;
  const int thread = threadIdx.x, column = group * V_GROUP + thread % CHUNKS * CHUNK;
  const uint16_t* v_gmem = static_cast<const uint16_t*>(inputs.v_gmem) + batch * inputs.v_batch +
                           head * inputs.v_head + column;
  float sum[CHUNK] = {}, largest[CHUNK], smallest[CHUNK];
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) largest[j] = -LARGEST_V, smallest[j] = LARGEST_V;
  for_chunks<8>(
      column < inputs.dv ? seen.begin + thread / CHUNKS : seen.end, seen.end, ROWS_PER_STEP,
      inputs.dtype, [&](int64_t row) { return v_gmem + row * inputs.v_row; },
      [&](const float (&given)[CHUNK], int64_t) {
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
          const float x = is_finite(given[j]) ? fminf(fmaxf(given[j], -LARGEST_V), LARGEST_V) : 0;
          sum[j] += x;
          largest[j] = fmaxf(largest[j], x);
          smallest[j] = fminf(smallest[j], x);
        }
      });
  constexpr int WARPS = CONVERT_THREADS / 32;
  __shared__ float parts[WARPS][3][V_GROUP];
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) {
#pragma unroll
    for (int distance = CHUNKS; distance < 32; distance *= 2) {
      sum[j] += __shfl_xor_sync(0xFFFFFFFFu, sum[j], distance);
      largest[j] = fmaxf(largest[j], __shfl_xor_sync(0xFFFFFFFFu, largest[j], distance));
      smallest[j] = fminf(smallest[j], __shfl_xor_sync(0xFFFFFFFFu, smallest[j], distance));
    }
    if (thread % 32 < CHUNKS) {
      const int place = thread % CHUNKS * CHUNK + j;
      parts[thread / 32][0][place] = sum[j];
      parts[thread / 32][1][place] = largest[j];
      parts[thread / 32][2][place] = smallest[j];
    }
  }
  __syncthreads();  // every warp has written its parts, before the first one reads them
  if (thread >= V_GROUP) return;
  float total = 0.0f, most = -LARGEST_V, least = LARGEST_V;
  for (int warp = 0; warp < WARPS; ++warp) {
    total += parts[warp][0][thread];
    most = fmaxf(most, parts[warp][1][thread]);
    least = fminf(least, parts[warp][2][thread]);
  }
  VColumn found = {1.0f, 0.0f, 0.0f, 0.0f};
  if (least <= most) {
    constexpr float SMALLEST_SCALE = 0x1p-110f;  // its reciprocal is finite
    found.centre = total / (seen.end - seen.begin);
    found.scale = fmaxf(fmaxf(most - found.centre, found.centre - least) / 127.0f, SMALLEST_SCALE);
    found.largest = fmaxf(most, -least);
  }
  inputs.v_columns_gmem[static_cast<int64_t>(batch * inputs.heads_kv + head) * inputs.v_columns +
                        group * V_GROUP + thread] = found;
}

__device__ __forceinline__ void find_stats(const ConvertParams& params) {
  const ApproximateInputs& inputs = params.inputs;
  const int head_of_all = blockIdx.x / inputs.chunks, chunk = blockIdx.x % inputs.chunks;
  const int batch = head_of_all / inputs.heads_kv, head = head_of_all % inputs.heads_kv;
  const SeenKeys seen(params, batch);
  const int thread = threadIdx.x;
  if (inputs.v_columns > 0) {
    find_v_columns(params, seen, batch, head, chunk);
  } else {
    const int per_row = inputs.dv / CHUNK, rows_per_step = CONVERT_THREADS / per_row;
    const uint16_t* v_gmem = static_cast<const uint16_t*>(inputs.v_gmem) + batch * inputs.v_batch +
                             head * inputs.v_head + thread % per_row * CHUNK;
    const int first = max(chunk * STATS_ROWS, seen.begin);
    const int end = min(chunk * STATS_ROWS + STATS_ROWS, seen.end);
    float largest = 0.0f;
    if (thread / per_row < rows_per_step) {
      for_chunks<8>(
          first + thread / per_row, end, rows_per_step, inputs.dtype,
          [&](int64_t row) { return v_gmem + row * inputs.v_row; },
          [&](const float (&x)[CHUNK], int64_t) {
#pragma unroll
            for (int j = 0; j < CHUNK; ++j)
              largest = fmaxf(largest, is_finite(x[j]) ? fabsf(x[j]) : 0.0f);
          });
    }
    largest = device::largest_of_cta<CONVERT_THREADS>(largest);
    if (thread == 0) inputs.v_largest_gmem[blockIdx.x] = largest;
  }
  if (inputs.columns == 0 || chunk > 0) return;

  // The mean, and the range of each column, of every step-th key. The step is odd, so that it does
  // not pick only one of two kinds of alternating keys.
  const int step = ((seen.end + SAMPLED_ROWS - 1) / SAMPLED_ROWS) | 1;
  const int keys = (seen.end + step - 1) / step;
  const int per_row = inputs.d / CHUNK, rows_per_step = CONVERT_THREADS / per_row;
  const int column = thread % per_row * CHUNK, first = thread / per_row;
  const uint16_t* k_gmem = static_cast<const uint16_t*>(inputs.k_gmem) + batch * inputs.k_batch +
                           head * inputs.k_head + column;
  float sum[CHUNK] = {}, largest[CHUNK], smallest[CHUNK];
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) largest[j] = -LARGEST_FLOAT, smallest[j] = LARGEST_FLOAT;
  for_chunks<8>(
      first < rows_per_step ? first : keys, keys, rows_per_step, inputs.dtype,
      [&](int64_t key) { return k_gmem + key * (step * inputs.k_row); },
      [&](const float (&x)[CHUNK], int64_t) {
#pragma unroll
        for (int j = 0; j < CHUNK; ++j) {
          if (!is_finite(x[j])) continue;
          sum[j] += x[j];
          largest[j] = fmaxf(largest[j], x[j]);
          smallest[j] = fminf(smallest[j], x[j]);
        }
      });
  // The largest magnitude of each column in every step-th row of the heads of Q that share this
  // head of K.
  const int group = inputs.heads_q / inputs.heads_kv;
  const int64_t q_rows = static_cast<int64_t>(group) * inputs.nq;
  const int64_t q_step = ((q_rows + SAMPLED_ROWS - 1) / SAMPLED_ROWS) | 1;
  const uint16_t* q_gmem = static_cast<const uint16_t*>(inputs.q_gmem) + batch * inputs.q_batch +
                           head * group * inputs.q_head + column;
  float largest_q[CHUNK] = {};
  for_chunks<8>(
      first < rows_per_step ? first * q_step : q_rows, q_rows, rows_per_step * q_step, inputs.dtype,
      [&](int64_t row) {
        return q_gmem + row % group * inputs.q_head + row / group * inputs.q_row;
      },
      [&](const float (&x)[CHUNK], int64_t) {
#pragma unroll
        for (int j = 0; j < CHUNK; ++j)
          largest_q[j] = fmaxf(largest_q[j], is_finite(x[j]) ? fabsf(x[j]) : 0.0f);
      });
  // Combines what all threads found of the column whose number is the thread's.
  __shared__ float parts[CONVERT_THREADS * CHUNK];  // (rows_per_step, d)
  const auto of_column = [&](const float (&own)[CHUNK], const auto& add) {
    __syncthreads();  // all threads have read what was here before
#pragma unroll
    for (int j = 0; first < rows_per_step && j < CHUNK; ++j)
      parts[first * inputs.d + column + j] = own[j];
    __syncthreads();  // all threads have written their parts, before they are read
    float result = thread < inputs.d ? parts[thread] : 0.0f;
    for (int row = 1; thread < inputs.d && row < rows_per_step; ++row)
      result = add(result, parts[row * inputs.d + thread]);
    return result;
  };
  const auto larger = [](float x, float y) { return fmaxf(x, y); };
  const float mean = of_column(sum, [](float x, float y) { return x + y; }) / keys;
  const float range = of_column(largest, larger) -
                      of_column(smallest, [](float x, float y) { return fminf(x, y); });
  const float of_q = of_column(largest_q, larger);
  if (thread >= inputs.columns) return;
  // A column whose numbers are large in K and small in Q, or the other way round, is scaled by a
  // power of two so that they are as large in both: no product changes.
  int halves = 0;
  if (range > 0.0f && range <= LARGEST_FLOAT && of_q > 0.0f)
    halves = (exponent_of(range, -100, 100) - exponent_of(of_q, -100, 100)) >> 1;
  inputs.k_columns_gmem[head_of_all * inputs.columns + thread] = {
      is_finite(mean) ? mean : 0.0f,  // NaN without keys
      power_of_two(-min(max(halves, -30), 30))};
}

}  // namespace archflash::ampere
