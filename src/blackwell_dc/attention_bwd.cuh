// Attention backward on tcgen05 and tensor memory, for compute capability 10.x and 11.0: fp16 or
// bf16 inputs, products summed in fp32.
//
// A CTA owns 128 keys of a head and goes over the blocks of 128 query rows that see any of them, of
// all query heads that share its head of K. It sums up dK and dV of its keys in tensor memory. All
// CTAs of a head add their parts of dQ to sums in the workspace, in an order that is not known, or
// in turns: in the order of their keys, so that the same inputs always give the same bits. A kernel
// of its own (write_dq) then scales and rounds the sums.
//
// In turns, a CTA waits only for CTAs with smaller indices, which have started before it. All CTAs
// go from later blocks of queries to earlier ones, and over the heads that share a head of K inside
// of a block's rows. Each begins with a later block than that of the keys before, so that the turn
// has mostly come. Behind its first block it goes on with the last one; what it adds from there on
// has a sum of its own, because it may come to these blocks before the CTAs of earlier keys do.
//
// clang-format off
//   role     warps       work
//   score    0-3, 4-7    S -> P, dP -> dS, a thread for each key; at the end dK, dV -> gradients
//   dq       8-11        dQ -> shared memory -> sums in the workspace, by TMA
//   mma      12          the five products
//   load     13          K, V, Q, dO -> shared memory, by TMA
//   terms    14          the LSEs and deltas of a block's rows -> shared memory
//
//   mma      S0 dP0 | dV0 | S1 dK0 dQ0 dP1 | dV1 | S2 dK1 dQ1 dP2 | dV2 | ... dK dQ
//   score       P0     dS0      P1            dS1      P2           dS2
//   dq                             dQ0                    dQ1
//   (if dQ has columns of its own: S1 dK0 dP1 dQ0)
// clang-format on
//
// Each role has a file (backward_load, _products, _dq, _scores), backward_pipeline.cuh the table of
// barriers, backward_config.cuh the tiles and the memory plan, plan_backward.cpp the plan,
// BACKWARD.md the budget.
#pragma once

#include <cstdint>

#include "blackwell_dc/backward_config.cuh"
#include "blackwell_dc/backward_dq.cuh"
#include "blackwell_dc/backward_load.cuh"
#include "blackwell_dc/backward_params.h"
#include "blackwell_dc/backward_pipeline.cuh"
#include "blackwell_dc/backward_products.cuh"
#include "blackwell_dc/backward_scores.cuh"
#include "common/device/backward_rounds.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/uniform.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc::backward {

// What comes before: the terms of all query rows, zeros for the sums of dQ and the turns.
template <DType DTYPE>
__device__ __forceinline__ void prepare(const BackwardKernelParams& params) {
  device::prepare_rounds<DTYPE>(params);
}

template <class C>
__device__ __forceinline__ void attention_bwd(const BackwardKernelParams& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(CtaWork) <= C::WORK_BYTES);
  CtaWork& work = *reinterpret_cast<CtaWork*>(shared + C::WORK_SMEM);
  device::clear_keys_of_no_sequence<C::ROWS, DK | DV>(params.backward, blockIdx.x, C::THREADS / 32);
  {
    const BackwardWork found =
        device::find_backward_work<Owns::Keys, C::ROWS>(params.backward.attention, blockIdx.x);
    if (found.first_row < 0) return;
    if (threadIdx.x == 0) device::find_queries<C>(params, found, work);
  }
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp == C::MMA_WARP) {
    ptx::tcgen05_alloc<ptx::TMEM_COLUMNS>(shared_smem + C::TMEM_ADDRESS_SMEM);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  if (threadIdx.x == 0) BackwardBarriers<C>{shared_smem + C::BARRIER_SMEM}.init();
  // The barriers are initialised, tensor memory is allocated and `work` is written before any warp
  // uses them. All columns of tensor memory are this CTA's.
  __syncthreads();

  const bool any_block = work.blocks > 0;
  if (warp < C::DQ_WARP) {
    ptx::setmaxnreg_inc<C::SCORE_REGISTERS>();
    score<C>(params, work, shared, shared_smem);
  } else if (warp < C::MMA_WARP) {
    if constexpr (C::DQ_REGISTERS > C::REGISTERS_AT_LAUNCH)
      ptx::setmaxnreg_inc<C::DQ_REGISTERS>();
    else
      ptx::setmaxnreg_dec<C::DQ_REGISTERS>();
    if (any_block) add_dq<C>(params, work, shared, shared_smem);
  } else {
    ptx::setmaxnreg_dec<C::OTHER_REGISTERS>();
    if (!any_block) {
    } else if (warp == C::MMA_WARP) {
      mma<C>(work, shared_smem, *reinterpret_cast<uint32_t*>(shared + C::TMEM_ADDRESS_SMEM));
    } else if (warp == C::LOAD_WARP) {
      load<C>(params, work, shared, shared_smem);
    } else if (warp == C::TERMS_WARP) {
      load_terms<C>(params, work, shared, shared_smem);
    }
  }
  // All warps are done with tensor memory before it is freed. Each role has fenced its last use.
  __syncthreads();
  if (warp == C::MMA_WARP) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc<ptx::TMEM_COLUMNS>(0);
  }
}

}  // namespace archflash::blackwell_dc::backward
