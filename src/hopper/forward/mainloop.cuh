// The consumers: S, the softmax, P V, and the end of each tile.
#pragma once

#include <cstdint>

#include "hopper/cache/merge_shares.cuh"
#include "hopper/config.cuh"
#include "hopper/forward/blocks.cuh"
#include "hopper/forward/drop_weights.cuh"
#include "hopper/forward/epilogue.cuh"
#include "hopper/forward/pipeline.cuh"
#include "hopper/forward/products.cuh"
#include "hopper/forward/row_softmax.cuh"
#include "hopper/forward/scores.cuh"
#include "hopper/forward/walk.cuh"
#include "hopper/params.h"

namespace archflash::hopper {

template <class C>
__device__ __forceinline__ void consume(const ParamsOf<C>& all_params, unsigned char* shared,
                                        uint32_t shared_smem) {
  const Params& params = call_of<C>(all_params);
  using QTile = typename C::QTile;
  constexpr int OUTPUTS = C::PASS_COLUMNS / 2, WORDS = C::BLOCK_K / (4 * C::PACK);
  const AttentionParams& attention = params.attention;
  const Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int group = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  const Turns<C> turns{group};
  if (group == C::WARPGROUPS - 1) turns.hand_over();  // warpgroup 0 begins
  RingPosition<C::STAGES> k_ring, v_ring;
  RingPosition<C::Q_STAGES> q_ring;
  // With STORES_BY_TMA: hands back Q of the tile before, from whose stage TMA has read output rows
  // meanwhile. The first tile does so, too (free_parity()), without a branch.
  const auto hand_back_before = [&] {
    if constexpr (C::STORES_BY_TMA) {
      ptx::cp_async_bulk_wait_group_read_0();
      release(barriers.q_empty(q_ring.stage ^ 1));
    }
  };

  if constexpr (C::PACKS) clear_rows_of_no_head<C>(params.groups, shared, group);
  while (true) {
    ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);  // Q has landed
    const TileOf<C> tile = tile_message<C, TileOf<C>>(shared, q_ring.stage);
    if (tile.first_row < 0) break;
    // Which 64 rows of the tile the warpgroup has. Under a causal mask one half of a tile of 128
    // rows sees fewer keys than the other, so two warpgroups change places with each tile.
    const int place = C::CHANGES_PLACES ? group ^ uniform(q_ring.stage) : group;
    const int warp_row = static_cast<int>(threadIdx.x / 32 * C::WARP_ROWS) +
                         (C::CHANGES_PLACES ? (place - group) * C::GROUP_ROWS : 0);
    const VisibleKeysOf<C> visible = visible_keys_of<C>(all_params, shared, tile, q_ring.stage);
    bool all_need_more = attention.transform_scores;
    float exp2_scale = attention.exp2_scale;
    device::KeyDescales key_descales{};  // null: one descale serves all keys
    device::WarpDescale warp_descale{1.0f, 1.0f};
    find_scale<C>(params, shared, tile, q_ring.stage, warp_row, exp2_scale, key_descales,
                  warp_descale, all_need_more);
    device::Blocks all_blocks;  // those that the CTA visits
    GroupBlocks blocks;
    find_blocks_of_group<C>(params, shared, tile, q_ring.stage, visible, place, all_blocks, blocks);
    all_blocks = {uniform(all_blocks.first), uniform(all_blocks.last)};
    // The first of the bare blocks, whose scores need no more than a softmax.
    const int bare_first = uniform(all_need_more ? INT32_MAX : blocks.clear_first);
    blocks = {uniform(blocks.seen_first), uniform(blocks.seen_last), uniform(blocks.clear_first),
              uniform(blocks.clear_last)};
    // Whether a block that is not bare must be masked. Without a softcap and descales it always
    // must. With one of them no block is bare, also where every row sees every key and nothing has
    // to be masked. With 8 bits, a cache or dropout all are masked: to ask would spill registers.
    const auto hides_some = [&](int block) {
      return C::FP8 || C::CACHE || C::DROPS || block < blocks.clear_first ||
             block > blocks.clear_last;
    };
    k_ring = {uniform(k_ring.stage), uniform(k_ring.parity)};
    v_ring = k_ring;
    unsigned char* q = shared + C::Q_SMEM + uniform(q_ring.stage) * QTile::BYTES;
    const ptx::WgmmaDescriptor q_descriptor =
        describe_q<C>(shared_smem, uniform(q_ring.stage), place);

    int lane_rows[2];  // this lane's query rows
    for (int r = 0; r < 2; ++r) {
      const int row = warp_row + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * r;
      int of_tile = C::CAN_PACK ? params.packed_heads.row(row) : row;
      if constexpr (C::PACKS)
        of_tile = group * params.groups.rows + params.groups.row(row % C::GROUP_ROWS);
      if constexpr (C::MIXED) of_tile = heads_of(params, tile).row(row);
      lane_rows[r] = tile.first_row + of_tile;
    }

    [[maybe_unused]] const auto dropout = [&] {
      if constexpr (C::DROPS) {
        return find_dropout(all_params.dropout, tile.batch_head);
      } else {
        return nullptr;
      }
    }();

    device::Scores<C> s_rmem;
    Probabilities<C> p_rmem;
    [[maybe_unused]] Probabilities<C> kept_rmem;  // masks of P: what is not dropped
    device::Outputs<C> o_rmem = {};
    PassOutputs<C> part_rmem;  // O += P V of the last blocks, if SUMS_IN_PARTS
    int part_keys = 0;         // the keys of these blocks
    PassOutputs<C>& products_rmem = products_of<C>(o_rmem, part_rmem);
    float* const o = &products_rmem[0][0][0];
    uint32_t* const p = &p_rmem[0][0][0];
    device::RowState<C> state;
    device::clear(state);
    state.large = false;

    const auto begin_qk = [&] { start_qk<C>(s_rmem, q_descriptor, shared_smem, k_ring.stage); };
    const auto begin_pv = [&]<int KEYS = C::BLOCK_K>() {
      // mutants: fence-before-both-products (tests/sim/tags.py)
      start_pv<C, KEYS>(products_rmem, p_rmem, shared_smem, v_ring.stage,
                        !C::SUMS_IN_PARTS || part_keys > 0);
      part_keys += KEYS;
    };
    const auto wait_for_outputs = [&] {
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<OUTPUTS>(o);
    };
    const auto add_part = [&] {
      if constexpr (C::SUMS_IN_PARTS) {
        add_pass<C>(o_rmem, part_rmem, 0);
        part_keys = 0;
      }
    };
    // With SHORT: clears the rows of V that do not count, where a block has any.
    const auto clear_v = [&](int block) {
      if constexpr (C::SHORT) {
        using VTile = typename C::VTile;
        const int begin = visible.begin() - block, end = visible.nk - block;
        // Without cu_seqlens TMA reads zeros behind the last key.
        const bool beyond = attention.cu_seqlens_k_gmem != nullptr || visible.nk < attention.nk;
        if (begin <= 0 && (end >= C::BLOCK_K || !beyond)) return;
        clear_rows<VTile, VTile::SLABS, C::WARPGROUP>(
            shared + C::V_SMEM + v_ring.stage * VTile::BYTES, begin, end);
        ptx::bar_sync(1, C::WARPGROUP);  // all warps' zeros come before any warp's product
      }
    };
    // O += P V of the first KEYS keys of a block, from beginning to end.
    const auto multiply_pv = [&]<int KEYS = C::BLOCK_K>(int block, const auto& meanwhile) {
      ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
      clear_v(block);
      if constexpr (C::FP8) {
        multiply_passes<C, KEYS>(o_rmem, p_rmem, shared_smem, v_ring.stage, meanwhile);
      } else {
        begin_pv.template operator()<KEYS>();
        meanwhile();
        wait_for_outputs();
      }
      ptx::registers_change<KEYS / (4 * C::PACK)>(p);
      release(barriers.v_empty(v_ring.stage));
      v_ring.advance();
    };
    // What a block needs whose keys are not all visible, or whose scores are capped or have a
    // descale of their own. Returns the scale for exponentiate_rows().
    const auto finish_scores = [&](int block) {
      float scale = exp2_scale;
      if constexpr (C::FP8) {
        scale = device::descale_scores<C>(s_rmem, attention, key_descales, warp_descale, block);
      } else if constexpr (C::CACHE) {
        // The message is read anew, so that it needs no registers between the blocks.
        const Tile& message = tile_message<C>(shared, q_ring.stage);
        scale = device::descale_scores<C>(
            s_rmem, attention, key_descales,
            device::find_warp_descale(params.descales, attention, message, 0), block);
      } else if (!C::DROPS && attention.transform_scores) {
        cap_scores<C>(s_rmem, attention.rule);
      }
      if constexpr (C::SPARES_REGISTERS) {
        mask_rows_read_anew<C>(s_rmem, visible, tile, block);
      } else if constexpr (C::CACHE) {
        mask_cached_rows<C>(s_rmem, all_params, tile_message<C, TileOf<C>>(shared, q_ring.stage),
                            visible, lane_rows, warp_row, block);
      } else if (hides_some(block)) {
        mask_rows_by_bits<C>(s_rmem, visible, lane_rows, lane_key(block));
      }
      return scale;
    };
    // Dropout: what is kept of P of a block. It needs no scores, so that it takes the time in
    // which they are computed.
    const auto draw = [&](int block) {
      if constexpr (C::DROPS) draw_kept<C>(kept_rmem, dropout, lane_rows[0], lane_key(block));
    };
    const auto pack_kept = [&] {
      pack<C>(s_rmem, p_rmem);
      if constexpr (C::DROPS) drop<C>(p_rmem, kept_rmem);
    };
    // Waits for O += P V of the block before: its V can go then, and P may be overwritten.
    const auto finish_pv = [&] {
      wait_for_outputs();
      release_v<C>(p_rmem, barriers, v_ring);
    };
    const auto rescale_outputs = [&](const float (&corrections)[2]) {
      rescale<C>(o_rmem, corrections);
      if constexpr (C::SUMS_IN_PARTS && C::OVERLAPS) rescale<C>(part_rmem, corrections);
    };
    // FP8: adds the sums of the last blocks to the outputs if they are of enough keys. From then on
    // the outputs are in the unit of `block`, where each block of V has a descale of its own.
    const auto add_full_part = [&](int block) {
      if (part_keys >= (key_descales.v_gmem != nullptr ? C::BLOCK_K : C::PART_KEYS)) add_part();
      if (key_descales.v_gmem != nullptr)
        device::change_unit<C>(o_rmem, key_descales, warp_descale, block, INT32_MAX);
    };
    // With RELEASES_Q_BEHIND_SCORES: called when the scores of a block are there. No product reads
    // Q behind those of the last one.
    const auto release_q_behind = [&](int block) {
      if constexpr (C::RELEASES_Q_BEHIND_SCORES) {
        if (block - C::BLOCK_K < blocks.seen_first) release(barriers.q_empty(q_ring.stage));
      }
    };
    // S and the exponentials of the first KEYS keys of the warpgroup's first block, which sees no
    // others of it and has no score capped. meanwhile() is called when the scores are there.
    const auto exponentiate_first_keys = [&]<int KEYS>(int block, const auto& meanwhile) {
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
      turns.wait();
      start_qk<C, KEYS>(s_rmem, q_descriptor, shared_smem, k_ring.stage);
      turns.hand_over();
      ptx::wgmma_wait_group<0>();
      release_k<C, KEYS>(s_rmem, barriers, k_ring);
      meanwhile();
      mask_rows_by_bits<C, KEYS>(s_rmem, visible, lane_rows, lane_key(block));
      const auto nothing_to_rescale = [](const float (&)[2]) {};  // the outputs are still 0
      const float scale =
          update_row_max<C, true, KEYS>(s_rmem, state, exp2_scale, nothing_to_rescale);
      exponentiate_rows<C, KEYS>(s_rmem, state, scale);
    };
    // With TAIL_KEYS: S, P and P V of the first TAIL_KEYS keys. Other blocks come behind them.
    const auto tail_step = [&](int block) {
      if constexpr (C::TAIL_KEYS > 0) {
        constexpr int KEYS = C::TAIL_KEYS;
        exponentiate_first_keys.template operator()<KEYS>(block, [] {});
        pack<C, KEYS>(s_rmem, p_rmem);
        multiply_pv.template operator()<KEYS>(block, [] {});
      }
    };
    // The first block of the warpgroup, or the one behind its tail, whose P V the next step starts.
    const auto first_step = [&](int block) {
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
      turns.wait();
      begin_qk();
      turns.hand_over();
      draw(block);
      ptx::wgmma_wait_group<0>();
      release_k<C>(s_rmem, barriers, k_ring);
      release_q_behind(block);
      hand_back_before();
      float scale = exp2_scale;
      if (block < bare_first || block > blocks.clear_last) scale = finish_scores(block);
      const auto rescale_tail = [&](const float (&corrections)[2]) {
        if constexpr (C::TAIL_KEYS > 0) rescale<C>(o_rmem, corrections);  // else they are still 0
      };
      scale = update_row_max<C, true>(s_rmem, state, scale, rescale_tail);
      exponentiate_rows<C>(s_rmem, state, scale);
      if (key_descales.v_gmem != nullptr)
        device::change_unit<C>(o_rmem, key_descales, warp_descale, block, block);
      pack_kept();
    };
    // With HALVES: first_step() of the first half of the block.
    const auto first_half_step = [&](int block) {
      if constexpr (C::HALVES) {
        constexpr int KEYS = C::BLOCK_K / 2;
        exponentiate_first_keys.template operator()<KEYS>(block, hand_back_before);
        // P V multiplies the whole block: a branch around its second half, in the step that all
        // blocks share, would cost more.
#pragma unroll
        for (int n = KEYS / 8; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) s_rmem[0][n][i] = 0.0f;
        }
        pack<C>(s_rmem, p_rmem);
      }
    };
    const auto step_alone = [&]<bool MASKED>(int block) {
      turns.wait();
      multiply_pv(block + C::BLOCK_K, [] {});
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
      begin_qk();
      turns.hand_over();
      ptx::wgmma_wait_group<0>();
      release_k<C>(s_rmem, barriers, k_ring);
      release_q_behind(block);
      float scale = exp2_scale;
      if constexpr (MASKED) scale = finish_scores(block);
      scale = update_row_max<C>(s_rmem, state, scale, rescale_outputs);
      if constexpr (C::FP8) {
        exponentiate_and_pack<C>(s_rmem, p_rmem, state, scale);
      } else {
        exponentiate_rows<C>(s_rmem, state, scale);
        pack<C>(s_rmem, p_rmem);
      }
    };
    const auto step_overlapped = [&]<bool MASKED>(int block) {
      ptx::mbarrier_wait_parity(barriers.k_full(k_ring.stage), k_ring.parity);  // K has landed
      turns.wait();
      begin_qk();
      ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
      begin_pv();
      turns.hand_over();
      draw(block);
      ptx::wgmma_wait_group<1>();  // the scores are there
      release_k<C>(s_rmem, barriers, k_ring);
      release_q_behind(block);
      float scale = exp2_scale;
      if constexpr (MASKED) scale = finish_scores(block);
      bool raised = false;
      float corrections[2];
      const auto note = [&](const float (&wanted)[2]) {
        raised = true;
        corrections[0] = wanted[0], corrections[1] = wanted[1];
      };
      scale = update_row_max<C>(s_rmem, state, scale, note);
      exponentiate_rows<C>(s_rmem, state, scale);
      finish_pv();
      pack_kept();
      if (raised) rescale_outputs(corrections);
      add_full_part(block);
    };

