// A backward pass whose CTAs own keys and go over rounds of query rows. What is the same in every
// folder that has one: which rounds a CTA goes over; in backward_round_loads.cuh the warps that
// bring Q, dO and the terms of their rows, in backward_round_sums.cuh where the sums of dQ lie.
// `Params` is a folder's BackwardKernelParams; C is a kernel's tile, of which a round has ROUND
// rows in BLOCKS_OF_ROUND blocks of BLOCK rows.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/listed_round.h"
#include "common/device/uniform.cuh"
#include "common/device/varlen_tiles.cuh"

namespace archflash::device {

// What a CTA works on, in shared memory.
struct CtaWork : BackwardWork {
  // The query rows that it goes over: of whole rounds, which see its keys, the first rows of the
  // first and of the last one; begin > last: none. It goes over the heads that share a head of K
  // inside of a round, and over the rounds from `start` to the first one and then from the last one
  // on; or, if `upwards`, from the first one to the last one.
  int begin, last, start;
  bool upwards;
  // In folders whose CTAs merge parts of tiles: which part of the rows it has, -1: all; and the
  // number of the tile among those in parts.
  int8_t part;
  int16_t tile_in_parts;
  int blocks;  // of all rounds and heads
  // In kernels with SINGLE_BLOCKS, where no row is in the second block of the last round: how many
  // such rounds it begins with, one of each head. They come before `start`, and `last` is the round
  // before theirs.
  int singles;
  // In turns: the chain of tiles that add to the same sums, which turn of it the CTA has, and what
  // the CTA of the turn before has, which is that of the keys before in this chain, or behind if
  // `upwards`; before_begin > before_last: no round.
  int chain, turn;
  int before_begin, before_last, before_start;
  // The number of the first head's first round among all rounds, and what comes to it for the next
  // head and for the next round.
  int dq_first, dq_next_head, dq_next_round;
  int gradient_head;  // that it writes of dK and dV, in folders whose CTAs share out a tile's rows
  // In turns where tiles start apart: the head of its first round, and how many rounds, of all
  // heads, come behind that one, which before_begin says of the tile before. There before_start is
  // the first row of the CTA's share, and before_last the tile's number among those of its chain
  // that run together.
  int start_head, start_step;
};

// Whether tiles may start apart, in a folder with such parameters.
template <class Params>
consteval bool can_start_apart() {
  return requires(Params params) { params.turn_tiles; };
}

// The number of the round of query row `row` among those of all heads.
template <class C, class Params>
__device__ __forceinline__ int dq_round(const Params& params, int batch, int head, int row) {
  const AttentionParams& attention = params.backward.attention;
  const int* cu_q = attention.cu_seqlens_q_gmem;
  if (cu_q == nullptr) return (batch * attention.heads_q + head) * params.rounds + row / C::ROUND;
  const int tile = varlen_tile_start(cu_q, batch, C::ROUND) + row / C::ROUND;
  return tile * attention.heads_q + head;
}

// Whether a kernel leaves out the second block of a round where no row is in it.
template <class C>
consteval bool has_single_blocks() {
  if constexpr (requires { C::SINGLE_BLOCKS; }) return C::SINGLE_BLOCKS;
  return false;
}

// The round that a CTA begins with in turns: the last one, or where a round has two sums
// (core::sums_of_round()) later keys with a later one. There a CTA comes to a round behind the CTA
// of the keys before, if either both or none of them have come to their first round in between.
template <class Params>
__device__ __forceinline__ int start_in_turns(const Params& params, int first_key, int begin,
                                              int last) {
  return params.sums_of_round == 2 ? min(begin + first_key, last) : last;
}

// Whether a tile starts apart from those that run together with it, in turns.
template <class Params>
__device__ __forceinline__ bool starts_apart(const Params& params, const CtaWork& cta) {
  if constexpr (can_start_apart<Params>()) {
    return params.turn_tiles > 0 && !cta.upwards;
  } else {
    return false;
  }
}

// How many chains the tiles of a head are in turns, of which every so many-th tile is one: with
// more than two sums of a round each chain has one of them, and two where tiles start apart.
template <class Params>
__device__ __forceinline__ int count_chains(const Params& params) {
  if constexpr (can_start_apart<Params>()) {
    if (params.turn_tiles > 0) return params.sums_of_round / 2;
  }
  return params.sums_of_round > 2 ? params.sums_of_round : 1;
}

// Writes where a tile starts that starts apart.
template <class C, class Params>
__device__ __forceinline__ void start_apart(const Params& params, CtaWork& cta, int tile,
                                            int first_row, int chains) {
  const int turn = tile / chains;
  cta.chain = tile - turn * chains;
  cta.turn = turn;
  cta.before_start = first_row;
  const int number = turn % params.turn_tiles;
  cta.before_last = number;
  cta.before_begin = (number - 1) << params.turn_steps_shift;
  const int step = number << params.turn_steps_shift;
  cta.start_step = step;
  const int round = step / cta.heads;
  cta.start_head = cta.heads - 1 - (step - round * cta.heads);
  cta.start = first_row + round * C::ROUND;
  // No such round sees its keys.
  if (cta.start < cta.begin || cta.start > cta.last) cta.start = cta.last, cta.start_head = 0;
}

// Writes what a CTA works on, with the query rows. upwards: in turns the tiles of its head come
// from the last one to the first. share, part: of the rows, in folders whose CTAs share them out;
// part -1: all rows.
template <class C, class Params>
__device__ __forceinline__ void find_queries(const Params& params, const BackwardWork& work,
                                             CtaWork& cta, bool upwards = false, int share = 0,
                                             int part = -1) {
  const AttentionParams& attention = params.backward.attention;
  static_cast<BackwardWork&>(cta) = work;
  cta.upwards = false;
  cta.part = static_cast<int8_t>(part);
  cta.before_begin = 0, cta.before_last = -1, cta.before_start = 0;
  // The rows that see keys from `first_key` on, of the CTA's share.
  const auto rows_of = [&](int first_key, int& begin, int& last) {
    begin = work.visible.first(first_key) & -C::ROUND;
    last = work.visible.last(min(first_key + C::ROWS, work.own_rows) - 1) & -C::ROUND;
    if constexpr (requires { params.shares; }) {
      const int of_rows = max(share, part);  // one of them is not shared out
      begin = max(begin, of_rows * params.share_rows);
      if (params.shares > 1 || part >= 0)
        last = min(last, (of_rows + 1) * params.share_rows - C::ROUND);
    }
  };
  if constexpr (requires { params.shares; }) cta.gradient_head = work.head * params.shares + share;
  int begin, last;
  rows_of(work.first_row, begin, last);
  int rounds = begin > last ? 0 : (last - begin) / C::ROUND + 1;
  cta.begin = begin, cta.last = last;
  if constexpr (can_start_apart<Params>()) cta.start_head = 0;
  cta.blocks = rounds * C::BLOCKS_OF_ROUND * work.heads;
  if constexpr (has_single_blocks<C>()) {
    cta.singles = 0;
    // Where tiles start apart or have two sums, they may not begin with the same round.
    const bool begins_anywhere =
        params.turns_gmem == nullptr || (params.sums_of_round != 2 && params.turn_tiles == 0);
    if (rounds > 0 && last + C::BLOCK >= work.passing_rows && begins_anywhere && !upwards) {
      cta.singles = work.heads;
      last -= C::ROUND, --rounds;
      cta.last = last;
    }
  }
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
    if (starts_apart(params, cta)) {
      if constexpr (can_start_apart<Params>()) {
        start_apart<C>(params, cta, tile, share * params.share_rows, chains);
        start = cta.start;
      }
    } else if (turn > 0) {
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

  // Whether its round has one block.
  __device__ __forceinline__ bool is_single(const CtaWork& cta) const {
    return has_single_blocks<C>() && row > uniform(cta.last);
  }
  __device__ __forceinline__ void next_round(const CtaWork& cta) {
    if (++head < uniform(cta.heads)) return;
    head = 0;
    if constexpr (has_single_blocks<C>()) {
      if (is_single(cta)) {
        row = uniform(cta.start);
        return;
      }
    }
    row += uniform(cta.upwards) ? C::ROUND : -C::ROUND;
    if (row < uniform(cta.begin)) row = uniform(cta.last);
  }
};

template <class C>
__device__ __forceinline__ bool is_single(const CtaWork& cta, const BlockPosition<C>& block) {
  if constexpr (has_single_blocks<C>()) return block.is_single(cta);
  return false;
}

// Where a CTA begins.
template <class C, class Params>
__device__ __forceinline__ BlockPosition<C> first_block(const Params&, const CtaWork& cta) {
  if constexpr (has_single_blocks<C>()) {
    if (uniform(cta.singles) > 0) return {0, cta.last + C::ROUND};
  }
  if constexpr (can_start_apart<Params>()) {
    return {cta.start_head, cta.start};
  } else {
    return {0, cta.start};
  }
}

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

}  // namespace archflash::device
