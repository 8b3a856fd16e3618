// The consumers of a kernel with mask tensors, WARPGROUPS warpgroups of 64 rows: S, P, O and the
// output rows. What a block needs is found while products run, and done to its scores before their
// softmax; ScoreMasks knows how (masks_in_place.cuh, masks_summarized.cuh).
#pragma once

#include <cstdint>

#include "common/device/few_rows.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/quad.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/forward/clear_outputs.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_messages.cuh"
#include "hopper/masks/masked_params.h"

namespace archflash::hopper {

// Q as fragments of A, where it is kept.
template <class C>
using QFragments = uint32_t[C::KEEPS_Q ? C::HEAD_DIM / 16 : 1][4];

template <class C>
__device__ __forceinline__ void load_q(QFragments<C>& q_rmem, uint32_t shared_smem, int stage,
                                       int warp_row) {
  using QTile = typename C::QTile;
  const int lane = threadIdx.x % 32;
  const uint32_t row_smem = shared_smem + C::Q_SMEM + stage * QTile::BYTES +
                            warp_row * QTile::ROW_BYTES + QTile::offset(lane % 16, lane / 16);
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM / 16; ++i)
    ptx::ldmatrix_x4(q_rmem[i], QTile::advance(row_smem, 2 * i));
}

// Marks the LSEs of rows that see lowest scores only (device/lowest_rows.cuh).
template <class C>
__device__ __forceinline__ void mark_lowest(TileEnd<C>& end, const device::RowState<C>& state,
                                            float sink) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float keys = device::sum_of_quad(state.sum[0][r]);
    if (device::sees_lowest(state.base[0][r], sink)) end.ends[r].lse = device::lse_of_lowest(keys);
  }
}

