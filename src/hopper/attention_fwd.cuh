// Attention forward on TMA, mbarriers and wgmma, for compute capability 9.0: fp16, bf16 or e4m3
// inputs, fp32 scores, sums and output accumulators.
//
// The CTAs share out row tiles (BLOCK_Q query rows of a head, the longest first). For each tile a
// CTA visits the visible blocks of keys from the last one, which may be ragged, back to the first,
// with an online softmax.
//
// clang-format off
//   role        warps                     code             work
//   producer    first of the last         load.cuh         finds the tile; Q, K and V -> shared memory, by TMA
//               warpgroup
//   V producer  second of it              load.cuh         with PAGES: V -> shared memory
//   transpose   second to fourth of it    transpose_v.cuh  8-bit V, where transposes_v(): keys of a column side by side
//   clear       second to fourth of it    grouped_load.cuh with CLEARS_BESIDE: rows of V that do not count
//   consumers   the WARPGROUPS others,    mainloop.cuh     S = Q K^T, softmax, O += P V; output rows
//               128 threads each
//
//   what is handed over    from -> to                          barriers: ready / free again
//   a tile's message, Q    producer -> consumers               q_full / q_empty
//   K, V                   producer -> consumers               k_full, v_full / k_empty, v_empty
//   V of which some rows   producer -> itself, or with         v_ragged, v_full / v_empty, v_cleared
//     must be cleared        CLEARS_BESIDE others -> consumers
//   8-bit V                producer -> transpose -> consumers  raw_full, v_full / raw_empty, v_empty
//   the tile, for V        producer -> V producer              v_tile_full / v_tile_empty
//   the turn to multiply   consumers -> consumers              named barriers from 1 on
//
//   shared memory, in bytes from 0 on (config.cuh has the offsets)
//   ring of Q | ring of K | ring of V | ring of V to transpose | barriers | messages
//
//   one step of a consumer warpgroup, which keeps the tensor cores busy during its softmax:
//
//   tensor cores   S of block b | O += P V of block b + 1
//   warps                       | row maxima, exponentials and row sums of block b | P of b in 16 bits
// clang-format on
//
// A consumer warpgroup owns 64 rows: their scores, P and outputs never leave its registers. The
// mainloop takes products.cuh (wgmma), scores.cuh (masks, softcap, descales, ALiBi) and
// row_softmax.cuh; the end of a tile is in epilogue.cuh. Producer and consumers find the same tiles
// and blocks (walk.cuh). pipeline.cuh lists the barriers with the hazards that they close.
//
// 8-bit V must be transposed, so that the keys of a column lie side by side. In calls for which
// transposes_v() holds the other warps of the producer's warpgroup do that, a block at a time: the
// producer loads V into a ring of its own, and these warps arrive at v_full. Elsewhere a kernel of
// its own (transpose_v.cuh) has transposed V into the workspace, with zeros behind the end of a
// sequence; there this kernel starts early (Launch::uses_pdl), and the producer waits for the
// other kernel's end before it loads V.
//
// The tiles are in config.cuh, the choice among the kernels in plan.cpp, budgets and measurements
// in docs/lab.
#pragma once

#include <cstdint>

#include "hopper/config.cuh"
#include "hopper/forward/epilogue.cuh"
#include "hopper/forward/load.cuh"
#include "hopper/forward/mainloop.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/forward/transpose_v.cuh"
#include "hopper/forward/walk.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

// The roles of a CTA's warps, behind the initialisation of the barriers: the consumers' warpgroups,
// the producer's warp, and the others of its warpgroup.
template <class C, class Consume, class Produce, class Others>
__device__ __forceinline__ void run_roles(const Consume& consume, const Produce& produce,
                                          const Others& others) {
  __syncthreads();  // the barriers are initialised before any warp uses them
  if (threadIdx.x < C::CONSUMER_THREADS) {
    if constexpr (C::MOVES_REGISTERS) ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    consume();
  } else {
    if constexpr (C::MOVES_REGISTERS) ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (threadIdx.x < C::CONSUMER_THREADS + 32) {
      produce();
    } else {
      others();
    }
  }
}

template <class C>
__device__ __forceinline__ void attention_fwd(const ParamsOf<C>& all_params) {
  static_assert(!C::CACHE || C::BLOCK_K <= MOST_CACHE_KEYS);
  const Params& params = call_of<C>(all_params);
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(C::QTile::ALIGNMENT <= 1024);
  if (threadIdx.x == 0) {
    Barriers<C>{shared_smem + C::BARRIER_SMEM}.initialise(
        transposes_v<C>(params) ? C::TRANSPOSING_WARPS * ptx::ARRIVALS_OF_WARP : 1);
  }
  run_roles<C>([&] { consume<C>(all_params, shared, shared_smem); },
               [&] { produce<C>(all_params, shared, shared_smem); },
               [&] {
                 if constexpr (C::PRODUCERS == 2) {
                   if (threadIdx.x < C::CONSUMER_THREADS + 64)
                     return produce_v<C>(all_params, shared, shared_smem);
                 }
                 if constexpr (C::TRANSPOSES_V) {
                   if (transposes_v<C>(params)) transpose_blocks_of_v<C>(shared, shared_smem);
                 }
                 write_rows_of_no_sequence<C>(params);
                 if constexpr (C::CLEARS_BESIDE) clear_v_beside<C>(shared, shared_smem);
               });
}

}  // namespace archflash::hopper
