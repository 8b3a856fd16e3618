// The loader's warpgroup of the backward pass for few query rows: one warp brings Q, dO, K and V to
// shared memory.
#pragma once

#include <cstdint>

#include "common/device/backward_rows.cuh"
#include "common/device/slab_load.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "hopper/backward/rows_pipeline.cuh"

namespace archflash::hopper {

template <class C>
__device__ __forceinline__ void load_for_rows(const BackwardKernelParams& params,
                                              unsigned char* shared, uint32_t shared_smem) {
  using QTile = typename C::QTile;
  using KTile = typename C::KTile;
  const RowsBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const AttentionParams& attention = params.backward.attention;
  const bool packed = C::PACKED && attention.cu_seqlens_q_gmem != nullptr;
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes wait and count
  RingPosition<C::ROW_STAGES> row_ring;
  RingPosition<C::KEY_STAGES> ring;
  uint32_t ragged_parity = 0;
#pragma unroll 1
  for (int index = static_cast<int>(blockIdx.x); index < params.tiles;
       index += static_cast<int>(gridDim.x)) {
    ptx::mbarrier_wait_parity(barriers.rows_empty(row_ring.stage), row_ring.parity ^ 1);
    // The message is read anew where something of it is needed, so that it needs no registers.
    RowsWork& work = rows_work<C>(shared, row_ring.stage);
    {
      const RowsWork found = find_rows_work<C>(params, index);
      __syncwarp();  // every lane has read the message before
      if (leader) work = found;
      __syncwarp();
    }
    {
      const device::VisibleKeys visible = visible_of(attention, work);
      const int rows_begin = max(-visible.last_shift, 0);
      const int rows_end = min(work.nk - visible.first_shift, work.nq);
      const int keys_begin = visible.begin(), keys_end = visible.end(work.nq);
      if (leader) {
        work.rows_begin = rows_begin, work.rows_end = rows_end;
        work.keys_begin = keys_begin, work.keys_end = keys_end;
        ptx::mbarrier_arrive(barriers.work_full(row_ring.stage));
      }
      __syncwarp();
    }
    const int &rows_begin = work.rows_begin, &rows_end = work.rows_end;
    const int &keys_begin = work.keys_begin, &keys_end = work.keys_end;
    // Without cu_seqlens TMA reads zeros behind the end.
    const bool rows_ragged =
        C::PACKED &&
        (rows_begin > 0 || (rows_end < C::MOST_ROWS && (packed || rows_end < work.nq)));
    // A dimension that is repeated (a stride of 0) has size 1 in the map.
    const auto load_rows = [&](int offset, const TensorMap& map, int64_t head_stride,
                               int64_t batch_stride, uint32_t full) {
      if (!leader) return;
      const uint32_t barrier = rows_ragged ? barriers.ragged() : full;
      if (!rows_ragged) ptx::mbarrier_arrive_expect_tx(full, C::ROW_BYTES);
#pragma unroll
      for (int tile = 0; tile < C::ROW_TILES; ++tile) {
        device::start_copy<QTile>(shared_smem + offset + tile * QTile::BYTES, map,
                                  work.q_start + tile * C::TILE_ROWS,
                                  head_stride == 0 ? 0 : work.head,
                                  packed || batch_stride == 0 ? 0 : work.batch, barrier);
      }
    };
    const auto clear_tiles = [&](int offset, uint32_t full) {
#pragma unroll 1
      for (int tile = 0; tile < C::ROW_TILES; ++tile) {
        clear_rows<QTile>(shared + offset + tile * QTile::BYTES, rows_begin - tile * C::TILE_ROWS,
                          rows_end - tile * C::TILE_ROWS, ptx::mov_tid_x_volatile());
      }
      if (leader) ptx::mbarrier_arrive(full);
    };
    const int q_offset = C::Q_SMEM + row_ring.stage * C::ROW_BYTES;
    const int dout_offset = C::DOUT_SMEM + row_ring.stage * C::ROW_BYTES;
#pragma unroll 1
    for (int block = work.begin; block < work.end; ++block) {
      const int first = block * C::BLOCK;
      const bool keys_ragged =
          C::PACKED &&
          (first < keys_begin || (first + C::BLOCK > keys_end && (packed || keys_end < work.nk)));
      const bool loads_rows = block == work.begin;
      const int k_offset = C::K_SMEM + ring.stage * KTile::BYTES;
      const int v_offset = C::V_SMEM + ring.stage * KTile::BYTES;
      const auto load_keys = [&](int offset, const TensorMap& map, int64_t head_stride,
                                 int64_t batch_stride, uint32_t full) {
        if (!leader) return;
        if (!keys_ragged) ptx::mbarrier_arrive_expect_tx(full, KTile::BYTES);
        device::start_copy<KTile>(
            shared_smem + offset, map, work.k_start + first, head_stride == 0 ? 0 : work.head,
            packed || batch_stride == 0 ? 0 : work.batch, keys_ragged ? barriers.ragged() : full);
      };
      ptx::mbarrier_wait_parity(barriers.empty(ring.stage), ring.parity ^ 1);
      const bool clears_rows = loads_rows && rows_ragged;
      if (leader && (clears_rows || keys_ragged)) {
        ptx::mbarrier_arrive_expect_tx(barriers.ragged(),
                                       (clears_rows ? 2 * C::ROW_BYTES : 0) +
                                           (keys_ragged ? 2 * static_cast<int>(KTile::BYTES) : 0));
      }
      if (loads_rows) {
        load_rows(q_offset, params.q_map, attention.q_head, attention.q_batch,
                  barriers.q_full(row_ring.stage));
      }
      load_keys(k_offset, params.k_map, attention.k_head, attention.k_batch,
                barriers.k_full(ring.stage));
      if (loads_rows) {
        load_rows(dout_offset, params.dout_map, params.backward.dout_head,
                  params.backward.dout_batch, barriers.dout_full(row_ring.stage));
      }
      load_keys(v_offset, params.v_map, attention.v_head, attention.v_batch,
                barriers.v_full(ring.stage));
      if (clears_rows || keys_ragged) {
        ptx::mbarrier_wait_parity(barriers.ragged(), ragged_parity);  // all tiles have landed
        ragged_parity ^= 1;
        if (clears_rows) {
          clear_tiles(q_offset, barriers.q_full(row_ring.stage));
          clear_tiles(dout_offset, barriers.dout_full(row_ring.stage));
        }
        if (keys_ragged) {
          const auto clear_keys = [&](int offset, uint32_t full) {
            clear_rows<KTile>(shared + offset, keys_begin - first, keys_end - first,
                              ptx::mov_tid_x_volatile());
            if (leader) ptx::mbarrier_arrive(full);
          };
          clear_keys(k_offset, barriers.k_full(ring.stage));
          clear_keys(v_offset, barriers.v_full(ring.stage));
        }
      }
      ring.advance();
    }
    if (work.begin >= work.end && leader) {  // the consumers count these phases
      ptx::mbarrier_arrive(barriers.q_full(row_ring.stage));
      ptx::mbarrier_arrive(barriers.dout_full(row_ring.stage));
    }
    row_ring.advance();
  }
}

// Clears the gradients of keys in a packed tensor that belong to no sequence, because they come
// before the first or behind the last one. Called by the warps of the loader's warpgroup that have
// nothing else to do, and have few registers.
template <class C>
__device__ __forceinline__ void clear_keys_of_none(const BackwardKernelParams& params) {
  constexpr int WARPS = C::WARPGROUP / 32 - 1, CHUNK_BYTES = 16;
  static_assert(C::HEAD_DIM * 4 <= 32 * CHUNK_BYTES, "a lane writes one chunk of a row");
  const AttentionParams& attention = params.backward.attention;
  const int* const cu_k = attention.cu_seqlens_k_gmem;
  if (cu_k == nullptr) return;
  const int number = static_cast<int>(threadIdx.x - C::CONSUMER_THREADS) / 32 - 1;
  const int first = static_cast<int>(blockIdx.x) * WARPS + number;
  const auto clear = [&](const GradientParams& gradient, int columns, int begin, int end) {
    const int bytes = gradient.dtype == DType::F32 ? 4 : 2;
    const int byte = static_cast<int>(threadIdx.x) % 32 * CHUNK_BYTES;
    if (gradient.accumulate || byte >= columns * bytes) return;
#pragma unroll 1
    for (int row = begin + first; row < end; row += static_cast<int>(gridDim.x) * WARPS) {
#pragma unroll 1
      for (int head = 0; head < attention.heads_q; ++head) {
        const int64_t start = head * gradient.head + row * gradient.row;
        ptx::st_global_v4_b32(static_cast<unsigned char*>(gradient.gmem) + start * bytes + byte, 0,
                              0, 0, 0);
      }
    }
  };
  const auto clear_both = [&](int begin, int end) {
    clear(params.backward.dk, attention.d, begin, end);
    clear(params.backward.dv, attention.dv, begin, end);
  };
  clear_both(0, device::sequence_start(cu_k, 0, attention.nk));
  clear_both(device::sequence_start(cu_k, attention.batch, attention.nk), attention.nk);
}

}  // namespace archflash::hopper
