// fp32 outputs of kernels on mma.sync for 16-bit inputs: partial results that are merged later,
// each of which would otherwise be rounded (out_dtype of attention()). C is a kernel's Config.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"

namespace archflash::device {

// Divides a warp's outputs by the row sums and writes them, and the LSE where it is asked for. The
// four lanes of a row write 32 bytes at a time. warp_row is the warp's first row, counted from the
// CTA's first row.
template <class C, class Flag>
__device__ __forceinline__ void store_f32_out(const Outputs<C>& o_rmem,
                                              const RowState<C, Flag>& state,
                                              const AttentionParams& params, const Work& work,
                                              int warp_row) {
  const OutRows out(params, work, warp_row);
  const int lane = threadIdx.x % 32;
  float* out_gmem = static_cast<float*>(params.out_gmem) + out.batch * params.out_batch +
                    out.head * params.out_head + out.packed_row * params.out_row;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowEnd end = finish_lane_row<C>(state, m, r, out.sink);
      const int row = 16 * m + 8 * r + lane / 4;
      if (row >= out.rows) continue;
      float* row_gmem = out_gmem + row * params.out_row;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        const int column = 8 * n + lane % 4 * 2;
        const float* o = &o_rmem[m][n][2 * r];
        if (column < params.dv) {
          *reinterpret_cast<float2*>(row_gmem + column) = {o[0] * end.factor, o[1] * end.factor};
        }
      }
      if (params.lse_gmem != nullptr && lane % 4 == 0) out.store_lse(params, row, end.lse);
    }
  }
}

}  // namespace archflash::device
