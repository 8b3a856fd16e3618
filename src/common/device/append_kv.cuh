// The first kernel of a call that appends to a KV cache: it writes k_new and v_new behind the
// lengths, rotated where the call has a rotary embedding, and leaves a rotated copy of q in the
// workspace. Each warp makes one row. A row whose place lies outside the cache is dropped.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/bfloat16.cuh"
#include "common/device/fp8_to_16_bits.cuh"
#include "common/device/kv_cache.cuh"
#include "common/dtype.h"
#include "common/kv_cache.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/f32_of_half.cuh"

namespace archflash::device {

// Reads element `index` of 16-bit or fp32 numbers.
__device__ __forceinline__ float load_number(const void* numbers_gmem, int64_t index, DType dtype) {
  if (dtype == DType::F32) return static_cast<const float*>(numbers_gmem)[index];
  const uint16_t bits = static_cast<const uint16_t*>(numbers_gmem)[index];
  return dtype == DType::F16 ? ptx::cvt_f32_f16(bits)
                             : __uint_as_float(float_bits_of_bfloat16(bits));
}

// The sequence of a row of packed queries: the last one that starts at or before it.
__device__ __forceinline__ int find_sequence(const int* cu_seqlens_gmem, int batch, int row) {
  int low = 0, high = batch - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (cu_seqlens_gmem[middle] <= row) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Copies a row of `columns` numbers, which are of DTYPE or of the cache's 8-bit type. Its first
// rotary_dim columns are rotated by the row's position, which is clamped to the table.
template <DType DTYPE, class Number>
__device__ __forceinline__ void copy_row(const AppendParams& params, const Number* from_gmem,
                                         Number* to_gmem, int columns, int64_t position,
                                         int rotary_dim) {
  const int lane = threadIdx.x % 32;
  const int half = rotary_dim / 2;
  const int64_t last = params.rotary_rows - 1;
  const int64_t table_row = min(max(position, int64_t{0}), last) * half;
  for (int pair = lane; pair < half; pair += 32) {
    const int one = params.interleaved ? 2 * pair : pair;
    const int other = params.interleaved ? 2 * pair + 1 : pair + half;
    const float cos = load_number(params.rotary_cos_gmem, table_row + pair, params.rotary_dtype);
    const float sin = load_number(params.rotary_sin_gmem, table_row + pair, params.rotary_dtype);
    const auto turn = [&](float x, float y) {
      return float2{fmaf(x, cos, -(y * sin)), fmaf(x, sin, y * cos)};
    };
    if constexpr (sizeof(Number) == 1) {
      const Fp8Format format(params.cache_dtype);
      const float2 turned =
          turn(format.to_float(from_gmem[one]), format.to_float(from_gmem[other]));
      to_gmem[one] = format.from_float(turned.x);
      to_gmem[other] = format.from_float(turned.y);
    } else if constexpr (DTYPE == DType::F32) {
      const float2 turned = turn(from_gmem[one], from_gmem[other]);
      to_gmem[one] = turned.x;
      to_gmem[other] = turned.y;
    } else {
      const float2 turned = turn(ptx::f32_of_half<DTYPE>(from_gmem[one], 0),
                                 ptx::f32_of_half<DTYPE>(from_gmem[other], 0));
      const uint32_t pair = ptx::cvt_rn_x2_f32<DTYPE>(turned.x, turned.y);
      to_gmem[one] = static_cast<uint16_t>(pair);
      to_gmem[other] = static_cast<uint16_t>(pair >> 16);
    }
  }
  for (int column = rotary_dim + lane; column < columns; column += 32)
    to_gmem[column] = from_gmem[column];
}

// Appends row `index` of k_new or of v_new, counted over sequences, new rows and heads. Number: how
// the cache stores one.
template <DType DTYPE, class Number>
__device__ __forceinline__ void append_row(const AppendParams& params, int64_t index, bool is_v) {
  const AttentionParams& attention = params.attention;
  const KvCache& cache = params.cache;
  const int head = static_cast<int>(index % params.heads_kv);
  const int number = static_cast<int>(index / params.heads_kv % cache.n_new);
  const int sequence = static_cast<int>(index / params.heads_kv / cache.n_new);
  const int64_t row = static_cast<int64_t>(cache.seqlens_gmem[sequence]) + number;
  if (row < 0 || row >= cache.capacity) return;
  const int block = find_cache_block(cache, sequence, static_cast<int>(row));
  if (block < 0 || block >= cache.blocks) return;
  const int64_t row_of_block = row % cache.block_rows;
  const int padding = cache.leftpad_gmem == nullptr ? 0 : cache.leftpad_gmem[sequence];
  if (is_v) {
    copy_row<DTYPE, Number>(
        params,
        static_cast<const Number*>(params.v_new_gmem) + sequence * params.v_new_batch +
            number * params.v_new_row + head * params.v_new_head,
        static_cast<Number*>(const_cast<void*>(attention.v_gmem)) + block * attention.v_batch +
            row_of_block * attention.v_row + head * attention.v_head,
        attention.dv, 0, 0);
  } else {
    copy_row<DTYPE, Number>(
        params,
        static_cast<const Number*>(params.k_new_gmem) + sequence * params.k_new_batch +
            number * params.k_new_row + head * params.k_new_head,
        static_cast<Number*>(const_cast<void*>(attention.k_gmem)) + block * attention.k_batch +
            row_of_block * attention.k_row + head * attention.k_head,
        attention.d, row - padding, params.rotary_dim);
  }
}

// Copies row `index` of q, counted over rows and heads, with its first columns rotated.
template <DType DTYPE>
__device__ __forceinline__ void rotate_query(const AppendParams& params, int64_t index) {
  using Number = std::conditional_t<DTYPE == DType::F32, float, uint16_t>;
  const AttentionParams& attention = params.attention;
  const int head = static_cast<int>(index % attention.heads_q);
  const int64_t row_of_all = index / attention.heads_q;
  int sequence, row;
  int64_t from;
  if (attention.cu_seqlens_q_gmem == nullptr) {
    sequence = static_cast<int>(row_of_all / attention.nq);
    row = static_cast<int>(row_of_all % attention.nq);
    from = sequence * attention.q_batch + row * attention.q_row;
  } else {
    row = static_cast<int>(row_of_all);
    sequence = find_sequence(attention.cu_seqlens_q_gmem, attention.batch, row);
    from = row * attention.q_row;
    row -= attention.cu_seqlens_q_gmem[sequence];
  }
  const int padding =
      params.cache.leftpad_gmem == nullptr ? 0 : params.cache.leftpad_gmem[sequence];
  const int64_t first = static_cast<int64_t>(params.cache.seqlens_gmem[sequence]) - padding;
  copy_row<DTYPE>(params,
                  static_cast<const Number*>(attention.q_gmem) + from + head * attention.q_head,
                  static_cast<Number*>(params.rotated_q_gmem) + index * attention.d, attention.d,
                  max(first, int64_t{0}) + (params.ordered ? row : 0), params.rotary_dim);
}

// DTYPE is the type of q.
template <DType DTYPE, class Number>
__device__ __forceinline__ void append_kv(const AppendParams& params) {
  int64_t index = static_cast<int64_t>(blockIdx.x) * APPEND_WARPS + threadIdx.x / 32;
  for (const bool is_v : {false, true}) {
    if (index < params.new_rows) {
      append_row<DTYPE, Number>(params, index, is_v);
      return;
    }
    index -= params.new_rows;
  }
  if (index < params.q_rows) rotate_query<DTYPE>(params, index);
}

}  // namespace archflash::device
