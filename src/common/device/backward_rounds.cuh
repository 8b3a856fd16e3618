// A backward pass whose CTAs own keys and go over rounds of query rows. What is the same in every
// folder that has one: which rounds a CTA goes over, the warps that bring Q, dO and the terms of
// their rows, and where the sums of dQ lie. `Params` is a folder's BackwardKernelParams; C is a
// kernel's tile, of which a round has ROUND rows in BLOCKS_OF_ROUND blocks of BLOCK rows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/backward_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/backward_rows.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/listed_round.h"
#include "common/device/ring.cuh"
#include "common/device/slab_load.cuh"
#include "common/device/uniform.cuh"
#include "common/device/varlen_tiles.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/lg2.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/warp_roles.cuh"
#include "common/tensor_map.h"

namespace archflash::device {

// What a CTA works on, in shared memory.
struct CtaWork : BackwardWork {
  // The query rows that it goes over: of whole rounds, which see its keys, the first rows of the
  // first and of the last one; begin > last: none. It goes over the heads that share a head of K
  // inside of a round, and over the rounds from `start` to the first one and then from the last one
  // on; or, if `upwards`, from the first one to the last one.
  int begin, last, start;
  bool upwards;
  int blocks;  // of all rounds and heads
  // In turns: the chain of tiles that add to the same sums, which turn of it the CTA has, and what
  // the CTA of the turn before has, which is that of the keys before in this chain, or behind if
  // `upwards`; before_begin > before_last: no round.
  int chain, turn;
  int before_begin, before_last, before_start;
  // The number of the first head's first round among all rounds, and what comes to it for the next
  // head and for the next round.
  int dq_first, dq_next_head, dq_next_round;
  int gradient_head;  // that it writes of dK and dV, in folders whose CTAs share out a tile's rows
};

// The number of the round of query row `row` among those of all heads.
template <class C, class Params>
__device__ __forceinline__ int dq_round(const Params& params, int batch, int head, int row) {
  const AttentionParams& attention = params.backward.attention;
  const int* cu_q = attention.cu_seqlens_q_gmem;
  if (cu_q == nullptr) return (batch * attention.heads_q + head) * params.rounds + row / C::ROUND;
  const int tile = varlen_tile_start(cu_q, batch, C::ROUND) + row / C::ROUND;
  return tile * attention.heads_q + head;
}

// The round that a CTA begins with in turns: the last one, or where a round has two sums
// (core::sums_of_round()) later keys with a later one. There a CTA comes to a round behind the CTA
// of the keys before, if either both or none of them have come to their first round in between.
template <class Params>
__device__ __forceinline__ int start_in_turns(const Params& params, int first_key, int begin,
                                              int last) {
  return params.sums_of_round == 2 ? min(begin + first_key, last) : last;
}

// How many chains the tiles of a head are in turns: with more than two sums of a round each chain
// has one of them, and every so many-th tile is in it.
template <class Params>
__device__ __forceinline__ int count_chains(const Params& params) {
  return params.sums_of_round > 2 ? params.sums_of_round : 1;
}

// Writes what a CTA works on, with the query rows. upwards: in turns the tiles of its head come
// from the last one to the first. share: of the rows, in folders whose CTAs share them out.
template <class C, class Params>
__device__ __forceinline__ void find_queries(const Params& params, const BackwardWork& work,
                                             CtaWork& cta, bool upwards = false, int share = 0) {
  const AttentionParams& attention = params.backward.attention;
  static_cast<BackwardWork&>(cta) = work;
  cta.upwards = false;
  cta.before_begin = 0, cta.before_last = -1, cta.before_start = 0;
  // The rows that see keys from `first_key` on, of the CTA's share.
  const auto rows_of = [&](int first_key, int& begin, int& last) {
    begin = work.visible.first(first_key) & -C::ROUND;
    last = work.visible.last(min(first_key + C::ROWS, work.own_rows) - 1) & -C::ROUND;
    if constexpr (requires { params.shares; }) {
      begin = max(begin, share * params.share_rows);
      if (params.shares > 1) last = min(last, (share + 1) * params.share_rows - C::ROUND);
    }
  };
  if constexpr (requires { params.shares; }) cta.gradient_head = work.head * params.shares + share;
  int begin, last;
  rows_of(work.first_row, begin, last);
  const int rounds = begin > last ? 0 : (last - begin) / C::ROUND + 1;
  cta.begin = begin, cta.last = last;
  cta.blocks = rounds * C::BLOCKS_OF_ROUND * work.heads;
  int start = last;
  if (params.turns_gmem == nullptr) {
    // CTAs begin so many steps apart at most that L2 has what the one before has read.
    constexpr int STEPS_APART = C::HEAD_DIM > 128 ? 1 : 4;
    const int apart = work.first_row / C::ROWS * STEPS_APART / max(work.heads, STEPS_APART);
    if (rounds > 0) start -= apart % rounds * C::ROUND;
  } else {
    const int tile = work.first_row / C::ROWS;
    cta.upwards = upwards;
    const int chains = count_chains(params);
    const int turn = upwards ? (work.own_rows - 1) / C::ROWS - tile : tile / chains;
    cta.turn = turn;
    cta.chain = tile % chains;
    start = upwards ? begin : start_in_turns(params, work.first_row, begin, last);
    if (turn > 0) {
      const int before = work.first_row + (upwards ? C::ROWS : -C::ROWS * chains);
      int before_begin, before_last;
      rows_of(before, before_begin, before_last);
      cta.before_begin = before_begin, cta.before_last = before_last;
      cta.before_start = start_in_turns(params, before, before_begin, before_last);
    }
  }
  cta.start = start;
  const bool packed = attention.cu_seqlens_q_gmem != nullptr;
  cta.dq_first = dq_round<C>(params, work.batch, work.head * attention.heads_per_kv, 0);
  cta.dq_next_head = packed ? 1 : params.rounds;
  cta.dq_next_round = packed ? attention.heads_q : 1;
}

// The block of queries that a CTA is at: its rounds, and in these its heads.
template <class C>
struct BlockPosition {
  int head = 0, row;  // of the heads that share a head of K; the block's first row

