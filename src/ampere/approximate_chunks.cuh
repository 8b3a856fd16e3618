// What the kernels that convert inputs for approximate= share: chunks of rows, and which keys are
// read.
#pragma once

#include <cstdint>

#include "ampere/approximate_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/bfloat16.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"

namespace archflash::ampere {

constexpr int CHUNK = 8;  // neighbouring elements that a thread reads at once (16 bytes)
constexpr float LARGEST_FLOAT = 3.402823466e38f;
constexpr float LARGEST_V = 0x1p100f;  // magnitudes of V beyond it count as it

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= LARGEST_FLOAT; }

// 2^exponent, of a normal number.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// The exponent e of a magnitude in [2^e, 2^(e+1)), within [least, most].
__device__ __forceinline__ int exponent_of(float magnitude, int least, int most) {
  return min(max(static_cast<int>(__float_as_uint(magnitude) >> 23) - 127, least), most);
}

// The eight elements of a chunk.
__device__ __forceinline__ void unpack_chunk(float (&x)[CHUNK], const uint4& data, DType dtype) {
  const uint32_t words[4] = {data.x, data.y, data.z, data.w};
#pragma unroll
  for (int j = 0; j < CHUNK; ++j) {
    const uint16_t bits = static_cast<uint16_t>(words[j / 2] >> (j % 2 * 16));
    x[j] = dtype == DType::F16 ? ptx::cvt_f32_f16(bits)
                               : __uint_as_float(device::float_bits_of_bfloat16(bits));
  }
}

// Calls use(x, row) with a chunk of every step-th row from `first` to `end`, READS of which are
// loaded together. at(row) is the chunk's address.
template <int READS, class At, class Use>
__device__ __forceinline__ void for_chunks(int64_t first, int64_t end, int64_t step, DType dtype,
                                           const At& at, const Use& use) {
  for (int64_t row = first; row < end; row += READS * step) {
    uint4 data[READS];
#pragma unroll
    for (int i = 0; i < READS; ++i) {
      data[i] = make_uint4(0, 0, 0, 0);
      if (row + i * step < end) data[i] = *reinterpret_cast<const uint4*>(at(row + i * step));
    }
#pragma unroll
    for (int i = 0; i < READS; ++i) {
      if (row + i * step >= end) break;
      float x[CHUNK];
      unpack_chunk(x, data[i], dtype);
      use(x, row + i * step);
    }
  }
}

// The keys of a batch that some query sees lie between these.
struct SeenKeys {
  int begin, end;

  __device__ __forceinline__ SeenKeys(const ConvertParams& params, int batch) {
    const AttentionParams& call = params.call;
    if (call.cu_seqlens_k_gmem != nullptr) {
      begin = 0;
      end = device::sequence_start(call.cu_seqlens_k_gmem, call.batch, call.nk);
    } else {
      const device::Work work{
          .batch_head = batch * call.heads_q, .first_row = 0, .nq = call.nq, .nk = call.nk};
      const device::VisibleKeys visible = device::find_visible_keys(call, work);
      begin = visible.begin();
      end = max(0, visible.end(call.nq));
    }
  }
};

}  // namespace archflash::ampere
