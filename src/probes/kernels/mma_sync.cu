// targets: 80:80,90,100,120,ptx
// Matrix products of a warp, asynchronous copies and named barriers.
#include "common/ptx/cp_async.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/mma_sync_f16.cuh"
#include "common/ptx/mma_sync_u8.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/tf32.cuh"
#include "probes/probe.cuh"

namespace archflash::probes {

__device__ __forceinline__ void write_sums(const Params& params, const float (&d)[4]) {
  for (int i = 0; i < 4; ++i) params.out[threadIdx.x * 4 + i] = __float_as_uint(d[i]);
}

template <DType DTYPE>
__device__ __forceinline__ void multiply(const Params& params) {
  const int lane = threadIdx.x;
  float d[4];
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    a[i] = numbers<DTYPE>(lane * 8 + 2 * i);
    d[i] = static_cast<float>(number(1000 + lane * 4 + i));
  }
  for (int i = 0; i < 2; ++i) b[i] = numbers<DTYPE>(500 + lane * 4 + 2 * i);
  ptx::mma_m16n8k16<DTYPE>(d, a, b[0], b[1]);
  write_sums(params, d);
}
__device__ __forceinline__ void mma_f16(const Params& params) { multiply<DType::F16>(params); }
__device__ __forceinline__ void mma_bf16(const Params& params) { multiply<DType::BF16>(params); }

__device__ __forceinline__ void mma_tf32(const Params& params) {
  const int lane = threadIdx.x;
  float d[4];
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    a[i] = __float_as_uint(static_cast<float>(number(lane * 4 + i)));
    d[i] = static_cast<float>(number(1000 + lane * 4 + i));
  }
  for (int i = 0; i < 2; ++i)
    b[i] = __float_as_uint(static_cast<float>(number(500 + lane * 2 + i)));
  ptx::mma_m16n8k8_tf32(d, a, b[0], b[1]);
  write_sums(params, d);
}

// Sums of 16 bits, which hold these.
__device__ __forceinline__ void mma_f16_sums(const Params& params) {
  const int lane = threadIdx.x;
  uint32_t d[2], a[4], b[2];
  for (int i = 0; i < 4; ++i) a[i] = numbers<DType::F16>(lane * 8 + 2 * i);
  for (int i = 0; i < 2; ++i) {
    b[i] = numbers<DType::F16>(500 + lane * 4 + 2 * i);
    d[i] = numbers<DType::F16>(1000 + lane * 4 + 2 * i);
  }
  ptx::mma_m16n8k16_f16(d, a, b[0], b[1]);
  for (int i = 0; i < 2; ++i) params.out[lane * 2 + i] = d[i];
}

template <bool U8>
__device__ __forceinline__ void multiply_8_bits(const Params& params) {
  const int lane = threadIdx.x;
  int32_t d[4], c[4];
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    a[i] = static_cast<uint32_t>(lane * 4 + i) * 0x9E3779B1u;
    c[i] = d[i] = number(1000 + lane * 4 + i);
  }
  for (int i = 0; i < 2; ++i) b[i] = static_cast<uint32_t>(500 + lane * 2 + i) * 0x85EBCA77u;
  if constexpr (U8) {
    ptx::mma_m16n8k32_u8_s8(d, a, b[0], b[1], c);
  } else {
    ptx::mma_m16n8k32_s8(d, a, b[0], b[1]);
  }
  for (int i = 0; i < 4; ++i) params.out[lane * 4 + i] = static_cast<uint32_t>(d[i]);
}
__device__ __forceinline__ void mma_s8(const Params& params) { multiply_8_bits<false>(params); }
__device__ __forceinline__ void mma_u8_s8(const Params& params) { multiply_8_bits<true>(params); }

// How sums are rounded: a lane's first product is 1, and the others are powers of two so small that
// a sum keeps some of them only.
__device__ __forceinline__ void mma_rounding(const Params& params) {
  const int lane = threadIdx.x, group = lane / 4, quad = lane % 4;
  const auto power = [](int exponent) { return static_cast<uint32_t>(127 + exponent) << 7; };
  float d[4] = {0, 0, 1.5f, -3.0f};
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = quad == 0 && i < 2 ? power(0) | power(-8 - group - i) << 16
                              : power(-9 - group) | power(-10 - quad) << 16;
  for (int i = 0; i < 2; ++i)
    b[i] = quad == 0 && i == 0 ? power(0) | power(-9) << 16 : power(-11 + i) | power(-13) << 16;
  ptx::mma_m16n8k16<DType::BF16>(d, a, b[0], b[1]);
  write_sums(params, d);
}

// Copies with zeros behind them.
__device__ __forceinline__ void cp_async(const Params& params) {
  __shared__ __align__(16) uint32_t shared[3 * 32 * 4];
  const int lane = threadIdx.x;
  for (int i = 0; i < 12; ++i) shared[lane * 12 + i] = ~0u;
  __syncwarp();
  ptx::cp_async_cg_16(shared_address(shared + lane * 4), params.in + lane * 4);
  ptx::cp_async_commit_group();
  ptx::cp_async_cg_16(shared_address(shared + (32 + lane) * 4), params.in + (32 + lane) * 4,
                      lane % 5 * 4);
  ptx::cp_async_ca_8(shared_address(shared + (64 + lane) * 4), params.in + (64 + lane) * 4,
                     lane % 3 * 4);
  ptx::cp_async_commit_group();
  ptx::cp_async_wait_group<1>();
  for (int i = 0; i < 4; ++i) params.out[lane * 12 + i] = shared[lane * 4 + i];
  ptx::cp_async_wait_all();
  for (int i = 0; i < 4; ++i) {
    params.out[lane * 12 + 4 + i] = shared[(32 + lane) * 4 + i];
    params.out[lane * 12 + 8 + i] = shared[(64 + lane) * 4 + i];
  }
}

// Two warps hand a row of shared memory over and back by two named barriers.
__device__ __forceinline__ void named_barriers(const Params& params) {
  __shared__ uint32_t row[32];
  constexpr int FULL = 1, EMPTY = 2, THREADS = 64, TURNS = 8;
  const int lane = threadIdx.x % 32;
  for (int turn = 0; turn < TURNS; ++turn) {
    if (threadIdx.x < 32) {
      if (turn > 0) ptx::bar_sync(EMPTY, THREADS);
      row[lane] = static_cast<uint32_t>(number(turn * 32 + lane));
      ptx::bar_arrive(FULL, THREADS);
    } else {
      ptx::bar_sync(FULL, THREADS);
      params.out[turn * 32 + lane] = row[lane ^ 1];
      if (turn + 1 < TURNS) ptx::bar_arrive(EMPTY, THREADS);
    }
  }
}

}  // namespace archflash::probes

PROBE(mma_f16, 32)
PROBE(mma_bf16, 32)
PROBE(mma_tf32, 32)
PROBE(mma_f16_sums, 32)
PROBE(mma_s8, 32)
PROBE(mma_u8_s8, 32)
PROBE(mma_rounding, 32)
PROBE(cp_async, 32)
PROBE(named_barriers, 64)
