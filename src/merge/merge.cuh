// merge_attention: partial attention results of the same rows over different keys become the result
// over all of these keys.
//   lse = log(sum of exp(lse_i)),  out = sum of exp(lse_i - lse) out_i
// A part whose LSE is -inf has weight 0, and its output is not read. FlashAttention-2 gives a row
// that saw no key the LSE +inf and the output 0: such a part has weight 0, too.
//
// Each CTA merges ROWS rows. First a thread a row finds the weights of the parts and where the row
// lies in each of them, which go to shared memory. Then each thread takes the same columns of some
// rows at a time, whose loads are under way together: the kernel is bound by memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/bfloat16.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/st_global.cuh"
#include "merge/params.h"

namespace archflash::merge {

constexpr float MINUS_INFINITY = -__builtin_huge_valf();

// What the threads of a CTA know of its rows.
struct Rows {
  float weight[MERGE_PARTS][ROWS];
  const void* part[MERGE_PARTS][ROWS];  // where a row begins
  void* out[ROWS];                      // null: there is no such row
};

__device__ __forceinline__ int64_t element_bytes(DType dtype) {
  return dtype == DType::F32 ? 4 : 2;
}

// COLUMNS neighbouring numbers of a type as they lie in memory.
template <DType DTYPE, int COLUMNS>
struct Columns {
  static constexpr int WORDS = COLUMNS * (DTYPE == DType::F32 ? 4 : 2) / 4;
  uint32_t words[WORDS] = {};

  __device__ __forceinline__ void load(const void* row, int column) {
    const uint32_t* from = static_cast<const uint32_t*>(row) + column / COLUMNS * WORDS;
    if constexpr (WORDS == 2) {
      const uint2 x = *reinterpret_cast<const uint2*>(from);
      words[0] = x.x, words[1] = x.y;
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        const uint4 x = *reinterpret_cast<const uint4*>(from + i);
        words[i] = x.x, words[i + 1] = x.y, words[i + 2] = x.z, words[i + 3] = x.w;
      }
    }
  }
  __device__ __forceinline__ float number(int i) const {
    if constexpr (DTYPE == DType::F32) return __uint_as_float(words[i]);
    const uint16_t bits = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
    if constexpr (DTYPE == DType::F16) return ptx::cvt_f32_f16(bits);
    return __uint_as_float(device::float_bits_of_bfloat16(bits));
  }
  __device__ __forceinline__ static void store(void* row, int column, const float (&x)[COLUMNS]) {
    uint32_t* to = static_cast<uint32_t*>(row) + column / COLUMNS * WORDS;
    uint32_t made[WORDS];
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if constexpr (DTYPE == DType::F32) {
        made[i] = __float_as_uint(x[i]);
      } else {
        made[i] = ptx::cvt_rn_x2_f32<DTYPE>(x[2 * i], x[2 * i + 1]);
      }
    }
    if constexpr (WORDS == 2) {
      ptx::st_global_v2_b32(to, made[0], made[1]);
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; i += 4)
        ptx::st_global_v4_b32(to + i, made[i], made[i + 1], made[i + 2], made[i + 3]);
    }
  }
};

// Calls f<DTYPE>() with the type of a part: all threads of a warp go the same way.
template <class F>
__device__ __forceinline__ auto with_dtype(DType dtype, const F& f) {
  if (dtype == DType::F32) return f.template operator()<DType::F32>();
  if (dtype == DType::F16) return f.template operator()<DType::F16>();
  return f.template operator()<DType::BF16>();
}

// Whether a row of a part is 0.
template <DType DTYPE>
__device__ __forceinline__ bool is_zero(const void* row, int dv) {
  for (int column = 0; column < dv; column += FEWEST_COLUMNS) {
    Columns<DTYPE, FEWEST_COLUMNS> x;
    x.load(row, column);
#pragma unroll
    for (int i = 0; i < FEWEST_COLUMNS; ++i) {
      if (x.number(i) != 0.0f) return false;  // NaN, too
    }
  }
  return true;
}

// Finds what `all` says of row `i` of the CTA, and writes the row's LSE.
__device__ __forceinline__ void find_row(const Params& params, Rows& all, int i) {
  const int64_t index = params.first_row + static_cast<int64_t>(blockIdx.x) * ROWS + i;
  if (index >= params.all_rows) {
    all.out[i] = nullptr;
#pragma unroll
    for (int p = 0; p < MERGE_PARTS; ++p) all.weight[p][i] = 0.0f;
    return;
  }
  const int64_t row = index % params.rows;
  const int64_t head = index / params.rows % params.heads;
  const int64_t batch = index / params.rows / params.heads;
  const int64_t out_start =
      batch * params.out_batch + head * params.out_head + row * params.out_row;
  all.out[i] =
      static_cast<unsigned char*>(params.out_gmem) + out_start * element_bytes(params.out_dtype);

  float lse[MERGE_PARTS];
  float largest = MINUS_INFINITY;
#pragma unroll
  for (int p = 0; p < MERGE_PARTS; ++p) {  // numbers of parameters must be constants
    lse[p] = MINUS_INFINITY;
    if (p >= params.parts) continue;
    const Part& part = params.part[p];
    const int64_t start = batch * part.out_batch + head * part.out_head + row * part.out_row;
    all.part[p][i] =
        static_cast<const unsigned char*>(part.out_gmem) + start * element_bytes(params.dtype[p]);
    lse[p] = part.lse_gmem[batch * part.lse_batch + head * part.lse_head + row * part.lse_row];
  }
#pragma unroll
  for (int p = 0; p < MERGE_PARTS; ++p) {
    if (lse[p] == -MINUS_INFINITY && with_dtype(params.dtype[p], [&]<DType DTYPE>() {
          return is_zero<DTYPE>(all.part[p][i], params.dv);
        }))
      lse[p] = MINUS_INFINITY;
    largest = fmaxf(largest, lse[p]);
  }
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < MERGE_PARTS; ++p) {
    // Equal ones are compared, because the difference of infinities would be NaN.
    const float weight = lse[p] == largest ? 1.0f : expf(lse[p] - largest);
    lse[p] = lse[p] == MINUS_INFINITY ? 0.0f : weight;
    sum += lse[p];
  }
  params.lse_gmem[index] = sum == 0.0f ? MINUS_INFINITY : largest + logf(sum);
