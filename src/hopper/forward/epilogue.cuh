// The end of a tile: its outputs are scaled, rounded and written, from registers or through Q's
// part of shared memory.
#pragma once

#include <cstdint>

#include "common/device/descales.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/quad.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/mov.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma_store.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/forward/row_softmax.cuh"
#include "hopper/forward/tile_end.cuh"
#include "hopper/forward/walk.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

// Writes a warp's rows of outputs from registers: the four lanes of a row exchange their columns,
// and each lane writes 16 bytes.
template <class C>
__device__ __forceinline__ void store_by_quads(const device::Outputs<C>& o_rmem,
                                               const TileEnd<C>& end,
                                               const AttentionParams& params) {
  static_assert(C::HEAD_DIM_V % 32 == 0, "the lanes of a quad exchange 32 columns at a time");
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 8 * r + lane / 4, first_column = lane % 4 * 8;
    uint16_t* place = end.place(params, row, first_column);
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; n += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = end.pair(&o_rmem[0][n + i][2 * r], r);
      device::transpose_in_quad(words);
      end.store(params, place + 8 * n, row, first_column + 8 * n, words);
    }
  }
}

// Puts a warp's rows of outputs into `rows`, its own rows of Q's part of shared memory.
template <class C>
__device__ __forceinline__ void put_into_q(const device::Outputs<C>& o_rmem, const TileEnd<C>& end,
                                           unsigned char* rows, int lane) {
  using QTile = typename C::QTile;
  const uint32_t row_smem =
      static_cast<uint32_t>(__cvta_generic_to_shared(rows)) + QTile::offset(lane % 16, lane / 16);
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
    const float* left = o_rmem[0][n];
    const float* right = o_rmem[0][n + 1];
    const uint32_t x[4] = {end.pair(left, 0), end.pair(left + 2, 1), end.pair(right, 0),
                           end.pair(right + 2, 1)};
    ptx::stmatrix_x4(QTile::advance(row_smem, n), x);
  }
}

// Writes a warp's rows of outputs through `rows`, its own rows of Q's part of shared memory or of
// as much of V's, and calls hand_back() before it writes to global memory: its fence would wait for
// those stores.
template <class C, class HandBack>
__device__ __forceinline__ void store_through_q(const device::Outputs<C>& o_rmem,
                                                const TileEnd<C>& end,
                                                const AttentionParams& params, unsigned char* rows,
                                                const HandBack& hand_back) {
  using QTile = typename C::QTile;
  const int lane = threadIdx.x % 32;
  put_into_q<C>(o_rmem, end, rows, lane);
  // mutants: zeros-without-keys (tests/sim/tags.py)
  __syncwarp();  // the warp's rows are complete before any lane reads them
  constexpr int CHUNKS = C::HEAD_DIM_V / 8;
  constexpr int COUNT = C::WARP_ROWS * CHUNKS / 32;  // of a lane
  uint32_t chunks[COUNT][4];
  const auto row = [&](int i) { return (lane + 32 * i) / CHUNKS; };
  const auto chunk = [&](int i) { return (lane + 32 * i) % CHUNKS; };
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    // mutants: zeros-without-keys
    const uint4 x = *reinterpret_cast<const uint4*>(rows + QTile::offset(row(i), chunk(i)));
    chunks[i][0] = x.x, chunks[i][1] = x.y, chunks[i][2] = x.z, chunks[i][3] = x.w;
  }
  hand_back();
  uint16_t* place = end.place(params, row(0), 8 * chunk(0));
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if constexpr (32 % CHUNKS != 0) place = end.place(params, row(i), 8 * chunk(i));
    end.store(params, place, row(i), 8 * chunk(i), chunks[i]);
    place += 32 / CHUNKS * params.out_row;  // else to the same column
  }
}

// With PACKS: where a row of a warp lies: the head, counted from the tile's first one, and the row,
// counted from TileEnd::first_row.
struct PackedRow {
  int head, row;
  bool wanted;  // it belongs to a head and a sequence

