// Makes what the kernels for approximate= multiply: V in fp16, scaled by a power of two for each
// head so that no sum of a few keys overflows, or in int8, with a mean and a scale for each column;
// and Q and K in int8, with a scale for each row.
//
// Before they are rounded, the mean over the keys is subtracted from K: what all keys have in
// common only shifts the scores of a row. A column of large numbers in K that is small in Q, or the
// other way round, is scaled to be alike in both. Then the rows of Q and K are rotated alike: the
// sign of some columns changes, and a Hadamard transform mixes all of them. That changes no
// product, and spreads a column of large numbers over all columns, each of which 8 bits then
// describe well. The result is right for any mean and scale, so those of at most SAMPLED_ROWS rows
// will do.
//
// Two kernels run:
//   find_stats: (approximate_stats.cuh) a CTA for each STATS_ROWS rows of V of a head finds their
//               largest magnitude, or for int8 the mean and scale of V_GROUP columns of the head;
//               and the first CTA of a head the mean and scale of each column of K
//   convert:    a CTA for each CONVERT_ROWS rows of each head of K, V and Q
// Keys that no query of the batch sees, such as the unused rest of a cache, are not read. There are
// no atomics, so the same inputs give the same bits.
#pragma once

#include <cstdint>

#include "ampere/approximate_chunks.cuh"
#include "ampere/approximate_params.h"
#include "common/device/largest_of_cta.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/lg2.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::ampere {

// The rows that a CTA of convert() converts.
struct ConvertBlock {
  enum Kind { K, V, Q } kind;
  int batch, head, heads;
  int rows;   // rows of the head
  int first;  // the block's first row

  __device__ __forceinline__ explicit ConvertBlock(const ApproximateInputs& inputs) {
    int index = blockIdx.x;
    kind = index < inputs.k_ctas ? K : index < inputs.k_ctas + inputs.v_ctas ? V : Q;
    if (kind == V) index -= inputs.k_ctas;
    if (kind == Q) index -= inputs.k_ctas + inputs.v_ctas;
    heads = kind == Q ? inputs.heads_q : inputs.heads_kv;
    rows = kind == Q ? inputs.nq : inputs.nk;
    const int blocks = (rows + CONVERT_ROWS - 1) / CONVERT_ROWS;
    first = index % blocks * CONVERT_ROWS;
    head = index / blocks % heads;
    batch = index / blocks / heads;
  }
};

// The scale of V in a head: a power of two by which the largest number is at most 1. Numbers beyond
// 2^100 count as 2^100. All threads call it.
__device__ __forceinline__ VScale find_v_scale(const ApproximateInputs& inputs, int head) {
  float largest = 0.0f;
  for (int chunk = threadIdx.x; chunk < inputs.chunks; chunk += CONVERT_THREADS)
    largest = fmaxf(largest, inputs.v_largest_gmem[head * inputs.chunks + chunk]);
  largest = device::largest_of_cta<CONVERT_THREADS>(largest);
  const float scale = power_of_two(exponent_of(largest, -100, 99) + 1);
  return {scale, fminf(largest / scale, 1.0f)};
}

__device__ __forceinline__ void convert_v(const ConvertParams& params, const ConvertBlock& at) {
  const ApproximateInputs& inputs = params.inputs;
  const int head_of_all = at.batch * inputs.heads_kv + at.head;
  const VScale found = find_v_scale(inputs, head_of_all);
  if (threadIdx.x == 0 && at.first == 0) inputs.v_scales_gmem[head_of_all] = found;
  const float factor = 1.0f / found.scale;  // exact
  const int per_row = inputs.dv / CHUNK, rows_per_step = CONVERT_THREADS / per_row;
  const int column = threadIdx.x % per_row * CHUNK, thread_row = threadIdx.x / per_row;
  if (thread_row >= rows_per_step) return;
  const SeenKeys seen(params, at.batch);
  const int end = min(at.first + CONVERT_ROWS, seen.end);
  const uint16_t* v_gmem = static_cast<const uint16_t*>(inputs.v_gmem) + at.batch * inputs.v_batch +
                           at.head * inputs.v_head + column;
  uint16_t* values_gmem =
      inputs.v_values_gmem + static_cast<int64_t>(head_of_all) * inputs.nk * inputs.dv + column;
  for_chunks<4>(
      at.first + thread_row, end, rows_per_step, inputs.dtype,
      [&](int64_t row) { return v_gmem + row * inputs.v_row; },
      [&](const float (&x)[CHUNK], int64_t row) {
        uint32_t words[CHUNK / 2];
#pragma unroll
        for (int j = 0; j < CHUNK; j += 2) {
          float pair[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float scaled = fminf(fmaxf(x[j + i] * factor, -1.0f), 1.0f);
            pair[i] = is_finite(x[j + i]) ? scaled : x[j + i];
          }
          words[j / 2] = ptx::cvt_rn_x2_f32<DType::F16>(pair[0], pair[1]);
        }
        ptx::st_global_v4_b32(values_gmem + row * inputs.dv, words[0], words[1], words[2],
                              words[3]);
      });
}

