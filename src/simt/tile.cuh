// The parts of the simt kernel: element types, the lane map, loads into shared memory, and the two
// products.
#pragma once

#include <cstdint>

#include "common/device/bfloat16.cuh"
#include "common/dtype.h"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"
#include "simt/config.cuh"

namespace archflash::simt {

constexpr unsigned FULL_WARP = 0xFFFFFFFFu;

template <DType DTYPE>
struct ElementOf {
  using Type = uint16_t;  // fp16 and bf16 travel as bits
};
template <>
struct ElementOf<DType::F32> {
  using Type = float;
};

template <DType DTYPE>
__device__ __forceinline__ float half_to_float(uint16_t bits) {
  if constexpr (DTYPE == DType::F16) return ptx::cvt_f32_f16(bits);
  return __uint_as_float(device::float_bits_of_bfloat16(bits));
}

template <DType DTYPE>
__device__ __forceinline__ uint16_t float_to_half(float x) {
  if constexpr (DTYPE == DType::F16) return ptx::cvt_rn_f16_f32(x);
  return device::bfloat16_of_float_bits(__float_as_uint(x));
}

// Where a lane stands in its warp's LANE_ROWS x LANE_COLS grid. Bit 0 of the lane number is bit 0
// of the row; the next bits are the column; bit 4 is bit 1 of the row if there are four rows. Note:
// this order halves the shared-memory passes of a 16-byte load from four to two, which happens when
// lanes t and t^1 (for K and V), or t and t^2 (for Q and P), read the same address.
// Construct a Lane where it is used and let it go: addresses kept across the products would cost
// registers.
template <class C>
struct Lane {
  int warp_row;  // first row of the warp in the CTA's tile
  int row;       // [0, LANE_ROWS)
  int col;       // [0, LANE_COLS)

  __device__ __forceinline__ Lane() {
    const int thread = ptx::mov_tid_x_volatile();
    warp_row = thread / 32 * C::WARP_ROWS;
    row = (thread & 1) | (C::LANE_ROWS == 4 ? (thread & 16) >> 3 : 0);
    col = thread >> 1 & (C::LANE_COLS - 1);
  }

  // Combines x over the lanes that hold the same rows as this lane.
  template <class Combine>
  static __device__ __forceinline__ float reduce_cols(float x, Combine combine) {
#pragma unroll
    for (int mask = 2; mask <= C::LANE_COLS; mask *= 2) {
      // mutants: butterfly-of-whole-warp (tests/sim/tags.py)
      x = combine(x, __shfl_xor_sync(FULL_WARP, x, mask));
    }
    return x;
  }
};

// What a thread holds of a block's scores, or of P, and of the outputs.
template <class C>
using Scores = float[C::THREAD_ROWS][C::THREAD_KEYS];
template <class C>
using Outputs = float[C::THREAD_ROWS][4 * C::OUT_GROUPS];

// Starts the copy of rows [0, ROWS) of `rows_gmem` to shared memory as fp32. Rows before `begin`
// and from `end` on and columns from `columns` on become zeros, so that memory beyond the end of a
// sequence never matters. fp32 is copied asynchronously: readers need copies_wait_all() and a
// barrier. 16-bit inputs are loaded, converted and stored before this returns: readers need a
// barrier.
template <class C, int ROWS, int PITCH>
__device__ __forceinline__ void start_load(float* tile_smem /* (ROWS, PITCH) */,
                                           const typename ElementOf<C::DTYPE>::Type* rows_gmem,
                                           int64_t row_stride, int begin, int end, int columns) {
  using Element = typename ElementOf<C::DTYPE>::Type;
  constexpr int CHUNK = 16 / sizeof(Element);
  constexpr int CHUNKS_PER_ROW = C::HEAD_DIM / CHUNK;
  constexpr int ROWS_PER_STEP = C::THREADS / CHUNKS_PER_ROW;
  constexpr int STEPS = ROWS / ROWS_PER_STEP;
  static_assert(STEPS * ROWS_PER_STEP == ROWS && ROWS_PER_STEP * CHUNKS_PER_ROW == C::THREADS,
                "threads must tile the rows");

  // The volatile read keeps the addresses below out of registers during the products.
  const int thread = ptx::mov_tid_x_volatile();
  const int row = thread / CHUNKS_PER_ROW;
  const int column = thread % CHUNKS_PER_ROW * CHUNK;
  // Rows to copy: from the one to the other, counted from `row` on.
  const int first = begin - row, behind = column < columns ? end - row : 0;
  const Element* source = rows_gmem + row * row_stride + column;
  float* target = tile_smem + row * PITCH + column;

  if constexpr (C::DTYPE == DType::F32) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const bool valid = step * ROWS_PER_STEP >= first && step * ROWS_PER_STEP < behind;
      ptx::copy_16_bytes_async(target + step * ROWS_PER_STEP * PITCH, valid ? source : rows_gmem,
                               valid);
      source += ROWS_PER_STEP * row_stride;
    }
  } else {
    uint4 raw_rmem[STEPS];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const bool valid = step * ROWS_PER_STEP >= first && step * ROWS_PER_STEP < behind;
      raw_rmem[step] =
          valid ? __ldg(reinterpret_cast<const uint4*>(source)) : make_uint4(0, 0, 0, 0);
      source += ROWS_PER_STEP * row_stride;
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const uint32_t words[4] = {raw_rmem[step].x, raw_rmem[step].y, raw_rmem[step].z,
                                 raw_rmem[step].w};
      float x[CHUNK];
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) {
        x[i] = half_to_float<C::DTYPE>(static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16)));
      }
      float4* store = reinterpret_cast<float4*>(target + step * ROWS_PER_STEP * PITCH);
      store[0] = make_float4(x[0], x[1], x[2], x[3]);
      store[1] = make_float4(x[4], x[5], x[6], x[7]);
    }
  }
}

