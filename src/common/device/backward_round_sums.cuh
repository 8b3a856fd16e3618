// The sums of dQ in a backward pass of rounds (backward_rounds.cuh): where a CTA adds to them, what
// comes before the main kernel, and what makes dQ of them behind it.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/backward_rounds.cuh"
#include "common/device/backward_rows.cuh"
#include "common/device/varlen_tiles.cuh"

namespace archflash::device {

// Where a CTA adds its part of a round's dQ. In turns the order is that of the keys, or the other
// way round for CTAs that go upwards. A round may have two sums side by side: one of the CTAs that
// come to it before their first round, the other one of those that come to it after that. CTAs that
// go upwards use the first one alone. Or it has one for each chain of tiles.
struct DqTurn {
  int sum;     // its number among all sums
  bool waits;  // a CTA adds to it before
  int come;    // what the sum's counter says when that one has
};

template <class C, class Params>
__device__ __forceinline__ DqTurn dq_turn(const Params& params, const CtaWork& cta,
                                          const BlockPosition<C>& block) {
  const int round =
      cta.dq_first + block.head * cta.dq_next_head + block.row / C::ROUND * cta.dq_next_round;
  if (params.turns_gmem == nullptr) return {round, false, 0};
  if constexpr (lists_rounds<C>()) {
    const ListedRound listed = block.listed(cta);
    const int come = listed.come();
    return {params.sums_of_round * round + listed.sum(), come > 0, come};
  }
  if constexpr (can_start_apart<Params>()) {
    if (C::SWAPS_KEYS ? params.turn_tiles > 0 : starts_apart(params, cta)) {
      const int step =
          (block.row - cta.before_start) / C::ROUND * cta.heads + cta.heads - 1 - block.head;
      const bool after = step > cta.start_step;
      // The tile before of its chain, if it adds to the same sum, else the last one that does of
      // those that ran together before.
      int before = cta.turn - 1;
      if (after) {
        if (cta.before_last == 0) {
          before -= params.turn_tiles -
                    ((step + (1 << params.turn_steps_shift) - 1) >> params.turn_steps_shift);
        }
      } else if (step > cta.before_begin) {
        before -= cta.before_last;
      }
      const int first_sum =  // with SWAPS_KEYS, for which few registers are left, of one chain
          C::SWAPS_KEYS ? 2 * round : params.sums_of_round * round + 2 * cta.chain;
      return {first_sum + (after ? 1 : 0), before >= 0, before + 1};
    }
    if constexpr (C::SWAPS_KEYS)  // all rows see all keys
      return {params.sums_of_round * round + cta.chain, cta.turn > 0, cta.turn};
  }
  const bool after = !cta.upwards && block.row > cta.start && !is_single<C>(cta, block);
  return {params.sums_of_round * round + (after ? 1 : cta.chain),
          block.row >= cta.before_begin && block.row <= cta.before_last &&
              (cta.upwards || (block.row > cta.before_start) == after),
          cta.turn};
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
  // sum are in flight together.
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

  // Adds up as read() does, the first `has` chunks of AT_A_TIME sums in flight together: one sum
  // after another would take longer than the main kernel where chains are many.
  template <int AT_A_TIME, int CHUNKS, int STEP>
  __device__ __forceinline__ void read_many(float4 (&sums)[CHUNKS], int index, int has) const {
#pragma unroll
    for (int t = 0; t < CHUNKS; ++t) sums[t] = {};
#pragma unroll 1
    for (uint32_t left = written; left != 0;) {
      float4 x[AT_A_TIME][CHUNKS] = {};
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
        if (left == 0) break;
        const float4* const sum_gmem =
            sums_gmem + static_cast<int64_t>(__ffs(left) - 1) * to_next + index;
#pragma unroll
        for (int t = 0; t < CHUNKS; ++t) {
          if (t < has) x[i][t] = sum_gmem[t * STEP];
        }
        left &= left - 1;
      }
#pragma unroll
      for (int i = 0; i < AT_A_TIME; ++i) {
#pragma unroll
        for (int t = 0; t < CHUNKS; ++t) {
          sums[t] = {sums[t].x + x[i][t].x, sums[t].y + x[i][t].y, sums[t].z + x[i][t].z,
                     sums[t].w + x[i][t].w};
        }
      }
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