// V in int8. A thread converts a group of columns of a row: less the centre of each column, in
// units of its scale, and then of the largest that the row has left. Columns are interleaved, so
// that the product's even ones are the first half of the group (mma_sync::Fp8VFragments). A row
// with a number that is not finite is spoilt by its scale of K.
__device__ __forceinline__ void convert_v_to_int8(const ConvertParams& params,
                                                  const ConvertBlock& at) {
  const ApproximateInputs& inputs = params.inputs;
  const int64_t head = at.batch * inputs.heads_kv + at.head;
  const int per_row = inputs.v_columns / V_GROUP, rows_per_step = CONVERT_THREADS / per_row;
  const int column = threadIdx.x % per_row * V_GROUP, thread_row = threadIdx.x / per_row;
  const bool converts = thread_row < rows_per_step;
  float centre[V_GROUP], factor[V_GROUP];
#pragma unroll
  for (int j = 0; j < V_GROUP; ++j) {
    const VColumn found = inputs.v_columns_gmem[head * inputs.v_columns + column + j];
    centre[j] = found.centre;
    factor[j] = 1.0f / found.scale;
  }
  __shared__ float largest_of_group[CONVERT_THREADS];
  const int end = min(at.first + CONVERT_ROWS, SeenKeys(params, at.batch).end);
  const uint16_t* v_gmem = static_cast<const uint16_t*>(inputs.v_gmem) + at.batch * inputs.v_batch +
                           at.head * inputs.v_head + column;
  int8_t* bytes_gmem = inputs.v_bytes_gmem + head * inputs.nk * inputs.v_columns + column;
  for (int first = at.first; first < end; first += rows_per_step) {
    const int row = first + thread_row;
    float x[V_GROUP], largest = 0.0f;  // at most 127
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 data = make_uint4(0, 0, 0, 0);
      const bool valid = converts && row < end && column + half * CHUNK < inputs.dv;
      if (valid) data = *reinterpret_cast<const uint4*>(v_gmem + row * inputs.v_row + half * CHUNK);
      float given[CHUNK];
      unpack_chunk(given, data, inputs.dtype);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) {
        const int i = half * CHUNK + j;
        const float clamped = fminf(fmaxf(given[j], -LARGEST_V), LARGEST_V);
        x[i] = valid && is_finite(given[j]) ? (clamped - centre[i]) * factor[i] : 0.0f;
        largest = fmaxf(largest, fabsf(x[i]));
      }
    }
    __syncthreads();  // all threads have read what was here before
    largest_of_group[threadIdx.x] = largest;
    __syncthreads();  // all threads have written their parts, before they are read
    if (!converts || row >= end) continue;
    for (int i = 0; i < per_row; ++i)
      largest = fmaxf(largest, largest_of_group[thread_row * per_row + i]);
    constexpr float SMALLEST_SCALE = 0x1p-12f;  // P is not made smaller than this
    const float scale = fmaxf(largest * (1.0f / 127.0f), SMALLEST_SCALE), inverse = 1.0f / scale;
    uint32_t words[V_GROUP / 4] = {};
