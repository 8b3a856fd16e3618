// The end of a tile in a call of mixed lengths. Where several CTAs share out its keys, the one that
// is done last merges their results: no kernel follows for that.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/quad.cuh"
#include "common/partials.h"
#include "common/ptx/atom_global.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"
#include "hopper/cache/mixed_params.h"
#include "hopper/forward/pipeline.cuh"

namespace archflash::hopper {

// Whether a row of a tile belongs to a head and to the tile's rows.
__device__ __forceinline__ bool is_wanted(const device::PackedHeads& heads, const MixedTile& tile,
                                          int row_of_tile) {
  return heads.head(row_of_tile) < heads.count &&
         tile.first_row + heads.row(row_of_tile) < tile.end_row;
}

// Leaves a warp's rows of a share in the workspace. Returns whether those of all other shares are
// there: then outputs and state become those of all keys. The shares are merged in their order,
// whoever does it, so that the same inputs always give the same bits.
template <class C>
__device__ __forceinline__ bool merge_shares(device::Outputs<C>& o_rmem, device::RowState<C>& state,
                                             const MixedParams& params, const MixedTile& tile,
                                             int lane, int warp_row) {
  constexpr int TILES = C::HEAD_DIM_V / 8;
  const AttentionParams& attention = params.call.attention;
  const MixedTiles& tiles = params.tiles;
  bool wanted[2];
  const auto index = [&](int share, int r) {
    return static_cast<int64_t>(tile.slot + share) * C::GROUP_ROWS + warp_row + lane / 4 + 8 * r;
  };
  const auto outputs = [&](int share, int r) {
    return tiles.rows_gmem + index(share, r) * attention.dv + lane % 4 * 2;
  };
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = device::sum_of_quad(state.sum[0][r]);
    wanted[r] = is_wanted(params.call.packed_heads, tile, warp_row + lane / 4 + 8 * r);
    if (!wanted[r]) continue;
    if (lane % 4 == 0) tiles.ends_gmem[index(tile.split, r)] = {state.base[0][r], sum};
    if (sum == 0.0f) continue;  // nobody reads the outputs
    float* row_gmem = outputs(tile.split, r);
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      if (8 * n < attention.dv)
        *reinterpret_cast<float2*>(row_gmem + 8 * n) = {o_rmem[0][n][2 * r],
                                                        o_rmem[0][n][2 * r + 1]};
    }
  }
  __syncwarp();  // all lanes have stored theirs, before one of them releases it
  int before = 0;
  // One counter for each warp, at the first slot of the tile.
  if (lane == 0)
    before =
        ptx::atom_add_acq_rel_s32(tiles.done_gmem + 4 * tile.slot + warp_row / C::WARP_ROWS, 1);
  before = __shfl_sync(device::FULL_WARP, before, 0);
  __syncwarp();  // what one lane has acquired, all lanes may read
  if (!__any_sync(device::FULL_WARP, before == tile.shares - 1)) return false;
  float base[2] = {device::LOWEST, device::LOWEST}, sum[2] = {};
  const auto end_of = [&](int share, int r) {
    return wanted[r] ? tiles.ends_gmem[index(share, r)] : PartialEnd{0.0f, 0.0f};
  };
  // fmaxf drops a NaN, which a row has whose inputs were not finite: its weight is NaN below.
  for (int share = 0; share < tile.shares; ++share) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PartialEnd end = end_of(share, r);
      if (end.sum != 0.0f) base[r] = fmaxf(base[r], end.base);
    }
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o_rmem[0][n][i] = 0.0f;
  }
#pragma unroll 1
  for (int share = 0; share < tile.shares; ++share) {
    float weight[2];
    const float* row_gmem[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const PartialEnd end = end_of(share, r);
      weight[r] = end.sum == 0.0f ? 0.0f : ptx::ex2_approx_ftz(end.base - base[r]);
      sum[r] = fmaf(end.sum, weight[r], sum[r]);
      // A share in which the row sees no key has left no outputs.
      row_gmem[r] = end.sum == 0.0f ? nullptr : outputs(share, r);
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (row_gmem[r] == nullptr || 8 * n >= attention.dv) continue;
        const float2 x = *reinterpret_cast<const float2*>(row_gmem[r] + 8 * n);
        o_rmem[0][n][2 * r] = fmaf(x.x, weight[r], o_rmem[0][n][2 * r]);
        o_rmem[0][n][2 * r + 1] = fmaf(x.y, weight[r], o_rmem[0][n][2 * r + 1]);
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    state.base[0][r] = base[r];
    state.sum[0][r] = lane % 4 == 0 ? sum[r] : 0.0f;  // the four lanes of a row add theirs
  }
  return true;
}

