// Where a warp's rows of a tile go, and how they end.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/few_rows.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/forward/row_softmax.cuh"
#include "hopper/forward/walk.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

// Whether a consumer finds where its rows go and how they end while the last P V of a tile runs.
// With 256 columns of V that a CTA transposes itself that would spill registers.
template <class C>
consteval bool finds_ends() {
  return C::PREPARES_TILES || (C::FP8 && !C::OVERLAPS && !C::TRANSPOSES_V);
}

// What a kernel's output consists of.
template <class C>
consteval bool writes_f32() {
  if constexpr (requires { C::WRITES_F32; }) return C::WRITES_F32;
  return false;
}
template <class C>
using OutElement = std::conditional_t<writes_f32<C>(), float, uint16_t>;

// Where a warp's rows of a tile go and how they end.
template <class C>
struct TileEnd {
  OutElement<C>* out_gmem;  // of the warp's first row
  float* lse_gmem;          // likewise; null where no LSE is asked for
  int first_row;            // with STORES_BY_TMA: the warp's first row, in the tensor
  int rows;  // from the warp's first one to the end of the tile; may exceed the warp's
  // With PACKS both are counted from the warpgroup's first row of each head.
  device::RowEnd ends[2];  // of the rows lane / 4 + 8r

  TileEnd() = default;
  // v_factor: what the outputs are multiplied by.
  __device__ __forceinline__ TileEnd(const device::RowState<C>& state,
                                     const AttentionParams& params, const TileHead& at,
                                     const Tile& tile, int warp_row, float v_factor = 1.0f,
                                     const GroupHeads& groups = {}) {
    if constexpr (C::STORES_BY_TMA) {
      const int row_of_head = C::PACKS ? warp_row / C::GROUP_ROWS * groups.rows : warp_row;
      first_row = device::sequence_start(params.cu_seqlens_q_gmem, at.batch, params.nq) +
                  tile.first_row + row_of_head;
      rows = tile.end_row - tile.first_row - row_of_head;
    } else {
      lse_gmem = params.lse_gmem;
      rows = tile.end_row - tile.first_row - warp_row;
      find_places(params, at,
                  device::sequence_start(params.cu_seqlens_q_gmem, at.batch, params.nq) +
                      tile.first_row + warp_row);
    }
    const auto sink_of_row = [&](int row) {
      if (params.sinks_gmem == nullptr) return device::MINUS_INFINITY;
      const int head = groups.head(warp_row % C::GROUP_ROWS + row);
      return device::load_sink(params, at.head + min(head, groups.count - 1));
    };
    float sink;
    if constexpr (!C::PACKS) sink = device::load_sink(params, at.head);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = static_cast<int>(threadIdx.x % 32 / 4) + 8 * r;
      if constexpr (C::PACKS) sink = sink_of_row(row);
      // mutants: zeros-without-keys (tests/sim/tags.py)
      ends[r] = device::finish_lane_row<C>(state, 0, r, sink);
      if constexpr (C::FP8) ends[r].factor *= v_factor;
      // Rows of no head become zeros in Q's part: what earlier tiles have left there would decide
      // when the bases of the warp's other rows rise, and so their bits.
      if (C::PACKS && warp_row % C::GROUP_ROWS + row >= groups.filled()) ends[r].factor = 0.0f;
    }
  }

  // Finds where `row`, the warp's first one, goes. With STORES_BY_TMA only few tiles need that.
  __device__ __forceinline__ void find_places(const AttentionParams& params, const TileHead& at,
                                              int64_t row) {
    out_gmem = static_cast<OutElement<C>*>(params.out_gmem) + at.batch * params.out_batch +
               at.head * params.out_head + row * params.out_row;
    if (lse_gmem != nullptr)
      lse_gmem += at.batch * params.lse_batch + at.head * params.lse_head + row;
  }
  // Two neighbouring outputs of row r, from the first one of them on.
  __device__ __forceinline__ uint32_t pair(const float* o, int r) const {
    return ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * ends[r].factor, o[1] * ends[r].factor);
  }
  // Where a row's outputs from a column on go.
  __device__ __forceinline__ OutElement<C>* place(const AttentionParams& params, int row,
                                                  int column) const {
    return out_gmem + row * params.out_row + column;
  }
  // Writes 8 columns of a row to their place.
  __device__ __forceinline__ void store(const AttentionParams& params, uint16_t* place, int row,
                                        int column, const uint32_t (&x)[4]) const {
    if (row < rows && column < params.dv) ptx::st_global_v4_b32(place, x[0], x[1], x[2], x[3]);
  }
  __device__ __forceinline__ void store_lse() const {
    const int lane = threadIdx.x % 32;
    if (lse_gmem == nullptr || lane % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 8 * r + lane / 4;
      if (row < rows) lse_gmem[row] = ends[r].lse;
    }
  }
};

}  // namespace archflash::hopper
