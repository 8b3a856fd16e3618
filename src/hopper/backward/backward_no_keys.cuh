// A consumer warpgroup of the backward pass whose 64 keys are behind the end of the sequence: it
// only computes its part of dQ, from what the other one's keys give.
#pragma once

#include <cstdint>

#include "hopper/backward/backward_mainloop.cuh"

namespace archflash::hopper {

// Whether the second warpgroup has none of a tile's keys.
template <class C>
__device__ __forceinline__ bool has_no_keys(const CtaWork& work) {
  if constexpr (!C::LEAVES_OUT_KEYS) return false;
  const int group = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  return group * C::GROUP_ROWS + uniform(work.first_row) >= uniform(work.own_rows);
}

// What consume() is for such a warpgroup. Its dS is 0: it clears the part of each stage once.
template <class C>
__device__ __forceinline__ void pass_without_keys(const BackwardKernelParams&, const CtaWork& work,
                                                  unsigned char* shared, uint32_t shared_smem,
                                                  const RingPosition<C::TILE_STAGES>& tile,
                                                  ConsumerPosition<C>& position) {
  constexpr int PART = C::PART_COLUMNS / 2;
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32), lane = threadIdx.x % 32;
  const uint32_t k_smem = shared_smem + k_offset<C>(tile.stage);
  float dq[PART];
  const auto ds_at = [&](int stage) { return shared_smem + C::DS_SMEM + stage * C::DsTile::BYTES; };
  const auto hand_on_ds = [&](bool clears) {
    if (clears) {
#pragma unroll
      for (int row = 0; row < C::ROUND; row += C::BLOCK)
        clear_ds<C>(ds_at(position.ds_ring.stage) + row * C::DsTile::ROW_BYTES);
      ptx::fence_proxy_async_shared();  // the stores come before wgmma reads them
    }
    release(barriers.ds_full(position.ds_ring.stage));
    position.ds_ring.advance();
  };
  // dQ of the round before the one whose dS comes next, of that number.
  const auto end_dq_of = [&](uint32_t round) {
    ptx::registers_begin<PART>(dq);
    const bool wraps = position.ds_ring.stage == 0;
    const int stage = uniform((wraps ? C::DS_STAGES : position.ds_ring.stage) - 1);
    ptx::mbarrier_wait_parity(barriers.ds_full(stage), position.ds_ring.parity ^ (wraps ? 1 : 0));
    ptx::wgmma_fence();
    start_dq<C>(dq, ds_at(stage), k_smem, 1);
    ptx::wgmma_wait_group<0>();
    ptx::registers_change<PART>(dq);
    ptx::mbarrier_wait_parity(barriers.dq_empty(1), round % 2 ^ 1);
    unsigned char* const first = shared + C::DQ_SMEM + 4 * warp * C::WARP_SUMS + lane * 16;
#pragma unroll
    for (int n = 0; n < C::PART_COLUMNS / 8; ++n) {
      *reinterpret_cast<float4*>(first + n * 32 * 16) =
          float4{dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]};
    }
    ptx::fence_proxy_async_shared();  // the stores come before TMA reads them
    release(barriers.dq_full(1, round));
  };
  hand_on_ds(true);  // of the round before the first one
  ptx::bar_sync(START_BARRIER, C::CONSUMER_THREADS);
  ptx::mbarrier_wait_parity(barriers.k_full(tile.stage), tile.parity);
  ptx::mbarrier_wait_parity(barriers.v_full(tile.stage), tile.parity);
  const int rounds = uniform(work.blocks) / C::BLOCKS_OF_ROUND;
  int singles = 0;
  if constexpr (C::SINGLE_BLOCKS) singles = uniform(work.singles);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
    // The dS of stages that other warps may still read is cleared when they have said so.
    if (round > 0) {
      end_dq_of(position.number / C::BLOCKS_OF_ROUND - 1);
    } else {
      const bool wraps = position.ds_ring.stage == 0;
      const int stage = (wraps ? C::DS_STAGES : position.ds_ring.stage) - 1;
      ptx::mbarrier_wait_parity(barriers.ds_full(stage), position.ds_ring.parity ^ (wraps ? 1 : 0));
    }
    hand_on_ds(round < C::DS_STAGES - 1);
    const int blocks = round < singles ? 1 : C::BLOCKS_OF_ROUND;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      const int before = (position.q_ring.stage == 0 ? C::Q_STAGES : position.q_ring.stage) - 1;
      ptx::mbarrier_wait_parity(barriers.q_full(position.q_ring.stage), position.q_ring.parity);
      if (position.number + block > 0) release(barriers.q_empty(before));
      position.q_ring.advance();
      const int stage = position.dout_ring.stage;
      ptx::mbarrier_wait_parity(barriers.dout_full(stage), position.dout_ring.parity);
      release(barriers.dout_empty(stage));
      position.dout_ring.advance();
    }
    position.number += C::BLOCKS_OF_ROUND;
  }
  end_dq_of(position.number / C::BLOCKS_OF_ROUND - 1);
  if constexpr (C::HANDS_KEYS_BACK) release(barriers.keys_empty());
}

}  // namespace archflash::hopper
