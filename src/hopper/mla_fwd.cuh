// Attention over a cache of latent rows (multi-head latent attention, MLA), on TMA, mbarriers and
// wgmma, for compute capability 9.0. A row of the cache has 512 columns that are V and belong to
// the key too, and 64 more of the key alone. With the query's parts qv (512) and q (64)
//   scores = qv V^T + q K^T,  out = softmax(scores) V
// so each row is copied to shared memory once and serves both products.
//
// A CTA computes 64 rows, mostly the query heads of one position, packed. Their outputs are 64 x
// 512 numbers in fp32: warpgroup 0 keeps columns 0 to 255 in its registers, warpgroup 1 the others.
// The blocks of 64 keys come in pairs. Warpgroup 0 computes scores and P of the first block,
// warpgroup 1 those of the second. Each hands its P to the other one through shared memory, and
// multiplies both with its half of V.
//
// clang-format off
//                  each block                    of a pair
//
//   producers,     wait empty | load the part    a warp each for K, the left half of V, the right half
//   3 warps            | full of each part
//                      v
//   warpgroup 0    S of block 0 | softmax | hand P over | O += P V of block 0 | O += P V of block 1
//                                              | p_full                             ^ p_full
//                                              v                                    |
//   warpgroup 1    . . . S of block 1 . . . . O += P V of block 0 | softmax | hand P over | O += P V of block 1
//                                              (at the same time)
//   tensor cores   S of 0 | S of 1 | P V of 0, both halves | P V of 1, both halves
// clang-format on
//
// While one warpgroup computes its softmax the products of the other one run: so warpgroup 1 begins
// S when warpgroup 0 has issued its own, not beside it. The two blocks that fit shared memory leave
// no third stage: so a half of V is handed back as soon as its warpgroup has multiplied it, and the
// next block's part comes while the other parts are still read. What follows a part that comes back
// is the longest chain of the loop, and wgmma leaves other accesses of shared memory little room (a
// wait took 200 to 300 cycles), so each part has a warp of its own that waits for nothing else.
//
// Both warpgroups take the blocks in the same order, and the base of a block, from which its P was
// computed, comes with P. A base never falls. A warpgroup whose outputs have an older base rescales
// them, so both end with the same one.
//
// The query's 512 columns are in shared memory. Its other 64 are fragments in registers, since
// shared memory has no room for them.
#pragma once

#include <cstdint>

#include "common/math/attention_work.cuh"
#include "common/math/chunked_keys.cuh"
#include "common/math/few_rows.cuh"
#include "common/math/kv_cache.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/tile_walk.cuh"
#include "common/math/uniform.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/cache_rows.cuh"
#include "hopper/mla_config.cuh"
#include "hopper/tile.cuh"

namespace archflash::hopper {

// The parts of a stage, in the order in which they come.
enum MlaPart { MLA_KEYS = 0, MLA_LEFT = 1, MLA_RIGHT = 2 };

// The barriers, as addresses in shared memory.
//
// clang-format off
//   barrier                  arrives                  waits         so that
//   full of each part        its producer, bytes      consumers     the part has landed before wgmma reads it
//   empty of the keys' part  the 4 warps that         its producer  their product has read it before TMA
//                            compute the scores                     overwrites it
//   empty of a half of V     the 4 warps that         its producer  the same. They multiply P V of a block only when
//                            multiply it                            they have its P, so its scores are there too
//   p_full of a warpgroup    its 4 warps              the other     P and its bases are there before they are read.
//                                                     warpgroup     There is no empty barrier: a warpgroup writes its
//                                                                   next P when it has scores of rows that came after
//                                                                   the other one has handed back the half of V that
//                                                                   it multiplied with the last P
//   ragged of each part      its producer, bytes      its producer  a part has landed before its rows that no query
//                                                                   sees are cleared
//   named barrier 2          warpgroup 0: arrives     warpgroup 1   the products of S do not run side by side, which
//                                                                   would end both late. It closes no hazard
// clang-format on
template <class C>
struct MlaBarriers {
  uint32_t first_smem;

