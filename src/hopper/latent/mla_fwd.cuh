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
//
// With GATHERS the keys are those of a list that each query has, so the rows of a tile are the
// heads of one query. Four warps gather the rows of 64 places of the list by cp.async, and a bit of
// each place says whether it names a key that the query sees. With PAIRS a cluster of two CTAs
// shares the rows of a list.
//
// The producers are in mla_load.cuh and mla_gather_load.cuh, the consumers in mla_mainloop.cuh, the
// barriers with the hazards that they close in mla_pipeline.cuh, the tile and the memory plan in
// mla_config.cuh, and the plan in plan_mla.cpp.
#pragma once

#include <cstdint>

#include "hopper/latent/mla_config.cuh"
#include "hopper/latent/mla_gather_load.cuh"
#include "hopper/latent/mla_load.cuh"
#include "hopper/latent/mla_mainloop.cuh"
#include "hopper/latent/mla_packed_load.cuh"
#include "hopper/latent/mla_pipeline.cuh"

namespace archflash::hopper {

template <class C>
__device__ __forceinline__ void initialise_mla_barriers(const MlaBarriers<C>& barriers) {
  for (int stage = 0; stage < C::STAGES; ++stage) {
    for (int part = 0; part < C::PARTS; ++part) {
      if constexpr (C::PAIRS) {
        if (part == MLA_KEYS) continue;
        ptx::mbarrier_init_for_warps(barriers.full(stage, part), C::PRODUCER_WARPS);
        ptx::mbarrier_init(barriers.sent(stage, part), 1);
      } else if constexpr (C::GATHERS) {
        ptx::mbarrier_init_for_warps(barriers.full(stage, part), C::PRODUCER_WARPS,
                                     32 * C::PRODUCER_WARPS);
      } else {
        ptx::mbarrier_init(barriers.full(stage, part), 1);
      }
      ptx::mbarrier_init_for_warps(barriers.empty(stage, part),
                                   (C::PAIRS ? 2 : 1) * C::WARPGROUP / 32);
    }
  }
  for (int group = 0; group < C::WARPGROUPS; ++group)
    ptx::mbarrier_init_for_warps(barriers.p_full(group), C::WARPGROUP / 32);
  for (int part = 0; part < C::PARTS; ++part) ptx::mbarrier_init(barriers.ragged(part), 1);
  ptx::fence_mbarrier_init();
}

// The roles of a CTA that computes a tile of lists. Nobody waits for what another one loads before
// it has begun to load itself, since loads take microseconds here.
template <class C>
__device__ __forceinline__ void compute_listed_tile(const typename C::Params& params,
                                                    unsigned char* shared, uint32_t shared_smem) {
  static_assert(sizeof(MlaListTile) <= C::TILE_BYTES);
  MlaListTile& tile = *reinterpret_cast<MlaListTile*>(shared + C::TILE_SMEM);
  if (threadIdx.x == 0) {
    ptx::prefetch_tensormap(params.qv_map);
    if (!params.call.partials.wanted()) ptx::prefetch_tensormap(params.out_map);
  }
  MlaListTile found = find_list_tile<C>(params);
  if (found.row >= params.call.attention.nq) return;  // the last list may have fewer rows
  if (threadIdx.x >= C::CONSUMER_THREADS) {
    ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    const int entry = first_entry<C>(found);
    find_seen_keys(params, found);
    if (threadIdx.x == C::CONSUMER_THREADS) tile = found;
    const int warp = uniform(static_cast<int>(threadIdx.x - C::CONSUMER_THREADS) / 32);
    if constexpr (!C::PACKED) {
      gather_latent_rows<C>(params, found, shared, shared_smem, warp, entry);
    } else if (params.packed == PackedRows::Bytes656) {
      convert_latent_rows<C, true>(params, found, tile, shared, shared_smem, warp, entry);
    } else {
      convert_latent_rows<C, false>(params, found, tile, shared, shared_smem, warp, entry);
    }
  } else {
    ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    if (uniform(static_cast<int>(threadIdx.x) / 32) == 0) {
      if (threadIdx.x == 0) initialise_mla_barriers(MlaBarriers<C>{shared_smem + C::BARRIER_SMEM});
      __syncwarp();  // the barriers are there before the elected lane uses one
      load_listed_query<C>(params, found, shared_smem);
    }
    if (threadIdx.x < C::WARPGROUP) {
      consume_latent_rows<C, 0>(params, tile, found, shared, shared_smem);
    } else {
      consume_latent_rows<C, 1>(params, tile, found, shared, shared_smem);
    }
  }
  if constexpr (C::PAIRS) {  // a CTA's shared memory ends with it: the other one is done with it
    __syncwarp();
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

// Computes a tile whose keys are consecutive rows of the cache.
template <class C>
__device__ __forceinline__ void compute_tile(const typename C::Params& params,
                                             unsigned char* shared, uint32_t shared_smem) {
  const mma_sync::CacheParams& call = params.call;
  const device::PackedHeads& packed = call.packed_heads;
  static_assert(sizeof(MlaTile) <= C::TILE_BYTES);
  MlaTile& tile = *reinterpret_cast<MlaTile*>(shared + C::TILE_SMEM);
  if (call.attention.cu_seqlens_q_gmem != nullptr && !call.partials.wanted()) {
    for (int head = 0; head < packed.count; ++head) {
      device::write_rows_of_no_sequence(call.attention, blockIdx.x, threadIdx.x, C::THREADS,
                                        packed.rows(), packed.count, head);
    }
  }
  const device::Work work = device::find_work(call.attention, blockIdx.x / call.partials.splits,
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
    initialise_mla_barriers(MlaBarriers<C>{shared_smem + C::BARRIER_SMEM});
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
    qv.store(shared);
    if (threadIdx.x < C::WARPGROUP) {
      consume_latent_rows<C, 0>(params, tile, tile, shared, shared_smem);
    } else {
      consume_latent_rows<C, 1>(params, tile, tile, shared, shared_smem);
    }
  }
}

template <class C>
__device__ __forceinline__ void mla_fwd(const typename C::Params& params) {
  extern __shared__ __align__(1024) unsigned char shared[];  // where swizzle patterns start
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (C::GATHERS) {
    // Uniform, or the assembler computes the descriptors of products with 150 instructions more.
    // The kernels that transform scores would spill.
    compute_listed_tile<C>(params, shared, C::TRANSFORMS ? shared_smem : uniform(shared_smem));
  } else {
    compute_tile<C>(params, shared, shared_smem);
  }
}

}  // namespace archflash::hopper
