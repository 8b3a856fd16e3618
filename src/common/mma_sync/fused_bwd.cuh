// Attention backward on mma.sync tensor cores in one kernel: 5 products of queries and keys.
//
// A CTA owns keys; blocks of queries pass by. SPLIT warps share the same keys:
//
//   wait block | barrier | dQ of the block before | S^T = K Q^T | start next block | dP^T = V dO^T
//   | P, dS | dV += P^T dO   dK += dS^T Q of the warp's own queries | barrier of the SPLIT warps |
//   the same of the other queries
//
//   scores   a warp has its keys and a share of the block's queries
//   dV, dK   a warp has its keys and a share of the columns. Its own P and dS are the first operand
//            as they lie in registers; those of the other queries come through shared memory
//   dQ       dS K of all keys of the CTA: a warp has a share of the block's rows and columns. It is
//            one block late, so that one barrier of the CTA serves a block
//
// dQ is added to sums in fp32 (DqSums), which another kernel scales and converts;
// device/dq_turns.cuh says in which order.
//
// An SM may have one of these CTAs at a time, so nothing hides its start: each thread finds out by
// itself where its copies lie, and S of the first block needs no V and dO.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/backward_work.cuh"
#include "common/device/dq_turns.cuh"
#include "common/device/kept_weights.cuh"
#include "common/mma_sync/attention_bwd.cuh"
#include "common/mma_sync/dropout_bwd.cuh"
#include "common/mma_sync/fused_bwd_config.cuh"
#include "common/mma_sync/fused_dq.cuh"
#include "common/mma_sync/fused_products.cuh"
#include "common/mma_sync/key_tiles.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// Starts the copies of a block of queries into a stage: of Q and the terms, of dO, or of all. Those
// that see no key become zeros.
template <class C, bool QUERIES = true, bool DOUT = true>
__device__ __forceinline__ void start_queries(const BackwardParams& params, const FusedWork& cta,
                                              const Passing& block, uint32_t stage_smem,
                                              uint32_t terms_smem) {
  const AttentionParams& attention = params.attention;
  const uint32_t head = block.head, row = block.row;
  const uint16_t* q_gmem = cta.q_gmem + head * static_cast<uint64_t>(attention.q_head);
  const uint16_t* dout_gmem = cta.dout_gmem + head * static_cast<uint64_t>(params.dout_head);
  const int begin = cta.passing_begin() - block.row, end = cta.passing_end() - block.row;
  if constexpr (QUERIES) {
    const device::RowTerms* terms_gmem =
        cta.terms_gmem + head * static_cast<uint64_t>(attention.lse_head) + row;
    const int thread = ptx::mov_tid_x_volatile();
    if (thread < C::BLOCK) {
      const bool exists = thread < end;
      ptx::cp_async_ca_8(terms_smem + thread * static_cast<int>(sizeof(device::RowTerms)),
                         exists ? terms_gmem + thread : terms_gmem, exists ? 8 : 0);
    }
  }
  const uint32_t second_smem = stage_smem + C::SECOND_OF_STAGE;
  if (begin <= 0 && end >= C::BLOCK) {
    if constexpr (QUERIES) {
      start_load<C, typename C::FirstTile, C::BLOCK>(stage_smem, q_gmem, row, 2 * attention.q_row,
                                                     attention.d);
    }
    if constexpr (DOUT) {
      start_load<C, typename C::SecondTile, C::BLOCK>(second_smem, dout_gmem, row,
                                                      2 * params.dout_row, attention.dv);
    }
  } else {
    if constexpr (QUERIES) {
      start_ragged_load<C, typename C::FirstTile, C::BLOCK>(
          stage_smem, q_gmem + row * attention.q_row, attention.q_row, begin, end, attention.d);
    }
    if constexpr (DOUT) {
      start_ragged_load<C, typename C::SecondTile, C::BLOCK>(
          second_smem, dout_gmem + row * params.dout_row, params.dout_row, begin, end,
          attention.dv);
    }
  }
}

