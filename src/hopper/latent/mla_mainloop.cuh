// The consumers of latent attention, two warpgroups: scores, softmax, P V and the output rows.
#pragma once

#include <cstdint>

#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma_store_5d.cuh"
#include "hopper/forward/products.cuh"
#include "hopper/forward/row_softmax.cuh"
#include "hopper/latent/mla_config.cuh"
#include "hopper/latent/mla_load.cuh"
#include "hopper/latent/mla_pipeline.cuh"
#include "hopper/latent/mla_softmax.cuh"

namespace archflash::hopper {

template <class C, int GROUP>
struct MlaConsumer {
  using G = typename C::Group;
  using RowTile = typename C::RowTile;
  using PTile = typename C::PTile;
  static constexpr int SCORES = C::BLOCK_K / 2, OUTPUTS = G::HEAD_DIM_V / 2;
  static constexpr MlaPart HALF = GROUP == 0 ? MLA_LEFT : MLA_RIGHT;  // of V, that it multiplies
  static constexpr int OTHER = 1 - GROUP;

  const typename C::Params& params;
  const MlaTileOf<C>& tile;  // in shared memory
  unsigned char* shared;
  uint32_t shared_smem;
  MlaBarriers<C> barriers;
  int warp_row;
  int open_first, open_last;  // every row of the tile sees the keys from the one to the other
  MlaQuery q_rmem;
  device::Scores<G> s_rmem;
  device::Probabilities<G> p_rmem;
  device::Outputs<G> o_rmem;
  device::RowState<G> state;
  bool raised;  // outputs wait for these corrections
  float corrections[2];

  __device__ __forceinline__ float* s() { return &s_rmem[0][0][0]; }
  __device__ __forceinline__ float* o() { return &o_rmem[0][0][0]; }
  __device__ __forceinline__ float* bases(int group, int r) {
    return reinterpret_cast<float*>(shared + C::BASE_SMEM) + group * C::BLOCK_Q + warp_row +
           threadIdx.x % 32 / 4 + 8 * r;
  }

  // Waits for a part of the block in stage GROUP.
  __device__ __forceinline__ void wait_for(int part, uint32_t parity) {
    ptx::mbarrier_wait_parity(barriers.full(GROUP, part), parity);
    if constexpr (C::PAIRS) ptx::mbarrier_wait_parity(barriers.sent(GROUP, part), parity);
    // cp.async writes in the generic proxy what wgmma reads in the async proxy.
    if constexpr (C::GATHERS) ptx::fence_proxy_async_shared();
  }
  // Starts S of the block in stage GROUP, part by part as they land.
  __device__ __forceinline__ void begin_scores(uint32_t parity) {
    using Product = ptx::Wgmma<C::DTYPE, C::BLOCK_K>;
    const uint32_t rows_smem = shared_smem + C::ROWS_SMEM + GROUP * RowTile::BYTES;
    const ptx::WgmmaDescriptor k = describe_tile<RowTile>(rows_smem, 16);
    const ptx::WgmmaDescriptor q = describe_tile<typename C::QTile>(shared_smem + C::Q_SMEM, 16);
    // With GATHERS the columns of K alone come with the left half.
    wait_for(C::GATHERS ? MLA_LEFT : MLA_KEYS, parity);
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
      if (!C::GATHERS || part == MLA_RIGHT) wait_for(part, parity);
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
    release_half<C>(barriers.empty(stage, HALF));
  }

