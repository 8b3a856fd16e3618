// The roles that make the output: correction, four warps, rescales O when bases rise and at the end
// turns O into output rows; store, one warp, writes the rows. The table in pipeline.cuh says what
// they wait for and hand over.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/next_tile.cuh"
#include "blackwell_dc/pair_pipeline.cuh"
#include "blackwell_dc/params.h"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/row_softmax.cuh"
#include "blackwell_dc/row_softmax_e4m3.cuh"
#include "blackwell_dc/walk.cuh"
#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/f32x2.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/st_global.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

// --- correction, four warps: O *= factor when bases rise; at the end O -> output rows ---

template <class C>
__device__ __forceinline__ void rescale(uint32_t o_tmem, float factor) {
#pragma unroll
  for (int column = 0; column < C::HEAD_DIM_V; column += 16) {
    float o_rmem[16];
    ptx::tcgen05_ld(o_rmem, o_tmem + column);
    ptx::tcgen05_wait_ld(o_rmem);
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const float2 pair = ptx::mul_rn_f32x2({o_rmem[i], o_rmem[i + 1]}, {factor, factor});
      o_rmem[i] = pair.x;
      o_rmem[i + 1] = pair.y;
    }
    ptx::tcgen05_st(o_tmem + column, o_rmem);
  }
  ptx::tcgen05_wait_st();
  ptx::tcgen05_fence_before_thread_sync();
}

// Writes one output row, O * factor, to a tile of rows in shared memory. any: O has a product; else
// the row is zeros.
template <class C>
__device__ __forceinline__ void stage_row(uint32_t o_tmem, bool any, float factor, DType out_dtype,
                                          unsigned char* tile_smem, int row) {
#pragma unroll
  for (int column = 0; column < C::HEAD_DIM_V; column += 16) {
    float o_rmem[16] = {};
    if (any) {
      ptx::tcgen05_ld(o_rmem, o_tmem + column);
      ptx::tcgen05_wait_ld(o_rmem);
    }
    uint32_t x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float low = o_rmem[2 * i] * factor, high = o_rmem[2 * i + 1] * factor;
      if constexpr (C::FP8) {
        x[i] = out_dtype == DType::F16 ? ptx::cvt_rn_x2_f32<DType::F16>(low, high)
                                       : ptx::cvt_rn_x2_f32<DType::BF16>(low, high);
      } else {
        x[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(low, high);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int offset = C::OTile::offset(row, column / 8 + half);
      *reinterpret_cast<uint4*>(tile_smem + offset) =
          uint4{x[4 * half], x[4 * half + 1], x[4 * half + 2], x[4 * half + 3]};
    }
  }
}

// Writes one row, O * factor, in fp32, `columns` columns of it (0: nothing). any: O has a product;
// else the row is zeros.
template <class C>
__device__ __forceinline__ void write_f32_row(uint32_t o_tmem, bool any, float factor,
                                              float* row_gmem, int columns) {
#pragma unroll
  for (int column = 0; column < C::HEAD_DIM_V; column += 16) {
    float o_rmem[16] = {};
    if (any) {
      ptx::tcgen05_ld(o_rmem, o_tmem + column);
      ptx::tcgen05_wait_ld(o_rmem);
    }
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      if (column + i >= columns) continue;
      ptx::st_global_v4_b32(row_gmem + column + i, __float_as_uint(o_rmem[i] * factor),
                            __float_as_uint(o_rmem[i + 1] * factor),
                            __float_as_uint(o_rmem[i + 2] * factor),
                            __float_as_uint(o_rmem[i + 3] * factor));
    }
  }
}

// The role correction for one warp.
template <class C>
struct Correction {
  // A row tile all of whose blocks were visited, and whose rows are not written yet.
  struct Ended {
    Tile work;
    int blocks = -1;  // with keys; -1: there is no such tile
  };

