// How the two CTAs of a pair hand over their data (Config::CTAS == 2). Each function here also has
// the form for a CTA that works alone.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/walk.cuh"
#include "common/device/slab_load.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/tcgen05_pair.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

// Only the mma warp of the first CTA starts products. A product has 256 rows: tile t of the first
// CTA, then tile t of the second. Each CTA loads its own Q, half of the rows of K (S has a column
// for each row of K, in both CTAs) and half of the columns of V (O has all columns, in both CTAs),
// and works on S, P and O of its own rows in its own tensor memory. Each CTA has all barriers of
// pipeline.cuh. Between the CTAs they are used so:
//
// clang-format off
//   barrier          of which CTA  arrives                so that
//   q_full t         the first     the first one's load,  Q of both CTAs has landed
//                                  bytes of both
//   kv_full slot     the first     the first one's load,  both halves of K or V have landed
//                                  bytes of both
//   v_ragged slot    each          its load, bytes        its half of a ragged V has landed
//   v_clean slot     the first     clean of both          the rows of another sequence are zeros
//                                                         in both halves
//   p_ready b,       the first     softmax and            both CTAs have read S, written P and
//   p_last b                       correction of both     rescaled O
//   s_ready b,       each          commit to both         its rows of S, or of O, are complete
//   o_ready t
//   kv_empty slot,   each          commit to both         all products have read its half of K or
//   q_empty t                                             V, or its Q, before TMA writes there
//   barrier.cluster  both          all threads            at the start: barriers and tensor memory
//                                                         are ready before the other CTA uses them;
//                                                         at the end: shared memory stays while the
//                                                         other CTA arrives there, tensor memory
//                                                         while products write it
// clang-format on
//
// Note: the second CTA's bytes may land before the first CTA's load has said how many are to come.
// The phase ends only when both have happened.
//
// Arrivals at the other CTA's barriers, and waits, order only what their own CTA does, as in
// CUTLASS's kernels. That is enough for tensor memory, which has fences of its own, and for bytes
// that TMA counts. v_clean alone hands over what threads have stored to products that the other CTA
// starts: its arrivals and waits have the scope of the cluster.

// The barriers at which mma waits: the first CTA's, in the address space of the cluster.
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
// The arrival for products that read what the warp's threads have stored, and mma's wait for it.
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

// Waits until all threads of the CTA, or of the pair, are here.
template <class C>
__device__ __forceinline__ void sync_threads() {
  if constexpr (C::CTAS == 1) {
    __syncthreads();
  } else {
    ptx::barrier_cluster_arrive();
    ptx::barrier_cluster_wait();
  }
}

// Allocates and frees all of the CTA's tensor memory. Called by one warp of each CTA.
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

// Starts one product, D = A B or D += A B, that sums over PRODUCT_DEPTH. `a` is a descriptor if A
// is in shared memory, or an address if it is in tensor memory.
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
// Arrives at a barrier of each CTA once all products that were started so far are done.
template <class C>
__device__ __forceinline__ void commit(uint32_t barrier_smem) {
  if constexpr (C::CTAS == 1) {
    ptx::tcgen05_commit(barrier_smem);
  } else {
    ptx::tcgen05_pair_commit(barrier_smem, 0b11);
  }
}

// Starts the copy of this CTA's part of a tile. The bytes of both CTAs' parts count at the first
// CTA's barrier: barrier_of_mma_smem names it in the cluster, and in the first CTA barrier_smem
// names it too. There the first CTA says how many bytes will come in all. `policy` is what L2 is
// told of the tile, if SWITCHES.l2_hints says so.
template <class C, class Tile>
__device__ __forceinline__ void start_part(uint32_t tile_smem, const TensorMap& map, int column,
                                           int row, int head, int batch, uint32_t barrier_smem,
                                           uint32_t barrier_of_mma_smem, uint64_t policy) {
  constexpr bool HINT = C::SWITCHES.l2_hints;
  if constexpr (C::CTAS == 1) {
    device::start_load<Tile, C::PACK, HINT>(tile_smem, map, row, head, batch, barrier_smem, 0,
                                            policy);
  } else {
    if (rank_in_pair<C>() == 0) ptx::mbarrier_arrive_expect_tx(barrier_smem, C::CTAS * Tile::BYTES);
#pragma unroll
    for (int slab = 0; slab < Tile::SLABS; ++slab) {
      const uint32_t slab_smem = tile_smem + slab * Tile::SLAB_BYTES;
      const int slab_column = column + slab * Tile::SLAB;
      if constexpr (HINT) {
        ptx::cp_async_bulk_tensor_4d_load_of_pair(slab_smem, map, slab_column, row, head, batch,
                                                  barrier_of_mma_smem, policy);
      } else {
        ptx::cp_async_bulk_tensor_4d_load_of_pair(slab_smem, map, slab_column, row, head, batch,
                                                  barrier_of_mma_smem);
      }
    }
  }
}

}  // namespace archflash::blackwell_dc