// Where a warp's P lies where its dS comes behind it: dV += P^T dO, dK += dS^T Q, each first of the
// warp's own queries. Lane numbers are found anew, because there are no registers to keep them.
template <class C>
__device__ __forceinline__ void multiply_in_one_place(
    float (&dv_rmem)[C::M_TILES][C::HEAD_DIM_V / C::SPLIT / 8][4],
    float (&dk_rmem)[C::M_TILES][C::HEAD_DIM / C::SPLIT / 8][4],
    const BlockFragments<ScoresOfWarp<C>>& p_rmem, const BlockFragments<ScoresOfWarp<C>>& ds_rmem,
    uint32_t scores_smem, uint32_t stage_smem) {
  // The warps that share keys meet. Number 0 is the barrier of the CTA.
  const auto meet = [] {
    ptx::bar_sync(1 + ptx::mov_tid_x_volatile() / (32 * C::SPLIT), 32 * C::SPLIT);
  };
  const auto add = [&]<class Tile, int COLUMNS>(auto& x_rmem, const auto& of_warp_rmem,
                                                uint32_t passing_smem) {
    const int thread = ptx::mov_tid_x_volatile();
    const int lane = thread % 32, part = thread / 32 % C::SPLIT;
    const int warp_row = thread / (32 * C::SPLIT) * C::WARP_ROWS;
    store_scores<C>(scores_smem, of_warp_rmem, warp_row, part, lane);
    multiply_own<C, Tile, COLUMNS>(x_rmem, of_warp_rmem, passing_smem, part, lane);
    meet();  // what all of these warps have is written, before it is read
    multiply_others<C, Tile, COLUMNS>(x_rmem, scores_smem + warp_row * C::ScoreTile::ROW_BYTES,
                                      passing_smem, part, lane);
  };
  add.template operator()<typename C::SecondTile, C::HEAD_DIM_V / C::SPLIT>(
      dv_rmem, p_rmem, stage_smem + C::SECOND_OF_STAGE);
  meet();  // P is read, before dS overwrites it
  add.template operator()<typename C::FirstTile, C::HEAD_DIM / C::SPLIT>(dk_rmem, ds_rmem,
                                                                         stage_smem);
}