  __device__ __forceinline__ void next_round(const CtaWork& cta) {
    if (++head < uniform(cta.heads)) return;
    head = 0;
    row += uniform(cta.upwards) ? C::ROUND : -C::ROUND;
    if (row < uniform(cta.begin)) row = uniform(cta.last);
  }
};

// Whether the CTAs of a kernel go over lists of rounds (listed_round.h).
template <class C>
consteval bool lists_rounds() {
  if constexpr (requires { C::LISTS_ROUNDS; }) return C::LISTS_ROUNDS;
  return false;
}

struct ListedWork : CtaWork {
  const ListedRound* rounds_gmem;
  int keys_begin, keys_end;  // the tile's keys that any query may see lie between these
};

// The rounds of a list. The first one is of the first head, and starts with row CtaWork::start.
template <class C>
  requires(lists_rounds<C>())
struct BlockPosition<C> {
  int head = 0, row;
  int number = 0;

  __device__ __forceinline__ ListedRound listed(const CtaWork& cta) const {
    return static_cast<const ListedWork&>(cta).rounds_gmem[number];
  }
  __device__ __forceinline__ void next_round(const CtaWork& cta) {
    if (++number * C::BLOCKS_OF_ROUND >= uniform(cta.blocks)) return;
    const ListedRound round = listed(cta);
    head = round.head();
    row = round.row_block() * C::BLOCK;
  }
};

// --- sums of dQ ---

// Where a CTA adds its part of a round's dQ. In turns the order is that of the keys, or the other
// way round for CTAs that go upwards. A round may have two sums side by side: one of the CTAs that
// come to it before their first round, the other one of those that come to it after that. CTAs that
// go upwards use the first one alone. Or it has one for each chain of tiles.
struct DqTurn {
  int sum;     // its number among all sums
  bool waits;  // the CTA of the turn before adds to it
};

template <class C, class Params>
__device__ __forceinline__ DqTurn dq_turn(const Params& params, const CtaWork& cta,
                                          const BlockPosition<C>& block) {
  const int round =
      cta.dq_first + block.head * cta.dq_next_head + block.row / C::ROUND * cta.dq_next_round;
  if (params.turns_gmem == nullptr) return {round, false};
  const bool after = !cta.upwards && block.row > cta.start;
  return {params.sums_of_round * round + (after ? 1 : cta.chain),
          block.row >= cta.before_begin && block.row <= cta.before_last &&
              (cta.upwards || (block.row > cta.before_start) == after)};
}

// The columns of the sums: those of dQ, or as many more as make steps of C::SUMS_STEP.
template <class C>
__device__ __forceinline__ int sums_columns(int d) {
  if constexpr (C::SUMS_STEP == C::HEAD_DIM) {
    return C::HEAD_DIM;
  } else {
    return (d + C::SUMS_STEP - 1) / C::SUMS_STEP * C::SUMS_STEP;
  }
}

// The rows of the sums of a round: kernels that leave out columns leave out rows, too.
template <class C, class Params>
__device__ __forceinline__ int sums_rows(const Params& params) {
  if constexpr (C::SUMS_STEP == C::HEAD_DIM) {
    return C::ROUND;
  } else {
    return params.sums_rows;
  }
}

// How many floats the sums of a round are.
template <class C, class Params>
__device__ __forceinline__ int round_sums(const Params& params) {
  return sums_rows<C>(params) * sums_columns<C>(params.backward.attention.d);
}

// Where sums number `sum` start.
template <class C, class Params>
__device__ __forceinline__ float* sums_of_round(const Params& params, int64_t sum) {
  return params.dq_sums_gmem + sum * round_sums<C>(params);
}

// The sums of a round, when all CTAs have added to them. Made by whole warps.
template <class C>
struct SumsOfRound {
  const float4* sums_gmem;
  int to_next;       // in chunks of 16 bytes
  uint32_t written;  // a bit for each sum: whether a CTA has added to it