__device__ __forceinline__ void load_4(float (&x)[4], const float* x_smem) {
  const float4 vector = *reinterpret_cast<const float4*>(x_smem);
  x[0] = vector.x, x[1] = vector.y, x[2] = vector.z, x[3] = vector.w;
}

// S = Q K^T over `columns` columns. s_rmem[i][j] belongs to row i * LANE_ROWS + lane.row of the
// warp and to key j * LANE_COLS + lane.col of the block. Even and odd columns have separate sums:
// shorter chains round less, and ptxas can place an accumulator in the register bank that its
// operands do not use (a 16-byte load puts column e into a register of parity e % 2).
template <class C>
__device__ __forceinline__ void multiply_columns(Scores<C>& s_rmem,
                                                 const float* q_smem /* this lane's first row */,
                                                 const float* k_smem /* this lane's first key */,
                                                 int columns) {
  Scores<C> even_rmem = {};
  Scores<C> odd_rmem = {};
#pragma unroll 1
  for (int column = 0; column < columns; column += C::D_STEP) {
#pragma unroll
    for (int step = 0; step < C::D_STEP; step += 4) {
      float q[C::THREAD_ROWS][4];
#pragma unroll
      for (int i = 0; i < C::THREAD_ROWS; ++i)
        load_4(q[i], q_smem + i * C::LANE_ROWS * C::QK_PITCH + step);
#pragma unroll
      for (int j = 0; j < C::THREAD_KEYS; ++j) {
        float k[4];
        load_4(k, k_smem + j * C::LANE_COLS * C::QK_PITCH + step);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int i = 0; i < C::THREAD_ROWS; ++i) {
            float& sum = e % 2 == 0 ? even_rmem[i][j] : odd_rmem[i][j];
            sum = fmaf(q[i][e], k[e], sum);
          }
        }
      }
    }
    q_smem += C::D_STEP;
    k_smem += C::D_STEP;
  }
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < C::THREAD_KEYS; ++j) s_rmem[i][j] = even_rmem[i][j] + odd_rmem[i][j];
  }
}

// S = Q K^T over the first d columns, in one sum or, with SHORT_SUMS, in sums of SUM_COLUMNS.
template <class C>
__device__ __forceinline__ void multiply_qk(Scores<C>& s_rmem, const float* q_smem,
                                            const float* k_smem, int d) {
  if constexpr (!C::SHORT_SUMS) {
    multiply_columns<C>(s_rmem, q_smem, k_smem, d);
  } else {
    multiply_columns<C>(s_rmem, q_smem, k_smem, min(d, C::SUM_COLUMNS));
#pragma unroll 1
    for (int first = C::SUM_COLUMNS; first < d; first += C::SUM_COLUMNS) {
      Scores<C> more_rmem;
      multiply_columns<C>(more_rmem, q_smem + first, k_smem + first,
                          min(d - first, C::SUM_COLUMNS));
#pragma unroll
      for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < C::THREAD_KEYS; ++j) s_rmem[i][j] += more_rmem[i][j];
      }
    }
  }
}

