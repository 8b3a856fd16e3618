// The kernels of quantize_fp8. A CTA of THREADS threads holds a tile of SCALE_ROWS rows of
// one head in its registers. If each tile has a descale of its own, one kernel reads it once:
//   at_once:  read the tile | find its largest magnitude | write values and descale
// If tiles share a descale (per head or tensor: a group of tiles), three kernels read it twice:
//   largest:  read the tile | write its largest magnitude
//   descale:  one CTA for each group of tiles | largest magnitude of its tiles -> descale
//   values:   read the tile | write values
// Numbers that are not finite do not influence a descale: an infinity becomes the largest number of
// the output type, NaN stays NaN.
#pragma once

#include <cstdint>

#include "common/device/bfloat16.cuh"
#include "common/device/largest_of_cta.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/st_global.cuh"
#include "quantize/params.h"

namespace archflash::quantize {

constexpr int CHUNKS = SCALE_ROWS * MOST_COLUMNS / CHUNK / THREADS;  // chunks of a thread

// The number of the tile that this CTA takes; in the `descale` kernel, of the group of tiles.
__device__ __forceinline__ int64_t index_of_cta(const Params& params) {
  return params.first + blockIdx.x;
}

// The chunks of a tile that one thread holds. Its chunk i is number
// i * THREADS + threadIdx.x of the tile, counted along the rows.
template <DType DTYPE>
struct TileChunks {
  static constexpr int VECTORS = DTYPE == DType::F32 ? 2 : 1;  // 16-byte vectors in a chunk

  uint4 data[CHUNKS][VECTORS];
  int per_row, rows;
  int64_t x_offset, out_offset;

  __device__ __forceinline__ explicit TileChunks(const Params& params) {
    const int64_t tile = index_of_cta(params);
    const int64_t batch_head = tile / params.tiles_per_head;
    const int64_t batch = batch_head / params.heads;
    const int64_t head = batch_head - batch * params.heads;
    const int64_t row = (tile - batch_head * params.tiles_per_head) * SCALE_ROWS;
    per_row = params.d / CHUNK;
    rows = static_cast<int>(min(static_cast<int64_t>(SCALE_ROWS), params.rows - row));
    x_offset = batch * params.x_batch + head * params.x_head + row * params.x_row;
    out_offset = batch * params.out_batch + head * params.out_head + row * params.out_row;
  }

  // The position of this thread's chunks, one after another. It avoids a division for each chunk.
  struct Cursor {
    int row, column, per_row;  // columns and the length of a row in chunks

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
      return row * row_stride + column * CHUNK;
    }
  };

  __device__ __forceinline__ void read(const Params& params) {
    constexpr int BYTES = VECTORS * 16 / CHUNK;
    const char* tile_gmem = static_cast<const char*>(params.x_gmem) + x_offset * BYTES;
    const int step_rows = THREADS / per_row, step_columns = THREADS % per_row;
    Cursor cursor(per_row);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
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
    return __uint_as_float(device::float_bits_of_bfloat16(bits));
  }

  // The magnitude of element j of chunk i; NaN if it is not finite. It unpacks 16-bit numbers in
  // another way than value() does, because the compiler would otherwise keep the results of value()
  // in registers until write().
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
    for (int i = 0; i < CHUNKS; ++i) {
#pragma unroll
      for (int j = 0; j < CHUNK; ++j) result = fmaxf(result, finite_magnitude(i, j));  // drops NaN
    }
    return result;
  }

  template <DType OUT>
  __device__ __forceinline__ void write_as(const Params& params, float factor) const {
    const int step_rows = THREADS / per_row, step_columns = THREADS % per_row;
    Cursor cursor(per_row);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i, cursor.advance(step_rows, step_columns)) {
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

  __device__ __forceinline__ void write(const Params& params, float descale) const {
    const float factor = 1.0f / descale;
    if (params.out_dtype == DType::E4M3) {
      write_as<DType::E4M3>(params, factor);
    } else {
      write_as<DType::E5M2>(params, factor);
    }
  }
};

// The descale for numbers up to `largest`. It is at least the smallest normal number, so that its
// reciprocal is finite, and 1 if all numbers are zeros.
__device__ __forceinline__ float descale_of(float largest, DType out_dtype) {
  constexpr float SMALLEST_NORMAL = 1.17549435e-38f;
  if (largest == 0.0f) return 1.0f;
  const float limit = out_dtype == DType::E4M3 ? 448.0f : 57344.0f;
  return fmaxf(largest / limit, SMALLEST_NORMAL);
}

template <DType DTYPE>
__device__ __forceinline__ void quantize_at_once(const Params& params) {
  TileChunks<DTYPE> tile(params);
  tile.read(params);
  const float descale =
      descale_of(device::largest_of_cta<THREADS>(tile.largest()), params.out_dtype);
  tile.write(params, descale);
  if (threadIdx.x == 0) params.descale_gmem[index_of_cta(params)] = descale;
}

template <DType DTYPE>
__device__ __forceinline__ void write_largest(const Params& params) {
  TileChunks<DTYPE> tile(params);
  tile.read(params);
  const float largest = device::largest_of_cta<THREADS>(tile.largest());
  if (threadIdx.x == 0) params.largest_gmem[index_of_cta(params)] = largest;
}

template <DType DTYPE>
__device__ __forceinline__ void quantize_values(const Params& params) {
  TileChunks<DTYPE> tile(params);
  tile.read(params);
  tile.write(params, params.descale_gmem[index_of_cta(params) / params.tiles_per_group]);
}

__device__ __forceinline__ void write_descale(const Params& params) {
  const int64_t group = index_of_cta(params);
  const float* tiles_gmem = params.largest_gmem + group * params.tiles_per_group;
  float largest = 0.0f;
  for (int64_t tile = threadIdx.x; tile < params.tiles_per_group; tile += THREADS)
    largest = fmaxf(largest, tiles_gmem[tile]);
  largest = device::largest_of_cta<THREADS>(largest);
  if (threadIdx.x == 0) params.descale_gmem[group] = descale_of(largest, params.out_dtype);
}

}  // namespace archflash::quantize

// Defines the entry points for one input type. CTAS is how many CTAs of at_once must fit on an SM:
// with several, one reads while another writes.
#define ARCHFLASH_QUANTIZE_KERNELS(WORD, DTYPE, CTAS)                                  \
  extern "C" __global__ void __launch_bounds__(archflash::quantize::THREADS, CTAS)     \
      quantize_at_once_##WORD(const __grid_constant__ archflash::quantize::Params p) { \
    archflash::quantize::quantize_at_once<DTYPE>(p);                                   \
  }                                                                                    \
  extern "C" __global__ void __launch_bounds__(archflash::quantize::THREADS)           \
      quantize_largest_##WORD(const __grid_constant__ archflash::quantize::Params p) { \
    archflash::quantize::write_largest<DTYPE>(p);                                      \
  }                                                                                    \
  extern "C" __global__ void __launch_bounds__(archflash::quantize::THREADS)           \
      quantize_values_##WORD(const __grid_constant__ archflash::quantize::Params p) {  \
    archflash::quantize::quantize_values<DTYPE>(p);                                    \
  }