  // Hides the places of the block in stage GROUP that name no key or one that the query does not
  // see.
  __device__ __forceinline__ void hide_unseen_places() {
    const uint2 seen = *reinterpret_cast<const uint2*>(shared + C::SEEN_SMEM + 8 * GROUP);
    if ((seen.x & seen.y) == ~0u) return;
    const int first_bit = static_cast<int>(threadIdx.x) % 4 * 2;
    const uint32_t words[2] = {seen.x >> first_bit, seen.y >> first_bit};
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((words[n / 4] >> (n % 4 * 8 + i % 2) & 1) == 0)
          s_rmem[0][n][i] = device::MINUS_INFINITY;
      }
    }
  }
  // The scores are there: hands the keys back and makes P of the scores, for both warpgroups.
  __device__ __forceinline__ void exponentiate(int key) {
    const AttentionParams& attention = params.call.attention;
    ptx::registers_change<SCORES>(s());
    if constexpr (!C::GATHERS) release(barriers.empty(GROUP, MLA_KEYS));
    if constexpr (C::TRANSFORMS) {
      if (attention.transform_scores) device::transform_scores<G>(s_rmem, attention.rule);
    }
    if constexpr (C::GATHERS) {
      hide_unseen_places();
    } else if (key < open_first || key + C::BLOCK_K - 1 > open_last) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = tile.work.first_row +
                        params.call.packed_heads.row(warp_row + threadIdx.x % 32 / 4 + 8 * r);
        device::mask_row<G>(s_rmem, tile.visible.of_row(row), 0, r, 0,
                            key + static_cast<int>(threadIdx.x) % 4 * 2);
      }
    }
    raised = false;
    const auto note = [&](const float (&wanted)[2]) {
      raised = true;
      corrections[0] = wanted[0], corrections[1] = wanted[1];
    };
    const float scale = update_latent_row_max<G>(s_rmem, state, attention.exp2_scale, note);
    exponentiate_rows<G>(s_rmem, state, scale);
    // The stage goes back before P is packed, since gathered rows take longer to come.
    if constexpr (C::GATHERS && GROUP == 1) finish_pv(0);
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
  // Rescales outputs, which no product is adding to, if exponentiate() has raised a base.
  __device__ __forceinline__ void follow_own_bases() {
    if (raised) rescale<G>(o_rmem, corrections);
  }
  // Waits for P of the other warpgroup. Rescales outputs and sums if its bases are newer.
  __device__ __forceinline__ void follow_other_bases(uint32_t parity) {
    ptx::mbarrier_wait_parity(barriers.p_full(OTHER), parity);
    float (&base)[2] = state.base[0];
    const float newer[2] = {*bases(OTHER, 0), *bases(OTHER, 1)};
    if (!__any_sync(device::FULL_WARP, newer[0] != base[0] || newer[1] != base[1])) return;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      factors[r] = newer[r] == base[r] ? 1.0f : ptx::ex2_approx_ftz(base[r] - newer[r]);
      base[r] = newer[r];
      state.sum[0][r] *= factors[r];
    }
    rescale<G>(o_rmem, factors);
    state.large = __any_sync(device::FULL_WARP, device::is_large<device::Weights16>(base[0]) ||
                                                    device::is_large<device::Weights16>(base[1]));
  }

  // A pair of blocks, from `key` on downwards. If not WHOLE it has its first block only.
  template <bool WHOLE>
  __device__ __forceinline__ void visit_pair(int key, uint32_t parity) {
    if constexpr (GROUP == 0) {
      begin_scores(parity);
      if constexpr (WHOLE) ptx::bar_arrive(C::SCORES_BARRIER, C::CONSUMER_THREADS);
      ptx::wgmma_wait_group<0>();
      exponentiate(key);
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
      exponentiate(key - C::BLOCK_K);
      if constexpr (!C::GATHERS) finish_pv(0);
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
    device::clear(state);
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

  // Adds the row sums of both warpgroups, whose bases are the same at the end. All four lanes of a
  // row then have the sum.
  __device__ __forceinline__ void add_sums() {
    float* const sums = reinterpret_cast<float*>(shared + C::SUM_SMEM);
    const int lane = threadIdx.x % 32;
    const int row = warp_row + lane / 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& sum = state.sum[0][r];
      sum += __shfl_xor_sync(device::FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(device::FULL_WARP, sum, 2);
      if (lane % 4 == 0) sums[GROUP * C::BLOCK_Q + row + 8 * r] = sum;
    }
    ptx::bar_sync(1, C::CONSUMER_THREADS);  // both warpgroups have written before either reads
#pragma unroll
    for (int r = 0; r < 2; ++r) state.sum[0][r] += sums[OTHER * C::BLOCK_Q + row + 8 * r];
  }
  __device__ __forceinline__ device::RowEnd finish_row(int r, int head) const {
    const float sum = state.sum[0][r];
    return device::finish_row(
        sum == 0.0f ? device::MINUS_INFINITY : state.base[0][r] * device::LN_2, sum,
        device::load_sink(params.call.attention, head));
  }

  // Writes this warpgroup's half of the columns: to the workspace if the keys are split, else to
  // the output. Warpgroup 0 writes what there is one of for each row.
  __device__ __forceinline__ void store() {
    if (params.call.partials.wanted()) {
      store_partial_rows();
    } else if constexpr (C::GATHERS) {
      store_heads();
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
      const auto row = find_row(params.call, tile, warp_row + lane / 4 + 8 * r);
      const float sum = state.sum[0][r];
      if (!row.wanted) continue;
      const int64_t index = partials.index(tile.share, row.lse_index(attention));
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

  // Columns 16 i to 16 i + 15 of this warpgroup's half, finished, as stmatrix takes them.
  __device__ __forceinline__ void pack_outputs(int i, const float (&factors)[2], uint32_t (&x)[4]) {
    const float (&left)[4] = o_rmem[0][2 * i];
    const float (&right)[4] = o_rmem[0][2 * i + 1];
    x[0] = ptx::cvt_rn_x2_f32<C::DTYPE>(left[0] * factors[0], left[1] * factors[0]);
    x[1] = ptx::cvt_rn_x2_f32<C::DTYPE>(left[2] * factors[1], left[3] * factors[1]);
    x[2] = ptx::cvt_rn_x2_f32<C::DTYPE>(right[0] * factors[0], right[1] * factors[0]);
    x[3] = ptx::cvt_rn_x2_f32<C::DTYPE>(right[2] * factors[1], right[3] * factors[1]);
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
      const auto row = find_row(params.call, tile, warp_row + lane / 4 + 8 * r);
      const device::RowEnd end = finish_row(r, row.head);
      factors[r] = end.factor;
      if (row.wanted && attention.lse_gmem != nullptr && GROUP == 0 && lane % 4 == 0)
        attention.lse_gmem[row.lse_index(attention)] = end.lse;
    }
    const uint32_t row_smem =
        shared_smem + C::Q_SMEM + QTile::offset(warp_row + lane % 16, first_chunk + lane / 16);
#pragma unroll
    for (int i = 0; i < CHUNKS / 2; ++i) {  // 16 columns each
      uint32_t x[4];
      pack_outputs(i, factors, x);
      ptx::stmatrix_x4(QTile::advance(row_smem, 2 * i), x);
    }
    __syncwarp();  // the other lanes have stored before a lane reads
    const auto own = find_row(params.call, tile, warp_row + lane % 16);
    const int64_t offset_of_lane = own.batch * attention.out_batch + own.head * attention.out_head +
                                   own.packed * attention.out_row;
    const uint32_t wanted = __ballot_sync(device::FULL_WARP, own.wanted);
    uint16_t* const out_gmem =
        static_cast<uint16_t*>(attention.out_gmem) + 8 * (first_chunk + lane);
    // mutants: from-a-low-lane (tests/sim/tags.py)
#pragma unroll 4
    for (int i = 0; i < C::WARP_ROWS; ++i) {
      // mutants: from-a-low-lane
      const int64_t offset = __shfl_sync(device::FULL_WARP, offset_of_lane, i);
      if ((wanted >> i & 1) == 0) continue;
      *reinterpret_cast<uint4*>(out_gmem + offset) = *reinterpret_cast<const uint4*>(
          shared + C::Q_SMEM + QTile::offset(warp_row + i, first_chunk + lane));
    }
  }

  // Stores the outputs where keys are listed: rows are heads of one query, and a warp's are a box
  // of TMA in each slab, which leaves out those that do not exist. They lie in the place of qv,
  // each warp's together.
  __device__ __forceinline__ void store_heads() {
    using Rows = device::SlabTile<G::HEAD_DIM_V, C::WARP_ROWS>;
    const AttentionParams& attention = params.call.attention;
    const int lane = threadIdx.x % 32;
    float factors[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
      factors[r] =
          finish_row(r, find_row(params.call, tile, warp_row + lane / 4 + 8 * r).head).factor;
    const uint32_t rows_smem =
        shared_smem + C::Q_SMEM + static_cast<int>(threadIdx.x) / 32 * Rows::BYTES;
    const uint32_t row_smem = rows_smem + Rows::offset(lane % 16, lane / 16);
#pragma unroll
    for (int i = 0; i < G::HEAD_DIM_V / 16; ++i) {
      uint32_t x[4];
      pack_outputs(i, factors, x);
      ptx::stmatrix_x4(Rows::advance(row_smem, 2 * i), x);
    }
    ptx::fence_proxy_async_shared();  // the stores come before TMA reads
    __syncwarp();                     // ... those of all lanes
    const bool leader = ptx::elect_sync() && warp_row < params.call.packed_heads.count;
    if (leader) {
#pragma unroll
      for (int slab = 0; slab < C::HALF_SLABS; ++slab) {
        ptx::cp_async_bulk_tensor_5d_store(
            params.out_map, GROUP * G::HEAD_DIM_V + slab * Rows::SLAB, warp_row, tile.head_tile,
            tile.row, tile.list.sequence, rows_smem + slab * Rows::SLAB_BYTES);
      }
      ptx::cp_async_bulk_commit_group();
    }
    if (GROUP == 0 && attention.lse_gmem != nullptr && lane % 4 == 0) {
      // Here and not with the factors, for which everybody waits.
      ptx::registers_change<2>(state.sum[0]);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const auto row = find_row(params.call, tile, warp_row + lane / 4 + 8 * r);
        if (row.wanted) attention.lse_gmem[row.lse_index(attention)] = finish_row(r, row.head).lse;
      }
    }
    if (leader) ptx::cp_async_bulk_wait_group_read_0();  // before shared memory goes
  }
};

// found: as `tile`, which shared memory may not hold yet. The warp's rows of qv are stored, or
// being copied.
template <class C, int GROUP>
__device__ __forceinline__ void consume_latent_rows(const typename C::Params& params,
                                                    const MlaTileOf<C>& tile,
                                                    const MlaTileOf<C>& found,
                                                    unsigned char* shared, uint32_t shared_smem) {
  int open_first = 0, open_last = 0;
  if constexpr (!C::GATHERS) {
    open_first = uniform(tile.visible.first(tile.last_row));
    open_last = uniform(tile.visible.last(tile.work.first_row));
  }
  MlaConsumer<C, GROUP> consumer{params,
                                 tile,
                                 shared,
                                 shared_smem,
                                 {shared_smem + C::BARRIER_SMEM},
                                 static_cast<int>(threadIdx.x) % C::WARPGROUP / 32 * C::WARP_ROWS,
                                 open_first,
                                 open_last};
  load_q<C>(consumer.q_rmem, params, found, consumer.warp_row);
  if constexpr (C::GATHERS) {
    wait_for_start<C>();
    ptx::mbarrier_wait_parity(consumer.barriers.query(), 0);
  } else {
    ptx::fence_proxy_async_shared();        // the stores come before the reads of wgmma
    ptx::bar_sync(1, C::CONSUMER_THREADS);  // all consumers have stored their part of qv
  }
  consumer.run();
}

}  // namespace archflash::hopper
