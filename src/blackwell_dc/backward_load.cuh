// The roles load (K, V, Q and dO -> shared memory, by TMA) and terms, one warp each.
#pragma once

#include <cstdint>

#include "blackwell_dc/backward_params.h"
#include "blackwell_dc/backward_pipeline.cuh"
#include "common/device/backward_round_loads.cuh"
#include "common/device/backward_rounds.cuh"
#include "common/ptx/mbarrier.cuh"

namespace archflash::blackwell_dc::backward {

using device::CtaWork;
using device::RingPosition;

template <class C>
__device__ __forceinline__ void load(const BackwardKernelParams& params, const CtaWork& work,
                                     unsigned char* shared, uint32_t shared_smem) {
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  device::LoaderPosition<C> position;
  device::load_rounds<C>(params, work, shared, shared_smem, barriers,
                         {C::K_SMEM, C::V_SMEM, barriers.k_full(), barriers.v_full()}, position);
  RingPosition<C::Q_STAGES>& q_ring = position.q_ring;
  RingPosition<C::DOUT_STAGES>& dout_ring = position.dout_ring;
  // mma's last commits arrive at barriers in shared memory: load stays, and the CTA's shared memory
  // with it, until all of them have.
  for (int i = 0; i < C::Q_STAGES; ++i, q_ring.advance())
    ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
  for (int i = 0; i < C::DOUT_STAGES; ++i, dout_ring.advance())
    ptx::mbarrier_wait_parity(barriers.dout_empty(dout_ring.stage), dout_ring.parity ^ 1);
}

// The role terms: the terms of a block's rows, and a note about it -> shared memory.

template <class C>
__device__ __forceinline__ void load_terms(const BackwardKernelParams& params, const CtaWork& work,
                                           unsigned char* shared, uint32_t shared_smem) {
  RingPosition<C::Q_STAGES> q_ring;
  device::load_terms_of_rounds<C>(params, work, shared,
                                  BackwardBarriers<C>{shared_smem + C::BARRIER_SMEM}, q_ring);
}

}  // namespace archflash::blackwell_dc::backward
