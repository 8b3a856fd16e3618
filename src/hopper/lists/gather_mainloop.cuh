// The consumers of a kernel for listed rows: S, the softmax, P V, and the output rows.
#pragma once

#include <cstdint>

#include "common/device/few_rows.cuh"
#include "common/device/online_softmax.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/forward/clear_outputs.cuh"
#include "hopper/forward/products.cuh"
#include "hopper/forward/row_softmax.cuh"
#include "hopper/lists/gather_pipeline.cuh"

namespace archflash::hopper {

// Sets the scores of keys that a row does not see to -inf.
template <class C>
__device__ __forceinline__ void mask_gathered(device::Scores<C>& s_rmem,
                                              const GatheredKeys<C>& keys,
                                              const GatherParams& params, const GatherTile& tile,
                                              int row_of_tile) {
  const device::PackedHeads& packed = params.call.packed_heads;
  const int first_key = static_cast<int>(threadIdx.x) % 4 * 2;
  int first[2], last[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = tile.work.first_row + packed.row(row_of_tile + 8 * r);
    first[r] = max(tile.visible.first(row), 0), last[r] = tile.visible.last(row);
  }
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; ++n) {
    const int2 position = *reinterpret_cast<const int2*>(&keys.positions[8 * n + first_key]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float* const s = &s_rmem[0][n][2 * r];
      if (position.x < first[r] || position.x > last[r]) s[0] = device::MINUS_INFINITY;
      if (position.y < first[r] || position.y > last[r]) s[1] = device::MINUS_INFINITY;
    }
  }
}

template <class C>
__device__ __forceinline__ void consume_gathered(const GatherParams& params, unsigned char* shared,
                                                 uint32_t shared_smem) {
  constexpr int SCORES = C::BLOCK_K / 2, OUTPUTS = C::HEAD_DIM_V / 2, WORDS = C::BLOCK_K / 4;
  const AttentionParams& attention = params.call.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int group = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  const int warp_row = static_cast<int>(threadIdx.x) / 32 * C::WARP_ROWS;
  const ptx::WgmmaDescriptor q_descriptor = describe_q<C>(shared_smem, 0, group);
  const Turns<C> turns{group};
  if (group == C::WARPGROUPS - 1) turns.hand_over();  // warpgroup 0 begins
  RingPosition<C::STAGES> k_ring, v_ring;
  uint32_t q_parity = 0;

#pragma unroll 1
  for (int index = blockIdx.x; index < params.tiles; index += gridDim.x) {
    const GatherTile tile = find_gather_tile<C>(params, index);
    if (!tile.exists()) continue;
    k_ring = {uniform(k_ring.stage), uniform(k_ring.parity)};
    v_ring = k_ring;
    device::Scores<C> s_rmem;
    device::Probabilities<C> p_rmem;
    device::Outputs<C> o_rmem;
    float* const s = &s_rmem[0][0][0];
    float* const o = &o_rmem[0][0][0];
    uint32_t* const p = &p_rmem[0][0][0];
    device::RowState<C> state;
    device::clear(state);
    state.large = false;
    clear_outputs<C>(o_rmem);

    const auto finish_pv = [&] {
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<OUTPUTS>(o);
      ptx::registers_change<WORDS>(p);
      release(barriers.v_empty(v_ring.stage));
      v_ring.advance();
    };
    int blocks =
        uniform(tile.any_block() ? (tile.blocks.last - tile.blocks.first) / C::BLOCK_K + 1 : 0);
    // A step starts S of its block, and O += P V of the block before, which runs during this one's
    // softmax. STARTS: there is no block before.
    const auto step = [&]<bool STARTS>() {
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
      if constexpr (STARTS) {
        ptx::mbarrier_wait_parity(barriers.q_full(0), q_parity);  // Q has landed
      } else {
        ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
      }
      // cp.async writes in the generic proxy what wgmma reads in the async proxy. The fence waits
      // for other accesses, so there is one for both products.
      ptx::fence_proxy_async_shared();
      turns.wait();
      start_qk<C>(s_rmem, q_descriptor, shared_smem, k_ring.stage);
      if constexpr (!STARTS) start_pv<C>(o_rmem, p_rmem, shared_smem, v_ring.stage, true);
      turns.hand_over();
      const GatheredKeys<C>& keys = gathered_keys<C>(shared, k_ring.stage);
      const bool bare = uniform(static_cast<int>(keys.all_bare())) != 0;
      --blocks;
      ptx::wgmma_wait_group<STARTS ? 0 : 1>();  // the scores are there
      ptx::registers_change<SCORES>(s);
      if (!bare) {
        if (attention.transform_scores) device::transform_scores<C>(s_rmem, attention.rule);
        mask_gathered<C>(s_rmem, keys, params, tile,
                         warp_row + static_cast<int>(threadIdx.x) % 32 / 4);
      }
      release(barriers.k_empty(k_ring.stage));
      k_ring.advance();
      if (blocks == 0) release(barriers.q_empty(0));
      bool raised = false;
      float corrections[2];
      const auto note = [&](const float (&wanted)[2]) {
        raised = true;
        corrections[0] = wanted[0], corrections[1] = wanted[1];
      };
      const float scale = update_row_max<C, STARTS>(s_rmem, state, attention.exp2_scale, note);
      exponentiate_rows<C>(s_rmem, state, scale);
      if constexpr (!STARTS) finish_pv();
      pack<C>(s_rmem, p_rmem);
      if (!STARTS && raised) rescale<C>(o_rmem, corrections);
    };
    if (blocks > 0) {
      step.template operator()<true>();
      q_parity ^= 1;
#pragma unroll 1
      while (blocks > 0) step.template operator()<false>();
      ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
      ptx::fence_proxy_async_shared();
      start_pv<C>(o_rmem, p_rmem, shared_smem, v_ring.stage, true);
      finish_pv();
    }

    if (params.call.partials.wanted()) {
      device::store_partials<C>(o_rmem, state, attention, params.call.partials,
                                params.call.packed_heads, tile.work,
                                index % params.call.partials.splits, warp_row);
    } else {
      device::store_packed_out<C>(o_rmem, state, attention, params.call.packed_heads, tile.work,
                                  warp_row);
    }
  }
  // The last turn that was handed over: a barrier must not end with arrivals.
  if (group == 0) turns.wait();
}

}  // namespace archflash::hopper
