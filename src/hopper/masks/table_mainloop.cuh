// The consumers of a stream of a kernel for tables of blocks, a warpgroup: S, P, O and the output
// rows of a row of blocks after another.
#pragma once

#include <cstdint>

#include "common/device/online_softmax.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/forward/clear_outputs.cuh"
#include "hopper/forward/epilogue.cuh"
#include "hopper/forward/products.cuh"
#include "hopper/forward/row_softmax.cuh"
#include "hopper/forward/scores.cuh"
#include "hopper/masks/masked_params.h"
#include "hopper/masks/table_messages.cuh"

namespace archflash::hopper {

// Which keys of a block attn_mask keeps, where all rows see the same ones: a warp reads two keys in
// each lane while the scores are computed.
struct KeptKeys {
  uint8_t even = 0, odd = 0;  // bytes of the mask

  // Starts to read the keys from `key` on.
  __device__ __forceinline__ void read(const MaskParams& masks, const TableTile& tile, int key) {
    const auto* const row_gmem = static_cast<const uint8_t*>(masks.mask_gmem) +
                                 tile.head.batch * masks.mask_batch +
                                 tile.head.head * masks.mask_head;
    key += static_cast<int>(threadIdx.x % 32) * 2;
    if (key < tile.nk) even = row_gmem[key * masks.mask_key];
    if (key + 1 < tile.nk) odd = row_gmem[(key + 1) * masks.mask_key];
  }
  // Sets the scores of the other keys to -inf, even if they were NaN. For a whole warp.
  template <class C>
  __device__ __forceinline__ void select(device::Scores<C>& s_rmem) const {
    static_assert(C::BLOCK_K == 64, "two keys in each lane");
    const unsigned place = threadIdx.x % 4;  // a lane has the keys 2 * place and the next of 8
    const uint32_t kept[2] = {__ballot_sync(device::FULL_WARP, even != 0) >> place,
                              __ballot_sync(device::FULL_WARP, odd != 0) >> place};
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if ((kept[i % 2] >> 4 * n & 1) == 0) s_rmem[0][n][i] = device::MINUS_INFINITY;
      }
    }
  }
};

// `shared`: of the stream.
template <class C>
__device__ __forceinline__ void compute_table(const MaskedParams& params, unsigned char* shared,
                                              uint32_t shared_smem) {
  constexpr int SCORES = C::BLOCK_K / 2, OUTPUTS = C::HEAD_DIM_V / 2, WORDS = C::BLOCK_K / 4;
  const AttentionParams& attention = params.call.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const ptx::WgmmaDescriptor q_descriptor = describe_q<C>(shared_smem, 0, 0);
  TableRing<C> ring(uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP));
  uint32_t q_parity = 0;

  while (true) {
    ptx::mbarrier_wait_parity(barriers.q_full(0), q_parity);  // Q has landed
    const TableTile& tile = table_message<C>(shared, uniform(q_parity));
    if (uniform(tile.first_row) < 0) break;
    ring.stage = uniform(ring.stage), ring.parity = uniform(ring.parity);

    device::Scores<C> s_rmem;
    Probabilities<C> p_rmem;
    device::Outputs<C> o_rmem;
    float* const s = &s_rmem[0][0][0];
    float* const o = &o_rmem[0][0][0];
    uint32_t* const p = &p_rmem[0][0][0];
    device::RowState<C> state;
    device::clear(state);
    state.large = false;
    clear_outputs<C>(o_rmem);

    bool more = uniform(tile.any_block);
    if (!more) release(barriers.q_empty(0));
    // A step starts S of its block, and O += P V of the block before, which runs during this one's
    // softmax. STARTS: there is no block before.
    const auto step = [&]<bool STARTS>() {
      ptx::mbarrier_wait_parity(barriers.k_full(ring.stage), ring.parity);  // K has landed
      // Their message is read before the products are started, behind which it would wait.
      const device::TableBlock& block = table_block<C>(shared, ring.stage);
      const uint32_t block_state = block.states;
      more = block.last == 0;
      const bool some_keys = C::KEYS && (block_state & device::BLOCK_KEYS) != 0;
      KeptKeys kept;
      if (some_keys) kept.read(params.masks, tile, block.key);
      start_qk<C>(s_rmem, q_descriptor, shared_smem, ring.stage);
      const int k_stage = ring.stage;
      ring.advance();
      int v_stage = 0;
      if constexpr (!STARTS) {
        ptx::mbarrier_wait_parity(barriers.k_full(ring.stage), ring.parity);  // V has landed
        start_pv<C>(o_rmem, p_rmem, shared_smem, ring.stage, true);
        v_stage = ring.stage;
        ring.advance();
      }
      ptx::wgmma_wait_group<STARTS ? 0 : 1>();  // the scores are there
      ptx::registers_change<SCORES>(s);
      if ((block_state & device::BLOCK_MASKED) != 0) {
        const device::VisibleKeys visible = device::find_visible_keys(attention, tile);
        const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile()) % C::WARPGROUP;
        const int row =
            tile.first_row + static_cast<int>(thread / 32 * C::WARP_ROWS + thread % 32 / 4);
        const int rows[2] = {row, row + 8};
        device::mask_rows<C>(s_rmem, visible, rows, block.key + static_cast<int>(thread % 4 * 2));
      }
      if (some_keys) kept.select<C>(s_rmem);
      release(barriers.k_empty(k_stage));
      if (!more) release(barriers.q_empty(0));
      bool raised = false;
      float corrections[2];
      const auto note = [&](const float (&wanted)[2]) {
        raised = true;
        corrections[0] = wanted[0], corrections[1] = wanted[1];
      };
      const float scale = update_row_max<C, STARTS>(s_rmem, state, attention.exp2_scale, note);
      exponentiate_rows<C>(s_rmem, state, scale);
      if constexpr (!STARTS) {
        ptx::wgmma_wait_group<0>();
        ptx::registers_change<OUTPUTS>(o);
        ptx::registers_change<WORDS>(p);
        release(barriers.k_empty(v_stage));
      }
      pack<C>(s_rmem, p_rmem);
      if (!STARTS && raised) rescale<C>(o_rmem, corrections);
    };
    const int warp_row = static_cast<int>(threadIdx.x) / 32 % C::WARPS * C::WARP_ROWS;
    TileEnd<C> end;
    if (more) {
      step.template operator()<true>();
#pragma unroll 1
      while (more) step.template operator()<false>();
      ptx::mbarrier_wait_parity(barriers.k_full(ring.stage), ring.parity);  // V has landed
      start_pv<C>(o_rmem, p_rmem, shared_smem, ring.stage, true);
      end = TileEnd<C>(state, attention, tile.head, tile, warp_row);  // beside the products
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<OUTPUTS>(o);
      release(barriers.k_empty(ring.stage));
      ring.advance();
    } else {  // a copy of the code: outputs that meet here would let the products wait
      end = TileEnd<C>(state, attention, tile.head, tile, warp_row);
    }
    store_by_quads<C>(o_rmem, end, attention);
    end.store_lse();
    q_parity ^= 1;
  }
}

}  // namespace archflash::hopper
