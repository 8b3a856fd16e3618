// The loads of latent attention: a producer warp for each part of a block of latent rows, and the
// query rows, which the consumers load themselves.
#pragma once

#include <cstdint>

#include "common/device/few_rows.cuh"
#include "hopper/cache/cache_rows.cuh"
#include "hopper/latent/mla_config.cuh"
#include "hopper/latent/mla_pipeline.cuh"

namespace archflash::hopper {

// --- producers, a warp for each part: latent rows -> shared memory ---

// The box with key `key` of a sequence. A box behind the sequence is that of the last key, which is
// in the cache; its rows are cleared.
__device__ __forceinline__ CachePlace find_place(const MlaParams& params, const MlaTile& tile,
                                                 int sequence, int key) {
  const KvCache& cache = params.call.cache;
  const int row = min(key, tile.work.nk - 1);
  CachePlace place{device::find_cache_block(cache, sequence, row), row + tile.first};
  if (cache.page_table_gmem != nullptr) place.row = row % cache.block_rows & -params.box_rows;
  return place;
}

template <class C, MlaPart PART>
__device__ __forceinline__ void produce_latent_part(const MlaParams& params, const MlaTile& tile,
                                                    unsigned char* shared, uint32_t shared_smem) {
  using RowTile = typename C::RowTile;
  constexpr int SLABS = PART == MLA_KEYS ? 1 : C::HALF_SLABS;
  constexpr int SLAB = PART == MLA_KEYS ? C::V_SLABS : (PART - 1) * C::HALF_SLABS;  // of a stage
  const AttentionParams& attention = params.call.attention;
  const KvCache& cache = params.call.cache;
  const MlaBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const TensorMap& map = PART == MLA_KEYS ? params.k_map : params.v_map;
  const int first_slab = PART == MLA_RIGHT ? C::HALF_SLABS : 0;  // of the map
  const int box_slabs = PART == MLA_KEYS ? 1 : params.box_slabs;
  const bool leader = ptx::elect_sync();
  const int sequence = tile.work.batch_head / attention.heads_q;
  const int kv_head = uniform(tile.work.batch_head % attention.heads_q / attention.heads_per_kv);
  const int boxes = C::BLOCK_K / params.box_rows;  // one below another
  const int box_of_lane = static_cast<int>(threadIdx.x) % 32 % boxes;
  const int seen_begin = uniform(tile.visible.begin()),
            seen_end = uniform(tile.visible.end(tile.work.nq));
  const int first = uniform(tile.blocks.first);
  int key = uniform(tile.blocks.last);
  if (key < first) return;
  uint32_t ragged_parity = 0;
  CachePlace place =
      find_place(params, tile, sequence, key + box_of_lane * params.box_rows);  // this lane's box
#pragma unroll 1
  for (int number = 0; key >= first; ++number, key -= C::BLOCK_K) {
    const int stage = number % C::STAGES;
    const uint32_t parity = number / C::STAGES % 2;
    const int offset = C::ROWS_SMEM + stage * RowTile::BYTES + SLAB * RowTile::SLAB_BYTES;
    // Rows that no query sees may hold NaN, which 0 does not silence in P V.
    const bool ragged = key < seen_begin || key + C::BLOCK_K > seen_end;
    const uint32_t barrier = ragged ? barriers.ragged(PART) : barriers.full(stage, PART);
    const int block_of_lane = min(max(place.block, 0), cache.blocks - 1);
    // Every product of the part that the stage held is done.
    ptx::mbarrier_wait_parity(barriers.empty(stage, PART), parity ^ 1);
#pragma unroll 1
    for (int box = 0; box < boxes; ++box) {
      const int row = __shfl_sync(device::FULL_WARP, place.row, box);
      const int block = __shfl_sync(device::FULL_WARP, block_of_lane, box);
      if (!leader) continue;
      uint32_t box_smem = shared_smem + offset + box * params.box_rows * RowTile::ROW_BYTES;
#pragma unroll 1
      for (int slab = 0; slab < SLABS; slab += box_slabs) {
        ptx::cp_async_bulk_tensor_5d_load(box_smem, map, 0, row, first_slab + slab, kv_head, block,
                                          barrier);
        box_smem += box_slabs * RowTile::SLAB_BYTES;
      }
    }
    // Behind the copies, which wait for one access of shared memory less. The phase cannot end
    // before this arrival, even if bytes land first.
    if (leader) ptx::mbarrier_arrive_expect_tx(barrier, SLABS * RowTile::SLAB_BYTES);
    if (key - C::BLOCK_K >= first) {  // looked up ahead: it is not needed before the next waits end
      place = find_place(params, tile, sequence, key - C::BLOCK_K + box_of_lane * params.box_rows);
    }
    if (ragged) {
      ptx::mbarrier_wait_parity(barrier, ragged_parity);
      ragged_parity ^= 1;
      clear_rows<RowTile, SLABS>(shared + offset, seen_begin - key, seen_end - key);
      if (leader) ptx::mbarrier_arrive(barriers.full(stage, PART));
    }
  }
}

// A consumer warp's rows of qv on their way to shared memory: 16 bytes of a row in a lane, twice.
// Each lane finds one of the rows, since code that finds every row in every lane takes longer to
// fetch than the rows themselves.
template <class C>
struct MlaQueryRows {
  using QTile = typename C::QTile;
  static constexpr int CHUNKS = C::HEAD_DIM_V / 8 / 32;  // of a row, for one lane
  static constexpr int ROWS = C::BLOCK_Q / C::WARPS;     // of a warp