  template <class C>
  __device__ __forceinline__ PackedRow(const GroupHeads& groups, const TileEnd<C>& end,
                                       int warp_row, int row_of_warp)
      : head(groups.head(warp_row % C::GROUP_ROWS + row_of_warp)),
        row(groups.row(warp_row % C::GROUP_ROWS + row_of_warp)),
        wanted(head < groups.count && row < end.rows) {}
};

// With PACKS: writes the rows of a warp that are no box of TMA's from `rows`, where they are.
template <class C>
__device__ __forceinline__ void store_packed_rows(const TileEnd<C>& end, const Params& params,
                                                  const TileHead& at, int warp_row,
                                                  unsigned char* rows) {
  using QTile = typename C::QTile;
  const AttentionParams& attention = params.attention;
  constexpr int CHUNKS = C::HEAD_DIM_V / 8;
  constexpr int COUNT = C::WARP_ROWS * CHUNKS / 32;  // of a lane
  const int lane = static_cast<int>(threadIdx.x % 32);
  uint4 chunks[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    chunks[i] = *reinterpret_cast<const uint4*>(
        rows + QTile::offset((lane + 32 * i) / CHUNKS, (lane + 32 * i) % CHUNKS));
  }
  // The reads come before TMA writes the next Q there. Behind a store the fence would wait for it.
  // mutants: ragged-rows-come-last
  ptx::fence_proxy_async_shared();
  uint16_t* const out_gmem = static_cast<uint16_t*>(attention.out_gmem) +
                             at.batch * attention.out_batch + at.head * attention.out_head +
                             int64_t{end.first_row} * attention.out_row;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const int chunk = (lane + 32 * i) % CHUNKS;
    const PackedRow place(params.groups, end, warp_row, (lane + 32 * i) / CHUNKS);
    if (place.wanted && 8 * chunk < attention.dv) {
      const uint4& x = chunks[i];
      ptx::st_global_v4_b32(
          out_gmem + place.head * attention.out_head + place.row * attention.out_row + 8 * chunk,
          x.x, x.y, x.z, x.w);
    }
  }
}

// Writes a warp's rows of outputs by TMA from `rows`, its own rows of Q's part of shared memory,
// where they are put first. TMA has read them when the warp's bulk group has. Where heads are
// packed a box has the rows of a warpgroup, and its first warp starts the copy. No path leaves out
// what others do: in branches ptxas has too few registers.
template <class C>
__device__ __forceinline__ void store_by_tma(const device::Outputs<C>& o_rmem,
                                             const TileEnd<C>& end, const StoringParams& params,
                                             const TileHead& at, int warp_row,
                                             unsigned char* rows) {
  using QTile = typename C::QTile;
  const AttentionParams& attention = params.call.attention;
  put_into_q<C>(o_rmem, end, rows, static_cast<int>(threadIdx.x % 32));
  ptx::fence_proxy_async_shared();  // the rows come before TMA reads them
  bool whole = end.rows >= C::WARP_ROWS, has_box = true;
  int first_row = end.first_row, rows_left = end.rows;
  if constexpr (C::PACKS) {
    const GroupHeads& groups = params.call.groups;
    const int row_of_group = warp_row % C::GROUP_ROWS;
    const bool packed = groups.count > 1;
    if (packed) {
      sync_group<C>(warp_row / C::GROUP_ROWS);  // those of all warps do
    } else {
      __syncwarp();
    }
    rows_left -= packed ? 0 : row_of_group;
    first_row += packed ? 0 : row_of_group;
    whole = rows_left >= (packed ? groups.rows : C::WARP_ROWS);
    has_box = !packed || row_of_group == 0;
  } else {
    __syncwarp();  // those of all lanes do
  }
  const bool starts = ptx::elect_sync() && whole && has_box;
  const auto rows_smem = static_cast<uint32_t>(__cvta_generic_to_shared(rows));
  const int batch = attention.cu_seqlens_q_gmem == nullptr ? at.batch : 0;
#pragma unroll
  for (int slab = 0; slab < C::VTile::SLABS; ++slab) {
    ptx::cp_async_bulk_tensor_4d_store_if(starts, params.out_map, slab * QTile::SLAB, first_row,
                                          at.head, batch, rows_smem + slab * QTile::SLAB_BYTES);
  }
  ptx::cp_async_bulk_commit_group();
  // Behind the last row of a tile there may be rows of the next sequence.
  if constexpr (C::PACKS) {
    if (!whole && rows_left > 0) store_packed_rows<C>(end, params.call, at, warp_row, rows);
  } else {
    constexpr int CHUNKS = C::HEAD_DIM_V / 8;
    const int count = whole ? 0 : end.rows * CHUNKS;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x % 32); i < count; i += 32) {
      const int row = i / CHUNKS, chunk = i % CHUNKS;
      const uint4 x = *reinterpret_cast<const uint4*>(rows + QTile::offset(row, chunk));
      // The read comes before TMA writes the next Q there.
      // mutants: ragged-rows-come-last
      ptx::fence_proxy_async_shared();
      uint16_t* const row_gmem = static_cast<uint16_t*>(attention.out_gmem) +
                                 at.batch * attention.out_batch + at.head * attention.out_head +
                                 int64_t{end.first_row + row} * attention.out_row;
      if (8 * chunk < attention.dv) ptx::st_global_v4_b32(row_gmem + 8 * chunk, x.x, x.y, x.z, x.w);
    }
  }
}