#pragma unroll
    for (int i = 0; i < V_GROUP; ++i) {
      const int j = i % CHUNK, integer = __float2int_rn(x[i] * inverse);
      const uint32_t byte = static_cast<uint32_t>(min(max(integer, -127), 127)) & 0xFFu;
      words[j / 2] |= byte << (j % 2 * 16 + i / CHUNK * 8);
    }
    if (column == 0) {
      float* key_gmem = inputs.k_scales_gmem + head * inputs.nk + row;
      key_gmem[inputs.keys] = ptx::lg2_approx_ftz(scale);
      key_gmem[2 * inputs.keys] = inverse;
    }
    ptx::st_global_v4_b32(bytes_gmem + static_cast<int64_t>(row) * inputs.v_columns, words[0],
                          words[1], words[2], words[3]);
  }
}

// Whether the rotation changes the sign of a column.
__device__ __forceinline__ bool changes_sign(int column) {
  return (static_cast<uint32_t>(column) * 0x9E3779B1u) >> 31 != 0;
}

// Rotates a row that `lanes` neighbouring lanes hold, a chunk each; `lane` is that of this one
// among them. Magnitudes grow at most by the number of columns.
__device__ __forceinline__ void rotate(float (&x)[CHUNK], int lane, int lanes) {
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) x[j] = changes_sign(lane * CHUNK + j) ? -x[j] : x[j];
#pragma unroll
  for (int distance = 1; distance < CHUNK; distance *= 2) {
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      if (j & distance) continue;
      const float a = x[j], b = x[j + distance];
      x[j] = a + b;
      x[j + distance] = a - b;
    }
  }
  for (int distance = 1; distance < lanes; distance *= 2) {
    const bool upper = lane & distance;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, x[j], distance);
      x[j] = upper ? other - x[j] : x[j] + other;
    }
  }
}

// The largest magnitude of the row that `lanes` neighbouring lanes hold.
__device__ __forceinline__ float largest_of_row(const float (&x)[CHUNK], int lanes) {
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) largest = fmaxf(largest, fabsf(x[j]));
  for (int distance = 1; distance < lanes; distance *= 2)
    largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, distance));
  return largest;
}

