// The consumers of the backward pass: S, P, dP, dS and the gradients.
#pragma once

#include <cstdint>

#include "common/ptx/ld_shared_if.cuh"
#include "hopper/backward/backward_added.cuh"
#include "hopper/backward/backward_dense.cuh"
#include "hopper/backward/backward_epilogue.cuh"
#include "hopper/backward/backward_parts.cuh"
#include "hopper/backward/backward_pipeline.cuh"
#include "hopper/backward/backward_products.cuh"
#include "hopper/backward/backward_scores.cuh"
#include "hopper/forward/drop_weights.cuh"

namespace archflash::hopper {

// The named barrier at which the second consumer warpgroup waits before its first step.
constexpr int START_BARRIER = 1;

// Where the consumers are in the blocks of all tiles of a CTA.
template <class C>
struct ConsumerPosition {
  uint32_t number = 0;  // of the block
  RingPosition<C::Q_STAGES> q_ring;
  RingPosition<C::DOUT_STAGES> dout_ring;
  RingPosition<C::DS_STAGES> ds_ring;  // of the dS to be written
};

// Goes over the blocks of queries of a tile, of which there is at least one, sums up dK and dV, and
// writes them while the last dQ is computed. `position` is that of the tile's first block, and
// becomes that of the next tile's.
template <class C>
__device__ __forceinline__ void consume(const BackwardParamsOf<C>& all_params, const CtaWork& work,
                                        unsigned char* shared, uint32_t shared_smem,
                                        const RingPosition<C::TILE_STAGES>& tile,
                                        ConsumerPosition<C>& position) {
  const BackwardKernelParams& params = call_of<C>(all_params);
  using KTile = typename C::KTile;
  using QTile = typename C::QTile;
  constexpr int SCORES = C::BLOCK / 2, SUMS = C::HEAD_DIM / 2, WORDS = C::BLOCK / 4,
                PART = C::PART_COLUMNS / 2;
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const AttentionParams& attention = params.backward.attention;
  const int group = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = threadIdx.x % 32;

  KeyGradient<KTile> dk_rmem = {}, dv_rmem = {};
  KeysByQueries<C> s_rmem, dp_rmem;
  KeysByQueries<C> own_p_rmem;  // P, and later dS, if S_AHEAD
  constexpr bool OWN_DQ = C::S_AHEAD || PART > SCORES;
  float own_dq_rmem[C::PART_COLUMNS / 8][4];
  KeysByQueries<C>& p_rmem = C::S_AHEAD ? own_p_rmem : s_rmem;
  // dS lies where P is not needed any more, or where dP was.
  constexpr bool OVERWRITES_P = C::S_AHEAD && !C::READS_MASK && !C::ADDS_MASK;
  KeysByQueries<C>& ds_rmem = OVERWRITES_P ? own_p_rmem : dp_rmem;
  KeysByQueries16<C> a_rmem;  // P or dS, as operand A
  float* const s = &s_rmem[0][0];
  float* const dp = &dp_rmem[0][0];
  float* const p = &p_rmem[0][0];
  float* const ds = &ds_rmem[0][0];
  float* const dq = OWN_DQ ? &own_dq_rmem[0][0] : dp;
  float* const dk = &dk_rmem[0][0];
  float* const dv = &dv_rmem[0][0];
  uint32_t* const a = &a_rmem[0][0];

  const int own_rows = group * C::GROUP_ROWS * C::KTile::ROW_BYTES;
  const uint32_t k_smem = shared_smem + k_offset<C>(tile.stage);
  const uint32_t v_smem = shared_smem + v_offset<C>(tile.stage);
  const ptx::WgmmaDescriptor k = describe_tile<typename C::KTile>(k_smem + own_rows, 16);
  const ptx::WgmmaDescriptor v = describe_tile<typename C::KTile>(v_smem + own_rows, 16);
  // Ring positions are the same in all lanes, which the assembler does not see between tiles.
  const auto own = [](auto ring) {
    if constexpr (C::STAYS) ring.stage = uniform(ring.stage), ring.parity = uniform(ring.parity);
    return ring;
  };
  uint32_t number = C::STAYS ? uniform(position.number) : 0;
  auto q_ring = own(position.q_ring);
  auto dout_ring = own(position.dout_ring);
  auto ds_ring = own(position.ds_ring);
  const uint32_t end = number + static_cast<uint32_t>(uniform(work.blocks));
  // The blocks of this tile that are done, and whether its first round is.
  const auto blocks_done = [&] { return number - (C::STAYS ? end - uniform(work.blocks) : 0); };
  const auto behind_first_round = [&] { return blocks_done() > C::BLOCKS_OF_ROUND; };
  const auto q_at = [&](int stage) { return shared_smem + C::Q_SMEM + stage * C::QTile::BYTES; };

  // Stores the warp's part of the dQ of round `round`, and hands it to the warp that adds it in the
  // workspace. In between the next products may start.
  const auto note_of_dq = [&] {
    return *reinterpret_cast<const DqNote*>(shared + C::DQ_NOTE_SMEM);
  };
  const auto store_dq = [&](uint32_t round) {
    if constexpr (C::ENDS_DQ) {
      if (C::WRITES_DQ || uniform(note_of_dq().ends)) {
        store_dq_rows<C>(shared_smem + C::DQ_SMEM + 4 * warp * C::WARP_SUMS, dq,
                         params.backward.scale);
        return;
      }
    } else {
      ptx::mbarrier_wait_parity(barriers.dq_empty(group), round % 2 ^ 1);
    }
    unsigned char* const first = shared + C::DQ_SMEM + 4 * warp * C::WARP_SUMS + lane * 16;
#pragma unroll
    for (int n = 0; n < C::PART_COLUMNS / 8; ++n) {
      *reinterpret_cast<float4*>(first + n * 32 * 16) =
          float4{dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]};
    }
  };
  const auto hand_on_dq = [&](uint32_t round) {
    ptx::fence_proxy_async_shared();  // the stores come before TMA reads them
    release(barriers.dq_full(group, round));
  };