// Writes a warp's rows of fp32 outputs from registers: the four lanes of a row write 32 bytes at a
// time.
template <class C>
__device__ __forceinline__ void store_f32_rows(const device::Outputs<C>& o_rmem,
                                               const TileEnd<C>& end,
                                               const AttentionParams& params) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 8 * r + lane / 4;
    const float factor = end.ends[r].factor;
    float* place = end.place(params, row, lane % 4 * 2);
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
      const float* o = &o_rmem[0][n][2 * r];
      if (row < end.rows && 8 * n < params.dv)
        *reinterpret_cast<float2*>(place + 8 * n) = {o[0] * factor, o[1] * factor};
    }
  }
}

// Writes a warp's rows of outputs from registers, where 8-bit V leaves a lane four neighbouring
// ones of every 16 columns of a row: the four lanes of a row write 32 bytes at a time.
template <class C, DType OUT>
__device__ __forceinline__ void store_fp8_rows(const device::Outputs<C>& o_rmem,
                                               const TileEnd<C>& end,
                                               const AttentionParams& params) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = 8 * r + lane / 4;
    const float factor = end.ends[r].factor;
    uint16_t* place = ptx::computed_here(end.place(params, row, lane % 4 * 4));
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
      const float* even = &o_rmem[0][n][2 * r];
      const float* odd = &o_rmem[0][n + 1][2 * r];
      const uint32_t first = ptx::cvt_rn_x2_f32<OUT>(even[0] * factor, odd[0] * factor);
      const uint32_t second = ptx::cvt_rn_x2_f32<OUT>(even[1] * factor, odd[1] * factor);
      if (row < end.rows && 8 * n < params.dv) ptx::st_global_v2_b32(place + 8 * n, first, second);
    }
  }
}

template <class C>
__device__ __forceinline__ void store_fp8_rows(const device::Outputs<C>& o_rmem,
                                               const TileEnd<C>& end, const Params& params) {
  if (params.out_dtype == DType::F16) {
    store_fp8_rows<C, DType::F16>(o_rmem, end, params.attention);
  } else {
    store_fp8_rows<C, DType::BF16>(o_rmem, end, params.attention);
  }
  end.store_lse();
}

