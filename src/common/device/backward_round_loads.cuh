// The warps that bring what a backward pass of rounds reads (backward_rounds.cuh).
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/backward_params.h"
#include "common/device/backward_rounds.cuh"
#include "common/device/backward_rows.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/ring.cuh"
#include "common/device/slab_load.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/warp_roles.cuh"
#include "common/tensor_map.h"

namespace archflash::device {

// --- the warp that loads K, V, Q and dO ---

// Where K and V of a tile go, in bytes, and the barriers that they arrive at.
struct KeyStage {
  int k_smem, v_smem;
  uint32_t k_full, v_full;
};

// Where the loader is in the rings of Q and dO, and the parity of its barrier for ragged blocks.
template <class C>
struct LoaderPosition {
  RingPosition<C::Q_STAGES> q_ring;
  RingPosition<C::DOUT_STAGES> dout_ring;
  uint32_t ragged_parity = 0;
};

// Nothing comes with a block but Q and dO.
struct NoMoreLoads {
  __device__ __forceinline__ void operator()(int, int) const {}
};

// Brings K and V of a tile once, and Q and dO of each block. load_more(head, row): brings what a
// folder has besides of a block of rows of a head of q.
template <class C, class Params, class Barriers, class LoadMore = NoMoreLoads>
__device__ __forceinline__ void load_rounds(const Params& params, const CtaWork& work,
                                            unsigned char* shared, uint32_t shared_smem,
                                            const Barriers& barriers, const KeyStage& keys,
                                            LoaderPosition<C>& position,
                                            const LoadMore& load_more = {}) {
  const AttentionParams& attention = params.backward.attention;
  const bool leader = ptx::elect_sync();  // one lane starts copies; all lanes wait and count
  const bool packed = attention.cu_seqlens_q_gmem != nullptr;
  RingPosition<C::Q_STAGES>& q_ring = position.q_ring;
  RingPosition<C::DOUT_STAGES>& dout_ring = position.dout_ring;
  uint32_t& ragged_parity = position.ragged_parity;

  // Loads rows of a sequence that starts at row `start` of the tensor and has `rows` of them, of
  // which those from `begin` to `end` count. Without cu_seqlens TMA reads zeros behind its end.
  const auto load_rows = [&]<class Tile>(int offset, const TensorMap& map, int start, int row,
                                         int rows, int begin, int end, int head, int batch,
                                         uint32_t full) {
    const bool ragged = row < begin || (row + Tile::ROWS > end && (packed || end < rows));
    if (leader) {
      start_load<Tile>(shared_smem + offset, map, start + row, head, batch,
                       ragged ? barriers.ragged() : full);
    }
    if (!ragged) return;
    ptx::mbarrier_wait_parity(barriers.ragged(), ragged_parity);  // the tile has landed
    ragged_parity ^= 1;
    // The volatile read keeps the number of the lane out of the registers until here.
    clear_rows<Tile>(shared + offset, begin - row, end - row, ptx::mov_tid_x_volatile());
    if (leader) ptx::mbarrier_arrive(full);
  };
  const auto load_keys = [&]<class Tile>(int offset, const TensorMap& map, int64_t head_stride,
                                         int64_t batch_stride, uint32_t full) {
    int begin = work.own_begin(), end = work.own_end(), head = work.head;
    if constexpr (requires { params.shares; } && !lists_rounds<C>()) {
      if (params.backward.head_shares > 1) head /= params.backward.head_shares;
    }
    if constexpr (lists_rounds<C>()) {
      const auto& listed = static_cast<const ListedWork&>(work);
      begin = max(begin, listed.keys_begin), end = min(end, listed.keys_end);
    }
    load_rows.template operator()<Tile>(offset, map, work.own_start, work.first_row, work.own_rows,
                                        begin, end, head_stride == 0 ? 0 : head,
                                        batch_stride == 0 ? 0 : work.batch, full);
  };
  const auto load_queries = [&]<class Tile>(int offset, const TensorMap& map, int64_t head_stride,
                                            int64_t batch_stride, int head, int row,
                                            uint32_t full) {
    load_rows.template operator()<Tile>(
        offset, map, work.passing_start, row, work.passing_rows, work.passing_begin(),
        work.passing_end(), head_stride == 0 ? 0 : head, batch_stride == 0 ? 0 : work.batch, full);
  };

  load_keys.template operator()<typename C::KTile>(keys.k_smem, params.k_map, attention.k_head,
                                                   attention.k_batch, keys.k_full);
  BlockPosition<C> block = first_block<C>(params, work);
  // The loop keeps few values: a warp that loads has few registers.
#pragma unroll 1
  for (int left = work.blocks; left > 0; left -= C::BLOCKS_OF_ROUND) {
    const bool single = is_single<C>(work, block);
    do {
      const int head = work.head * attention.heads_per_kv + block.head;
      ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
      load_queries.template operator()<typename C::QTile>(
          C::Q_SMEM + q_ring.stage * C::QTile::BYTES, params.q_map, attention.q_head,
          attention.q_batch, head, block.row, barriers.q_full(q_ring.stage));
      q_ring.advance();
      load_more(head, block.row);
      // V comes behind the first Q, because S comes before dP.
      if (left == work.blocks &&
          (has_single_blocks<C>() ? block.row % C::ROUND == 0 : block.row == work.start)) {
        load_keys.template operator()<typename C::VTile>(
            keys.v_smem, params.v_map, attention.v_head, attention.v_batch, keys.v_full);
      }
      ptx::mbarrier_wait_parity(barriers.dout_empty(dout_ring.stage), dout_ring.parity ^ 1);
      load_queries.template operator()<typename C::DoutTile>(
          C::DOUT_SMEM + dout_ring.stage * C::DoutTile::BYTES, params.dout_map,
          params.backward.dout_head, params.backward.dout_batch, head, block.row,
          barriers.dout_full(dout_ring.stage));
      dout_ring.advance();
      block.row += C::BLOCK;
    } while (C::BLOCKS_OF_ROUND > 1 && block.row % C::ROUND != 0 && !single);
    block.row -= single ? C::BLOCK : C::ROUND;
    block.next_round(work);
  }
}

// --- the warp that brings the terms of a block's rows ---

// What the terms of a block end with, in shared memory.
struct BlockNote {
  int row;  // the block's first row
  // A bit for each warp's keys: not all of them are there and seen by all rows. P of a key behind
  // the end must be 0, because its dS may be too large for 16 bits, and infinity * 0 spoils dQ.
  unsigned masked_warps;
  // With lists of rounds, UNSEEN_SHIFT bits higher: none of the keys is seen. Such warps are among
  // the masked ones, too.
  static constexpr int UNSEEN_SHIFT = 8;
};

// Nothing comes behind a block's note.
struct NoMoreNotes {
  struct Note {};
  template <class Terms>
  __device__ __forceinline__ Note operator()(int, int, const Terms&) const {
    return {};
  }
};

// Writes LSEs, deltas and a note of each block to shared memory, in the ring of Q. A warp's keys
// are WARP_ROWS of KEY_WARPS * WARP_ROWS. more_of(head, row, terms): what a folder's own notes have
// of a block besides, which lies behind the note; head: of those that share a head of K; terms: of
// the lane's rows.
template <class C, class Params, class Barriers, class More = NoMoreNotes>
__device__ __forceinline__ void load_terms_of_rounds(const Params& params, const CtaWork& work,
                                                     unsigned char* shared,
                                                     const Barriers& barriers,
                                                     RingPosition<C::Q_STAGES>& q_ring,
                                                     const More& more_of = {}) {
  const int lane = threadIdx.x % 32;
  BlockPosition<C> block = first_block<C>(params, work);
  if constexpr (C::USES_PDL) ptx::griddepcontrol_wait();  // the terms are written
#pragma unroll 1
  for (int left = work.blocks; left > 0; left -= C::BLOCKS_OF_ROUND) {
    const int head = work.head * params.backward.attention.heads_per_kv + block.head;
    const RowTerms* terms_gmem = terms_of(params.backward, work.batch, head, work.passing_start);
    const int end = block.row + (is_single<C>(work, block) ? C::BLOCK : C::ROUND);
#pragma unroll 1
    for (int first = block.row; first < end; first += C::BLOCK) {
      RowTerms terms[C::BLOCK / 32];
#pragma unroll
      for (int j = 0; j < C::BLOCK / 32; ++j) {
        const int row = first + 32 * j + lane;
        // P of rows behind the end is 0.
        terms[j] = {-MINUS_INFINITY, 0.0f};
        if (row < work.passing_rows) terms[j] = terms_gmem[row];
      }
      using MoreNote = typename More::Note;
      const MoreNote more = more_of(block.head, first, terms);
      ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
      float* of_stage =
          reinterpret_cast<float*>(shared + C::TERMS_SMEM + q_ring.stage * C::TERMS_BYTES);
#pragma unroll
      for (int j = 0; j < C::BLOCK / 32; ++j) {
        of_stage[32 * j + lane] = terms[j].lse_log2;
        of_stage[C::BLOCK + 32 * j + lane] = terms[j].delta;
      }
      const int first_key = work.first_row + lane % C::KEY_WARPS * C::WARP_ROWS;
      const int last_key = first_key + C::WARP_ROWS - 1;
      const bool masks = last_key >= work.own_rows ||
                         work.visible.masks(first_key, last_key, first, first + C::BLOCK - 1);
      unsigned masked_warps = __ballot_sync(FULL_WARP, masks);
      if constexpr (lists_rounds<C>()) {
        const uint32_t seen = block.listed(work).seen((first - block.row) / C::BLOCK);
        const unsigned unseen = (seen & 1 ? 0 : 0x0Fu) | (seen & 2 ? 0 : 0xF0u);
        masked_warps = (masked_warps & 0xFF) | unseen | unseen << BlockNote::UNSEEN_SHIFT;
      }
      if constexpr (requires { more.masked_warps(); }) masked_warps |= more.masked_warps();
      if (lane == 0) {
        auto* const note = reinterpret_cast<BlockNote*>(of_stage + 2 * C::BLOCK);
        *note = {first, masked_warps};
        if constexpr (!std::is_empty_v<MoreNote>) *reinterpret_cast<MoreNote*>(note + 1) = more;
      }
      release(barriers.q_full(q_ring.stage));
      q_ring.advance();
    }
    block.next_round(work);
  }
}

}  // namespace archflash::device
