// Attention forward on tcgen05 and tensor memory, for compute capability 10.0 and 10.3: fp16, bf16
// or e4m3 inputs, fp32 scores, sums and output accumulators. The CTAs, one for each SM, share out
// row tiles (BLOCK_Q query rows of a head, the longest first) and visit the visible key blocks of
// each from the last (ragged) one back to the first with an online softmax.
//   warps 0-3, 4-7  softmax of tile 0, 1    S -> P in tensor memory, a thread for each row
//   warps 8-11      correction              rescales O, at the end O -> rows in shared memory
//   warp 12         mma                     S = Q K^T and O += P V, two steps in flight
//   warp 13         store                   rows -> global memory
//   warp 14         load                    Q, K, V -> shared memory
//   warp 15         clean                   zeros in V after a packed sequence's end
// For long sequences two CTAs multiply together (pair_pipeline.cuh). Roles: load.cuh, products.cuh,
// softmax.cuh, output.cuh. Their walk: walk.cuh. Barriers: pipeline.cuh. Tiles: config.cuh. Choice:
// plan.cpp. Counts: NOTES.md.
#pragma once

#include <cstdint>

#include "blackwell_dc/config.cuh"
#include "blackwell_dc/load.cuh"
#include "blackwell_dc/output.cuh"
#include "blackwell_dc/pair_pipeline.cuh"
#include "blackwell_dc/params.h"
#include "blackwell_dc/pipeline.cuh"
#include "blackwell_dc/products.cuh"
#include "blackwell_dc/softmax.cuh"
#include "blackwell_dc/walk.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc {

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& params) {
  extern __shared__ __align__(1024) unsigned char shared[];  // where a swizzle pattern starts
  const uint32_t shared_smem =
      ptx::mov_b32_volatile(static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
  static_assert(C::QTile::ALIGNMENT <= 1024);
  const int warp = uniform(threadIdx.x / 32);
  if (warp == C::MMA_WARP) {
    allocate_tensor_memory<C>(shared_smem + C::TMEM_ADDRESS_SMEM);
  }
  if (threadIdx.x == 0) {
    Barriers<C>{shared_smem + C::BARRIER_SMEM}.init();
    ptx::prefetch_tensormap(params.q_map);
    if (params.attention.nk > 0) {  // else they have no maps
      ptx::prefetch_tensormap(params.k_map);
      ptx::prefetch_tensormap(params.v_map);
    }
    ptx::prefetch_tensormap(params.out_map);
  }
  sync_threads<C>();  // barriers and tensor memory are ready before anyone uses them
  // All columns are this CTA's: the roles count them from 0.

  constexpr Registers REGISTERS = C::REGISTERS;
  constexpr bool MOVE = C::SWITCHES.move_registers;
  if (warp < C::CORRECTION_WARP) {
    if constexpr (MOVE) ptx::setmaxnreg_inc<REGISTERS.softmax>();
    const int t = warp / C::SOFTMAX_WARPS;
    if (t < C::TILES) softmax<C>(params, shared, shared_smem, t);
  } else if (warp < C::MMA_WARP) {
    if constexpr (MOVE) ptx::setmaxnreg_dec<REGISTERS.correction>();
    correction<C>(params, shared, shared_smem);
  } else {
    if constexpr (MOVE) ptx::setmaxnreg_dec<REGISTERS.other>();
    if (warp == C::STORE_WARP) {
      store<C>(params, shared, shared_smem);
    } else if (warp == C::LOAD_WARP) {
      load<C>(params, shared_smem);
    } else if (warp == C::CLEAN_WARP) {
      clean<C>(params, shared, shared_smem);
    } else if (rank_in_pair<C>() == 0) {
      mma<C>(params, shared_smem, *reinterpret_cast<uint32_t*>(shared + C::TMEM_ADDRESS_SMEM));
    }
  }
  // Nobody uses tensor memory any more. Each role has fenced its last use before it handed over.
  sync_threads<C>();
  if (warp == C::MMA_WARP) {
    ptx::tcgen05_fence_after_thread_sync();
    free_tensor_memory<C>();
  }
}

}  // namespace archflash::blackwell_dc

// One entry point: its name is what plan.cpp asks for. The one parameter stays in constant memory,
// where the copy engine reads the tensor maps.
#define ARCHFLASH_BLACKWELL_DC_KERNEL(NAME, CONFIG)                          \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, 1)           \
      NAME(const __grid_constant__ archflash::blackwell_dc::Params params) { \
    archflash::blackwell_dc::attention_fwd<CONFIG>(params);                  \
  }
