// Tiles of keys of the last round in parts: the CTAs of a tile share out its query rows, so that
// SMs which would be idle have some of them. The last one adds up what all have of dK and dV, and
// writes them; so the sums always have the same order.
//
//   the other CTAs    dK, dV in fp32 -> workspace     | a warp's counter
//                                                     v
//   the last CTA      waits for the same warp of the others, adds what they have to dK and dV
//
// It waits only for CTAs with smaller numbers, which have started before it.
#pragma once

#include <cstdint>

#include "common/ptx/global_order.cuh"
#include "hopper/backward/backward_params.h"
#include "hopper/backward/backward_pipeline.cuh"

namespace archflash::hopper {

// Which tile a CTA's number stands for, and which part of it: -1: all.
struct NumberInParts {
  int number, part;
};

template <class C>
__device__ __forceinline__ NumberInParts find_part(const BackwardKernelParams& params, int number) {
  if constexpr (C::MERGES_PARTS) {
    const int behind = number - params.first_in_parts;
    if (params.parts > 0 && behind >= 0) {
      const int tile = behind / params.parts;
      return {params.first_in_parts + tile, behind - tile * params.parts};
    }
  }
  return {number, -1};
}

// Merges the parts of a tile's dK and dV, of which a thread has SUMS each. Returns whether the
// caller writes what it then has.
template <class C, int SUMS>
__device__ __forceinline__ bool merge_parts(const BackwardKernelParams& params, const CtaWork& work,
                                            float* dk, float* dv) {
  constexpr int CHUNKS = SUMS / 4;
  const int thread = ptx::mov_tid_x_volatile();
  const int part = uniform(static_cast<int>(work.part)), others = params.parts - 1;
  const int first = uniform(static_cast<int>(work.tile_in_parts)) * others;  // part of the tile
  float4* const parts_gmem = reinterpret_cast<float4*>(params.parts_gmem) + thread;
  int32_t* const done_gmem = params.parts_done_gmem + thread / 32;
  const auto chunks_of = [&](int number) {
    return parts_gmem + static_cast<int64_t>(number) * (2 * CHUNKS * C::CONSUMER_THREADS);
  };
  if (part < others) {
    float4* const own_gmem = chunks_of(first + part);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      own_gmem[2 * i * C::CONSUMER_THREADS] =
          float4{dk[4 * i], dk[4 * i + 1], dk[4 * i + 2], dk[4 * i + 3]};
      own_gmem[(2 * i + 1) * C::CONSUMER_THREADS] =
          float4{dv[4 * i], dv[4 * i + 1], dv[4 * i + 2], dv[4 * i + 3]};
    }
    __syncwarp();
    if (thread % 32 == 0) ptx::st_release_s32(done_gmem + (first + part) * C::WARPS, 1);
    return false;
  }
#pragma unroll 1
  for (int other = first; other < first + others; ++other) {
    if (thread % 32 == 0) {
      while (ptx::ld_acquire_s32(done_gmem + other * C::WARPS) == 0) {
      }
    }
    __syncwarp();
    const float4* const other_gmem = chunks_of(other);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
      const float4 x = other_gmem[2 * i * C::CONSUMER_THREADS];
      const float4 y = other_gmem[(2 * i + 1) * C::CONSUMER_THREADS];
      dk[4 * i] += x.x, dk[4 * i + 1] += x.y, dk[4 * i + 2] += x.z, dk[4 * i + 3] += x.w;
      dv[4 * i] += y.x, dv[4 * i + 1] += y.y, dv[4 * i + 2] += y.z, dv[4 * i + 3] += y.w;
    }
  }
  return true;
}

}  // namespace archflash::hopper