  const Params& params;
  unsigned char* shared;
  uint32_t shared_smem;
  Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  Barriers<C> mma_barriers = barriers_of_mma<C>(barriers);
  int row_of_tile = threadIdx.x % C::TILE_ROWS;
  uint32_t lanes_tmem = uniform(ptx::tmem_lanes_of_warp(threadIdx.x / 32));
  // Counted from the CTA's start, for each of its tiles: messages from softmax, phases of o_ready.
  uint32_t message = 0, product = 0;
  uint32_t first_step = 0;   // steps (products.cuh) before this row tile
  uint32_t tile_parity = 1;  // of the phase of q_empty and o_free that ends the previous row tile

  static constexpr int STATS =
      C::STATS_BYTES / 4;  // floats from one tile's statistics to the next's

  __device__ __forceinline__ const float* stats() const {
    return reinterpret_cast<const float*>(shared + C::STATS_SMEM) + row_of_tile;
  }

  // O of tile t may get the products of the row tile's first block, which overwrite it.
  __device__ __forceinline__ void release_o(int t) const {
    // mutants: whole-warp-on-tensor-memory (tests/sim/tags.py)
    arrive_at_mma_as_warp<C>(mma_barriers.p_ready((first_step + t) % 2));
  }

  // Rescales O of tile t, before the products of block `block` are added, where the base has risen.
  __device__ __forceinline__ void follow_base(int t, int block) const {
    // mutants: product-was-made
    ptx::mbarrier_wait_parity(barriers.stats_full(t), message & 1);
    const float factor = stats()[t * STATS];  // of this thread's row
    arrive_as_warp(barriers.stats_empty(t));
    if constexpr (EVERY_O_READY<C>) {
      // mutants: product-was-made
      ptx::mbarrier_wait_parity(barriers.o_ready(t), (product + block - 1) & 1);
    }
    if (!C::SWITCHES.lazy_rescale || __any_sync(FULL_WARP, factor != 1.0f)) {
      ptx::tcgen05_fence_after_thread_sync();
      rescale<C>(lanes_tmem + C::O_COLUMN + t * C::HEAD_DIM_V, factor);
    }
    // mutants: whole-warp-on-tensor-memory
    arrive_at_mma_as_warp<C>(mma_barriers.p_ready((first_step + block * C::TILES + t) % 2));
  }

  // Writes the rows of tile t.
  __device__ __forceinline__ void write_rows(const Ended& ended, int t) const {
    const AttentionParams& attention = params.attention;
    const Tile& work = ended.work;
    const int batch = work.batch_head / attention.heads_q;
    const device::PackedHeads packed_heads = find_packed_heads<C>(params);
    const int head_of_tile = packed_heads.head(row_of_tile);  // of this thread's rows
    const bool owned = head_of_tile < packed_heads.count;     // else they belong to no head
    const int head = work.batch_head % attention.heads_q + (owned ? head_of_tile : 0);
    const int64_t lse_row =
        batch * attention.lse_batch + head * attention.lse_head +
        device::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
    const bool any = ended.blocks > 0;
    ptx::mbarrier_wait_parity(barriers.stats_full(t), message & 1);
    const float sum = stats()[t * STATS];
    const float base = stats()[t * STATS + C::TILE_ROWS];
    arrive_as_warp(barriers.stats_empty(t));
    const int row = work.first_row + packed_heads.row(t * C::TILE_ROWS + row_of_tile);
    const bool wanted = owned && row < work.nq;
    device::RowEnd end{};
    if (splits_keys<C>(params)) {
      if (wanted)
        params.partials.ends_gmem[params.partials.index(work.split, lse_row + row)] = {base, sum};
    } else {
      const float keys_max = sum == 0.0f ? device::MINUS_INFINITY : base * device::LN_2;
      end = device::finish_row(keys_max, sum, device::load_sink(attention, head));
      if (C::FP8 && any) end.factor *= find_v_unit(params.descales, attention, work);
    }
    if (any) {
      ptx::mbarrier_wait_parity(barriers.o_ready(t), (product - 1) & 1);
      ptx::tcgen05_fence_after_thread_sync();
    } else if (C::O_OVER_Q) {
      // Without a product to wait for, q_empty's phase of the previous row tile must be over, so
      // that store's next arrival counts for this one.
      ptx::mbarrier_wait_parity(barriers.q_empty(t), tile_parity);
    }
    // store has written out the rows that lay here.
    ptx::mbarrier_wait_parity(barriers.o_free(t), tile_parity);
    const uint32_t o_tmem = lanes_tmem + C::O_COLUMN + t * C::HEAD_DIM_V;
    const int columns = wanted ? attention.dv : 0;
    if (splits_keys<C>(params)) {
      const int64_t start = params.partials.index(work.split, lse_row + row) * attention.dv;
      if (any) write_f32_row<C>(o_tmem, any, 1.0f, params.partials.rows_gmem + start, columns);
    } else if (writes_f32<C>(params)) {
      const int64_t packed_row =
          device::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq) + row;
      float* row_gmem = static_cast<float*>(attention.out_gmem) + batch * attention.out_batch +
                        head * attention.out_head + packed_row * attention.out_row;
      write_f32_row<C>(o_tmem, any, end.factor, row_gmem, columns);
    } else {
      stage_row<C>(o_tmem, any, end.factor, params.out_dtype, shared + C::O_SMEM + t * C::O_STRIDE,
                   row_of_tile);
    }
    ptx::tcgen05_fence_before_thread_sync();  // the reads of O come before the next p_ready
    ptx::fence_proxy_async_shared();          // the stores of the rows come before TMA's reads
    arrive_as_warp(barriers.o_staged(t));
    if (!splits_keys<C>(params) && attention.lse_gmem != nullptr && wanted)
      attention.lse_gmem[lse_row + row] = end.lse;
  }
};