// Writes a warp's rows of 16-bit outputs of a tile: to the workspace if its keys are split, else to
// the output, where rows of one head pass through Q's part of shared memory, at `q`, unless Q has
// gone back already. `end`: how the tile ends, if that is known and Q has gone back.
template <class C>
__device__ __forceinline__ void store_rows(const device::Outputs<C>& o_rmem,
                                           const device::RowState<C>& state, const Params& params,
                                           const Tile& tile, int warp_row, unsigned char* q,
                                           const TileEnd<C>* end = nullptr) {
  using QTile = typename C::QTile;
  const AttentionParams& attention = params.attention;
  if (C::CAN_SPLIT && params.partials.splits > 1) {
    device::store_partials<C>(o_rmem, state, attention, params.partials, params.packed_heads, tile,
                              tile.split, warp_row);
  } else if (C::CAN_PACK && params.packed_heads.count > 1) {
    device::store_packed_out<C>(o_rmem, state, attention, params.packed_heads, tile, warp_row);
  } else if constexpr (C::RELEASES_Q_EARLY) {
    const TileHead head{tile.batch_head / attention.heads_q, tile.batch_head % attention.heads_q};
    const TileEnd<C> known =
        end != nullptr ? *end : TileEnd<C>(state, attention, head, tile, warp_row);
    store_by_quads<C>(o_rmem, known, attention);
    known.store_lse();
  } else {
    device::store_out<C, QTile>(o_rmem, state, attention, tile.rows(), warp_row,
                                q + warp_row * QTile::ROW_BYTES);
  }
}

// Writes the LSE of a warp's rows of packed heads.
template <class C>
__device__ __forceinline__ void store_packed_lse(const TileEnd<C>& end, const Params& params,
                                                 const TileHead& at, int warp_row) {
  const AttentionParams& attention = params.attention;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const PackedRow place(params.groups, end, warp_row, 8 * r + lane / 4);
    if (lane % 4 == 0 && place.wanted) {
      attention.lse_gmem[at.batch * attention.lse_batch +
                         (at.head + place.head) * attention.lse_head + end.first_row + place.row] =
          end.ends[r].lse;
    }
  }
}

// With finds_ends(): how the tile ends.
template <class C>
__device__ __forceinline__ TileEnd<C> find_tile_end(const device::RowState<C>& state,
                                                    const Params& params, unsigned char* shared,
                                                    const RingPosition<C::Q_STAGES>& q_ring,
                                                    const Tile& tile, int warp_row,
                                                    float v_factor) {
  const AttentionParams& attention = params.attention;
  if constexpr (C::PREPARES_TILES) {
    return TileEnd<C>(state, attention, blocks_message<C>(shared, q_ring.stage).head, tile,
                      warp_row, v_factor, params.groups);
  } else {
    const TileHead head{tile.batch_head / attention.heads_q, tile.batch_head % attention.heads_q};
    return TileEnd<C>(state, attention, head, tile, warp_row, v_factor);
  }
}

// With finds_ends(): writes a warp's rows of outputs, of 16-bit inputs through Q's part of shared
// memory, at `q`, and hands Q back; with STORES_BY_TMA the next tile does (hand_back_before).
template <class C>
__device__ __forceinline__ void end_tile(const device::Outputs<C>& o_rmem, TileEnd<C> end,
                                         const ParamsOf<C>& all_params, unsigned char* shared,
                                         const Barriers<C>& barriers,
                                         const RingPosition<C::Q_STAGES>& q_ring, unsigned char* q,
                                         int warp_row) {
  const Params& params = call_of<C>(all_params);
  const AttentionParams& attention = params.attention;
  if constexpr (finds_ends<C>() && C::FP8) {
    store_fp8_rows<C>(o_rmem, end, params);
  } else if constexpr (writes_f32<C>()) {
    hand_back_q(barriers, q_ring.stage);
    store_f32_rows<C>(o_rmem, end, attention);
    end.store_lse();
  } else if constexpr (C::STORES_BY_TMA) {
    const TileHead at = blocks_message<C>(shared, q_ring.stage).head;
    store_by_tma<C>(o_rmem, end, all_params, at, warp_row, q + warp_row * C::QTile::ROW_BYTES);
    if constexpr (C::PACKS) {
      if (attention.lse_gmem != nullptr) store_packed_lse<C>(end, params, at, warp_row);
    } else if (attention.lse_gmem != nullptr) {
      end.lse_gmem = attention.lse_gmem;
      end.find_places(attention, at, end.first_row);
      end.store_lse();
    }
  } else if constexpr (finds_ends<C>()) {
    store_through_q<C>(o_rmem, end, attention, q + warp_row * C::QTile::ROW_BYTES,
                       [&] { hand_back_q(barriers, q_ring.stage); });
    end.store_lse();
  }
}

