// Attention forward on tcgen05 and tensor memory, for compute capability 10.x and 11.0: fp16, bf16
// or e4m3 inputs, fp32 scores, sums and output accumulators.
//
// The CTAs, one for each SM, share out row tiles (BLOCK_Q query rows of a head, the longest first):
// a CTA that is done with a tile takes the next one. For each of them it visits the visible blocks
// of keys from the last one, which may be ragged, back to the first, with an online softmax. A CTA
// has one or two tiles of 128 rows in flight, so that the softmax of one step runs under the
// products of another.
//
// clang-format off
//   role        warps       code          work
//   load        14          load.cuh      Q, K, V -> shared memory, by TMA
//   clean       15          load.cuh      zeros in rows of V that no row of a sequence sees
//   mma         12          products.cuh  S = Q K^T and O += P V: shared -> tensor memory
//   softmax     0-3, 4-7    softmax.cuh   S -> P of tile 0, 1 in tensor memory, a thread per row
//   correction  8-11        output.cuh    rescales O; at the end O -> output rows in shared memory
//   store       13          output.cuh    output rows -> global memory, by TMA
//
//   what is handed over           from -> to              barriers: ready / free again
//   Q                             load -> mma             q_full / q_empty
//   K, V                          load -> mma             kv_full / kv_empty
//   V with rows nobody sees       load -> clean -> mma    v_ragged, v_clean / kv_empty
//   S                             mma -> softmax          s_ready / p_ready
//   P                             softmax -> mma          p_ready, p_last / the order of products
//   factors; sums and bases       softmax -> correction   stats_full / stats_empty
//   O                             mma -> correction       o_ready / p_ready
//   output rows                   correction -> store     o_staged / o_free
//   the next tile                 the GPU, which load asks -> all     response_full / response_empty
// clang-format on
//
// All roles walk over the same tiles and blocks (next_tile.cuh, walk.cuh). pipeline.cuh lists the
// barriers and the hazards that they close, pair_pipeline.cuh what changes where two CTAs multiply
// together, for long sequences. The tiles and the memory plan are in config.cuh, the choice among
// the kernels in plan.cpp, decisions in NOTES.md.
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
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  // Opaque to the compiler, which otherwise computes the address anew at each use.
  const uint32_t shared_smem =
      ptx::mov_b32_volatile(static_cast<uint32_t>(__cvta_generic_to_shared(shared)));
  static_assert(C::QTile::ALIGNMENT <= 1024);
  const int warp = uniform(threadIdx.x / 32);
  const auto allocate = [&] {
    if (warp == C::MMA_WARP) allocate_tensor_memory<C>(shared_smem + C::TMEM_ADDRESS_SMEM);
  };
  if constexpr (C::CTAS == 1) allocate();
  if (threadIdx.x == 0) {
    Barriers<C>{shared_smem + C::BARRIER_SMEM}.init(any_ragged(params.attention));
    ptx::prefetch_tensormap(params.q_map);
    if (params.attention.nk > 0) {  // plan.cpp makes no maps of an empty k and v
      ptx::prefetch_tensormap(params.k_map);
      ptx::prefetch_tensormap(params.v_map);
    }
    if (!writes_f32<C>(params)) ptx::prefetch_tensormap(params.out_map);
  }
  // Barriers are initialised and tensor memory is allocated before any warp uses them, also those
  // of the other CTA of a pair. All columns of tensor memory are this CTA's.
  sync_threads<C>();
  // A pair allocates together, and so does not begin before both CTAs have started.
  if constexpr (C::CTAS == 2) {
    allocate();
    __syncthreads();
  }

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
  // All warps are done with tensor memory before it is freed, and with the other CTA's shared
  // memory before that CTA ends. Each role has fenced its last use of tensor memory.
  sync_threads<C>();
  if (warp == C::MMA_WARP) {
    ptx::tcgen05_fence_after_thread_sync();
    free_tensor_memory<C>();
  }
}

}  // namespace archflash::blackwell_dc
