// The role mma, one warp: the five products.
#pragma once

#include <cstdint>

#include "blackwell_dc/backward_pipeline.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/matrix_descriptor.h"
#include "common/device/uniform.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc::backward {

using device::CtaWork;
using device::RingPosition;
using device::uniform;

// The descriptor of what one product reads of an operand: `fields` and `step` are from
// matrix_descriptor.h. Only the lower half is computed at run time.
__device__ __forceinline__ uint64_t operand(uint64_t fields, uint32_t address, uint64_t step) {
  constexpr uint64_t LOWER = 0xFFFFFFFF;
  return (fields & ~LOWER) |
         (static_cast<uint32_t>(fields) + address + static_cast<uint32_t>(step));
}

// D = A B^T of two tiles, summed over their columns.
template <class C, class A, class B>
__device__ __forceinline__ void multiply_rows(uint32_t d_tmem, uint32_t a_address,
                                              uint32_t b_address) {
  constexpr uint32_t INSTRUCTION =
      device::instruction_descriptor(C::DTYPE, A::ROWS, B::ROWS, false);
#pragma unroll
  for (int i = 0; i < A::COLUMNS / C::PRODUCT_DEPTH; ++i) {
    ptx::tcgen05_mma_f16(d_tmem,
                         operand(device::K_MAJOR_FIELDS<A>, a_address, device::k_major_step<A>(i)),
                         operand(device::K_MAJOR_FIELDS<B>, b_address, device::k_major_step<B>(i)),
                         ptx::mov_instruction_descriptor<C::DTYPE, INSTRUCTION>(), i > 0);
  }
}

// D += A B, summed over the block's queries. A, P or dS, is in tensor memory, in the pieces that
// the two groups of score warps wrote; the rows of B are the queries.
template <class C>
__device__ __forceinline__ void add_gradient(uint32_t d_tmem, uint32_t a_tmem, uint32_t b_address,
                                             bool accumulate) {
  using Tile = typename C::QTile;
  constexpr uint32_t INSTRUCTION =
      device::instruction_descriptor(C::DTYPE, C::ROWS, C::HEAD_DIM, true);
  constexpr int PIECE = C::GROUP_QUERIES / C::PRODUCT_DEPTH;  // products
#pragma unroll
  for (int i = 0; i < C::BLOCK / C::PRODUCT_DEPTH; ++i) {
    ptx::tcgen05_mma_f16(
        d_tmem, a_tmem + i / PIECE * C::GROUP_QUERIES + i % PIECE * (C::PRODUCT_DEPTH / 2),
        operand(device::MN_MAJOR_FIELDS<Tile>, b_address,
                device::mn_major_step<Tile, C::PRODUCT_DEPTH>(i)),
        ptx::mov_instruction_descriptor<C::DTYPE, INSTRUCTION>(), i > 0 || accumulate);
  }
}

// dQ = dS K, summed over the CTA's keys, which are the rows of both tiles.
template <class C>
__device__ __forceinline__ void multiply_dq(uint32_t dq_tmem, uint32_t ds_address,
                                            uint32_t k_address) {
  using DsTile = typename C::DsTile;
  using KTile = typename C::KTile;
  constexpr uint32_t INSTRUCTION =
      device::instruction_descriptor(C::DTYPE, C::BLOCK, C::HEAD_DIM, true, true);
#pragma unroll
  for (int i = 0; i < C::ROWS / C::PRODUCT_DEPTH; ++i) {
    ptx::tcgen05_mma_f16(dq_tmem,
                         operand(device::MN_MAJOR_FIELDS<DsTile>, ds_address,
                                 device::mn_major_step<DsTile, C::PRODUCT_DEPTH>(i)),
                         operand(device::MN_MAJOR_FIELDS<KTile>, k_address,
                                 device::mn_major_step<KTile, C::PRODUCT_DEPTH>(i)),
                         ptx::mov_instruction_descriptor<C::DTYPE, INSTRUCTION>(), i > 0);
  }
}

