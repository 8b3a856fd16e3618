// Converts K and V to four bits with block scales, into chunks that the attention kernel copies
// (nvfp4_config.cuh). Two kernels run:
//   means:   one CTA for each head of K: the mean of K over at most MEAN_KEYS keys, and V's unit
//   chunks:  one CTA for each block of keys of each head
// Inputs that have four bits as they come take the second alone.
// The mean is subtracted from K: what all keys have in common only shifts a row's scores, and the
// attention kernel adds the shift to the log-sum-exp. Any vector in place of the mean is right.
// Keys that no query of the batch sees are not read and count as zeros. There are no atomics, so
// that the same inputs give the same bits.
//
// A number that is not finite counts as zero in means and units. The scale of its group is NaN, so
// that it spoils what the group takes part in.
#pragma once

#include <cstdint>

#include "blackwell_consumer/block_scales.cuh"
#include "blackwell_consumer/nvfp4_config.cuh"
#include "blackwell_consumer/nvfp4_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/bfloat16.cuh"
#include "common/device/largest_of_cta.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/nvfp4.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::blackwell_consumer {

constexpr int MEAN_KEYS = 512;
constexpr float LARGEST_FLOAT = 3.402823466e38f;
constexpr float SMALLEST_UNIT = 0x1p-60f;  // the product of two units is a normal number
constexpr uint32_t NAN_SCALE = 0x7F;

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= LARGEST_FLOAT; }

__device__ __forceinline__ float float_of(uint32_t bits, DType dtype) {
  if (dtype == DType::F16) return ptx::cvt_f32_f16(static_cast<uint16_t>(bits));
  return __uint_as_float(device::float_bits_of_bfloat16(static_cast<uint16_t>(bits)));
}
// The eight numbers of 16 bytes.
__device__ __forceinline__ void floats_of(const uint4& data, DType dtype, float* x) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = float_of(words[i / 2] >> i % 2 * 16 & 0xFFFF, dtype);
}

// The unit of numbers of which this is the largest magnitude.
__device__ __forceinline__ float unit_of(float largest) {
  return largest == 0.0f ? 1.0f : fmaxf(largest * (1.0f / NVFP4_LARGEST), SMALLEST_UNIT);
}

// The scale of a group whose largest magnitude, in units, is given, and the factor for its numbers.
__device__ __forceinline__ uint32_t scale_of(float largest, float& factor) {
  const uint16_t pair = ptx::cvt_rn_satfinite_x2_f32<DType::E4M3>(largest * (1.0f / 6), 0.0f);
  const float scale = ptx::cvt_f32_f16(static_cast<uint16_t>(ptx::cvt_rn_f16x2_e4m3x2(pair)));
  constexpr float SMALLEST_SCALE = 0x1p-9f;
  factor = 1.0f / fmaxf(scale, SMALLEST_SCALE);
  return pair & 0xFF;
}

// Writes a group of 16 numbers as chunk bytes. Returns its scale.
__device__ __forceinline__ uint32_t write_group(unsigned char* place, const float (&x)[16],
                                                float per_unit) {
  float largest = 0.0f;
  bool odd = false;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if (is_finite(x[i]))
      largest = fmaxf(largest, fabsf(x[i]));
    else
      odd = true;
  }
  float factor;
  const uint32_t scale = scale_of(largest * per_unit, factor);
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float scaled[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      scaled[j] = is_finite(x[8 * i + j]) ? x[8 * i + j] * per_unit * factor : 0.0f;
    words[i] = ptx::cvt_rn_satfinite_e2m1x8_f32(scaled);
  }
  ptx::st_global_v2_b32(place, words[0], words[1]);
  return odd ? NAN_SCALE : scale;
}

// The keys that some query of the batch sees are those from `begin` to `end` - 1.
struct SeenKeys {
  int begin, end;