template <class C>
__device__ __forceinline__ void correction(const Params& params, unsigned char* shared,
                                           uint32_t shared_smem) {
  Correction<C> role{params, shared, shared_smem};
  typename Correction<C>::Ended ended;
  TileWalk<C> walk(params, shared_smem);
  for (;; walk.next()) {
    const bool more = walk.more();
    Tile work{};
    int count = 0;
    if (more) {
      work = find_tile<C>(params, walk.tile());
      if (work.first_row >= 0) count = count_blocks<C>(find_blocks<C>(params, work));
    }
    // The rows of the row tile before this one are written here, so that the first product for O of
    // each tile can begin as soon as that tile's O has been read. They are written at a tile
    // without rows, too: store waits for them, and load for store, before it asks for tiles far
    // ahead.
#pragma unroll 1
    for (int t = 0; t < C::TILES; ++t) {
      if (ended.blocks >= 0) role.write_rows(ended, t);
      if (C::SWITCHES.release_each_tile && count > 0) role.release_o(t);
    }
    if (ended.blocks >= 0) {
      ++role.message;
      role.tile_parity ^= 1;
      ended.blocks = -1;
    }
    if (!more) break;
    if (work.first_row < 0) continue;
    for (int t = 0; t < C::TILES && !C::SWITCHES.release_each_tile && count > 0; ++t)
      role.release_o(t);
#pragma unroll 1
    for (int block = 1; block < count; ++block) {
#pragma unroll
      for (int t = 0; t < C::TILES; ++t) role.follow_base(t, block);
      ++role.message;
    }
    role.product += EVERY_O_READY<C> ? count : count > 0;
    role.first_step += C::TILES * count;
    ended = {work, count};
  }
}

// --- store, one warp: output rows -> global memory ---

// Copies `rows` rows of each head, 16 bytes a lane. It is for a tile that ends inside a packed
// tensor, where TMA's box would write the next sequence's rows as well.
template <class C>
__device__ __forceinline__ void copy_rows(const unsigned char* tile_smem, uint16_t* out_gmem,
                                          const AttentionParams& attention,
                                          const device::PackedHeads& packed_heads, int rows) {
  constexpr int CHUNKS = C::HEAD_DIM_V / 8;
  for (int i = threadIdx.x % 32; i < C::TILE_ROWS * CHUNKS; i += 32) {
    const int row_of_tile = i / CHUNKS, chunk = i % CHUNKS;
    const int head = packed_heads.head(row_of_tile), row = packed_heads.row(row_of_tile);
    if (head >= packed_heads.count || row >= rows || chunk * 8 >= attention.dv) continue;
    const uint4 x =
        *reinterpret_cast<const uint4*>(tile_smem + C::OTile::offset(row_of_tile, chunk));
    ptx::st_global_v4_b32(
        out_gmem + head * attention.out_head + row * attention.out_row + chunk * 8, x.x, x.y, x.z,
        x.w);
  }
  // The reads of the rows come before TMA writes the next Q there.
  if (C::O_OVER_Q) ptx::fence_proxy_async_shared();
}

