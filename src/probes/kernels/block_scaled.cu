// targets: 120f:120f
// Matrix products of a warp with block scales.
#include "common/ptx/mma_block_scaled.cuh"
#include "probes/probe.cuh"

namespace archflash::probes {

struct Operands {
  float d[4];
  uint32_t a[4], b[2];
};

__device__ __forceinline__ void write_sums(const Params& params, const float (&d)[4]) {
  for (int i = 0; i < 4; ++i) params.out[threadIdx.x * 4 + i] = __float_as_uint(d[i]);
}

// Fragments of words that `word_of` makes of their numbers, and the sums of other probes.
template <class WordOf>
__device__ __forceinline__ Operands operands(const WordOf& word_of) {
  const int lane = threadIdx.x;
  Operands x;
  for (int i = 0; i < 4; ++i) {
    x.a[i] = word_of(lane * 4 + i);
    x.d[i] = static_cast<float>(number(5000 + lane * 4 + i));
  }
  for (int i = 0; i < 2; ++i) x.b[i] = word_of(500 + lane * 2 + i);
  return x;
}

// Four scales near 1 that differ from lane to lane and from byte to byte.
__device__ __forceinline__ uint32_t scales(int first, int one, int step) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i)
    word |= static_cast<uint32_t>(one + step * (number(first + threadIdx.x * 4 + i) / 4)) << 8 * i;
  return word;
}

__device__ __forceinline__ void mma_mxf8(const Params& params) {
  Operands x = operands([](int word) { return numbers<DType::E4M3>(4 * word); });
  constexpr ptx::ScalePlace PLACE{.a_byte = 2, .a_pair = 1, .b_byte = 3, .b_lane = 2};
  ptx::mma_mxf8_m16n8k32<DType::E4M3, DType::E4M3, PLACE>(
      x.d, x.a, x.b[0], x.b[1], scales(7000, 127, 1), scales(8000, 127, 1));
  write_sums(params, x.d);
}

__device__ __forceinline__ void mma_nvf4(const Params& params) {
  Operands x = operands([](int word) { return static_cast<uint32_t>(word) * 0x9E3779B1u; });
  constexpr ptx::ScalePlace PLACE{.a_pair = 1, .b_lane = 3};
  constexpr int ONE = 0x38, HALVED = 8;
  ptx::mma_nvf4_m16n8k64<PLACE>(x.d, x.a, x.b[0], x.b[1], scales(7000, ONE, HALVED),
                                scales(8000, ONE, HALVED));
  write_sums(params, x.d);
}

// How sums are rounded: the scales of the rows and columns are 2^-40 to 2^40.
__device__ __forceinline__ void mma_mxf8_rounding(const Params& params) {
  Operands x = operands([](int word) { return numbers<DType::E4M3>(4 * word); });
  ptx::mma_mxf8_m16n8k32<DType::E4M3, DType::E4M3>(x.d, x.a, x.b[0], x.b[1], scales(7000, 127, 20),
                                                   scales(8000, 123, 3));
  write_sums(params, x.d);
}

// A product in e2m1 of four groups of 16, whose scales are 2^-6 to 2^7.
__device__ __forceinline__ void mma_nvf4_rounding(const Params& params) {
  Operands x = operands([](int word) { return static_cast<uint32_t>(word) * 0x9E3779B1u; });
  for (float& sum : x.d) sum *= 3.0e5f;
  ptx::mma_nvf4_m16n8k64(x.d, x.a, x.b[0], x.b[1], scales(7000, 0x3B, 27), scales(8000, 0x39, 25));
  write_sums(params, x.d);
}

}  // namespace archflash::probes

PROBE(mma_mxf8, 32)
PROBE(mma_nvf4, 32)
PROBE(mma_mxf8_rounding, 32)
PROBE(mma_nvf4_rounding, 32)