  __device__ __forceinline__ SeenKeys(const Nvfp4Params& params, int batch) {
    const AttentionParams& attention = params.attention;
    const device::Work work{.batch_head = batch * attention.heads_q,
                            .first_row = 0,
                            .nq = attention.nq,
                            .nk = attention.nk};
    const device::VisibleKeys visible = device::find_visible_keys(attention, work);
    begin = visible.begin();
    end = max(visible.end(attention.nq), begin);
  }
};

template <class C>
__device__ __forceinline__ void nvfp4_means(const Nvfp4Params& params) {
  constexpr int THREADS = NVFP4_PREPARE_THREADS;
  __shared__ float sums[THREADS][8];
  const AttentionParams& attention = params.attention;
  const int batch = blockIdx.x / params.heads_kv, head = blockIdx.x % params.heads_kv;
  const SeenKeys seen(params, batch);
  // A thread takes eight columns of every step-th key. The mean is that of every mean_step-th key;
  // the step is odd, so that it does not pick only one of two kinds of alternating keys.
  const int per_row = attention.d / 8, step = THREADS / per_row;
  const int column = threadIdx.x % per_row * 8, first = threadIdx.x / per_row;
  const int count = seen.end - seen.begin;
  const int mean_step = ((count + MEAN_KEYS - 1) / MEAN_KEYS) | 1;
  const int keys = (count + mean_step - 1) / mean_step;
  const uint16_t* k_gmem = static_cast<const uint16_t*>(attention.k_gmem) +
                           batch * attention.k_batch + head * attention.k_head + column;
  float sum[8] = {};
  for (int i = first; first < step && i < keys; i += step) {
    const int64_t key = seen.begin + i * mean_step;
    float x[8];
    floats_of(*reinterpret_cast<const uint4*>(k_gmem + key * attention.k_row), params.dtype, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum[j] += is_finite(x[j]) ? x[j] : 0.0f;
  }
#pragma unroll
  for (int j = 0; j < 8; ++j) sums[threadIdx.x][j] = sum[j];

  const int v_per_row = attention.dv / 8, v_step = THREADS / v_per_row;
  const int v_first = threadIdx.x / v_per_row;
  const uint16_t* v_gmem = static_cast<const uint16_t*>(attention.v_gmem) +
                           batch * attention.v_batch + head * attention.v_head +
                           threadIdx.x % v_per_row * 8;
  float largest = 0.0f;
  for (int64_t key = seen.begin + v_first; v_first < v_step && key < seen.end; key += v_step) {
    float x[8];
    floats_of(*reinterpret_cast<const uint4*>(v_gmem + key * attention.v_row), params.dtype, x);
#pragma unroll
    for (int j = 0; j < 8; ++j) largest = is_finite(x[j]) ? fmaxf(largest, fabsf(x[j])) : largest;
  }
  largest = device::largest_of_cta<THREADS>(largest);  // its barrier also completes `sums`
  if (threadIdx.x == 0) params.v_unit_gmem[blockIdx.x] = unit_of(largest);
  const int mine = threadIdx.x;
  if (mine >= C::HEAD_DIM) return;
  float total = 0.0f;
  if (mine < attention.d) {
    for (int row = 0; row < step; ++row) total += sums[row * per_row + mine / 8][mine % 8];
  }
  const float mean = total / max(keys, 1);
  params.k_mean_gmem[blockIdx.x * C::HEAD_DIM + mine] = is_finite(mean) ? mean : 0.0f;
}

template <class C>
__device__ __forceinline__ void make_k_chunk(const Nvfp4Params& params, const SeenKeys& seen,
                                             int batch, int head, int first_key,
                                             unsigned char* chunk, float& unit_gmem) {
  constexpr int GROUPS = C::HEAD_DIM / NVFP4_GROUP;
  constexpr int ITEMS = C::BLOCK_K * GROUPS / NVFP4_PREPARE_THREADS;
  const AttentionParams& attention = params.attention;
  const float* mean_gmem = params.k_mean_gmem + (batch * params.heads_kv + head) * C::HEAD_DIM;
  const uint16_t* k_gmem = static_cast<const uint16_t*>(attention.k_gmem) +
                           batch * attention.k_batch + head * attention.k_head;
  float x[ITEMS][16];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int item = i * NVFP4_PREPARE_THREADS + threadIdx.x;
    const int key = first_key + C::key_at(item / GROUPS);
    const bool read = key >= seen.begin && key < seen.end;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int column = item % GROUPS * 16 + half * 8;
      float y[8] = {};
      if (read && column < attention.d) {
        floats_of(*reinterpret_cast<const uint4*>(k_gmem + key * attention.k_row + column),
                  params.dtype, y);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        // A difference beyond float stays finite.
        const float less =
            fminf(fmaxf(y[j] - mean_gmem[column + j], -LARGEST_FLOAT), LARGEST_FLOAT);
        x[i][8 * half + j] = !read ? 0.0f : is_finite(y[j]) ? less : y[j];
        if (read && is_finite(y[j])) largest = fmaxf(largest, fabsf(less));
      }
    }
  }
  const float unit = unit_of(device::largest_of_cta<NVFP4_PREPARE_THREADS>(largest));
  if (threadIdx.x == 0) unit_gmem = unit;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int item = i * NVFP4_PREPARE_THREADS + threadIdx.x;
    const int row = item / GROUPS, group = item % GROUPS;
    unsigned char* place = chunk + C::KTile::offset(row, group / 2) + group % 2 * 8;
    chunk[C::K_SCALES + item] = static_cast<unsigned char>(write_group(place, x[i], 1.0f / unit));
  }
}

