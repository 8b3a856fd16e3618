// merge_attention: partial attention results of the same rows over different keys become the result
// over all of these keys. Each warp merges one row.
//   lse = log(sum of exp(lse_i)),  out = sum of exp(lse_i - lse) out_i
// A part whose LSE is -inf has weight 0, and its output is not read. FlashAttention-2 gives a row
// that saw no key the LSE +inf and the output 0: such a part has weight 0, too.
#pragma once

#include <cstdint>

#include "common/device/bfloat16.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/st_global.cuh"
#include "merge/params.h"

namespace archflash::merge {

constexpr unsigned ALL_LANES = 0xFFFFFFFFu;
constexpr float MINUS_INFINITY = -__builtin_huge_valf();

__device__ __forceinline__ float4 load_columns(const void* row_gmem, int column, DType dtype) {
  if (dtype == DType::F32)
    return *reinterpret_cast<const float4*>(static_cast<const float*>(row_gmem) + column);
  const uint2 pairs =
      *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(row_gmem) + column);
  const auto number = [&](uint32_t bits) {
    const uint16_t low = static_cast<uint16_t>(bits);
    return dtype == DType::F16 ? ptx::cvt_f32_f16(low)
                               : __uint_as_float(device::float_bits_of_bfloat16(low));
  };
  return {number(pairs.x), number(pairs.x >> 16), number(pairs.y), number(pairs.y >> 16)};
}

__device__ __forceinline__ void store_columns(void* row_gmem, int column, DType dtype, float4 x) {
  if (dtype == DType::F32) {
    *reinterpret_cast<float4*>(static_cast<float*>(row_gmem) + column) = x;
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(row_gmem) + column;
  if (dtype == DType::F16) {
    ptx::st_global_v2_b32(to, ptx::cvt_rn_x2_f32<DType::F16>(x.x, x.y),
                          ptx::cvt_rn_x2_f32<DType::F16>(x.z, x.w));
  } else {
    ptx::st_global_v2_b32(to, ptx::cvt_rn_x2_f32<DType::BF16>(x.x, x.y),
                          ptx::cvt_rn_x2_f32<DType::BF16>(x.z, x.w));
  }
}

__device__ __forceinline__ int64_t element_bytes(DType dtype) {
  return dtype == DType::F32 ? 4 : 2;
}

// Whether the columns of a lane are 0 in a row of a part.
__device__ __forceinline__ bool is_zero(const Params& params, int i, int64_t batch, int64_t head,
                                        int64_t row, int lane) {
  const Part& part = params.part[i];
  const int64_t start = batch * part.out_batch + head * part.out_head + row * part.out_row;
  const unsigned char* row_gmem =
      static_cast<const unsigned char*>(part.out_gmem) + start * element_bytes(params.dtype[i]);
  for (int column = lane * COLUMNS; column < params.dv; column += 32 * COLUMNS) {
    const float4 x = load_columns(row_gmem, column, params.dtype[i]);
    if (x.x != 0.0f || x.y != 0.0f || x.z != 0.0f || x.w != 0.0f) return false;  // NaN, too
  }
  return true;
}

__device__ __forceinline__ void merge_row(const Params& params) {
  const int lane = threadIdx.x % 32;
  const int64_t index =
      params.first_row + static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (index >= params.all_rows) return;
  const int64_t row = index % params.rows;
  const int64_t head = index / params.rows % params.heads;
  const int64_t batch = index / params.rows / params.heads;

  // Lane i finds the weight of part i.
  float lse = MINUS_INFINITY;
#pragma unroll
  for (int i = 0; i < MERGE_PARTS; ++i) {  // numbers of parameters must be constants
    const Part& part = params.part[i];
    if (lane == i && i < params.parts)
      lse = part.lse_gmem[batch * part.lse_batch + head * part.lse_head + row * part.lse_row];
  }
  const unsigned infinite = __ballot_sync(ALL_LANES, lse == -MINUS_INFINITY);
#pragma unroll
  for (int i = 0; i < MERGE_PARTS; ++i) {
    if ((infinite >> i & 1) == 0) continue;
    if (__all_sync(ALL_LANES, is_zero(params, i, batch, head, row, lane)) && lane == i)
      lse = MINUS_INFINITY;
  }
  float largest = lse;
#pragma unroll
  for (int lanes = MERGE_PARTS / 2; lanes > 0; lanes /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, lanes));
  largest = __shfl_sync(ALL_LANES, largest, 0);
  // Equal ones are compared, because the difference of infinities would be NaN.
  float weight = lse == largest ? 1.0f : expf(lse - largest);
  if (lse == MINUS_INFINITY) weight = 0.0f;
  float sum = weight;
#pragma unroll
  for (int lanes = MERGE_PARTS / 2; lanes > 0; lanes /= 2)
    sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
  sum = __shfl_sync(ALL_LANES, sum, 0);
  if (lane == 0) params.lse_gmem[index] = sum == 0.0f ? MINUS_INFINITY : largest + logf(sum);
  if (sum != 0.0f) weight /= sum;

  unsigned char* out_gmem =
      static_cast<unsigned char*>(params.out_gmem) +
      (batch * params.out_batch + head * params.out_head + row * params.out_row) *
          element_bytes(params.out_dtype);
  for (int first = 0; first < params.dv; first += 32 * COLUMNS) {
    const int column = first + lane * COLUMNS;
    float4 o{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < MERGE_PARTS; ++i) {
      if (i >= params.parts) break;
      const float of_part = __shfl_sync(ALL_LANES, weight, i);
      if (of_part == 0.0f || column >= params.dv) continue;
      const Part& part = params.part[i];
      const int64_t start = batch * part.out_batch + head * part.out_head + row * part.out_row;
      const float4 x = load_columns(
          static_cast<const unsigned char*>(part.out_gmem) + start * element_bytes(params.dtype[i]),
          column, params.dtype[i]);
      o = {fmaf(x.x, of_part, o.x), fmaf(x.y, of_part, o.y), fmaf(x.z, of_part, o.z),
           fmaf(x.w, of_part, o.w)};
    }
    if (column < params.dv) store_columns(out_gmem, column, params.out_dtype, o);
  }
}

}  // namespace archflash::merge