// Writes a warp's rows of a tile of either kind through its own rows of Q's part of shared memory,
// as device::store_out() does with rows of one head.
template <class C>
__device__ __forceinline__ void store_mixed_tile(device::Outputs<C>& o_rmem,
                                                 const device::RowState<C>& state,
                                                 const MixedParams& params, const MixedTile& tile,
                                                 unsigned char* q) {
  using QTile = typename C::QTile;
  // The thread's number is read anew, so that what follows from it needs no registers meanwhile.
  const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
  const int lane = static_cast<int>(thread % 32);
  const int warp_row = static_cast<int>(thread / 32 * C::WARP_ROWS);
  unsigned char* const rows_smem = q + warp_row * QTile::ROW_BYTES;
  device::RowState<C> of_all = state;
  // All rows of packed heads are the first warpgroup's: those of the others belong to no head.
  // ptxas spills registers where a warp returns early.
  bool is_last = true;
  if (__any_sync(device::FULL_WARP, tile.shares > 1 && warp_row < C::GROUP_ROWS))
    is_last = merge_shares<C>(o_rmem, of_all, params, tile, lane, warp_row);
  const AttentionParams& attention = params.call.attention;
  const device::PackedHeads heads = heads_of(params.call, tile);
  // Where the tile's first row is of its first head. Nothing is divided or loaded for a single row.
  const auto heads_q = static_cast<unsigned>(attention.heads_q);
  const unsigned batch = static_cast<unsigned>(tile.batch_head) / heads_q;
  const int first_head = static_cast<int>(tile.batch_head - batch * heads_q);
  const int64_t first_row =
      device::sequence_start(attention.cu_seqlens_q_gmem, static_cast<int>(batch), attention.nq) +
      tile.first_row;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 8 * r + lane / 4, row_of_tile = warp_row + row;
    const bool wanted = is_wanted(heads, tile, row_of_tile);
    const int head = first_head + (wanted ? heads.head(row_of_tile) : 0);
    const device::RowEnd end =
        device::finish_lane_row<C>(of_all, 0, r, device::load_sink(attention, head));
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
      const float* o = &o_rmem[0][n][2 * r];
      *reinterpret_cast<uint32_t*>(rows_smem + QTile::offset(row, n) + lane % 4 * 4) =
          ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * end.factor, o[1] * end.factor);
    }
    if (attention.lse_gmem != nullptr && lane % 4 == 0 && wanted && is_last)
      attention.lse_gmem[head * attention.lse_head + first_row + heads.row(row_of_tile)] = end.lse;
  }
  __syncwarp();  // the warp's rows are complete before any lane reads them
  constexpr int CHUNKS = C::HEAD_DIM_V / 8;
  uint16_t* const out_gmem = static_cast<uint16_t*>(attention.out_gmem) +
                             first_head * attention.out_head + first_row * attention.out_row;
#pragma unroll 4
  for (int index = lane; index < C::WARP_ROWS * CHUNKS; index += 32) {
    const int row = index / CHUNKS, chunk = index % CHUNKS, row_of_tile = warp_row + row;
    const uint4 x = *reinterpret_cast<const uint4*>(rows_smem + QTile::offset(row, chunk));
    if (!is_wanted(heads, tile, row_of_tile) || !is_last || chunk * 8 >= attention.dv) continue;
    ptx::st_global_v4_b32(out_gmem + heads.head(row_of_tile) * attention.out_head +
                              heads.row(row_of_tile) * attention.out_row + chunk * 8,
                          x.x, x.y, x.z, x.w);
  }
}

}  // namespace archflash::hopper
