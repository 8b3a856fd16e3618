// quantize_fp8: a CTA of QUANTIZE_THREADS threads takes a tile of SCALE_ROWS rows of one head,
// which its registers hold. Where a tile has its own descale, it is read once:
//   at_once:  read | largest magnitude of the CTA | write values and descale
// otherwise twice:
//   largest:  read | write the tile's largest magnitude
//   descale:  one CTA for each group of tiles: their largest -> its descale
//   values:   read | write values
// Numbers that are not finite count for no descale: an infinity becomes the largest number, NaN
// stays NaN.
#pragma once

#include <cstdint>

#include "ada/largest_of_cta.cuh"
#include "ada/quantize.h"
#include "common/math/bfloat16.cuh"
#include "common/problem.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::ada {

constexpr int QUANTIZE_CHUNKS =
    SCALE_ROWS * QUANTIZE_MOST_COLUMNS / QUANTIZE_CHUNK / QUANTIZE_THREADS;  // of a thread

// The tile that this CTA takes, or the group of tiles.
__device__ __forceinline__ int64_t index_of_cta(const QuantizeParams& params) {
  return params.first + blockIdx.x;
}

// Chunks of a tile as one thread holds them: chunk i is number i * QUANTIZE_THREADS + threadIdx.x,
// counted along the rows.
template <DType DTYPE>
struct TileChunks {
  static constexpr int VECTORS = DTYPE == DType::F32 ? 2 : 1;  // of 16 bytes in a chunk

  uint4 data[QUANTIZE_CHUNKS][VECTORS];
  int per_row, rows;
  int64_t x_offset, out_offset;

  __device__ __forceinline__ explicit TileChunks(const QuantizeParams& params) {
    const int64_t tile = index_of_cta(params);
    const int64_t batch_head = tile / params.tiles_per_head;
    const int64_t batch = batch_head / params.heads;
    const int64_t head = batch_head - batch * params.heads;
    const int64_t row = (tile - batch_head * params.tiles_per_head) * SCALE_ROWS;
    per_row = params.d / QUANTIZE_CHUNK;
    rows = static_cast<int>(min(static_cast<int64_t>(SCALE_ROWS), params.rows - row));
    x_offset = batch * params.x_batch + head * params.x_head + row * params.x_row;
    out_offset = batch * params.out_batch + head * params.out_head + row * params.out_row;
  }

  // Where this thread's chunks lie, one after another, without a division for each.
  struct Cursor {
    int row, column, per_row;  // column in chunks

    __device__ __forceinline__ explicit Cursor(int per_row) : per_row(per_row) {
      row = threadIdx.x / per_row;
      column = threadIdx.x % per_row;
    }
    __device__ __forceinline__ void advance(int step_rows, int step_columns) {
      row += step_rows;
      column += step_columns;
      if (column >= per_row) {
        column -= per_row;
        ++row;
      }
    }
    __device__ __forceinline__ int64_t offset(int64_t row_stride) const {
      return row * row_stride + column * QUANTIZE_CHUNK;
    }
  };

  __device__ __forceinline__ void read(const QuantizeParams& params) {
    constexpr int BYTES = VECTORS * 16 / QUANTIZE_CHUNK;
    const char* tile_gmem = static_cast<const char*>(params.x_gmem) + x_offset * BYTES;
    const int step_rows = QUANTIZE_THREADS / per_row, step_columns = QUANTIZE_THREADS % per_row;
    Cursor cursor(per_row);
#pragma unroll
    for (int i = 0; i < QUANTIZE_CHUNKS; ++i) {
#pragma unroll
      for (int vector = 0; vector < VECTORS; ++vector) {
        data[i][vector] = make_uint4(0, 0, 0, 0);
        if (cursor.row < rows) {
          data[i][vector] = reinterpret_cast<const uint4*>(tile_gmem + cursor.offset(params.x_row) *
                                                                           BYTES)[vector];
        }
      }
      cursor.advance(step_rows, step_columns);
    }
  }

  // Element j of chunk i.
  __device__ __forceinline__ float value(int i, int j) const {
    const uint4& v = data[i][VECTORS == 2 ? j / 4 : 0];
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    if constexpr (DTYPE == DType::F32) return __uint_as_float(words[j % 4]);
    const uint16_t bits = static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
    if constexpr (DTYPE == DType::F16) return ptx::cvt_f32_f16(bits);
    return __uint_as_float(math::float_bits_of_bfloat16(bits));
  }

  // Its magnitude; NaN if it is not finite. Reads numbers of 16 bits in another way than value()
  // does: otherwise the compiler keeps value()'s results in registers until write().
  __device__ __forceinline__ float finite_magnitude(int i, int j) const {
    float x;
    if constexpr (DTYPE == DType::F32) {
      x = fabsf(value(i, j));
    } else {
      const uint4& v = data[i][0];
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
      const uint32_t upper = j % 2 == 0 ? words[j / 2] << 16 : words[j / 2];
      const uint32_t bits = upper & 0x7FFF0000u;
      x = DTYPE == DType::BF16 ? __uint_as_float(bits)
                               : ptx::cvt_f32_f16(static_cast<uint16_t>(bits >> 16));
    }
    return fmaf(x, 0.0f, x);  // infinity times 0 is NaN
  }