template <class C>
__device__ __forceinline__ void fused_bwd(const typename C::Params& all_params) {
  using FirstTile = typename C::FirstTile;
  using SecondTile = typename C::SecondTile;
  using ScoreTile = typename C::ScoreTile;
  using Scores = ScoresOfWarp<C>;
  constexpr int FIRST_COLUMNS = C::HEAD_DIM / C::SPLIT;
  constexpr int SECOND_COLUMNS = C::HEAD_DIM_V / C::SPLIT;
  using FirstProduct = FusedProduct<C, FirstTile, FIRST_COLUMNS>;
  using SecondProduct = FusedProduct<C, SecondTile, SECOND_COLUMNS>;
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(FusedWork) <= C::CONTEXT_BYTES);
  FusedWork& cta = *reinterpret_cast<FusedWork*>(shared + C::CONTEXT_SMEM);
  const BackwardParams& params = call_of<C>(all_params);
  const AttentionParams& attention = params.attention;
  device::clear_keys_of_no_sequence<C::ROWS, DK | DV>(params, blockIdx.x, C::WARPS);
  FusedWork own;  // what `cta` will be behind the first barrier of the loop
  static_cast<BackwardWork&>(own) = find_key_tile<C::ROWS>(attention, blockIdx.x);
  if (own.first_row < 0) {
    ptx::griddepcontrol_wait();  // for the launch behind
    return;
  }
  {
    const int head = own.head * attention.heads_per_kv;
    const auto rows = device::query_rows<uint16_t>(params, own.batch, head, own.passing_start);
    own.q_gmem = rows.first_gmem;
    own.dout_gmem = rows.second_gmem;
    own.terms_gmem = device::terms_of(params, own.batch, head, own.passing_start);
    own.walk = device::find_dq_walk<C::ROWS, C::BLOCK>(params.dq_sums, own);
  }
  if (threadIdx.x == 0) cta = own;

  int blocks_left = own.walk.template blocks<C::BLOCK>();
  // The loop has no barrier then.
  if (C::MASKED || blocks_left == 0) __syncthreads();

  // With masks as data: the blocks in the same order, but for those in which no score counts. CTAs
  // that take turns leave none out, because the next one waits for each of them.
  [[maybe_unused]] int number = 0;
  const auto row_of = [&](int of_block) { return own.walk.last - of_block * C::BLOCK; };
  [[maybe_unused]] auto seen_blocks = [&] {
    if constexpr (C::MASKED) {
      const MaskParams& masks = all_params.masks;
      return device::SeenBlocks<C>{masks, cta, attention.heads_per_kv, blocks_left,
                                   (masks.ranges_gmem == nullptr && masks.blocks_gmem == nullptr) ||
                                       params.dq_sums.turns_gmem != nullptr};
    } else {
      return 0;
    }
  }();
  if constexpr (C::MASKED) {
    number = seen_blocks.next(0, row_of);
    blocks_left -= number;
  }

  float dk_rmem[C::M_TILES][FIRST_COLUMNS / 8][4] = {};
  float dv_rmem[C::M_TILES][SECOND_COLUMNS / 8][4] = {};
  if (blocks_left > 0) {
    const int64_t row = static_cast<int64_t>(own.own_start) + own.first_row;
    const auto keys = device::key_rows<uint16_t>(params, own.batch, own.head, row);
    const Passing first{0, row_of(number)};
    start_own_first<C>(attention, keys, own, shared_smem);
    // The terms are written, and the sums or turns are zero.
    ptx::griddepcontrol_wait();
    start_queries<C, true, false>(params, own, first, shared_smem + C::STAGES_SMEM,
                                  shared_smem + C::TERMS_SMEM);
    ptx::cp_async_commit_group();
    start_own_second<C>(attention, keys, own, shared_smem);
    start_queries<C, false, true>(params, own, first, shared_smem + C::STAGES_SMEM, 0);
    ptx::cp_async_commit_group();
    if (attention.d < C::HEAD_DIM || attention.dv < C::HEAD_DIM_V)
      clear_unwritten_columns<C, true>(attention, shared);
  } else {
    ptx::griddepcontrol_wait();
  }

  [[maybe_unused]] const auto dropout = [&] {
    if constexpr (C::DROPS) {
      return device::find_dropout(all_params.dropout, 0);  // whose head is found for each block
    } else {
      return 0;
    }
  }();

  int stage = 0;
  // The block whose dQ comes next, and the one whose dQ was added last; a negative head: none.
  Passing multiplied{-1, 0}, added{-1, 0};
  Passing block{0, row_of(number)};
  // The block behind another one; sets blocks_left to 0 behind the last one.
  const auto next_of = [&](const FusedWork& work, const Passing& before) {
    if (before.head + 1 < work.heads) return Passing{before.head + 1, before.row};
    if constexpr (C::MASKED) {
      const int before_number = number;
      number = seen_blocks.next(number + 1, row_of);
      blocks_left -= number - before_number;
      return Passing{0, row_of(number)};
    } else {
      if (before.row == work.walk.begin) blocks_left = 0;
      return Passing{0, before.row - C::BLOCK};
    }
  };
  // `true &&` has the compiler keep what it says in a predicate.
  const auto add_multiplied = [&] {
    add_dq<C>(params, cta, multiplied, shared_smem + C::DS_SMEM + (1 - stage) * C::SCORE_BYTES,
              shared_smem + C::OWN_FIRST_SMEM, true && cta.walk.waits(multiplied));
  };
  bool has_block = blocks_left > 0;
  Passing next = has_block ? next_of(own, block) : block;