template <class C, class Masks>
__device__ __forceinline__ void compute_masked(const typename Masks::Params& all_params,
                                               unsigned char* shared, uint32_t shared_smem) {
  using QTile = typename C::QTile;
  using ScoreMasks = typename Masks::ScoreMasks;
  constexpr int SCORES = C::BLOCK_K / 2, OUTPUTS = C::HEAD_DIM_V / 2, WORDS = C::BLOCK_K / 4;
  constexpr bool ALONE = C::WARPGROUPS == 1;  // such a warpgroup sees every block that comes
  const Params& params = all_params.call;
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int group = ALONE ? 0 : uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  const Turns<C> turns{group};
  if (group == C::WARPGROUPS - 1) turns.hand_over();  // warpgroup 0 begins
  RingPosition<C::STAGES> ring;                       // of K and V
  ScoreMasks masks(all_params, shared_smem, group, warp_row);
  RingPosition<C::Q_STAGES> q_ring;
  const uint32_t clear = attention.transform_scores ? 0 : STATE_SEEN;  // 0: no block is

  while (true) {
    ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);  // Q has landed
    // What the producer says stays in shared memory: it is read where masks are found, which have
    // few registers.
    const int message = uniform(message_of<C>(q_ring));
    const SeekingTile& tile = tile_message<C, SeekingTile>(shared, message);
    if (uniform(tile.first_row) < 0) break;
    const auto& cta = masked_context<C, typename Masks::Context>(shared, message);
    masks.begin_tile(tile, cta);
    ring = {uniform(ring.stage), uniform(ring.parity)};
    const int q_stage = C::Q_STAGES == 1 ? 0 : uniform(q_ring.stage);
    unsigned char* q = shared + C::Q_SMEM + q_stage * QTile::BYTES;
    const ptx::WgmmaDescriptor q_descriptor = describe_q<C>(shared_smem, q_stage, group);
    [[maybe_unused]] QFragments<C> q_rmem;

    device::Scores<C> s_rmem;
    Probabilities<C> p_rmem;
    device::Outputs<C> o_rmem;
    float* const s = &s_rmem[0][0][0];
    float* const o = &o_rmem[0][0][0];
    uint32_t* const p = &p_rmem[0][0][0];
    device::RowState<C> state;
    device::clear(state);
    state.large = false;
    // The block whose O += P V is still to be started.
    RingPosition<C::STAGES> pending;
    bool is_pending = false;
    bool has_outputs = false;  // whether o_rmem holds sums already
    // Whether the tile has rows for this warp: the first one of a head may not.
    [[maybe_unused]] const bool has_rows = uniform(tile.first_row + warp_row) < tile.end_row;

    const auto begin_qk = [&] {
      if constexpr (C::KEEPS_Q) {
        start_qk<C>(s_rmem, q_rmem, shared_smem, ring.stage);
      } else {
        start_qk<C>(s_rmem, q_descriptor, shared_smem, ring.stage);
      }
    };
    const auto begin_pv = [&] {
      ptx::mbarrier_wait_parity(barriers.v_full(pending.stage), pending.parity);  // V has landed
      // mutants: fence-before-both-products (tests/sim/tags.py)
      start_pv<C>(o_rmem, p_rmem, shared_smem, pending.stage, true);
    };
    // Waits for O += P V of the block before: its V can go then, and P may be overwritten.
    const auto finish_pv = [&] {
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<OUTPUTS>(o);
      ptx::registers_change<WORDS>(p);
      release(barriers.v_empty(pending.stage));
    };
    // What the producer says of the next block, which comes with this one.
    const auto read = [&](const BlockMessage& said) {
      return BlockMessage{uniform(said.key), uniform(said.states), uniform(said.last)};
    };
    const auto read_next = [&] { return read(block_message<C>(shared, ring.stage)); };
    const auto release_q = [&] { release(barriers.q_empty(q_ring.stage)); };
    const auto scores_are_there = [&](const BlockMessage& next) {
      ptx::registers_change<SCORES>(s);
      release(barriers.k_empty(ring.stage));
      if (C::RELEASES_Q_EARLY && next.last) release_q();
    };
    const auto advance = [&] {
      pending = ring;
      is_pending = true;
      ring.advance();
    };

    // Steps return what the producer says of the next block. `of_group`: the state of the block for
    // this warpgroup.
    const auto skip_block = [&](const BlockMessage& block) {
      const BlockMessage next = read_next();
      if (C::RELEASES_Q_EARLY && next.last) release_q();
      if (is_pending) {  // its V cannot wait for a block that comes later
        begin_pv();
        finish_pv();
        is_pending = false;
      }
      // The warps still wait for the block: otherwise they could lap the ring and hand back a stage
      // a phase too early.
      release(barriers.k_empty(ring.stage));
      masks.template hand_back<false>(0, block);
      turns.wait();  // each warpgroup takes one turn for a block
      turns.hand_over();
      // mutants: few-skipped-blocks
      ptx::mbarrier_wait_parity(barriers.v_full(ring.stage), ring.parity);
      release(barriers.v_empty(ring.stage));
      ring.advance();
      return next;
    };
    // A block before which no product is pending. In most tiles it is the first one that the
    // warpgroup sees, so row maxima rise without asking whether they must.
    const auto step_alone = [&](uint32_t of_group, const BlockMessage& block) {
      turns.wait();
      begin_qk();
      turns.hand_over();
      if (!has_outputs) {
        clear_outputs<C>(o_rmem);
        ptx::registers_change<OUTPUTS>(o);  // now, while the product runs
      }
      const BlockMessage next = read_next();
      typename ScoreMasks::Seen seen;
      typename ScoreMasks::Kept kept;
      // A block of a summarized mask that is clear here may have elements for other warpgroups.
      if (C::SUMMARIZED || of_group != clear)
        of_group = masks.template find<true>(seen, kept, of_group, block);
      ptx::wgmma_wait_group<0>();
      scores_are_there(next);
      float scale = attention.exp2_scale;
      if (of_group != clear)
        scale = masks.template finish<true>(s_rmem, seen, kept, of_group, block.key);
      masks.template hand_back<true>(of_group, block);
      const auto now = [&](const float (&corrections)[2]) {
        if (has_outputs) rescale<C>(o_rmem, corrections);
        has_outputs = true;
      };
      scale = update_row_max<C, true>(s_rmem, state, scale, now);
      exponentiate_rows<C>(s_rmem, state, scale);
      pack<C>(s_rmem, p_rmem);
      advance();
      return next;
    };
    // Without OVERLAPS: O += P V of the block before is done before the scores of this one begin,
    // so that P and the scores share registers.
    const auto step_in_turn = [&](auto& all_masks, uint32_t of_group, const BlockMessage& block) {
      turns.wait();
      if (is_pending) {
        begin_pv();
        finish_pv();
      }
      begin_qk();
      turns.hand_over();
      if (!has_outputs) {
        clear_outputs<C>(o_rmem);
        ptx::registers_change<OUTPUTS>(o);
        has_outputs = true;
      }
      const BlockMessage next = read_next();
      typename ScoreMasks::Seen seen;
      typename ScoreMasks::Kept kept;
      of_group = all_masks.template find<true>(seen, kept, of_group, block);
      ptx::wgmma_wait_group<0>();
      scores_are_there(next);
      const auto weigh = [&] {
        float scale = all_masks.template finish<true>(s_rmem, seen, kept, of_group, block.key);
        const auto raised = [&](const float (&corrections)[2]) { rescale<C>(o_rmem, corrections); };
        scale = all_masks.update_row_max(s_rmem, state, scale, seen, of_group, raised);
        all_masks.template hand_back<true>(of_group, block);
        if constexpr (C::COPIES_OWN) all_masks.copy_elements(next);
        exponentiate_rows<C>(s_rmem, state, scale);
      };
      if constexpr (C::COPIES_OWN) {
        if (has_rows) weigh();  // else P is of rows that nobody writes
      } else {
        weigh();
      }
      pack<C>(s_rmem, p_rmem);
      advance();
      return next;
    };
    const auto step = [&]<bool MASKED, bool MAY_ADD>(uint32_t of_group, const BlockMessage& block) {
      turns.wait();
      begin_qk();
      begin_pv();
      turns.hand_over();
      const BlockMessage next = read_next();
      typename ScoreMasks::Seen seen;
      typename ScoreMasks::Kept kept;
      if constexpr (MASKED) of_group = masks.template find<MAY_ADD>(seen, kept, of_group, block);
      ptx::wgmma_wait_group<1>();  // the scores are there
      scores_are_there(next);
      float scale = attention.exp2_scale;
      if constexpr (MASKED && C::MASKS_TAKE_P) finish_pv();
      if constexpr (MASKED)
        scale = masks.template finish<MAY_ADD>(s_rmem, seen, kept, of_group, block.key);
      masks.template hand_back<MAY_ADD>(of_group, block);
      bool raised = false;
      float corrections[2];
      const auto note = [&](const float (&wanted)[2]) {
        raised = true;
        corrections[0] = wanted[0], corrections[1] = wanted[1];
      };
      scale = update_row_max<C>(s_rmem, state, scale, note);
      exponentiate_rows<C>(s_rmem, state, scale);
      if constexpr (!MASKED || !C::MASKS_TAKE_P) finish_pv();
      pack<C>(s_rmem, p_rmem);
      if (raised) rescale<C>(o_rmem, corrections);
      advance();
      return next;
    };

    if (tile.any_block) {
      if constexpr (C::KEEPS_Q) load_q<C>(q_rmem, shared_smem, q_ring.stage, warp_row);
      BlockMessage block = read(cta.first);
      if constexpr (C::COPIES_OWN) {
        if (has_rows) masks.copy_elements(block);
      }
      // Returns the state of the block for this warpgroup.
      const auto wait_for_block = [&] {
        ptx::mbarrier_wait_parity(barriers.k_full(ring.stage), ring.parity);  // K has landed
        return ALONE ? block.states : block.states >> (8 * group) & 0xFF;
      };
      bool more = true;
      if constexpr (ALONE && C::OVERLAPS) {
        block = step_alone(wait_for_block(), block);
        more = !block.last;
      }
#pragma unroll 1
      for (; more; more = !block.last) {
        const uint32_t of_group = wait_for_block();
        if (!ALONE && of_group == 0) {
          block = skip_block(block);
        } else if constexpr (!C::OVERLAPS) {
          block = step_in_turn(masks, of_group, block);
        } else if (!is_pending) {
          block = step_alone(of_group, block);
        } else if (of_group == clear) {
          block = step.template operator()<false, false>(of_group, block);
        } else if (C::SUMMARIZED && (of_group & (STATE_ADDED | STATE_SLOPED)) == 0 && clear != 0) {
          block = step.template operator()<true, false>(of_group, block);
        } else {
          block = step.template operator()<true, true>(of_group, block);
        }
      }
    } else if constexpr (C::RELEASES_Q_EARLY) {
      release_q();
    }

    // How the tile ends is found while the last product runs.
    const auto find_end = [&] {
      TileEnd<C> end(state, attention, cta.head, tile, warp_row);
      mark_lowest<C>(end, state, device::load_sink(attention, cta.head.head));
      return end;
    };
    const auto end_tile = [&](const TileEnd<C>& end) {
      if constexpr (!C::RELEASES_Q_EARLY) {
        // Rows are written while Q goes back.
        store_through_q<C>(o_rmem, end, attention, q + warp_row * QTile::ROW_BYTES,
                           [&] { hand_back_q(barriers, q_ring.stage); });
        end.store_lse();
      } else {
        store_rows<C>(o_rmem, state, params, tile, warp_row, q, &end);
        if (params.packed_heads.count > 1 && !params.partials.wanted())
          device::store_lowest<C>(state, attention, params.packed_heads, tile, warp_row);
      }
    };
    if (is_pending) {
      begin_pv();
      const TileEnd<C> end = find_end();
      finish_pv();
      end_tile(end);
    } else {
      if (!has_outputs) clear_outputs<C>(o_rmem);
      end_tile(find_end());
    }
    advance_q<C>(q_ring, all_params.masks);
  }
  // The last turn that was handed over: no warpgroup waits for it, and a barrier must not end with
  // arrivals.
  if (group == 0) turns.wait();
}

}  // namespace archflash::hopper