  // The largest magnitude of the finite numbers; 0 if there are none.
  __device__ __forceinline__ float largest() const {
    float result = 0.0f;
#pragma unroll
    for (int i = 0; i < QUANTIZE_CHUNKS; ++i) {
#pragma unroll
      for (int j = 0; j < QUANTIZE_CHUNK; ++j)
        result = fmaxf(result, finite_magnitude(i, j));  // drops NaN
    }
    return result;
  }

  template <DType OUT>
  __device__ __forceinline__ void write_as(const QuantizeParams& params, float factor) const {
    const int step_rows = QUANTIZE_THREADS / per_row, step_columns = QUANTIZE_THREADS % per_row;
    Cursor cursor(per_row);
#pragma unroll
    for (int i = 0; i < QUANTIZE_CHUNKS; ++i, cursor.advance(step_rows, step_columns)) {
      if (cursor.row >= rows) continue;
      uint32_t words[2];
#pragma unroll
      for (int word = 0; word < 2; ++word) {
        const int j = 4 * word;
        const uint32_t low =
            ptx::cvt_rn_satfinite_x2_f32<OUT>(value(i, j) * factor, value(i, j + 1) * factor);
        const uint32_t high =
            ptx::cvt_rn_satfinite_x2_f32<OUT>(value(i, j + 2) * factor, value(i, j + 3) * factor);
        words[word] = low | high << 16;
      }
      ptx::st_global_v2_b32(params.out_gmem + out_offset + cursor.offset(params.out_row), words[0],
                            words[1]);
    }
  }

  __device__ __forceinline__ void write(const QuantizeParams& params, float descale) const {
    const float factor = 1.0f / descale;
    if (params.out_dtype == DType::E4M3) {
      write_as<DType::E4M3>(params, factor);
    } else {
      write_as<DType::E5M2>(params, factor);
    }
  }
};

// Normal, so that its reciprocal is finite; 1 for zeros.
__device__ __forceinline__ float descale_of(float largest, DType out_dtype) {
  constexpr float SMALLEST_NORMAL = 1.17549435e-38f;
  if (largest == 0.0f) return 1.0f;
  const float limit = out_dtype == DType::E4M3 ? 448.0f : 57344.0f;
  return fmaxf(largest / limit, SMALLEST_NORMAL);
}

template <DType DTYPE>
__device__ __forceinline__ void quantize_at_once(const QuantizeParams& params) {
  TileChunks<DTYPE> tile(params);
  tile.read(params);
  const float descale =
      descale_of(largest_of_cta<QUANTIZE_THREADS>(tile.largest()), params.out_dtype);
  tile.write(params, descale);
  if (threadIdx.x == 0) params.descale_gmem[index_of_cta(params)] = descale;
}

template <DType DTYPE>
__device__ __forceinline__ void quantize_largest(const QuantizeParams& params) {
  TileChunks<DTYPE> tile(params);
  tile.read(params);
  const float largest = largest_of_cta<QUANTIZE_THREADS>(tile.largest());
  if (threadIdx.x == 0) params.largest_gmem[index_of_cta(params)] = largest;
}

template <DType DTYPE>
__device__ __forceinline__ void quantize_values(const QuantizeParams& params) {
  TileChunks<DTYPE> tile(params);
  tile.read(params);
  tile.write(params, params.descale_gmem[index_of_cta(params) / params.tiles_per_group]);
}

__device__ __forceinline__ void quantize_descale(const QuantizeParams& params) {
  const int64_t group = index_of_cta(params);
  const float* tiles_gmem = params.largest_gmem + group * params.tiles_per_group;
  float largest = 0.0f;
  for (int64_t tile = threadIdx.x; tile < params.tiles_per_group; tile += QUANTIZE_THREADS)
    largest = fmaxf(largest, tiles_gmem[tile]);
  largest = largest_of_cta<QUANTIZE_THREADS>(largest);
  if (threadIdx.x == 0) params.descale_gmem[group] = descale_of(largest, params.out_dtype);
}

}  // namespace archflash::ada

// CTAS: on an SM, so that one reads while another writes.
#define ARCHFLASH_QUANTIZE_KERNELS(WORD, DTYPE, CTAS)                                         \
  extern "C" __global__ void __launch_bounds__(archflash::ada::QUANTIZE_THREADS, CTAS)        \
      ada_quantize_at_once_##WORD(const __grid_constant__ archflash::ada::QuantizeParams p) { \
    archflash::ada::quantize_at_once<DTYPE>(p);                                               \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(archflash::ada::QUANTIZE_THREADS)              \
      ada_quantize_largest_##WORD(const __grid_constant__ archflash::ada::QuantizeParams p) { \
    archflash::ada::quantize_largest<DTYPE>(p);                                               \
  }                                                                                           \
  extern "C" __global__ void __launch_bounds__(archflash::ada::QUANTIZE_THREADS)              \
      ada_quantize_values_##WORD(const __grid_constant__ archflash::ada::QuantizeParams p) {  \
    archflash::ada::quantize_values<DTYPE>(p);                                                \
  }