template <class C>
__device__ __forceinline__ void make_v_chunk(const Nvfp4Params& params, const SeenKeys& seen,
                                             int batch, int head, int first_key,
                                             unsigned char* chunk) {
  constexpr int GROUPS = C::V_SCALE_BYTES;
  constexpr int PAIRS = C::HEAD_DIM_V / 2;  // of columns: a thread reads both at once
  constexpr int ITEMS = PAIRS * GROUPS / NVFP4_PREPARE_THREADS;
  const AttentionParams& attention = params.attention;
  const uint16_t* v_gmem = static_cast<const uint16_t*>(attention.v_gmem) +
                           batch * attention.v_batch + head * attention.v_head;
  const float per_unit = 1.0f / params.v_unit_gmem[batch * params.heads_kv + head];
#pragma unroll 1
  for (int i = 0; i < ITEMS; ++i) {
    const int item = i * NVFP4_PREPARE_THREADS + threadIdx.x;
    const int column = item % PAIRS * 2, group = item / PAIRS;
    float x[2][16];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int key = first_key + group * 16 + j;
      uint32_t both = 0;
      if (key >= seen.begin && key < seen.end && column < attention.dv)
        both = *reinterpret_cast<const uint32_t*>(v_gmem + key * attention.v_row + column);
      x[0][j] = float_of(both & 0xFFFF, params.dtype);
      x[1][j] = float_of(both >> 16, params.dtype);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = C::v_row(column + j);
      unsigned char* place = chunk + C::VTile::offset(row, group / 2) + group % 2 * 8;
      chunk[C::V_SCALES + row * GROUPS + group] =
          static_cast<unsigned char>(write_group(place, x[j], per_unit));
    }
  }
}

// --- inputs that have four bits as they come: their numbers and scales, put in order ---

