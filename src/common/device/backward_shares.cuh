// The shares of dK and dV of CTAs that share out the query rows or heads of a tile of keys, added
// up: the kernel behind the main one. The order of the sum is fixed.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/backward_rows.cuh"

namespace archflash::device {

// A thread adds up 8 columns of a row of dK or dV.
template <DType DTYPE>
__device__ __forceinline__ void add_shares(const SharedGradientsParams& params) {
  const int64_t number = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (number >= params.all_chunks) return;
  const int64_t row_of_all = number / params.chunks;
  const int chunk_of_row = static_cast<int>(number % params.chunks);
  const bool of_dk = chunk_of_row < params.d_chunks;
  const int chunk = of_dk ? chunk_of_row : chunk_of_row - params.d_chunks;
  const int columns = 8 * (of_dk ? params.d_chunks : params.chunks - params.d_chunks);
  const int64_t head_of_all = row_of_all / params.nk;
  const auto row = static_cast<int>(row_of_all % params.nk);
  const int64_t head_floats = static_cast<int64_t>(params.nk) * columns;
  const float* share_gmem = (of_dk ? params.dk_shares_gmem : params.dv_shares_gmem) +
                            head_of_all * params.shares * head_floats +
                            static_cast<int64_t>(row) * columns + 8 * chunk;
  float x[8] = {};
  for (int share = 0; share < params.shares; ++share, share_gmem += head_floats) {
    const float4* chunk_gmem = reinterpret_cast<const float4*>(share_gmem);
    const float4 low = chunk_gmem[0], high = chunk_gmem[1];
    x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
    x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
  }
  const GradientParams& gradient = of_dk ? params.dk : params.dv;
  const int64_t start = head_of_all / params.heads_kv * gradient.batch +
                        head_of_all % params.heads_kv * gradient.head + row * gradient.row +
                        8 * chunk;
  store_gradient_chunk<DTYPE>(gradient, start, x);
}

}  // namespace archflash::device