#pragma unroll
  for (int p = 0; p < MERGE_PARTS; ++p) {
    if (p < params.parts) all.weight[p][i] = sum == 0.0f ? 0.0f : lse[p] / sum;
  }
}

// So many rows are under way together in a thread.
template <int COLUMNS>
constexpr int ROWS_AT_ONCE = 16 / COLUMNS;

// Adds COLUMNS columns of a part to those of ROWS_AT_ONCE rows of the CTA, from row `first` on and
// `step` rows apart.
template <DType DTYPE, int COLUMNS>
__device__ __forceinline__ void add_part(float (&o)[ROWS_AT_ONCE<COLUMNS>][COLUMNS],
                                         const Rows& all, int part, int first, int step,
                                         int column) {
  Columns<DTYPE, COLUMNS> x[ROWS_AT_ONCE<COLUMNS>];
  float weight[ROWS_AT_ONCE<COLUMNS>];
#pragma unroll
  for (int j = 0; j < ROWS_AT_ONCE<COLUMNS>; ++j) {
    const int row = first + j * step;
    weight[j] = row < ROWS ? all.weight[part][row] : 0.0f;
    if (weight[j] != 0.0f) x[j].load(all.part[part][row], column);
  }
#pragma unroll
  for (int j = 0; j < ROWS_AT_ONCE<COLUMNS>; ++j) {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) o[j][i] = fmaf(x[j].number(i), weight[j], o[j][i]);
  }
}

// Merges the columns of the CTA's rows, COLUMNS at a time.
template <int COLUMNS>
__device__ __forceinline__ void merge_columns(const Params& params, const Rows& all,
                                              int lane_bits) {
  // A row has 2^lane_bits threads.
  const int lane = threadIdx.x % (1 << lane_bits), step = THREADS >> lane_bits;
  for (int column = lane * COLUMNS; column < params.dv; column += COLUMNS << lane_bits) {
#pragma unroll 1
    for (int first = threadIdx.x >> lane_bits; first < ROWS;
         first += ROWS_AT_ONCE<COLUMNS> * step) {
      float o[ROWS_AT_ONCE<COLUMNS>][COLUMNS] = {};
#pragma unroll
      for (int p = 0; p < MERGE_PARTS; ++p) {
        if (p >= params.parts) break;
        with_dtype(params.dtype[p], [&]<DType DTYPE>() {
          add_part<DTYPE, COLUMNS>(o, all, p, first, step, column);
        });
      }
#pragma unroll
      for (int j = 0; j < ROWS_AT_ONCE<COLUMNS>; ++j) {
        const int row = first + j * step;
        if (row >= ROWS || all.out[row] == nullptr) continue;
        with_dtype(params.out_dtype, [&]<DType DTYPE>() {
          Columns<DTYPE, COLUMNS>::store(all.out[row], column, o[j]);
        });
      }
    }
  }
}

// Whether a thread can take twice as many columns: rows of 16-bit numbers start at multiples of 16
// bytes then.
__device__ __forceinline__ bool takes_more_columns(const Params& params) {
  const auto aligned = [](const void* gmem, int64_t batch, int64_t head, int64_t row, DType dtype) {
    const uint64_t bytes = reinterpret_cast<uint64_t>(gmem) | 2 * (batch | head | row);
    return dtype == DType::F32 || bytes % 16 == 0;
  };
  bool all =
      params.dv % (2 * FEWEST_COLUMNS) == 0 &&
      aligned(params.out_gmem, params.out_batch, params.out_head, params.out_row, params.out_dtype);
#pragma unroll
  for (int p = 0; p < MERGE_PARTS; ++p) {
    if (p >= params.parts) break;
    const Part& part = params.part[p];
    all &= aligned(part.out_gmem, part.out_batch, part.out_head, part.out_row, params.dtype[p]);
  }
  return all;
}

__device__ __forceinline__ void merge_rows(const Params& params) {
  __shared__ Rows all;
  if (threadIdx.x < ROWS) find_row(params, all, threadIdx.x);
  __syncthreads();  // the rows are known, before any thread reads or writes their columns
  if (takes_more_columns(params)) {
    merge_columns<2 * FEWEST_COLUMNS>(params, all, max(params.lane_bits - 1, 0));
  } else {
    merge_columns<FEWEST_COLUMNS>(params, all, params.lane_bits);
  }
}

}  // namespace archflash::merge