  const auto begin_s = [&](uint32_t q_smem) {
    ptx::registers_change<SCORES>(s);
    ptx::wgmma_fence();  // the last uses of S come before the product
    start_keys_by_queries<C, KTile, QTile>(s_rmem, k, q_smem);
  };
  // S becomes P.
  const float2* terms;  // of two queries each: LSEs, and from BLOCK / 2 on deltas
  bool masks;
  const auto note_of = [&](int q_stage) {
    return reinterpret_cast<const BlockNote*>(shared + C::TERMS_SMEM + q_stage * C::TERMS_BYTES +
                                              8 * C::BLOCK);
  };
  // The row of a block for clear_unseen(). Where the warp's keys are not seen, one behind all rows.
  const auto row_of = [&](int q_stage) {
    constexpr int BEHIND_ALL = 1 << 30;
    const BlockNote* const note = note_of(q_stage);
    if constexpr (C::LISTS_ROUNDS) {
      if ((note->masked_warps >> (warp + BlockNote::UNSEEN_SHIFT) & 1) != 0) return BEHIND_ALL;
    }
    return note->row;
  };
  [[maybe_unused]] auto dropout = [&] {
    if constexpr (C::DROPS) {
      const DroppedHeads& heads = all_params.dropped_heads;
      return find_dropout(all_params.dropout, heads.first + work.batch * heads.of_sequence +
                                                  work.head * attention.heads_per_kv +
                                                  work.start_head);
    } else {
      return nullptr;
    }
  }();
  // Blocks; the next one's head.
  [[maybe_unused]] int weighed = 0, head = C::DROPS ? uniform(work.start_head) : 0;
  // Which of the thread's scores attn_mask keeps, of the next block.
  [[maybe_unused]] uint32_t seen = 0;
  [[maybe_unused]] bool hides = false;  // some of this block
  const auto look_ahead = [&](int q_stage) {
    if constexpr (C::READS_MASK) seen = load_seen<C>(all_params, dense_note<C>(shared, q_stage));
  };
  const auto exponentiate = [&](int q_stage) {
    terms = reinterpret_cast<const float2*>(shared + C::TERMS_SMEM + q_stage * C::TERMS_BYTES) +
            lane % 4;
    masks = note_of(q_stage)->masked_warps >> warp & 1;
    if constexpr (C::READS_MASK) {
      const DenseNote& note = dense_note<C>(shared, q_stage);
      const uint32_t state = note.state(group);
      if ((state & DENSE_ADDED) != 0) {
        exponentiate_added<C>(p_rmem, s_rmem, terms, all_params, note);
      } else {
        exponentiate_scores<C>(p_rmem, s_rmem, terms, attention);
      }
      hides = (state & DENSE_HIDDEN) != 0;
      if (hides) clear_hidden<C>(p_rmem, seen);
    } else if constexpr (C::ADDS_MASK) {
      // Behind the last block there are no elements, and nobody uses P.
      if (number < end) {
        const bool lowest = added_note<C>(shared, q_stage).lowest;
        hides = exponentiate_with_elements<C>(p_rmem, s_rmem, terms, attention.exp2_scale,
                                              shared_smem, number, lowest);
      }
    } else {
      exponentiate_scores<C>(p_rmem, s_rmem, terms, attention);
    }
    if (masks) {
      clear_unseen<C>(p_rmem, work, row_of(q_stage));
      if constexpr (C::READS_MASK) {
        const uint32_t state = dense_note<C>(shared, q_stage).state(group);
        if ((state & DENSE_LOWEST) != 0) limit_lowest<C>(p_rmem, terms);
      }
    }
    if constexpr (C::DROPS) {
      const int thread = ptx::mov_tid_x_volatile();
      mark_dropped<C>(p_rmem, dropout,
                      work.first_row + thread / 32 * C::WARP_ROWS + thread % 32 / 4,
                      note_of(q_stage)->row + thread % 4 * 2);
      // The heads that share a head of K come one after another, each with a round.
      if (++weighed % C::BLOCKS_OF_ROUND == 0) {
        const bool last = ++head == uniform(work.heads);
        if (last) head = 0;
        dropout.batch_head += last ? 1 - uniform(work.heads) : 1;
      }
    }
    ptx::registers_change<SCORES>(p);  // all exponentials come before the next wait
  };

