// targets: 89:89,90,100,120,ptx
// Matrix products of a warp in 8 bits, and conversions to 8 bits and back.
#include "common/ptx/mma_sync.cuh"
#include "probes/probe.cuh"

namespace archflash::probes {

__device__ __forceinline__ void write_sums(const Params& params, const float (&d)[4]) {
  for (int i = 0; i < 4; ++i) params.out[threadIdx.x * 4 + i] = __float_as_uint(d[i]);
}

template <DType A, DType B>
__device__ __forceinline__ void multiply(const Params& params) {
  const int lane = threadIdx.x;
  float d[4];
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) {
    a[i] = numbers<A>(lane * 16 + 4 * i);
    d[i] = static_cast<float>(number(5000 + lane * 4 + i));
  }
  for (int i = 0; i < 2; ++i) b[i] = numbers<B>(2000 + lane * 8 + 4 * i);
  ptx::mma_m16n8k32<A, B>(d, a, b[0], b[1]);
  write_sums(params, d);
}
__device__ __forceinline__ void mma_e4m3(const Params& params) {
  multiply<DType::E4M3, DType::E4M3>(params);
}
__device__ __forceinline__ void mma_e5m2(const Params& params) {
  multiply<DType::E5M2, DType::E5M2>(params);
}
__device__ __forceinline__ void mma_e4m3_e5m2(const Params& params) {
  multiply<DType::E4M3, DType::E5M2>(params);
}

// How sums are rounded: one product is 256, the others are powers of two down to 2^-12.
__device__ __forceinline__ void mma_e4m3_rounding(const Params& params) {
  const int lane = threadIdx.x, group = lane / 4, quad = lane % 4;
  const auto power = [](int exponent) { return static_cast<uint32_t>(7 + exponent) << 3; };
  float d[4] = {0, 1.0f, 384.0f, -100.25f};
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i)
    a[i] = (quad == 0 && i < 2 ? power(4) : power(-6 + group % 3)) | power(-5 + i) << 8 |
           power(-6) << 16 | power(-quad) << 24;
  for (int i = 0; i < 2; ++i)
    b[i] = (quad == 0 && i == 0 ? power(4) : power(-5)) | power(-6 + group % 4) << 8 |
           power(-4) << 16 | power(-3 - i) << 24;
  ptx::mma_m16n8k32<DType::E4M3, DType::E4M3>(d, a, b[0], b[1]);
  write_sums(params, d);
}

__device__ __forceinline__ void conversions(const Params& params) {
  const int lane = threadIdx.x;
  const float x = static_cast<float>(number(lane)) * 0.3f, y = static_cast<float>(lane * lane);
  const uint16_t e4m3 = ptx::cvt_rn_satfinite_x2_f32<DType::E4M3>(x, y);
  params.out[lane] = e4m3 | ptx::cvt_rn_satfinite_x2_f32<DType::E5M2>(x, 100 * y) << 16;
  params.out[32 + lane] = ptx::cvt_rn_f16x2_e4m3x2(e4m3);
}

}  // namespace archflash::probes

PROBE(mma_e4m3, 32)
PROBE(mma_e5m2, 32)
PROBE(mma_e4m3_e5m2, 32)
PROBE(mma_e4m3_rounding, 32)
PROBE(conversions, 32)