  uint4 x[ROWS][CHUNKS];

  // Zeros for rows that do not exist.
  __device__ __forceinline__ void load(const typename C::Params& params, const device::Work& work) {
    const int lane = threadIdx.x % 32;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * ROWS;
    const device::FewRow own(params.call.attention, params.call.packed_heads, work,
                             warp_row + lane % ROWS);
    const int64_t offset_of_lane =
        own.batch * params.qv_batch + own.head * params.qv_head + own.packed * params.qv_row;
    const uint32_t wanted = __ballot_sync(device::FULL_WARP, own.wanted);
    const uint16_t* const qv_gmem = static_cast<const uint16_t*>(params.qv_gmem) + 8 * lane;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      // mutants: from-a-low-lane (tests/sim/tags.py)
      const int64_t offset = __shfl_sync(device::FULL_WARP, offset_of_lane, i);
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        x[i][j] = uint4{};
        if (wanted >> i & 1) x[i][j] = *reinterpret_cast<const uint4*>(qv_gmem + offset + 256 * j);
      }
    }
  }
  __device__ __forceinline__ void store(unsigned char* shared) const {
    const int lane = threadIdx.x % 32;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * ROWS;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        *reinterpret_cast<uint4*>(shared + C::Q_SMEM + QTile::offset(warp_row + i, lane + 32 * j)) =
            x[i][j];
      }
    }
  }
};

// A warp starts the copies of a tile's rows of qv, where keys are listed. Zeros are where heads are
// missing.
template <class C>
__device__ __forceinline__ void load_listed_query(const typename C::Params& params,
                                                  const MlaListTile& tile, uint32_t shared_smem) {
  const uint32_t barrier = MlaBarriers<C>{shared_smem + C::BARRIER_SMEM}.query();
  // Uniform, or the assembler starts each copy in a loop over lanes.
  const int head_tile = uniform(tile.head_tile), row = uniform(tile.row);
  const int sequence = uniform(tile.list.sequence);
  if (!ptx::elect_sync()) return;
  ptx::mbarrier_arrive_expect_tx(barrier, C::QTile::BYTES);
#pragma unroll
  for (int slab = 0; slab < C::V_SLABS; ++slab) {
    ptx::cp_async_bulk_tensor_5d_load(shared_smem + C::Q_SMEM + slab * C::QTile::SLAB_BYTES,
                                      params.qv_map, slab * C::QTile::SLAB, 0, head_tile, row,
                                      sequence, barrier);
  }
}

// The fragments of A of the query's 64 other columns.
using MlaQuery = uint32_t[4][4];

template <class C>
__device__ __forceinline__ void load_q(MlaQuery& q_rmem, const typename C::Params& params,
                                       const MlaTileOf<C>& tile, int warp_row) {
  const AttentionParams& attention = params.call.attention;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const auto row = find_row(params.call, tile, warp_row + lane / 4 + 8 * r);
    const uint16_t* q_gmem = static_cast<const uint16_t*>(attention.q_gmem) +
                             row.batch * attention.q_batch + row.head * attention.q_head +
                             row.packed * attention.q_row + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      q_rmem[i / 2][i % 2 * 2 + r] =
          row.wanted ? *reinterpret_cast<const uint32_t*>(q_gmem + 8 * i) : 0;
    }
  }
}

}  // namespace archflash::hopper