#pragma unroll 1
  while (has_block) {
    // Each thread waits for its own copies, in the first round for those of K and Q. The barrier
    // makes those of all threads visible, and dS of the block before. After it no warp still reads
    // the other stage, or the other buffer of dS, which are overwritten next.
    const bool is_first = multiplied.head < 0;
    if (is_first) {
      ptx::cp_async_wait_group<1>();
    } else {
      ptx::cp_async_wait_group<0>();
    }
    __syncthreads();
    pass_turn<C>(params, cta, added);
    if (multiplied.head >= 0) add_multiplied();

    const auto start_next = [&] {
      if (is_first) {
        ptx::cp_async_wait_group<0>();
        __syncthreads();  // V and dO of all threads have landed
      }
      if (blocks_left > 0) {
        start_queries<C>(params, cta, next,
                         shared_smem + C::STAGES_SMEM + (1 - stage) * C::STAGE_BYTES,
                         shared_smem + C::TERMS_SMEM + (1 - stage) * C::TERMS_BYTES);
      }
      ptx::cp_async_commit_group();
    };
    const int thread = ptx::mov_tid_x_volatile();
    const int lane = thread % 32, warp = thread / 32;
    const int part = warp % C::SPLIT;
    const int warp_row = warp / C::SPLIT * C::WARP_ROWS;
    const int warp_first = cta.first_row + warp_row;
    const int warp_last = min(warp_first + C::WARP_ROWS, cta.own_rows) - 1;
    const int block_last = block.row + C::BLOCK - 1;
    const uint32_t ds_smem = shared_smem + C::DS_SMEM + stage * C::SCORE_BYTES;
    BlockFragments<Scores> ds_fragments = {};
    // Warps without keys, or whose keys no query of the block sees, skip the work. All warps that
    // share keys do, and so none of them waits at their barrier.
    if (warp_last >= warp_first &&
        !cta.visible.hides(warp_first, warp_last, block.row, block_last)) {
      const uint32_t stage_smem = shared_smem + C::STAGES_SMEM + stage * C::STAGE_BYTES;
      const uint32_t second_smem = stage_smem + C::SECOND_OF_STAGE;
      const uint32_t unused[1][C::M_TILES][4] = {};  // owned rows are read from shared memory
      BlockScores<Scores> s_rmem, dp_rmem;
      multiply_qk<FirstProduct>(s_rmem, unused,
                                shared_smem + C::OWN_FIRST_SMEM + warp_row * FirstTile::ROW_BYTES +
                                    rows_first_offset<FirstTile>(lane),
                                stage_smem + part * C::PART * FirstTile::ROW_BYTES +
                                    columns_first_offset<FirstTile>(lane));
      start_next();
      if (!C::DROPS && attention.transform_scores) {
        device::transform_scores<FirstProduct>(s_rmem, attention.rule);
      }
      multiply_qk<SecondProduct>(dp_rmem, unused,
                                 shared_smem + C::OWN_SECOND_SMEM +
                                     warp_row * SecondTile::ROW_BYTES +
                                     rows_first_offset<SecondTile>(lane),
                                 second_smem + part * C::PART * SecondTile::ROW_BYTES +
                                     columns_first_offset<SecondTile>(lane));
      const float4* terms =
          reinterpret_cast<const float4*>(shared + C::TERMS_SMEM + stage * C::TERMS_BYTES) +
          part * (C::PART / 2) + lane % 4;
      const auto terms_of = [&](int, int n, int, int i) {
        const float4 two = terms[4 * n];  // of the lane's two neighbouring queries
        return i == 0 ? device::RowTerms{two.x, two.y} : device::RowTerms{two.z, two.w};
      };
      [[maybe_unused]] const auto dropout_of_head = [&] {
        auto of_head = dropout;
        if constexpr (C::DROPS) {
          const DroppedHeads& heads = all_params.dropped_heads;
          const int head = device::passing_head<C::OWNS>(attention, cta, block);
          of_head.batch_head = device::uniform(heads.first + cta.batch * heads.of_sequence + head);
        }
        return of_head;
      };
      // 1 / the scale of what is kept.
      [[maybe_unused]] const auto unscaled = [&] {
        if constexpr (C::DROPS) return __frcp_rn(all_params.dropout.scale);
        return 1.0f;
      };
      [[maybe_unused]] const int lane_query = block.row + part * C::PART + lane % 4 * 2;
      if constexpr (C::MASKED) {
        exponentiate_masked<Scores>(s_rmem, dp_rmem, all_params, cta,
                                    device::passing_head<C::OWNS>(attention, cta, block),
                                    warp_first, block.row + part * C::PART, lane, terms_of);
      } else if constexpr (C::DROPS) {
        exponentiate_dropping<Scores>(s_rmem, dp_rmem, attention.exp2_scale, dropout_of_head(),
                                      unscaled(), lane_query, warp_first + lane / 4, terms_of);
      } else {
        exponentiate_backward<Scores>(s_rmem, dp_rmem, attention, terms_of);
      }
      // P of a key behind the end must be 0, because its dS may be too large for 16 bits, and
      // infinity * 0 spoils dQ.
      const bool masks =
          !C::MASKED && (warp_first + C::WARP_ROWS > cta.own_rows ||
                         cta.visible.masks(warp_first, warp_last, block.row, block_last));
      if (masks) {
        const int row = warp_first + lane / 4;
        const int column = block.row + part * C::PART + lane % 4 * 2;
        clear_unseen<Scores>(s_rmem, cta, row, column);
        clear_unseen<Scores>(dp_rmem, cta, row, column);
      }
      BlockFragments<Scores> p_fragments;
      pack_block<Scores>(p_fragments, s_rmem);
      pack_block<Scores>(ds_fragments, dp_rmem);
      if constexpr (C::P_BEFORE_DS) {
        multiply_in_one_place<C>(dv_rmem, dk_rmem, p_fragments, ds_fragments, ds_smem, stage_smem);
      } else {
        if constexpr (C::SPLIT > 1)
          store_scores<C>(shared_smem + C::P_SMEM, p_fragments, warp_row, part, lane);
        store_scores<C>(ds_smem, ds_fragments, warp_row, part, lane);
        multiply_own<C, SecondTile, SECOND_COLUMNS>(dv_rmem, p_fragments, second_smem, part, lane);
        multiply_own<C, FirstTile, FIRST_COLUMNS>(dk_rmem, ds_fragments, stage_smem, part, lane);
      }
      if constexpr (C::SPLIT > 1 && !C::P_BEFORE_DS) {
        // P and dS of all warps that share the keys must be written before they are read. Number 0
        // is the barrier of the CTA.
        ptx::bar_sync(1 + warp / C::SPLIT, 32 * C::SPLIT);
        const uint32_t scores = warp_row * ScoreTile::ROW_BYTES;
        multiply_others<C, SecondTile, SECOND_COLUMNS>(dv_rmem, shared_smem + C::P_SMEM + scores,
                                                       second_smem, part, lane);
        multiply_others<C, FirstTile, FIRST_COLUMNS>(dk_rmem, ds_smem + scores, stage_smem, part,
                                                     lane);
      }
    } else {
      start_next();
      store_scores<C>(ds_smem, ds_fragments, warp_row, part, lane);  // zeros, which dQ reads
    }
    added = multiplied;
    multiplied = block;
    has_block = blocks_left > 0;
    block = next;
    if (has_block) next = next_of(cta, block);
    stage = 1 - stage;
  }
  if (multiplied.head >= 0) {
    __syncthreads();  // dS of the last block is complete
    pass_turn<C>(params, cta, added);
    add_multiplied();
    __syncthreads();  // all warps have added, before the turn passes
    pass_turn<C>(params, cta, multiplied);
  }

  const int warp = ptx::mov_tid_x_volatile() / 32;
  const int warp_row = warp / C::SPLIT * C::WARP_ROWS;
  const GradientParams dk = params.dk, dv = params.dv;  // copies: their fields go to registers
  store_gradient<C, true, C::template PAIR_STEP<FirstTile>>(
      dk_rmem, dk, cta, warp_row, 8 * first_chunk<C, FirstTile>(warp % C::SPLIT), attention.d,
      params.scale);
  float dv_factor = 1.0f;
  if constexpr (C::MASKED || C::DROPS) dv_factor = all_params.dropout.scale;
  store_gradient<C, true, C::template PAIR_STEP<SecondTile>>(
      dv_rmem, dv, cta, warp_row, 8 * first_chunk<C, SecondTile>(warp % C::SPLIT), attention.dv,
      dv_factor);
}

}  // namespace archflash::mma_sync
