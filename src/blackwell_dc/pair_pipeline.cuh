// How the two CTAs of a pair hand over (Config::CTAS == 2), and what a CTA alone does in its place.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/walk.cuh"
#include "common/math/slab_load.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/tcgen05_pair.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

// The mma warp of the first CTA alone starts products, of 256 rows: those of tile t of both CTAs,
// the first one's first. Each CTA loads its own Q, half of the rows of K (S has a column for each,
// in both CTAs) and half of the columns of V (O likewise), and works on S, P and O of its own rows
// in its own tensor memory. Each has all barriers of pipeline.cuh; between CTAs:
//
//   barrier          of          arrives                   so that
//   q_full t         the first   the first one's load,     Q of both has landed
//                                bytes of both
//   kv_full slot     the first   likewise                  both halves of K or V have landed. Note:
//                                                          bytes may land before the arrival that
//                                                          says how many are to come, which the
//                                                          phase waits for all the same
//   v_ragged slot    each        its load, bytes           its half of a ragged V has landed
//   v_clean slot     the first   clean of both             rows of another sequence are zeros in
//                                                          both halves
//   p_ready b,       the first   softmax and correction    S is read, P written and O rescaled in
//   p_last b                     of both                   both
//   s_ready b,       each        commit to both            its rows of S and of O are complete
//   o_ready t
//   kv_empty slot,   each        commit to both            no product reads its half of K or V, or
//   q_empty t                                              its Q, when TMA writes there again
//   the cluster's    both        all threads               first: barriers and tensor memory are
//                                                          there before the other CTA uses them;
//                                                          last: shared memory stays while the
//                                                          other arrives there, tensor memory while
//                                                          products write it
//
// Arrivals and waits order what their CTA does, as in CUTLASS's kernels: what they hand over is
// tensor memory, which has fences of its own, and bytes that TMA counts. Only v_clean hands over
// what threads have stored, to products that the other CTA starts.

// The barriers at which mma waits: whichever CTA of the pair arrives there.
template <class C>
__device__ __forceinline__ Barriers<C> barriers_of_mma(const Barriers<C>& own) {
  if constexpr (C::CTAS == 1) {
    return own;
  } else {
    return Barriers<C>{uniform(ptx::mapa_shared_cluster(own.smem, 0))};
  }
}
template <class C>
__device__ __forceinline__ void arrive_at_mma_as_warp(uint32_t barrier_smem) {
  if constexpr (C::CTAS == 1) {
    arrive_as_warp(barrier_smem);
  } else {
    __syncwarp();
    if (ptx::elect_sync()) ptx::mbarrier_arrive_shared_cluster(barrier_smem);
  }
}
// The same, and the wait for it, where the products read what the warp has stored.
template <class C>
__device__ __forceinline__ void arrive_at_mma_with_stores_as_warp(uint32_t barrier_smem) {
  if constexpr (C::CTAS == 1) {
    arrive_as_warp(barrier_smem);
  } else {
    __syncwarp();
    if (ptx::elect_sync()) ptx::mbarrier_arrive_release_cluster(barrier_smem);
  }
}
template <class C>
__device__ __forceinline__ void wait_for_stores(uint32_t barrier_smem, uint32_t parity) {
  if constexpr (C::CTAS == 1) {
    ptx::mbarrier_wait_parity(barrier_smem, parity);
  } else {
    ptx::mbarrier_wait_parity_acquire_cluster(barrier_smem, parity);
  }
}

// That all threads of the pair are here.
template <class C>
__device__ __forceinline__ void sync_threads() {
  if constexpr (C::CTAS == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

// All of tensor memory, by one warp of each CTA.
template <class C>
__device__ __forceinline__ void allocate_tensor_memory(uint32_t address_smem) {
  if constexpr (C::CTAS == 1) {
    ptx::tcgen05_alloc<ptx::TMEM_COLUMNS>(address_smem);
    ptx::tcgen05_relinquish_alloc_permit();
  } else {
    ptx::tcgen05_pair_alloc<ptx::TMEM_COLUMNS>(address_smem);
    ptx::tcgen05_pair_relinquish_alloc_permit();
  }
}
template <class C>
__device__ __forceinline__ void free_tensor_memory() {
  if constexpr (C::CTAS == 1) {
    ptx::tcgen05_dealloc<ptx::TMEM_COLUMNS>(0);
  } else {
    ptx::tcgen05_pair_dealloc<ptx::TMEM_COLUMNS>(0);
  }
}

// Starts one product of PRODUCT_DEPTH columns of A, which is in shared memory (a descriptor) or in
// tensor memory (an address).
template <class C, typename A>
__device__ __forceinline__ void multiply(uint32_t d_tmem, A a, uint64_t b_descriptor,
                                         uint32_t instruction, bool accumulate) {
  if constexpr (C::FP8) {
    ptx::tcgen05_mma_f8f6f4(d_tmem, a, b_descriptor, instruction, accumulate);
  } else if constexpr (C::CTAS == 1) {
    ptx::tcgen05_mma_f16(d_tmem, a, b_descriptor, instruction, accumulate);
  } else {
    ptx::tcgen05_pair_mma_f16(d_tmem, a, b_descriptor, instruction, accumulate);
  }
}
// An arrival in every CTA once all products so far are done.
template <class C>
__device__ __forceinline__ void commit(uint32_t barrier_smem) {
  if constexpr (C::CTAS == 1) {
    ptx::tcgen05_commit(barrier_smem);
  } else {
    ptx::tcgen05_pair_commit(barrier_smem, 0b11);
  }
}

// Starts the copy of this CTA's part of a tile. The bytes of all parts go to the first CTA's
// barrier, barrier_of_mma_smem; there barrier_smem is the same one, and says how many will come.
template <class C, class Tile>
__device__ __forceinline__ void start_part(uint32_t tile_smem, const TensorMap& map, int column,
                                           int row, int head, int batch, uint32_t barrier_smem,
                                           uint32_t barrier_of_mma_smem) {
  if constexpr (C::CTAS == 1) {
    math::start_load<Tile, C::PACK>(tile_smem, map, row, head, batch, barrier_smem);
  } else {
    if (rank_in_pair<C>() == 0) ptx::mbarrier_arrive_expect_tx(barrier_smem, C::CTAS * Tile::BYTES);
#pragma unroll
    for (int slab = 0; slab < Tile::SLABS; ++slab)
      ptx::cp_async_bulk_tensor_4d_load_of_pair(tile_smem + slab * Tile::SLAB_BYTES, map,
                                                column + slab * Tile::SLAB, row, head, batch,
                                                barrier_of_mma_smem);
  }
}

}  // namespace archflash::blackwell_dc
