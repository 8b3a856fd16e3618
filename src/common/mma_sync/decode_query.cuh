// Q of a decoding call (decode_fwd.cuh): the fragments of its 16 rows, and what a CTA knows of the
// call.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/kv_cache.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/decode_config.cuh"
#include "common/mma_sync/decode_params.h"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cvt.cuh"

namespace archflash::mma_sync {

// What a CTA knows besides: which share of its tile's keys it has, out of how many.
struct DecodeContext : CacheContext {
  int share, shares;
};

// Row `row_of_tile` of the CTA's tile.
template <class C>
__device__ __forceinline__ device::FewRow few_row(const AttentionParams& params,
                                                  const CacheContext& cta, int row_of_tile) {
  if constexpr (C::PLAIN) {
    const int first_head = static_cast<int>(blockIdx.y) * cta.packed_heads.count;
    return device::FewRow(cta.packed_heads, static_cast<int>(blockIdx.x), first_head, params.nq,
                          row_of_tile);
  } else {
    return device::FewRow(params, cta.packed_heads, cta.work, row_of_tile);
  }
}

// The fragments a of the 16 query rows, for each 16 columns.
template <class C>
struct DecodeQuery {
  static constexpr int STEPS = C::HEAD_DIM / 16;
  uint32_t rmem[C::Q_IN_REGISTERS ? STEPS : 1][4];
  const uint4* steps_smem;  // without Q_IN_REGISTERS: those of this lane, 32 from step to step
  // What a score has to be multiplied by, for the two rows of this lane. bf16 has numbers that fp16
  // has not, so that rows of Q are scaled by powers of two before they are multiplied with an FP8
  // cache: the largest number of a row is then at least 2^14.
  float scale[2];

  // Reads the rows from global memory; zeros for rows and columns that do not exist. Each warp does
  // it for itself; what goes to shared memory is complete after the next barrier of the CTA.
  __device__ __forceinline__ DecodeQuery(const AttentionParams& params, const CacheContext& cta,
                                         unsigned char* shared) {
    const int lane = threadIdx.x % 32;
    uint32_t all[STEPS][4];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const device::FewRow row = few_row<C>(params, cta, lane / 4 + 8 * r);
      const uint16_t* q_gmem = static_cast<const uint16_t*>(params.q_gmem) +
                               row.batch * params.q_batch + row.head * params.q_head +
                               row.packed * params.q_row;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) load_step(all[step], r, q_gmem, step, row, params.d);
      scale[r] = 1.0f;
      if constexpr (C::FP8_CACHE && C::DTYPE == DType::BF16) scale_row(all, r);
    }
    if constexpr (C::Q_IN_REGISTERS) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) rmem[step][i] = all[step][i];
      }
    } else {
      uint4* steps = reinterpret_cast<uint4*>(shared + C::Q_SMEM) + lane;
      steps_smem = steps;
      const int warp = threadIdx.x / 32;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const uint32_t (&q)[4] = all[step];
        if (step % C::WARPS == warp) steps[32 * step] = make_uint4(q[0], q[1], q[2], q[3]);
      }
    }
  }

  __device__ __forceinline__ void get(uint32_t (&q_rmem)[4], int step) const {
    if constexpr (C::Q_IN_REGISTERS) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q_rmem[i] = rmem[step][i];
    } else {
      const uint4 q = steps_smem[32 * step];
      q_rmem[0] = q.x, q_rmem[1] = q.y, q_rmem[2] = q.z, q_rmem[3] = q.w;
    }
  }

 private:
  // Row number r of this lane, 16 columns from 16 * step on.
  __device__ __forceinline__ static void load_step(uint32_t (&q)[4], int r, const uint16_t* q_gmem,
                                                   int step, const device::FewRow& row,
                                                   int columns) {
    const int lane = threadIdx.x % 32;
    if constexpr (C::FP8_CACHE) {
      const int column = 16 * step + 4 * (lane % 4);
      uint2 four = {0, 0};
      if (row.wanted && column < columns) four = *reinterpret_cast<const uint2*>(q_gmem + column);
      q[r] = __byte_perm(four.x, four.y, 0x5410);
      q[2 + r] = __byte_perm(four.x, four.y, 0x7632);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 16 * step + 8 * i + 2 * (lane % 4);
        q[2 * i + r] = 0;
        if (row.wanted && column < columns)
          q[2 * i + r] = *reinterpret_cast<const uint32_t*>(q_gmem + column);
      }
    }
  }

  // Makes fp16 of row number r of this lane, which is bf16.
  __device__ __forceinline__ void scale_row(uint32_t (&all)[STEPS][4], int r) {
    float largest = 0.0f;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = r; i < 4; i += 2) {
        largest = fmaxf(largest, fabsf(__uint_as_float(all[step][i] << 16)));
        largest = fmaxf(largest, fabsf(__uint_as_float(all[step][i] & 0xFFFF0000u)));
      }
    }
    largest = fmaxf(largest, __shfl_xor_sync(device::FULL_WARP, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(device::FULL_WARP, largest, 2));
    // Exponents with their bias of 127. Infinity and NaN stay what they are without a factor.
    const int exponent = static_cast<int>(__float_as_uint(largest) >> 23);
    const int up = exponent == 255 ? 127 : min(127 + 14 - (exponent - 127), 253);
    const float factor = __uint_as_float(static_cast<uint32_t>(up) << 23);
    scale[r] = __uint_as_float(static_cast<uint32_t>(254 - up) << 23);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = r; i < 4; i += 2) {
        uint32_t& pair = all[step][i];
        pair = ptx::cvt_rn_x2_f32<DType::F16>(__uint_as_float(pair << 16) * factor,
                                              __uint_as_float(pair & 0xFFFF0000u) * factor);
      }
    }
  }
};

}  // namespace archflash::mma_sync