  const auto ds_at = [&](int stage) { return shared_smem + C::DS_SMEM + stage * C::DsTile::BYTES; };
  // The round before the first one: its dS is 0, and nobody takes its dQ.
#pragma unroll
  for (int i = 0; i < WORDS; ++i) a[i] = 0;
#pragma unroll
  for (int row = 0; row < C::ROUND; row += C::BLOCK)
    store_ds<C>(ds_at(ds_ring.stage) + row * C::DsTile::ROW_BYTES, a_rmem);
  ptx::fence_proxy_async_shared();  // the stores come before wgmma reads them
  release(barriers.ds_full(ds_ring.stage));
  ds_ring.advance();
  [[maybe_unused]] bool starts = true;  // the tile
  // The second warpgroup begins a tile half a step after the first one, which tells it when.
  const auto hand_over_start = [&] {
    if (C::WARPGROUPS > 1 && group == 0) ptx::bar_arrive(START_BARRIER, C::CONSUMER_THREADS);
  };
  if (C::WARPGROUPS > 1 && group != 0) ptx::bar_sync(START_BARRIER, C::CONSUMER_THREADS);
  const auto begin_dq = [&] {  // of the round before that
    const bool wraps = ds_ring.stage == 0;
    const int stage = (wraps ? C::DS_STAGES : ds_ring.stage) - 1;
    ptx::mbarrier_wait_parity(barriers.ds_full(stage), ds_ring.parity ^ (wraps ? 1 : 0));
    if constexpr (PART > SCORES) {
      ptx::registers_begin<PART>(dq);
    } else {
      ptx::registers_change<PART>(dq);
    }
    bool adds = false;
    if constexpr (C::ENDS_DQ) {  // the sums of the CTA before, if there are any
      if (blocks_done() >= C::BLOCKS_OF_ROUND) {
        const uint32_t round = number / C::BLOCKS_OF_ROUND - 1;
        ptx::mbarrier_wait_parity(barriers.dq_empty(group), round % 2);
        if constexpr (!C::WRITES_DQ) adds = uniform(note_of_dq().begun);
      }
    }
    if constexpr (C::ENDS_DQ && !C::WRITES_DQ) {
      if constexpr (PART > SCORES) {  // registers that may keep their values live from before
#pragma unroll
        for (int i = 0; i < PART; ++i) dq[i] = 0.0f;
      }
      const uint32_t sums_smem = shared_smem + C::DQ_SMEM + 4 * warp * C::WARP_SUMS + lane * 16;
#pragma unroll
      for (int n = 0; n < C::PART_COLUMNS / 8; ++n)
        ptx::ld_shared_v4_f32_if(adds, dq + 4 * n, sums_smem + n * 32 * 16);
    }
    ptx::wgmma_fence();  // the last uses of dQ come before the product
    start_dq<C>(dq, ds_at(stage), k_smem, group, adds);
  };
  ptx::mbarrier_wait_parity(barriers.k_full(tile.stage), tile.parity);  // K has landed
  ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);
  begin_s(q_at(q_ring.stage));
  look_ahead(q_ring.stage);
  ptx::wgmma_wait_group<0>();
  ptx::registers_change<SCORES>(s);
  if constexpr (C::S_AHEAD) exponentiate(q_ring.stage);
  ptx::mbarrier_wait_parity(barriers.v_full(tile.stage), tile.parity);  // V has landed

  // A block, whose S is there: with S_AHEAD its P. dK of the block before and dQ of the round
  // before that may be unfinished, and the next ones are left so. Returns whether there is a next
  // one. Its products are not in branches more than they have to be: ptxas would wait for each of
  // them (NOTES.md).
  const auto step = [&]<bool LAST_OF_ROUND, bool SINGLE = false>() {
    constexpr bool FIRST_OF_ROUND = !LAST_OF_ROUND || C::BLOCKS_OF_ROUND == 1 || SINGLE;
    // Without S_AHEAD a step takes the dQ that the step before has started, of round `taken`.
    constexpr bool TAKES_DQ = !C::S_AHEAD && LAST_OF_ROUND && !SINGLE;
    [[maybe_unused]] const uint32_t taken =
        number / C::BLOCKS_OF_ROUND - (C::BLOCKS_OF_ROUND == 1 ? 2 : 1);
    const auto finish_dk = [&] {
      ptx::registers_change<SUMS>(dk);
      ptx::registers_change<WORDS>(a);
      const int before = (q_ring.stage == 0 ? C::Q_STAGES : q_ring.stage) - 1;
      if (number > 0) release(barriers.q_empty(before));
    };
    constexpr int COUNTED = SINGLE ? C::BLOCKS_OF_ROUND : 1;  // blocks
    const bool more = !LAST_OF_ROUND || number + COUNTED < end;
    RingPosition<C::Q_STAGES> next = q_ring;  // of the next block; of this one if it is the last
    if (more) next.advance();
    if constexpr (!C::S_AHEAD) {
      exponentiate(q_ring.stage);
      ptx::wgmma_wait_group<0>();
      finish_dk();
      if constexpr (TAKES_DQ) {
        ptx::registers_change<PART>(dq);
        if (behind_first_round()) store_dq(taken);
      }
    }
    const int dout_stage = dout_ring.stage;
    ptx::mbarrier_wait_parity(barriers.dout_full(dout_stage), dout_ring.parity);
    dout_ring.advance();
    const uint32_t dout_smem = shared_smem + C::DOUT_SMEM + dout_stage * C::QTile::BYTES;
    // If dQ has registers of its own, those of dP serve others in between.
    if constexpr (PART > SCORES) {
      ptx::registers_begin<SCORES>(dp);
    } else {
      ptx::registers_change<SCORES>(dp);
    }
    ptx::wgmma_fence();  // the last uses of dP come before the product
    start_keys_by_queries<C, KTile, QTile>(dp_rmem, v, dout_smem);
    if constexpr (C::S_AHEAD) {
      // Behind the last block S is that of the same queries once more, which nobody uses.
      ptx::mbarrier_wait_parity(barriers.q_full(next.stage), next.parity);
      begin_s(q_at(next.stage));
      look_ahead(next.stage);
      ptx::wgmma_wait_group<2>();
      finish_dk();
    }
    round_to_16_bits<C, C::DROPS>(a_rmem, p_rmem);
    ptx::registers_change<WORDS>(a);
    ptx::registers_change<SUMS>(dv);
    ptx::wgmma_fence();  // P is rounded before the product
    start_gradient<C, QTile>(dv_rmem, a_rmem, dout_smem);
    if (C::STAYS ? starts : number == 0) hand_over_start();
    starts = false;
    if constexpr (TAKES_DQ) {
      if (behind_first_round()) hand_on_dq(taken + 2);  // of the same parity
    }
    ptx::wgmma_wait_group<C::S_AHEAD ? 2 : 1>();  // dP
    ptx::registers_change<SCORES>(dp);
    if constexpr (C::SWAPS_KEYS) {
      if (!more) release(barriers.values_empty());  // all products of V have read it
    }
    if constexpr (C::DROPS) {
      differentiate_kept<C>(ds_rmem, p_rmem, dp_rmem, terms, all_params.kept_share);
    } else {
      differentiate<C>(ds_rmem, p_rmem, dp_rmem, terms, C::SOFTCAP ? params.uncap : 0.0f);
    }
    if constexpr (C::READS_MASK || C::ADDS_MASK) {
      // Without S_AHEAD no register is left to know whether that is needed.
      if (!C::S_AHEAD || masks || hides) clear_where_p_is_0<C>(ds_rmem, p_rmem);
      if constexpr (C::MASK_GRADIENT) {
        add_mask_gradient<C>(ds_rmem, all_params, work, *note_of(q_ring.stage),
                             dense_note<C>(shared, q_ring.stage));
      }
      if constexpr (C::KEEPS_GRADIENT) {
        const int head = [&] {
          if constexpr (C::READS_MASK) return dense_note<C>(shared, q_ring.stage).head();
          if constexpr (C::ADDS_MASK) return added_note<C>(shared, q_ring.stage).head;
        }();
        keep_mask_gradient<C>(ds_rmem, all_params.call, all_params.kept, work,
                              note_of(q_ring.stage)->row, head);
      }
    } else if (masks) {
      clear_unseen<C>(ds_rmem, work, row_of(q_ring.stage));
    }
    ptx::registers_change<SCORES>(ds);
    if constexpr (C::S_AHEAD) {
      ptx::wgmma_wait_group<0>();  // S of the next block and dV
      ptx::registers_change<SCORES>(s);
    } else {
      ptx::mbarrier_wait_parity(barriers.q_full(next.stage), next.parity);
      look_ahead(next.stage);
      // With two blocks in a round ptxas would wait for each product if this one had a branch:
      // behind the last block S is that of the same queries once more, which nobody uses.
      if (SINGLE) {
        ptx::wgmma_wait_group<0>();  // dV
      } else if (more || C::BLOCKS_OF_ROUND > 1) {
        begin_s(q_at(next.stage));
        ptx::wgmma_wait_group<1>();  // dV
      } else {
        ptx::wgmma_wait_group<0>();
      }
    }
    ptx::registers_change<SUMS>(dv);
    ptx::registers_change<WORDS>(a);
    release(barriers.dout_empty(dout_stage));

    round_to_16_bits<C>(a_rmem, ds_rmem);
    ptx::registers_change<WORDS>(a);
    if constexpr (FIRST_OF_ROUND) begin_dq();  // of the round before
    if constexpr (SINGLE) {
      // By dS other warps know that it is complete, which lies where they write dS of the next one.
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<PART>(dq);
      if (blocks_done() > 0) {
        store_dq(number / C::BLOCKS_OF_ROUND - 1);
        hand_on_dq(number / C::BLOCKS_OF_ROUND - 1);
      }
    }
    constexpr int BLOCK_OF_ROUND = LAST_OF_ROUND && !SINGLE ? C::BLOCKS_OF_ROUND - 1 : 0;
    store_ds<C>(ds_at(ds_ring.stage) + BLOCK_OF_ROUND * C::BLOCK * C::DsTile::ROW_BYTES, a_rmem);
    if constexpr (SINGLE) clear_ds<C>(ds_at(ds_ring.stage) + C::BLOCK * C::DsTile::ROW_BYTES);
    ptx::registers_change<SUMS>(dk);
    ptx::wgmma_fence();  // dS is rounded before the product
    start_gradient<C, QTile>(dk_rmem, a_rmem, q_at(q_ring.stage));
    ptx::fence_proxy_async_shared();  // the stores come before wgmma reads them
    if constexpr (LAST_OF_ROUND) {
      release(barriers.ds_full(ds_ring.stage));
      ds_ring.advance();
    }
    number += COUNTED;
    q_ring = next;
    if constexpr (C::S_AHEAD) {
      exponentiate(q_ring.stage);
      if constexpr (FIRST_OF_ROUND && !SINGLE) {
        ptx::wgmma_wait_group<1>();
        ptx::registers_change<PART>(dq);
        if (behind_first_round()) {
          const uint32_t round = (number - 1) / C::BLOCKS_OF_ROUND - 1;
          store_dq(round);
          hand_on_dq(round);
        }
      }
    } else {
      if constexpr (SINGLE) {
        ptx::wgmma_wait_group<0>();
        ptx::registers_change<SUMS>(dk);
        ptx::registers_change<WORDS>(a);
        begin_s(q_at(next.stage));
        ptx::wgmma_wait_group<0>();
        ptx::registers_change<SCORES>(s);
      } else {
        ptx::wgmma_wait_group<FIRST_OF_ROUND ? 2 : 1>();  // S of the next block
        ptx::registers_change<SCORES>(s);
      }
    }
    return more;
  };
  bool more_rounds = true;
  if constexpr (C::SINGLE_BLOCKS) {
#pragma unroll 1
    for (int left = uniform(work.singles); left > 0; --left)
      more_rounds = step.template operator()<true, true>();
  }