  __device__ __forceinline__ uint32_t full(int stage, int part) const {
    return first_smem + 8 * (C::PARTS * stage + part);
  }
  __device__ __forceinline__ uint32_t empty(int stage, int part) const {
    return full(stage, part) + 8 * C::STAGES * C::PARTS;
  }
  __device__ __forceinline__ uint32_t p_full(int group) const {
    return first_smem + 8 * (2 * C::STAGES * C::PARTS + group);
  }
  __device__ __forceinline__ uint32_t ragged(int part) const {
    return p_full(C::WARPGROUPS) + 8 * part;
  }
};

// What a CTA computes; thread 0 writes it to shared memory for all.
struct MlaTile {
  math::Work work;
  math::ChunkedKeys visible;
  math::Blocks blocks;  // first keys of the first and the last block of the CTA's share
  int last_row;         // of any head of the tile
  int first;            // row of the sequence that is its first key
};

template <class C>
__device__ __forceinline__ MlaTile find_mla_tile(const mma_sync::CacheParams& params,
                                                 const math::Work& found) {
  const AttentionParams& attention = params.attention;
  MlaTile tile;
  tile.work = found;
  const math::CacheRows rows =
      math::find_cache_rows(params.cache, found.batch_head / attention.heads_q);
  tile.work.nk = rows.count;
  tile.first = rows.first;
  tile.visible = {math::find_visible_keys(attention, tile.work), params.attention_chunk,
                  tile.work.nk - tile.work.nq};
  tile.last_row = min(found.first_row + params.packed_heads.rows(), found.nq) - 1;
  tile.blocks =
      math::blocks_of_share<C::BLOCK_K>({tile.visible.first(found.first_row) & -C::BLOCK_K,
                                         tile.visible.last(tile.last_row) & -C::BLOCK_K},
                                        params.partials, blockIdx.x % params.partials.splits);
  return tile;
}

// --- producers, a warp for each part: latent rows -> shared memory ---

// The box with key `key` of a sequence. A box behind the sequence is that of the last key, which is
// in the cache; its rows are cleared.
__device__ __forceinline__ CachePlace find_place(const MlaParams& params, const MlaTile& tile,
                                                 int sequence, int key) {
  const KvCache& cache = params.call.cache;
  const int row = min(key, tile.work.nk - 1);
  CachePlace place{math::find_cache_block(cache, sequence, row), row + tile.first};
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
      const int row = __shfl_sync(math::FULL_WARP, place.row, box);
      const int block = __shfl_sync(math::FULL_WARP, block_of_lane, box);
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

// --- consumers, two warpgroups ---

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
  __device__ __forceinline__ void load(const MlaParams& params, const math::Work& work) {
    const int lane = threadIdx.x % 32;
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * ROWS;
    const math::FewRow own(params.call.attention, params.call.packed_heads, work,
                           warp_row + lane % ROWS);
    const int64_t offset_of_lane =
        own.batch * params.qv_batch + own.head * params.qv_head + own.packed * params.qv_row;
    const uint32_t wanted = __ballot_sync(math::FULL_WARP, own.wanted);
    const uint16_t* const qv_gmem = static_cast<const uint16_t*>(params.qv_gmem) + 8 * lane;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      // mutants: from-a-low-lane
      const int64_t offset = __shfl_sync(math::FULL_WARP, offset_of_lane, i);
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

// The fragments of A of the query's 64 other columns.
using MlaQuery = uint32_t[4][4];

template <class C>
__device__ __forceinline__ void load_q(MlaQuery& q_rmem, const MlaParams& params,
                                       const math::Work& work, int warp_row) {
  const AttentionParams& attention = params.call.attention;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const math::FewRow row(attention, params.call.packed_heads, work, warp_row + lane / 4 + 8 * r);
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

template <class C, int GROUP>
struct MlaConsumer {
  using G = typename C::Group;
  using RowTile = typename C::RowTile;
  using PTile = typename C::PTile;
  static constexpr int SCORES = C::BLOCK_K / 2, OUTPUTS = G::HEAD_DIM_V / 2;
  static constexpr MlaPart HALF = GROUP == 0 ? MLA_LEFT : MLA_RIGHT;  // of V, that it multiplies
  static constexpr int OTHER = 1 - GROUP;

  const MlaParams& params;
  const MlaTile& tile;  // in shared memory
  unsigned char* shared;
  uint32_t shared_smem;
  MlaBarriers<C> barriers;
  int warp_row;
  int open_first, open_last;  // every row of the tile sees the keys from the one to the other
  MlaQuery q_rmem;
  math::Scores<G> s_rmem;
  math::Probabilities<G> p_rmem;
  math::Outputs<G> o_rmem;
  math::RowState<G> state;
  bool raised;  // outputs wait for these corrections
  float corrections[2];

  __device__ __forceinline__ float* s() { return &s_rmem[0][0][0]; }
  __device__ __forceinline__ float* o() { return &o_rmem[0][0][0]; }
  __device__ __forceinline__ float* bases(int group, int r) {
    return reinterpret_cast<float*>(shared + C::BASE_SMEM) + group * C::BLOCK_Q + warp_row +
           threadIdx.x % 32 / 4 + 8 * r;
  }

  // Starts S of the block in stage GROUP, part by part as they land.
  __device__ __forceinline__ void begin_scores(uint32_t parity) {
    using Product = ptx::Wgmma<C::DTYPE, C::BLOCK_K>;
    const uint32_t rows_smem = shared_smem + C::ROWS_SMEM + GROUP * RowTile::BYTES;
    const ptx::WgmmaDescriptor k = describe_tile<RowTile>(rows_smem, 16);
    const ptx::WgmmaDescriptor q = describe_tile<typename C::QTile>(shared_smem + C::Q_SMEM, 16);
    ptx::mbarrier_wait_parity(barriers.full(GROUP, MLA_KEYS), parity);
    ptx::registers_change<SCORES>(s());
    ptx::wgmma_fence();  // the last uses of the scores come before the product
#pragma unroll
    for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
      Product::template rs<false>(s(), q_rmem[i],
                                  advance(k, column_step<RowTile>(C::HEAD_DIM_V / 16 + i)), i != 0);
    }
    constexpr int STEPS = C::HEAD_DIM_V / 32;
#pragma unroll
    for (int part = MLA_LEFT; part <= MLA_RIGHT; ++part) {
      ptx::mbarrier_wait_parity(barriers.full(GROUP, part), parity);
      ptx::wgmma_fence();  // ptxas wants one behind each loop
#pragma unroll
      for (int i = (part - 1) * STEPS; i < part * STEPS; ++i) {
        Product::ss(s(), advance(q, column_step<typename C::QTile>(i)),
                    advance(k, column_step<RowTile>(i)), 1);
      }
    }
    ptx::wgmma_commit_group();
  }

  __device__ __forceinline__ ptx::WgmmaDescriptor describe_v(int stage) const {
    return describe_tile<RowTile>(
        shared_smem + C::ROWS_SMEM + stage * RowTile::BYTES + GROUP * C::HALF_BYTES,
        RowTile::SLAB_BYTES);
  }
  // Starts O += P V with this warpgroup's own P, of the block in stage GROUP.
  __device__ __forceinline__ void begin_own_pv() {
    const ptx::WgmmaDescriptor v = describe_v(GROUP);
    ptx::registers_change<OUTPUTS>(o());
    ptx::wgmma_fence();  // the last uses of P and the outputs come before the product
#pragma unroll
    for (int i = 0; i < C::BLOCK_K / 16; ++i) {
      ptx::Wgmma<C::DTYPE, G::HEAD_DIM_V>::rs(o(), p_rmem[0][i],
                                              advance(v, 16 * i * RowTile::ROW_BYTES), 1);
    }
    ptx::wgmma_commit_group();
  }
  // Starts O += P V with the P of the other warpgroup.
  __device__ __forceinline__ void begin_other_pv() {
    const ptx::WgmmaDescriptor v = describe_v(OTHER);
    const ptx::WgmmaDescriptor p =
        describe_tile<PTile>(shared_smem + C::P_SMEM + OTHER * PTile::BYTES, 16);
    ptx::registers_change<OUTPUTS>(o());
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < C::BLOCK_K / 16; ++i) {
      ptx::Wgmma<C::DTYPE, G::HEAD_DIM_V>::template ss<true>(
          o(), advance(p, column_step<PTile>(i)), advance(v, 16 * i * RowTile::ROW_BYTES), 1);
    }
    ptx::wgmma_commit_group();
  }
  // Waits for all products of this warpgroup, and hands its half of V back.
  __device__ __forceinline__ void finish_pv(int stage) {
    ptx::wgmma_wait_group<0>();
    ptx::registers_change<OUTPUTS>(o());
    release(barriers.empty(stage, HALF));
  }

  // The scores are there: hands the keys back and makes P of the scores, for both warpgroups.
  __device__ __forceinline__ void weigh(int key) {
    const AttentionParams& attention = params.call.attention;
    ptx::registers_change<SCORES>(s());
    release(barriers.empty(GROUP, MLA_KEYS));
    if (attention.transform_scores)
      math::transform_scores<G>(s_rmem, attention.tanh_scale, attention.softcap);
    if (key < open_first || key + C::BLOCK_K - 1 > open_last) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile.work.first_row +
                        params.call.packed_heads.row(warp_row + threadIdx.x % 32 / 4 + 8 * r);
        math::mask_row<G>(s_rmem, tile.visible.of_row(row), 0, r, 0,
                          key + static_cast<int>(threadIdx.x) % 4 * 2);
      }
    }
    raised = false;
    const auto note = [&](const float (&wanted)[2]) {
      raised = true;
      corrections[0] = wanted[0], corrections[1] = wanted[1];
    };
    const float scale = follow_maxima<G>(s_rmem, state, attention.exp2_scale, note);
    weigh_rows<G>(s_rmem, state, scale);
    pack<G>(s_rmem, p_rmem);
    const int lane = threadIdx.x % 32;
    const int row = warp_row + lane % 16;
    const uint32_t p_smem =
        shared_smem + C::P_SMEM + GROUP * PTile::BYTES + PTile::offset(row, lane / 16);
#pragma unroll
    for (int i = 0; i < C::BLOCK_K / 16; ++i)
      ptx::stmatrix_x4(PTile::advance(p_smem, 2 * i), p_rmem[0][i]);
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) *bases(GROUP, r) = state.base[0][r];
    }
    ptx::fence_proxy_async_shared();  // the stores come before the reads of wgmma
    release(barriers.p_full(GROUP));
  }
  // Rescales outputs, which no product is adding to, if weigh() has raised a base.
  __device__ __forceinline__ void follow_own_bases() {
    if (raised) rescale<G>(o_rmem, corrections);
  }
  // Waits for P of the other warpgroup. Rescales outputs and sums if its bases are newer.
  __device__ __forceinline__ void follow_other_bases(uint32_t parity) {
    ptx::mbarrier_wait_parity(barriers.p_full(OTHER), parity);
    float (&base)[2] = state.base[0];
    const float newer[2] = {*bases(OTHER, 0), *bases(OTHER, 1)};
    if (!__any_sync(math::FULL_WARP, newer[0] != base[0] || newer[1] != base[1])) return;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factors[r] = newer[r] == base[r] ? 1.0f : ptx::ex2_approx_ftz(base[r] - newer[r]);
      base[r] = newer[r];
      state.sum[0][r] *= factors[r];
    }
    rescale<G>(o_rmem, factors);
    state.large = __any_sync(math::FULL_WARP, math::is_large<math::Weights16>(base[0]) ||
                                                  math::is_large<math::Weights16>(base[1]));
  }

  // A pair of blocks, from `key` on downwards. If not WHOLE it has its first block only.
  template <bool WHOLE>
  __device__ __forceinline__ void visit_pair(int key, uint32_t parity) {
    if constexpr (GROUP == 0) {
      begin_scores(parity);
      if constexpr (WHOLE) ptx::bar_arrive(C::SCORES_BARRIER, C::CONSUMER_THREADS);
      ptx::wgmma_wait_group<0>();
      weigh(key);
      follow_own_bases();
      begin_own_pv();
      finish_pv(0);
      if constexpr (WHOLE) {
        follow_other_bases(parity);
        begin_other_pv();
        finish_pv(1);
      }
    } else if constexpr (WHOLE) {
      ptx::bar_sync(C::SCORES_BARRIER, C::CONSUMER_THREADS);
      begin_scores(parity);
      follow_other_bases(parity);
      begin_other_pv();
      ptx::wgmma_wait_group<1>();  // the scores are there
      weigh(key - C::BLOCK_K);
      finish_pv(0);
      follow_own_bases();
      begin_own_pv();
      finish_pv(1);
    } else {
      follow_other_bases(parity);
      begin_other_pv();
      finish_pv(0);
    }
  }

  __device__ __forceinline__ void run() {
    math::clear(state);
    state.large = false;
#pragma unroll
    for (int n = 0; n < G::HEAD_DIM_V / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_rmem[0][n][i] = 0.0f;
    }
    const int first = uniform(tile.blocks.first);
    int key = uniform(tile.blocks.last);
    uint32_t parity = 0;
#pragma unroll 1
    for (; key - C::BLOCK_K >= first; key -= 2 * C::BLOCK_K) {
      visit_pair<true>(key, parity);
      parity ^= 1;
    }
    if (key >= first) visit_pair<false>(key, parity);
    add_sums();
    store();
  }

  // Adds the row sums of both warpgroups, whose bases are the same at the end. The first of the
  // four lanes of a row then has the sum, the others 0.
  __device__ __forceinline__ void add_sums() {
    float* const sums = reinterpret_cast<float*>(shared + C::SUM_SMEM);
    const int lane = threadIdx.x % 32;
    const int row = warp_row + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& sum = state.sum[0][r];
      sum += __shfl_xor_sync(math::FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(math::FULL_WARP, sum, 2);
      if (lane % 4 == 0) sums[GROUP * C::BLOCK_Q + row + 8 * r] = sum;
    }
    ptx::bar_sync(1, C::CONSUMER_THREADS);  // both warpgroups have written before either reads
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float other = sums[OTHER * C::BLOCK_Q + row + 8 * r];
      state.sum[0][r] = lane % 4 == 0 ? state.sum[0][r] + other : 0.0f;
    }
  }

  // Writes this warpgroup's half of the columns: to the workspace if the keys are split, else to
  // the output. Warpgroup 0 writes what there is one of for each row.
  __device__ __forceinline__ void store() {
    if (params.call.partials.wanted()) {
      store_partial_rows();
    } else {
      store_rows();
    }
  }

  __device__ __forceinline__ void store_partial_rows() {
    const AttentionParams& attention = params.call.attention;
    const Partials& partials = params.call.partials;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const math::FewRow row(attention, params.call.packed_heads, tile.work,
                             warp_row + lane / 4 + 8 * r);
      const float sum = __shfl_sync(math::FULL_WARP, state.sum[0][r], lane & ~3);
      if (!row.wanted) continue;
      const int64_t index = partials.index(blockIdx.x % partials.splits, row.lse_index(attention));
      if (GROUP == 0 && lane % 4 == 0) partials.ends_gmem[index] = {state.base[0][r], sum};
      if (sum == 0.0f) continue;  // the combining kernel does not read the outputs
      float* row_gmem =
          partials.rows_gmem + index * C::HEAD_DIM_V + GROUP * G::HEAD_DIM_V + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < G::HEAD_DIM_V / 8; ++n) {
        *reinterpret_cast<float2*>(row_gmem + 8 * n) = {o_rmem[0][n][2 * r],
                                                        o_rmem[0][n][2 * r + 1]};
      }
    }
  }

  // The rows take the place of qv in shared memory, so that a warp writes whole rows of its half of
  // the columns. Nobody reads qv any more: add_sums() has waited for both warpgroups, whose
  // products are done. A warp reads back only what it has written.
  __device__ __forceinline__ void store_rows() {
    using QTile = typename C::QTile;
    constexpr int CHUNKS = G::HEAD_DIM_V / 8;  // of a row's half, 16 bytes each: one for a lane
    static_assert(CHUNKS == 32);
    const AttentionParams& attention = params.call.attention;
    const int lane = threadIdx.x % 32;
    const int first_chunk = GROUP * CHUNKS;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const math::FewRow row(attention, params.call.packed_heads, tile.work,
                             warp_row + lane / 4 + 8 * r);
      const math::RowEnd end =
          math::finish_lane_row<G>(state, 0, r, math::load_sink(attention, row.head));
      factors[r] = end.factor;
      if (row.wanted && attention.lse_gmem != nullptr && GROUP == 0 && lane % 4 == 0)
        attention.lse_gmem[row.lse_index(attention)] = end.lse;
    }
    const uint32_t row_smem =
        shared_smem + C::Q_SMEM + QTile::offset(warp_row + lane % 16, first_chunk + lane / 16);
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i) {  // 16 columns each
      const float (&left)[4] = o_rmem[0][2 * i];
      const float (&right)[4] = o_rmem[0][2 * i + 1];
      const uint32_t x[4] = {
          ptx::cvt_rn_x2_f32<C::DTYPE>(left[0] * factors[0], left[1] * factors[0]),
          ptx::cvt_rn_x2_f32<C::DTYPE>(left[2] * factors[1], left[3] * factors[1]),
          ptx::cvt_rn_x2_f32<C::DTYPE>(right[0] * factors[0], right[1] * factors[0]),
          ptx::cvt_rn_x2_f32<C::DTYPE>(right[2] * factors[1], right[3] * factors[1])};
      ptx::stmatrix_x4(QTile::advance(row_smem, 2 * i), x);
    }
    __syncwarp();  // the other lanes have stored before a lane reads
    const math::FewRow own(attention, params.call.packed_heads, tile.work, warp_row + lane % 16);
    const int64_t offset_of_lane = own.batch * attention.out_batch + own.head * attention.out_head +
                                   own.packed * attention.out_row;
    const uint32_t wanted = __ballot_sync(math::FULL_WARP, own.wanted);
    uint16_t* const out_gmem =
        static_cast<uint16_t*>(attention.out_gmem) + 8 * (first_chunk + lane);