// Numbers that are not finite make the scale NaN, and so all scores of their row.
__device__ __forceinline__ void convert_qk(const ConvertParams& params, const ConvertBlock& at) {
  constexpr float NOT_A_NUMBER = __builtin_nanf("");
  constexpr float LARGEST_SHIFT = 1.329227996e36f;  // 2^120: scores stay finite
  const ApproximateInputs& inputs = params.inputs;
  const bool is_k = at.kind == ConvertBlock::K;
  const int lanes = inputs.columns / CHUNK;  // of a row
  const int lane = threadIdx.x % lanes, column = lane * CHUNK;
  const int kv_head = is_k ? at.head : at.head / (inputs.heads_q / inputs.heads_kv);
  const KColumn* columns_gmem =
      inputs.k_columns_gmem + (at.batch * inputs.heads_kv + kv_head) * inputs.columns + column;
  float mean[CHUNK], factor_of_column[CHUNK];
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) {
    const KColumn found = inputs.nk == 0 ? KColumn{0.0f, 1.0f} : columns_gmem[j];
    mean[j] = found.mean;
    factor_of_column[j] = is_k ? found.factor : 1.0f / found.factor;  // exact
  }
  const int64_t row_stride = is_k ? inputs.k_row : inputs.q_row;
  const uint16_t* x_gmem = static_cast<const uint16_t*>(is_k ? inputs.k_gmem : inputs.q_gmem) +
                           at.batch * (is_k ? inputs.k_batch : inputs.q_batch) +
                           at.head * (is_k ? inputs.k_head : inputs.q_head) + column;
  const int64_t first_of_head = static_cast<int64_t>(at.batch * at.heads + at.head) * at.rows;
  const int end = is_k ? SeenKeys(params, at.batch).end : at.rows;
  int8_t* values_gmem = (is_k ? inputs.k_values_gmem : inputs.q_values_gmem) + column;

  // All lanes take part in each step, for the shuffles. The chunk of the next step is loaded ahead.
  const int thread_row = at.first + threadIdx.x / lanes, rows_per_step = CONVERT_THREADS / lanes;
  const auto load = [&](int row) {
    const bool valid = row < end && column < inputs.d;
    return valid ? *reinterpret_cast<const uint4*>(x_gmem + row * row_stride)
                 : make_uint4(0, 0, 0, 0);
  };
  // Whether this lane's part of the key's row of V is finite, of which int8 has no sign.
  const auto finite_chunks = [&](int row) {
    const uint16_t* v_gmem = static_cast<const uint16_t*>(inputs.v_gmem) +
                             at.batch * inputs.v_batch + at.head * inputs.v_head +
                             row * inputs.v_row;
    bool finite = true;
    for (int start = column; start < inputs.dv; start += lanes * CHUNK) {
      float x[CHUNK];
      unpack_chunk(x, *reinterpret_cast<const uint4*>(v_gmem + start), inputs.dtype);
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) finite &= is_finite(x[j]);
    }
    return finite;
  };
  uint4 next = load(thread_row);
  for (int row = thread_row; row < thread_row + CONVERT_ROWS; row += rows_per_step) {
    const bool valid = row < end;
    float x[CHUNK];
    unpack_chunk(x, next, inputs.dtype);
    if (row + rows_per_step < thread_row + CONVERT_ROWS) next = load(row + rows_per_step);
    bool finite = true;
    if (is_k && inputs.v_columns > 0) finite = !valid || finite_chunks(row);
    float dot = 0.0f;
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      finite &= is_finite(x[j]);
      if (!is_finite(x[j])) x[j] = 0.0f;
      if (is_k) {
        if (column < inputs.d) x[j] -= mean[j];
      } else {
        dot = fmaf(x[j], mean[j], dot);
      }
      x[j] = fminf(fmaxf(x[j] * factor_of_column[j], -LARGEST_FLOAT), LARGEST_FLOAT);
    }
    for (int distance = 1; distance < lanes; distance *= 2) {
      dot += __shfl_xor_sync(0xFFFFFFFFu, dot, distance);
      finite &= __shfl_xor_sync(0xFFFFFFFFu, static_cast<int>(finite), distance) != 0;
    }
    // Numbers beyond 2^51 count as 2^51, so that no score overflows.
    const int exponent = exponent_of(largest_of_row(x, lanes), -100, 50);
    const float unit = power_of_two(exponent), factor_of_unit = power_of_two(-exponent);
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) x[j] = fminf(fmaxf(x[j] * factor_of_unit, -2.0f), 2.0f);
    rotate(x, lane, lanes);
    const float largest = largest_of_row(x, lanes);
    // Few bits, so that the kernel multiplies it by 1.5 * 2^23 exactly.
    const float rounding = __uint_as_float(__float_as_uint(largest / 127.0f) & ~0xFFu);
    const float integer = rounding == 0.0f ? 1.0f : rounding;
    const float factor = 1.0f / integer;
    if (!valid) continue;
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < CHUNK; ++j) {
      const uint32_t byte = static_cast<uint32_t>(__float2int_rn(x[j] * factor)) & 0xFFu;
      words[j / 4] |= byte << (j % 4 * 8);
    }
    const int64_t index = first_of_head + row;
    ptx::st_global_v2_b32(values_gmem + index * inputs.columns, words[0], words[1]);
    if (lane != 0) continue;
    // The product of two rotated rows is `columns` times that of the rows: 2^6, 2^7 or 2^8.
    const float norm = inputs.columns == 64 || (is_k && inputs.columns == 128) ? 0.125f : 0.0625f;
    const float scale = finite ? integer * unit * norm : NOT_A_NUMBER;
    if (is_k) {
      inputs.k_scales_gmem[index] = scale;
    } else {
      inputs.q_rows_gmem[index] = {scale, fminf(fmaxf(dot, -LARGEST_SHIFT), LARGEST_SHIFT)};
    }
  }
}

__device__ __forceinline__ void convert(const ConvertParams& params) {
  const ConvertBlock at(params.inputs);
  if (at.kind == ConvertBlock::V) {
    if (params.inputs.v_columns > 0) {
      convert_v_to_int8(params, at);
    } else {
      convert_v(params, at);
    }
  } else {
    convert_qk(params, at);
  }
}

}  // namespace archflash::ampere