#pragma unroll 1
  while (more_rounds) {
    if constexpr (C::BLOCKS_OF_ROUND == 2) step.template operator()<false>();
    if (!step.template operator()<true>()) break;
  }
  ptx::wgmma_wait_group<0>();
  ptx::registers_change<SUMS>(dk);
  if constexpr (C::STAYS) q_ring.advance();
  if constexpr (!C::S_AHEAD && C::BLOCKS_OF_ROUND == 1) {
    ptx::registers_change<PART>(dq);
    if (behind_first_round()) {
      store_dq(number - 2);
      hand_on_dq(number);
    }
  }
  begin_dq();  // of the last round
  const auto finish_dq = [&] {
    ptx::wgmma_wait_group<0>();
    ptx::registers_change<PART>(dq);
    if constexpr (C::HANDS_KEYS_BACK) release(barriers.keys_empty());
    store_dq(number / C::BLOCKS_OF_ROUND - 1);
    hand_on_dq(number / C::BLOCKS_OF_ROUND - 1);
  };
  if constexpr (C::HANDS_KEYS_BACK) finish_dq();
  bool writes = true;
  if constexpr (C::MERGES_PARTS) {
    if (uniform(static_cast<int>(work.part)) >= 0)
      writes = merge_parts<C, SUMS>(params, work, dk, dv);
  }
  if (writes) {
    store_gradient<C, KTile>(dk_rmem, params.backward.dk, work, attention.d, params.backward.scale);
    float dv_factor = 1.0f;
    if constexpr (C::DROPS) dv_factor = all_params.dropout.scale;
    store_gradient<C, KTile>(dv_rmem, params.backward.dv, work, attention.dv, dv_factor);
  }
  if constexpr (!C::HANDS_KEYS_BACK) finish_dq();
  position = {number, q_ring, dout_ring, ds_ring};
}

}  // namespace archflash::hopper