// PV += P V over P_KEYS keys. pv_rmem[i][4 * n + c] belongs to row i * LANE_ROWS + lane.row of the
// warp and to column 4 * (n * LANE_COLS + lane.col) + c. With SHORT_SUMS the even and the odd keys
// have separate sums, which are added at the end. SELECTS: a P of 0 adds nothing, whatever V is.
template <class C, bool SELECTS = false>
__device__ __forceinline__ void multiply_pv(Outputs<C>& pv_rmem,
                                            const float* p_smem /* this lane's first row */,
                                            const float* v_smem /* this lane's first column */) {
  Outputs<C> even_rmem = {};  // unused without SHORT_SUMS
  Outputs<C> odd_rmem = {};
#pragma unroll 1
  for (int key = 0; key < C::P_KEYS; key += C::KEY_STEP) {
#pragma unroll
    for (int step = 0; step < C::KEY_STEP; step += 4) {
      float p[C::THREAD_ROWS][4];
#pragma unroll
      for (int i = 0; i < C::THREAD_ROWS; ++i)
        load_4(p[i], p_smem + i * C::LANE_ROWS * C::P_PITCH + step);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        auto& sum_rmem = !C::SHORT_SUMS ? pv_rmem : e % 2 == 0 ? even_rmem : odd_rmem;
#pragma unroll
        for (int n = 0; n < C::OUT_GROUPS; ++n) {
          float v[4];
          load_4(v, v_smem + (step + e) * C::V_PITCH + 4 * n * C::LANE_COLS);
#pragma unroll
          for (int i = 0; i < C::THREAD_ROWS; ++i) {
            // Columns are innermost, and every second row has them from the last one on:
            // consecutive FFMAs then share p[i][e] or v[c], which is read once from the registers.
#pragma unroll
            for (int step_c = 0; step_c < 4; ++step_c) {
              const int c = i % 2 == 0 ? step_c : 3 - step_c;
              float& sum = sum_rmem[i][4 * n + c];
              if (!SELECTS || p[i][e] != 0.0f) sum = fmaf(p[i][e], v[c], sum);
            }
          }
        }
      }
    }
    p_smem += C::KEY_STEP;
    v_smem += C::KEY_STEP * C::V_PITCH;
  }
  if constexpr (C::SHORT_SUMS) {
#pragma unroll
    for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
      for (int c = 0; c < 4 * C::OUT_GROUPS; ++c) pv_rmem[i][c] += even_rmem[i][c] + odd_rmem[i][c];
    }
  }
}

// Writes the columns of P for P_KEYS keys to the warp's part of shared memory, which is
// (WARP_ROWS, P_PITCH): those of part number `part` of a block.
template <class C>
__device__ __forceinline__ void store_part(const Scores<C>& p_rmem, float* shared, int part) {
  constexpr int COLUMNS = C::P_KEYS / C::LANE_COLS;  // scores of a row that a thread stores
  const Lane<C> lane;
  // mutants: field-to-last-bit
  float* p_smem = shared + C::P_SMEM + (lane.warp_row + lane.row) * C::P_PITCH;
#pragma unroll
  for (int i = 0; i < C::THREAD_ROWS; ++i) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      p_smem[i * C::LANE_ROWS * C::P_PITCH + j * C::LANE_COLS + lane.col] =
          p_rmem[i][part * COLUMNS + j];
    }
  }
}

// Writes four neighbouring columns of one row.
template <DType DTYPE>
__device__ __forceinline__ void store_4(void* target_gmem, const float (&x)[4]) {
  if constexpr (DTYPE == DType::F32) {
    ptx::st_global_v4_b32(target_gmem, __float_as_uint(x[0]), __float_as_uint(x[1]),
                          __float_as_uint(x[2]), __float_as_uint(x[3]));
  } else {
    const auto pair = [](float low, float high) {
      return float_to_half<DTYPE>(low) | static_cast<uint32_t>(float_to_half<DTYPE>(high)) << 16;
    };
    ptx::st_global_v2_b32(target_gmem, pair(x[0], x[1]), pair(x[2], x[3]));
  }
}

}  // namespace archflash::simt