#pragma unroll 4
    for (int i = 0; i < C::WARP_ROWS; ++i) {
      // mutants: from-a-low-lane
      const int64_t offset = __shfl_sync(math::FULL_WARP, offset_of_lane, i);
      if ((wanted >> i & 1) == 0) continue;
      *reinterpret_cast<uint4*>(out_gmem + offset) = *reinterpret_cast<const uint4*>(
          shared + C::Q_SMEM + QTile::offset(warp_row + i, first_chunk + lane));
    }
  }
};

template <class C, int GROUP>
__device__ __forceinline__ void consume_latent_rows(const MlaParams& params, const MlaTile& tile,
                                                    const MlaQueryRows<C>& qv,
                                                    unsigned char* shared, uint32_t shared_smem) {
  MlaConsumer<C, GROUP> consumer{params,
                                 tile,
                                 shared,
                                 shared_smem,
                                 {shared_smem + C::BARRIER_SMEM},
                                 static_cast<int>(threadIdx.x) % C::WARPGROUP / 32 * C::WARP_ROWS,
                                 uniform(tile.visible.first(tile.last_row)),
                                 uniform(tile.visible.last(tile.work.first_row))};
  qv.store(shared);
  load_q<C>(consumer.q_rmem, params, tile.work, consumer.warp_row);
  ptx::fence_proxy_async_shared();        // the stores come before the reads of wgmma
  ptx::bar_sync(1, C::CONSUMER_THREADS);  // all consumers have stored their part of qv
  consumer.run();
}

