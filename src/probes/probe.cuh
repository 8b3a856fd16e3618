// What probes share. A probe is a kernel of one CTA, or of a few, that tries one instruction and
// writes what came of it; `archflash verify` compares these bits with stored ones. The numbers are
// small integers, whose products and sums are exact, so that all GPUs give the same bits; probes
// of how sums are rounded say so.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/kernel_entry.cuh"
#include "common/ptx/cvt.cuh"
#include "common/tensor_map.h"

namespace archflash::probes {

struct Params {
  const uint32_t* in;  // a tensor of 16-bit integers, which `map` is of
  uint32_t* out;
  int32_t columns, rows;  // of the box that is copied
  int32_t column, row;    // where it lies in the tensor
  TensorMap map;
};

// Integers from -8 to 7 that look random, which every type of a matrix product holds.
__device__ __forceinline__ int number(int index) {
  uint32_t x = static_cast<uint32_t>(index) * 0x9E3779B1u;
  x ^= x >> 15;
  x *= 0x85EBCA77u;
  return static_cast<int>(x >> 28) - 8;
}

// A number's bits in a type of 8 or 16 bits.
template <DType DTYPE>
__device__ __forceinline__ uint32_t bits_of(float x) {
  if constexpr (DTYPE == DType::F16) {
    return ptx::cvt_rn_f16_f32(x);
  } else if constexpr (DTYPE == DType::BF16) {
    return __float_as_uint(x) >> 16;
  } else {
    return ptx::cvt_rn_satfinite_x2_f32<DTYPE>(x, 0) & 0xFF;
  }
}

// The 32 bits that hold the numbers from `index` on.
template <DType DTYPE>
constexpr int IN_WORD = DTYPE == DType::F16 || DTYPE == DType::BF16 ? 2 : 4;
template <DType DTYPE>
__device__ __forceinline__ uint32_t numbers(int index) {
  constexpr int COUNT = IN_WORD<DTYPE>;
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    word |= bits_of<DTYPE>(static_cast<float>(number(index + i))) << 32 / COUNT * i;
  return word;
}

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

}  // namespace archflash::probes

#define PROBE(NAME, THREADS) ARCHFLASH_ENTRY(probe_##NAME, (THREADS, 1), archflash::probes::NAME)