// One lane starts the products. All lanes wait and count.
template <class C>
__device__ __forceinline__ void mma(const CtaWork& work, uint32_t shared_smem, uint32_t tmem) {
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();
  const auto address = [&](int offset) {
    return static_cast<uint32_t>(device::matrix_descriptor_address(shared_smem + offset));
  };
  const auto q_at = [&](int stage) { return address(C::Q_SMEM + stage * C::QTile::BYTES); };
  const uint32_t blocks = uniform(work.blocks);
  RingPosition<C::Q_STAGES> q_ring;
  RingPosition<C::DOUT_STAGES> dout_ring;
  int last_q_stage = 0;  // that of the block before
  uint32_t drained_parity = 0;

  // Waits, if issue order is not trusted, until all products so far are done.
  const auto drain = [&] {
    if constexpr (!C::TRUST_ISSUE_ORDER) {
      if (leader) ptx::tcgen05_commit(barriers.drained());
      ptx::mbarrier_wait_parity(barriers.drained(), drained_parity);
      ptx::tcgen05_fence_after_thread_sync();
      drained_parity ^= 1;
    }
  };
  // dK of block `number`, whose dS is awaited here.
  const auto add_dk = [&](uint32_t number) {
    ptx::mbarrier_wait_parity(barriers.ds_ready(), number & 1);
    ptx::tcgen05_fence_after_thread_sync();
    if (leader) {
      add_gradient<C>(tmem + C::DK_COLUMN, tmem + C::DP_COLUMN, q_at(last_q_stage), number > 0);
      ptx::tcgen05_commit(barriers.q_empty(last_q_stage));
    }
    drain();  // dK has read dS before dQ, or the next dP, overwrites it
  };
  const auto start_dq = [&](uint32_t number) {
    if (!C::DQ_OVER_DS && number > 0) {  // dQ of the block before is read
      ptx::mbarrier_wait_parity(barriers.dq_empty(), (number - 1) & 1);
      ptx::tcgen05_fence_after_thread_sync();
    }
    if (leader) {
      // findings: overwrites-what-was-multiplied (tests/sim/tags.py)
      multiply_dq<C>(tmem + C::DQ_COLUMN, address(C::DS_SMEM), address(C::K_SMEM));
      ptx::tcgen05_commit(barriers.dq_ready());
      // There is no dS behind the last block's.
      if (!C::DQ_OVER_DS && number + 1 < blocks) ptx::tcgen05_commit(barriers.ds_empty());
    }
  };

  ptx::mbarrier_wait_parity(barriers.k_full(), 0);
#pragma unroll 1
  for (uint32_t number = 0; number < blocks; ++number) {
    const int q_stage = q_ring.stage;
    ptx::mbarrier_wait_parity(barriers.q_full(q_stage), q_ring.parity);
    q_ring.advance();
    // No fence is needed: P of the block before was awaited, whose warps had read S.
    if (leader) {
      // findings: overwrites-what-was-multiplied
      multiply_rows<C, typename C::KTile, typename C::QTile>(tmem + C::S_COLUMN, address(C::K_SMEM),
                                                             q_at(q_stage));
      ptx::tcgen05_commit(barriers.s_ready());
    }
    if (number > 0) {
      add_dk(number - 1);
      if constexpr (C::DQ_OVER_DS) {
        start_dq(number - 1);
        ptx::mbarrier_wait_parity(barriers.dq_empty(), (number - 1) & 1);  // dQ is read
        ptx::tcgen05_fence_after_thread_sync();
      }
    } else {
      ptx::mbarrier_wait_parity(barriers.v_full(), 0);
    }
    const uint32_t dout_address = address(C::DOUT_SMEM + dout_ring.stage * C::QTile::BYTES);
    ptx::mbarrier_wait_parity(barriers.dout_full(dout_ring.stage), dout_ring.parity);
    if (leader) {
      // findings: overwrites-what-was-multiplied
      multiply_rows<C, typename C::KTile, typename C::QTile>(tmem + C::DP_COLUMN,
                                                             address(C::V_SMEM), dout_address);
      ptx::tcgen05_commit(barriers.dp_ready());
    }
    if (!C::DQ_OVER_DS && number > 0) start_dq(number - 1);
    ptx::mbarrier_wait_parity(barriers.p_ready(), number & 1);
    ptx::tcgen05_fence_after_thread_sync();
    if (leader) {
      add_gradient<C>(tmem + C::DV_COLUMN, tmem + C::S_COLUMN, dout_address, number > 0);
      ptx::tcgen05_commit(barriers.dout_empty(dout_ring.stage));
    }
    drain();  // dV has read P before the next S overwrites it
    dout_ring.advance();
    last_q_stage = q_stage;
  }
  add_dk(blocks - 1);
  start_dq(blocks - 1);
  if (leader) ptx::tcgen05_commit(barriers.sums_ready());
}

}  // namespace archflash::blackwell_dc::backward