template <class C>
__device__ __forceinline__ void mla_fwd(const MlaParams& params) {
  extern __shared__ __align__(1024) unsigned char shared[];  // where swizzle patterns start
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const mma_sync::CacheParams& call = params.call;
  const math::PackedHeads& packed = call.packed_heads;
  static_assert(sizeof(MlaTile) <= C::TILE_BYTES);
  MlaTile& tile = *reinterpret_cast<MlaTile*>(shared + C::TILE_SMEM);
  if (call.attention.cu_seqlens_q_gmem != nullptr && !call.partials.wanted()) {
    for (int head = 0; head < packed.count; ++head) {
      math::write_rows_of_no_sequence(call.attention, blockIdx.x, threadIdx.x, C::THREADS,
                                      packed.rows(), packed.count, head);
    }
  }
  const math::Work work =
      math::find_work(call.attention, static_cast<int>(blockIdx.x) / call.partials.splits,
                      packed.rows(), packed.count);
  if (work.first_row < 0) return;
  // An empty cache has no maps.
  if (threadIdx.x == C::CONSUMER_THREADS && call.cache.capacity > 0) {
    ptx::prefetch_tensormap(params.k_map);
    ptx::prefetch_tensormap(params.v_map);
  }
  // Under way before thread 0 waits for the sequence's length. A load takes microseconds here: the
  // cache leaves nothing of other tensors in L2.
  MlaQueryRows<C> qv;
  if (threadIdx.x < C::CONSUMER_THREADS) qv.load(params, work);
  if (threadIdx.x == 0) {
    tile = find_mla_tile<C>(call, work);
    const MlaBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
    for (int stage = 0; stage < C::STAGES; ++stage) {
      for (int part = 0; part < C::PARTS; ++part) {
        ptx::mbarrier_init(barriers.full(stage, part), 1);
        ptx::mbarrier_init_for_warps(barriers.empty(stage, part), C::WARPGROUP / 32);
      }
    }
    for (int group = 0; group < C::WARPGROUPS; ++group)
      ptx::mbarrier_init_for_warps(barriers.p_full(group), C::WARPGROUP / 32);
    for (int part = 0; part < C::PARTS; ++part) ptx::mbarrier_init(barriers.ragged(part), 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // thread 0 has written `tile` and the barriers before others use them

  if (threadIdx.x >= C::CONSUMER_THREADS) {
    ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    const int warp = uniform(static_cast<int>(threadIdx.x - C::CONSUMER_THREADS) / 32);
    if (warp == MLA_KEYS) produce_latent_part<C, MLA_KEYS>(params, tile, shared, shared_smem);
    if (warp == MLA_LEFT) produce_latent_part<C, MLA_LEFT>(params, tile, shared, shared_smem);
    if (warp == MLA_RIGHT) produce_latent_part<C, MLA_RIGHT>(params, tile, shared, shared_smem);
  } else {
    ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    if (threadIdx.x < C::WARPGROUP) {
      consume_latent_rows<C, 0>(params, tile, qv, shared, shared_smem);
    } else {
      consume_latent_rows<C, 1>(params, tile, qv, shared, shared_smem);
    }
  }
}

}  // namespace archflash::hopper

// Defines an entry point. plan_mla.cpp launches it by NAME.
#define ARCHFLASH_HOPPER_MLA_KERNEL(NAME, CONFIG)                                    \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::hopper::MlaParams params) {            \
    archflash::hopper::mla_fwd<CONFIG>(params);                                      \
  }
