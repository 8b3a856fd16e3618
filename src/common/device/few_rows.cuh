// What kernels for few query rows write where a row ends: a share of the keys leaves partial
// results for the combining kernel, and the rows of packed heads lie apart. C is a kernel's Config
// with M_TILES = 1 (see online_softmax.cuh).
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/quad.cuh"
#include "common/partials.h"
#include "common/ptx/cvt.cuh"

namespace archflash::device {

// Where row `row_of_tile` of a tile lies.
struct FewRow {
  int batch, head;
  int row;         // of its sequence
  int64_t packed;  // of its tensor
  bool wanted;     // it belongs to a head and a sequence

  __device__ __forceinline__ FewRow(const AttentionParams& params, const PackedHeads& packed_heads,
                                    const Work& work, int row_of_tile)
      : batch(work.batch_head / params.heads_q),
        row(work.first_row + packed_heads.row(row_of_tile)) {
    const int head_of_tile = packed_heads.head(row_of_tile);
    wanted = head_of_tile < packed_heads.count && row < work.nq;
    head = work.batch_head % params.heads_q + (wanted ? head_of_tile : 0);
    packed = sequence_start(params.cu_seqlens_q_gmem, batch, params.nq) + row;
  }
  // Without cu_seqlens, of a tile that has all `nq` rows of its heads.
  __device__ __forceinline__ FewRow(const PackedHeads& packed_heads, int batch, int first_head,
                                    int nq, int row_of_tile)
      : batch(batch), row(packed_heads.row(row_of_tile)), packed(row) {
    const int head_of_tile = packed_heads.head(row_of_tile);
    wanted = head_of_tile < packed_heads.count && row < nq;
    head = first_head + (wanted ? head_of_tile : 0);
  }
  __device__ __forceinline__ int64_t lse_index(const AttentionParams& params) const {
    return batch * params.lse_batch + head * params.lse_head + packed;
  }
};

// Writes a warp's rows and their ends for the combining kernel. split: the number of the share.
template <class C, class Flag>
__device__ __forceinline__ void store_partials(const Outputs<C>& o_rmem,
                                               const RowState<C, Flag>& state,
                                               const AttentionParams& params,
                                               const Partials& partials,
                                               const PackedHeads& packed_heads, const Work& work,
                                               int split, int warp_row) {
  static_assert(C::M_TILES == 1);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_of_quad(state.sum[0][r]);
    const FewRow row(params, packed_heads, work, warp_row + lane / 4 + 8 * r);
    if (!row.wanted) continue;
    const int64_t index = partials.index(split, row.lse_index(params));
    if (lane % 4 == 0) partials.ends_gmem[index] = {state.base[0][r], sum};
    if (sum == 0.0f) continue;  // the combining kernel does not read the outputs
    float* row_gmem = partials.rows_gmem + index * params.dv;
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      if (column < params.dv) {
        *reinterpret_cast<float2*>(row_gmem + column) = {o_rmem[0][n][2 * r],
                                                         o_rmem[0][n][2 * r + 1]};
      }
    }
  }
}

// Divides a warp's outputs by the row sums and writes them, and the LSE where it is asked for, for
// rows of packed heads.
template <class C, class Flag>
__device__ __forceinline__ void store_packed_out(const Outputs<C>& o_rmem,
                                                 const RowState<C, Flag>& state,
                                                 const AttentionParams& params,
                                                 const PackedHeads& packed_heads, const Work& work,
                                                 int warp_row) {
  static_assert(C::M_TILES == 1);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const FewRow row(params, packed_heads, work, warp_row + lane / 4 + 8 * r);
    const RowEnd end = finish_lane_row<C>(state, 0, r, load_sink(params, row.head));
    if (!row.wanted) continue;
    if (params.lse_gmem != nullptr && lane % 4 == 0)
      params.lse_gmem[row.lse_index(params)] = end.lse;
    uint16_t* row_gmem = static_cast<uint16_t*>(params.out_gmem) + row.batch * params.out_batch +
                         row.head * params.out_head + row.packed * params.out_row;
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      const float* o = &o_rmem[0][n][2 * r];
      if (column < params.dv) {
        *reinterpret_cast<uint32_t*>(row_gmem + column) =
            ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * end.factor, o[1] * end.factor);
      }
    }
  }
}

// Marks the LSEs of a warp's rows that see lowest scores only (lowest_rows.cuh), behind the others.
template <class C, class Flag>
__device__ __forceinline__ void store_lowest(const RowState<C, Flag>& state,
                                             const AttentionParams& params,
                                             const PackedHeads& packed_heads, const Work& work,
                                             int warp_row) {
  static_assert(C::M_TILES == 1);
  if (params.lse_gmem == nullptr) return;
  const int thread = threadIdx.x, lane = thread % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float keys = sum_of_quad(state.sum[0][r]);
    if (state.base[0][r] != LOWEST_LOG2 || lane % 4 != 0) continue;
    const FewRow row(params, packed_heads, work, warp_row + lane / 4 + 8 * r);
    if (row.wanted && sees_lowest(state.base[0][r], load_sink(params, row.head)))
      params.lse_gmem[row.lse_index(params)] = lse_of_lowest(keys);
  }
}

}  // namespace archflash::device