    const auto step = [&]<bool MASKED>(int block) {
      if constexpr (C::OVERLAPS) {
        step_overlapped.template operator()<MASKED>(block);
      } else {
        step_alone.template operator()<MASKED>(block);
      }
    };

    // No product reads the tile's Q from here on.
    const auto release_q_early = [&] {
      if constexpr (C::RELEASES_Q_EARLY) release(barriers.q_empty(q_ring.stage));
    };
    // With STORES_THROUGH_V: read before Q and the message go back.
    [[maybe_unused]] const TileHead at = [&] {
      if constexpr (C::STORES_THROUGH_V) {
        const TileHead head = blocks_message<C>(shared, q_ring.stage).head;
        return TileHead{uniform(head.batch), uniform(head.head)};
      } else {
        return TileHead{};
      }
    }();
    [[maybe_unused]] TileEnd<C> end_through_v;
    const auto find_end = [&] {
      if constexpr (C::STORES_THROUGH_V)
        return TileEnd<C>(state, attention, at, tile, warp_row, warp_descale.v, params.groups);
      return find_tile_end<C>(state, params, shared, q_ring, tile, warp_row, warp_descale.v);
    };
    // The blocks, from the last to the first: those after the last one that the warpgroup sees,
    // those that it sees, and those before. Of those that it sees, some need masks at either end:
    // both ends run the same code, which is long, where that spills no registers.
    int block = all_blocks.last;
#pragma unroll 1
    for (; block >= all_blocks.first && block > blocks.seen_last; block -= C::BLOCK_K)
      skip_block<C>(barriers, turns, k_ring, v_ring);
    if (block >= blocks.seen_first) {
      if (C::TAIL_KEYS > 0 && !all_need_more && blocks.seen_last < block + C::TAIL_KEYS &&
          block > blocks.seen_first) {
        tail_step(block);
        block -= C::BLOCK_K;
      }
      if (C::HALVES && !all_need_more && blocks.seen_last < block + C::BLOCK_K / 2) {
        first_half_step(block);
      } else {
        first_step(block);
      }
      block -= C::BLOCK_K;
#pragma unroll(C::MASKED_STEPS)
      for (int end = 0; end < 2; ++end) {
#pragma unroll 1
        for (; block >= blocks.seen_first && (end == 1 || block > blocks.clear_last);
             block -= C::BLOCK_K)
          step.template operator()<true>(block);
        if (end == 1) break;
#pragma unroll 1
        for (; block >= blocks.seen_first && block >= bare_first; block -= C::BLOCK_K)
          step.template operator()<false>(block);
      }
      if constexpr (!C::RELEASES_Q_BEHIND_SCORES && !(C::FP8 && finds_ends<C>())) release_q_early();
      if constexpr (C::OVERLAPS) {
        ptx::mbarrier_wait_parity(barriers.v_full(v_ring.stage), v_ring.parity);  // V has landed
        begin_pv();
        const auto finish = [&] {
          wait_for_outputs();
          ptx::registers_change<WORDS>(p);
          add_part();
          // mutants: needless-with-one-tile
          release(barriers.v_empty(v_ring.stage));
          v_ring.advance();
        };
        if constexpr (C::STORES_THROUGH_V) {
          end_through_v = find_end();
          finish();
        } else if constexpr (C::PREPARES_TILES) {
          const TileEnd<C> end = find_end();
          finish();
          end_tile<C>(o_rmem, end, all_params, shared, barriers, q_ring, q, warp_row);
        } else {
          finish();
        }
      } else if constexpr (finds_ends<C>()) {
        TileEnd<C> end;
        multiply_pv(block + C::BLOCK_K, [&] {
          end = find_end();
          if constexpr (!C::RELEASES_Q_BEHIND_SCORES) release_q_early();
        });
        end_tile<C>(o_rmem, end, all_params, shared, barriers, q_ring, q, warp_row);
      } else {
        multiply_pv(block + C::BLOCK_K, [] {});
      }
    } else {
      hand_back_before();
      if constexpr (C::STORES_THROUGH_V) {
        end_through_v = find_end();
        release_q_early();
      } else if constexpr (finds_ends<C>()) {
        const TileEnd<C> end = find_end();
        release_q_early();
        end_tile<C>(o_rmem, end, all_params, shared, barriers, q_ring, q, warp_row);
      } else {
        release_q_early();
      }
    }
#pragma unroll 1
    for (; block >= all_blocks.first; block -= C::BLOCK_K)
      skip_block<C>(barriers, turns, k_ring, v_ring);
    if constexpr (C::STORES_THROUGH_V)
      store_through_v<C>(o_rmem, end_through_v, attention, barriers, shared, warp_row);

    if constexpr (C::MIXED) {  // the message is read anew, as above
      store_mixed_tile<C>(o_rmem, state, all_params,
                          tile_message<C, MixedTile>(shared, q_ring.stage), q);
    } else if constexpr (!finds_ends<C>()) {
      store_tile<C>(o_rmem, state, all_params, tile, warp_row, warp_descale.v, q);
    }
    if constexpr (!C::RELEASES_Q_EARLY && !C::PREPARES_TILES) hand_back_q(barriers, q_ring.stage);
    q_ring.advance();
  }
  if constexpr (C::STORES_BY_TMA) ptx::cp_async_bulk_wait_group_read_0();  // before the CTA ends
  // The last turn that was handed over: no warpgroup waits for it, and a barrier must not end with
  // arrivals.
  if (group == 0) turns.wait();
}

}  // namespace archflash::hopper