  template <class Params>
  __device__ __forceinline__ SumsOfRound(const Params& params, int64_t round)
      : to_next(round_sums<C>(params) / 4), written(1) {
    const int32_t* turns_gmem = params.turns_gmem;
    if (turns_gmem != nullptr) {
      const int count = params.sums_of_round;
      round *= count;
      const int lane = threadIdx.x % 32;
      written = __ballot_sync(FULL_WARP, lane < count && turns_gmem[round + lane] != 0);
    }
    sums_gmem = reinterpret_cast<const float4*>(sums_of_round<C>(params, round));
  }

  // Adds up CHUNKS times 16 bytes, which are STEP chunks apart from chunk `index` on. Those of a
  // sum are in flight together: one after another they would take longer than the main kernel where
  // chains are many.
  template <int CHUNKS, int STEP>
  __device__ __forceinline__ void read(float4 (&sums)[CHUNKS], int index) const {
#pragma unroll
    for (int t = 0; t < CHUNKS; ++t) sums[t] = {};
#pragma unroll 1
    for (uint32_t left = written; left != 0; left &= left - 1) {
      const float4* const sum_gmem =
          sums_gmem + static_cast<int64_t>(__ffs(left) - 1) * to_next + index;
      float4 x[CHUNKS];
#pragma unroll
      for (int t = 0; t < CHUNKS; ++t) x[t] = sum_gmem[t * STEP];
#pragma unroll
      for (int t = 0; t < CHUNKS; ++t)
        sums[t] = {sums[t].x + x[t].x, sums[t].y + x[t].y, sums[t].z + x[t].z, sums[t].w + x[t].w};
    }
  }
};

// --- what comes before the main kernel ---

// Writes the terms of all query rows, and zeros to the sums of dQ. In turns the first CTA writes a
// sum, and so only the turns become zeros.
template <DType DTYPE, class Params>
__device__ __forceinline__ void prepare_rounds(const Params& params) {
  void* const cleared_gmem =
      params.turns_gmem == nullptr ? static_cast<void*>(params.dq_sums_gmem) : params.turns_gmem;
  backward_rows<DTYPE>(params.backward, [&] { clear_by_grid(cleared_gmem, params.cleared_bytes); });
}

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
  BlockPosition<C> block{0, work.start};
  // The loop keeps few values: a warp that loads has few registers.
#pragma unroll 1
  for (int left = work.blocks; left > 0; left -= C::BLOCKS_OF_ROUND) {
    do {
      const int head = work.head * attention.heads_per_kv + block.head;
      ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
      load_queries.template operator()<typename C::QTile>(
          C::Q_SMEM + q_ring.stage * C::QTile::BYTES, params.q_map, attention.q_head,
          attention.q_batch, head, block.row, barriers.q_full(q_ring.stage));
      q_ring.advance();
      load_more(head, block.row);
      // V comes behind the first Q, because S comes before dP.
      if (left == work.blocks && block.row == work.start) {
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
    } while (C::BLOCKS_OF_ROUND > 1 && block.row % C::ROUND != 0);
    block.row -= C::ROUND;
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
  __device__ __forceinline__ Note operator()(int, int) const { return {}; }
};

// Writes LSEs, deltas and a note of each block to shared memory, in the ring of Q. A warp's keys
// are WARP_ROWS of KEY_WARPS * WARP_ROWS. more_of(head, row): what a folder's own notes have of a
// block besides, which lies behind the note; head: of those that share a head of K.
template <class C, class Params, class Barriers, class More = NoMoreNotes>
__device__ __forceinline__ void load_terms_of_rounds(const Params& params, const CtaWork& work,
                                                     unsigned char* shared,
                                                     const Barriers& barriers,
                                                     RingPosition<C::Q_STAGES>& q_ring,
                                                     const More& more_of = {}) {
  const int lane = threadIdx.x % 32;
  BlockPosition<C> block{0, work.start};
  if constexpr (C::USES_PDL) ptx::griddepcontrol_wait();  // the terms are written
#pragma unroll 1
  for (int left = work.blocks; left > 0; left -= C::BLOCKS_OF_ROUND) {
    const int head = work.head * params.backward.attention.heads_per_kv + block.head;
    const RowTerms* terms_gmem = terms_of(params.backward, work.batch, head, work.passing_start);
#pragma unroll 1
    for (int first = block.row; first < block.row + C::ROUND; first += C::BLOCK) {
      RowTerms terms[C::BLOCK / 32];
#pragma unroll
      for (int j = 0; j < C::BLOCK / 32; ++j) {
        const int row = first + 32 * j + lane;
        // P of rows behind the end is 0.
        terms[j] = {-MINUS_INFINITY, 0.0f};
        if (row < work.passing_rows) terms[j] = terms_gmem[row];
      }
      using MoreNote = typename More::Note;
      const MoreNote more = more_of(block.head, first);
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

// --- softcap ---

// A score becomes softcap * tanh(score / softcap). The error of tanh is relative to its result, as
// that of 1 - 2 / (1 + e^2x) is not near 0; the series ends with an error of 2^-24 at its limit.
__device__ __forceinline__ float cap_score(float score, const AttentionParams& params) {
  constexpr float SERIES_LIMIT = 0.1f;
  const float x = score * params.rule.tanh_scale;
  const float square = x * x;
  const float series = fmaf(x * square, fmaf(square, 2.0f / 15.0f, -1.0f / 3.0f), x);
  const float power = ptx::ex2_approx_ftz(x * (2.0f * LOG2_E));
  const float far = 1.0f - __fdividef(2.0f, 1.0f + power);
  return params.rule.softcap * (square < SERIES_LIMIT * SERIES_LIMIT ? series : far);
}

// The derivative of softcap * tanh(x / softcap) by x: 1 - tanh(x / softcap)^2. The tanh comes from
// P = 2^(score - LSE), because the score is no longer there. Where P is 0, tanh is anything.
__device__ __forceinline__ float softcap_derivative(float p, float lse, float uncap) {
  constexpr float LEAST_EXPONENT = -126.0f;
  const float exponent = fmaxf(ptx::lg2_approx_ftz(p), LEAST_EXPONENT);
  const float tanh = (exponent + lse) * uncap;
  return fmaxf(fmaf(-tanh, tanh, 1.0f), 0.0f);
}

// --- what comes behind the main kernel: dQ, when all CTAs have added to its sums ---

// A round of queries of a head, by its number among all rounds.
struct SummedRound {
  int batch, head;
  int first_row;  // of its sequence
  int rows;       // of its sequence; negative: no sequence has this round
};

template <class C, class Params>
__device__ __forceinline__ SummedRound find_summed_round(const Params& params, int index) {
  const AttentionParams& attention = params.backward.attention;
  const int* cu_q = attention.cu_seqlens_q_gmem;
  SummedRound found;
  if (cu_q == nullptr) {
    found.head = index / params.rounds % attention.heads_q;
    found.batch = index / params.rounds / attention.heads_q;
    found.first_row = index % params.rounds * C::ROUND;
    found.rows = attention.nq;
  } else {
    found.head = index % attention.heads_q;
    const int tile = index / attention.heads_q;
    found.rows = -1;
    found.batch = find_varlen_sequence(cu_q, attention.batch, C::ROUND, tile);
    if (found.batch < 0) return found;
    found.first_row = (tile - varlen_tile_start(cu_q, found.batch, C::ROUND)) * C::ROUND;
    found.rows = sequence_start(cu_q, found.batch + 1, attention.nq) -
                 sequence_start(cu_q, found.batch, attention.nq);
  }
  return found;
}

// Where the gradient of a round's sequence starts, in elements from the start of the tensor.
template <class Params>
__device__ __forceinline__ int64_t gradient_of_sequence(const Params& params,
                                                        const SummedRound& round) {
  const AttentionParams& attention = params.backward.attention;
  const GradientParams& gradient = params.backward.dq;
  const int first = sequence_start(attention.cu_seqlens_q_gmem, round.batch, attention.nq);
  return round.batch * gradient.batch + round.head * gradient.head +
         static_cast<int64_t>(first) * gradient.row;
}

}  // namespace archflash::device