template <class C>
__device__ __forceinline__ void copy_k_chunk(const Nvfp4Params& params, const SeenKeys& seen,
                                             int batch, int head, int first_key,
                                             unsigned char* chunk) {
  constexpr int GROUPS = C::HEAD_DIM / NVFP4_GROUP;
  const AttentionParams& attention = params.attention;
  const auto* k_gmem = static_cast<const unsigned char*>(attention.k_gmem) +
                       batch * attention.k_batch + head * attention.k_head;
  const unsigned char* scales_gmem = scales_of_head(params.scales.k, batch, head);
#pragma unroll
  for (int item = threadIdx.x; item < C::BLOCK_K * GROUPS; item += NVFP4_PREPARE_THREADS) {
    const int row = item / GROUPS, group = item % GROUPS;
    const int64_t key = first_key + C::key_at(row);
    uint2 numbers = make_uint2(0, 0);
    unsigned char scale = 0;
    if (key >= seen.begin && key < seen.end && group * NVFP4_GROUP < attention.d) {
      numbers = *reinterpret_cast<const uint2*>(k_gmem + key * attention.k_row + group * 8);
      scale = scales_gmem[key * params.scales.k.block + group];
    }
    unsigned char* place = chunk + C::KTile::offset(row, group / 2) + group % 2 * 8;
    ptx::st_global_v2_b32(place, numbers.x, numbers.y);
    chunk[C::K_SCALES + item] = scale;
  }
}

// The numbers of two neighbouring columns are the halves of a byte.
template <class C>
__device__ __forceinline__ void copy_v_chunk(const Nvfp4Params& params, const SeenKeys& seen,
                                             int batch, int head, int first_key,
                                             unsigned char* chunk) {
  constexpr int GROUPS = C::V_SCALE_BYTES;
  constexpr int PAIRS = C::HEAD_DIM_V / 2;
  const AttentionParams& attention = params.attention;
  const auto* v_gmem = static_cast<const unsigned char*>(attention.v_gmem) +
                       batch * attention.v_batch + head * attention.v_head;
  const unsigned char* scales_gmem = scales_of_head(params.scales.v, batch, head);
#pragma unroll 1
  for (int item = threadIdx.x; item < PAIRS * GROUPS; item += NVFP4_PREPARE_THREADS) {
    const int column = item % PAIRS * 2, group = item / PAIRS;
    const int64_t key = first_key + group * NVFP4_GROUP;
    const bool any = key < seen.end && key + NVFP4_GROUP > seen.begin && column < attention.dv;
    uint32_t numbers[2][2] = {};
#pragma unroll
    for (int j = 0; j < NVFP4_GROUP; ++j) {
      if (!any || key + j < seen.begin || key + j >= seen.end) continue;
      const uint32_t both = v_gmem[(key + j) * attention.v_row + column / 2];
      numbers[0][j / 8] |= (both & 0xF) << 4 * (j % 8);
      numbers[1][j / 8] |= (both >> 4) << 4 * (j % 8);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int row = C::v_row(column + j);
      unsigned char* place = chunk + C::VTile::offset(row, group / 2) + group % 2 * 8;
      ptx::st_global_v2_b32(place, numbers[j][0], numbers[j][1]);
      chunk[C::V_SCALES + row * GROUPS + group] =
          any ? scales_gmem[key / NVFP4_GROUP * params.scales.v.block + column + j] : 0;
    }
  }
}

// A block of keys for each CTA.
template <class C>
__device__ __forceinline__ void nvfp4_chunks(const Nvfp4Params& params) {
  const int block = blockIdx.x % params.k_blocks;
  const int batch_head = blockIdx.x / params.k_blocks;
  const int batch = batch_head / params.heads_kv, head = batch_head % params.heads_kv;
  const SeenKeys seen(params, batch);
  const int first_key = block * C::BLOCK_K;
  const int64_t index = blockIdx.x;
  if constexpr (C::STORED)
    copy_k_chunk<C>(params, seen, batch, head, first_key,
                    params.k_chunks_gmem + index * C::K_BYTES);
  else
    make_k_chunk<C>(params, seen, batch, head, first_key, params.k_chunks_gmem + index * C::K_BYTES,
                    params.k_units_gmem[index]);
  unsigned char* const v_chunk = params.v_chunks_gmem + index * C::V_BYTES;
  if constexpr (C::STORED)
    copy_v_chunk<C>(params, seen, batch, head, first_key, v_chunk);
  else
    make_v_chunk<C>(params, seen, batch, head, first_key, v_chunk);
}

}  // namespace archflash::blackwell_consumer
