// Attention to listed keys (key_indices) of K and V with head dimensions up to 256, on cp.async,
// mbarriers and wgmma, for compute capability 9.0.
//
// A CTA computes rows that share a list, 64 for each of its consumer warpgroups: the query heads of
// one position that share a head of K, packed, or with a list for 64 rows those rows too. So each
// row of K and V that is gathered serves all of them.
//
// clang-format off
//   role        warps                  code                  work
//   consumers   4 of each warpgroup    gather_mainloop.cuh   S = Q K^T, softmax, O += P V; output rows
//   producers   4, behind them         gather_load.cuh       look up the keys of a block; Q, K, V -> shared
//                                                            memory, by cp.async
//
//   what is handed over           from -> to               barriers: ready / free again
//   Q                             producers -> consumers   q_full / q_empty
//   K, the positions of its keys  producers -> consumers   k_full / k_empty
//   V                             producers -> consumers   v_full / v_empty
//
//   one step of a consumer warpgroup:
//
//   tensor cores   S of block b | O += P V of block b - 1
//   warps                       | row maxima, exponentials and row sums of block b | P of b in 16 bits
// clang-format on
//
// CTAs stay: the producers gather the first blocks of the next tile while this one ends. Both roles
// find the same tiles. gather_pipeline.cuh has the barriers with the hazards that they close.
#pragma once

#include <cstdint>

#include "common/ptx/warp_roles.cuh"
#include "hopper/lists/gather_config.cuh"
#include "hopper/lists/gather_load.cuh"
#include "hopper/lists/gather_mainloop.cuh"
#include "hopper/lists/gather_pipeline.cuh"

namespace archflash::hopper {

template <class C>
__device__ __forceinline__ void gather_fwd(const GatherParams& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (threadIdx.x == 0) initialise_gather_barriers(Barriers<C>{shared_smem + C::BARRIER_SMEM});
  __syncthreads();  // the barriers are initialised before any warp uses them
  if (threadIdx.x < C::CONSUMER_THREADS) {
    if constexpr (C::MOVES_REGISTERS) ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    consume_gathered<C>(params, shared, shared_smem);
  } else {
    if constexpr (C::MOVES_REGISTERS) ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    gather_rows<C>(params, shared, shared_smem);
  }
}

}  // namespace archflash::hopper