// With STORES_THROUGH_V: writes a warp's rows of outputs through the ring of V, when no block of
// the tile is left, and gives it back.
template <class C>
__device__ __forceinline__ void store_through_v(const device::Outputs<C>& o_rmem,
                                                const TileEnd<C>& end,
                                                const AttentionParams& params,
                                                const Barriers<C>& barriers, unsigned char* shared,
                                                int warp_row) {
  ptx::bar_sync(C::CONSUMERS_BARRIER, C::CONSUMER_THREADS);  // no product reads V any more
  store_through_q<C>(o_rmem, end, params, shared + C::V_SMEM + warp_row * C::QTile::ROW_BYTES, [&] {
    // This thread's reads of output rows come before TMA's next write there.
    ptx::fence_proxy_async_shared();
    release(barriers.v_free());
  });
  end.store_lse();
}

// Without finds_ends(): writes a warp's rows of outputs. `q`: Q's part of shared memory.
template <class C>
__device__ __forceinline__ void store_tile(device::Outputs<C>& o_rmem,
                                           const device::RowState<C>& state,
                                           const ParamsOf<C>& all_params, const Tile& tile,
                                           int warp_row, float v_factor, unsigned char* q) {
  const Params& params = call_of<C>(all_params);
  if constexpr (C::FP8 && !C::OVERLAPS) {
    const AttentionParams& attention = params.attention;
    const TileHead head{tile.batch_head / attention.heads_q, tile.batch_head % attention.heads_q};
    store_fp8_rows<C>(o_rmem, TileEnd<C>(state, attention, head, tile, warp_row, v_factor), params);
  } else if constexpr (C::FP8) {
    // The lane that knows it tells the others the unit of the last block.
    device::store_fp8_out<C>(o_rmem, state, params.attention, params.out_dtype, tile.rows(),
                             warp_row, uniform(v_factor), first_v_column<C>(tile));
  } else {
    if constexpr (C::CACHE) {
      if (params.descales.v.gmem != nullptr) {
        const float v = device::find_warp_descale(params.descales, params.attention, tile, 0).v;
        const float factors[2] = {v, v};
        rescale<C>(o_rmem, factors);
      }
    }
    if constexpr (C::DROPS) {  // what is left of P counts more
      const float factors[2] = {all_params.dropout.scale, all_params.dropout.scale};
      rescale<C>(o_rmem, factors);
    }
    store_rows<C>(o_rmem, state, params, tile, warp_row, q);
  }
}

// --- the other warps of the producer's warpgroup: output rows of no sequence ---

template <class C>
__device__ __forceinline__ void write_rows_of_no_sequence(const Params& params) {
  if (params.attention.cu_seqlens_q_gmem == nullptr) return;
  ptx::griddepcontrol_wait();  // what comes before this kernel is done
  if constexpr (C::PACKS) {
    // To look at each of the many small tiles takes the consumers' time.
    const AttentionParams& attention = params.attention;
    const auto start = [&](int sequence) {
      return device::sequence_start(attention.cu_seqlens_q_gmem, sequence, attention.nq);
    };
    if (start(0) == 0 && start(attention.batch) == attention.nq) return;
  }
  // With split keys the combining kernel writes these rows.
  if (C::CAN_SPLIT && params.partials.splits > 1) return;
  constexpr int THREADS = C::WARPGROUP - 32 * C::PRODUCERS;
  const int thread = threadIdx.x - C::CONSUMER_THREADS - 32 * C::PRODUCERS;
  const int heads = C::PACKS ? params.groups.count : C::CAN_PACK ? params.packed_heads.count : 1;
  const auto tiles = [&] { return C::SLICES_V ? params.tiles / params.v_slices : params.tiles; };
  for (int64_t index = blockIdx.x; index < tiles(); index += gridDim.x) {
    for (int head = 0; head < heads; ++head) {
      device::write_rows_of_no_sequence<sizeof(OutElement<C>)>(
          params.attention, static_cast<int>(index), thread, THREADS, rows_of_tile<C>(params),
          heads, head);
    }
  }
}

}  // namespace archflash::hopper