template <class C>
__device__ __forceinline__ void store(const Params& params, const unsigned char* shared,
                                      uint32_t shared_smem) {
  using OTile = typename C::OTile;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const device::PackedHeads packed_heads = find_packed_heads<C>(params);
  uint32_t tile_parity = 0;
  for (TileWalk<C> walk(params, shared_smem); walk.more(); walk.next()) {
    // With split keys the combining kernel writes these rows.
    const bool writes = rank_in_pair<C>() == 0 && !splits_keys<C>(params);
    for (int head = 0; writes && head < packed_heads.count; ++head) {
      if (writes_f32<C>(params)) {
        device::write_rows_of_no_sequence<4>(attention, walk.tile(), threadIdx.x % 32, 32,
                                             packed_heads.rows(), packed_heads.count, head);
      } else {
        device::write_rows_of_no_sequence(attention, walk.tile(), threadIdx.x % 32, 32,
                                          packed_heads.rows(), packed_heads.count, head);
      }
    }
    const Tile work = find_tile<C>(params, walk.tile());
    if (work.first_row < 0) continue;
    const int batch = work.batch_head / attention.heads_q;
    const int head = work.batch_head % attention.heads_q;
    const int map_head = attention.out_head == 0 ? 0 : head;
    const int map_batch = attention.out_batch == 0 ? 0 : batch;
    const int q_start = device::sequence_start(attention.cu_seqlens_q_gmem, batch, attention.nq);
    for (int t = 0; t < C::TILES; ++t) {
      ptx::mbarrier_wait_parity(barriers.o_staged(t), tile_parity);
      const int first_row = q_start + work.first_row + t * C::TILE_ROWS;
      const int rows =
          correction_writes<C>(params) ? 0 : work.nq - work.first_row - t * C::TILE_ROWS;
      const int offset = C::O_SMEM + t * C::O_STRIDE;
      const bool whole =
          attention.cu_seqlens_q_gmem == nullptr || rows >= min(packed_heads.rows(), C::TILE_ROWS);
      if (rows > 0 && C::SWITCHES.tma_store && whole) {
        if (ptx::elect_sync()) {
          for (int slab = 0; slab < OTile::SLABS; ++slab) {
            if (slab * OTile::SLAB >= attention.dv) continue;
            const uint32_t slab_smem = shared_smem + offset + slab * OTile::SLAB_BYTES;
            if constexpr (C::SWITCHES.l2_hints) {
              ptx::cp_async_bulk_tensor_4d_store(params.out_map, slab * OTile::SLAB, first_row,
                                                 map_head, map_batch, slab_smem,
                                                 ptx::createpolicy_evict_first());
            } else {
              ptx::cp_async_bulk_tensor_4d_store(params.out_map, slab * OTile::SLAB, first_row,
                                                 map_head, map_batch, slab_smem);
            }
          }
          ptx::cp_async_bulk_commit_group();
          ptx::cp_async_bulk_wait_group_read_0();  // TMA has read the rows
        }
      } else if (rows > 0) {
        uint16_t* out_gmem = static_cast<uint16_t*>(attention.out_gmem) +
                             batch * attention.out_batch + head * attention.out_head +
                             first_row * attention.out_row;
        copy_rows<C>(shared + offset, out_gmem, attention, packed_heads, rows);
      }
      // mutants: q-empty-waits-too
      arrive_as_warp(barriers.o_free(t));
      // mutants: arrives-for-itself
      if (C::O_OVER_Q) arrive_as_warp(barriers.q_empty(t));
    }
    tile_parity ^= 1;
  }
}

}  // namespace archflash::blackwell_dc
