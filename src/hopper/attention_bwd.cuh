// Attention backward on TMA, mbarriers and wgmma, for compute capability 9.0: fp16 or bf16 inputs,
// products summed in fp32.
//
// A CTA owns 128 keys of a head and goes over the blocks of 64 query rows that see any of them, of
// all query heads that share its head of K. It sums up dK and dV of its keys in registers. All CTAs
// of a head add their parts of dQ to sums in the workspace, in an order that is not known, or in
// turns: in an order that is fixed, so that the same inputs always give the same bits. A kernel of
// its own (write_dq) then scales and rounds the sums.
//
// In turns, a CTA waits only for CTAs with smaller indices, which have started before it. All CTAs
// go from later rounds of queries to earlier ones, and over the heads that share a head of K inside
// of a round. Each begins with a later round than that of the keys before, so that the turn has
// mostly come. Behind its first round it goes on with the last one; what it adds from there on has
// a sum of its own, because it may come to these rounds before the CTAs of earlier keys do. Others
// go from the last tile and the first round upwards, with one sum a round (backward_order.cuh).
// clang-format off
//                      once         each block of queries
//
//   loader, 1 warp     load K, V    wait q_empty    load Q                    wait dout_empty  load dO
//   terms, 1 warp                   wait q_empty    LSEs, deltas, a note        |
//                        |            | q_full                                  | dout_full
//                        v            v                                         v
//   consumers,         wait k_full  wait q_full                               wait dout_full
//   2 warpgroups of    v_full       start S^T = K Q^T                         start dP^T = V dO^T
//   128 threads                     P^T = 2^(S^T - LSE)                       start dV += P^T dO   | dout_empty
//                                                                             dS^T = P^T (dP^T - delta)
//                                   start dK += dS^T Q  | q_empty             dS -> shared memory  | ds_full
//                                   start dQ = dS K of the round before
//                                   wait dq_empty   dQ -> shared memory       | dq_full
//                                                                             v
//   dQ, 2 warps                     wait dq_full    add dQ in the workspace by TMA              | dq_empty
//
//   one step of a consumer warpgroup:
//
//   tensor cores   dQ of b - 2, dK of b - 1 |          | dP of b | dV of b | S of b + 1       | dQ of b - 1, dK of b
//   warps          P of b                   | store dQ | round P | dS of b | round, store dS  | P of b + 1
//   (with S_AHEAD S of b + 1 comes behind dP of b, and dQ is stored while dK is computed)
// clang-format on
//
// A consumer warpgroup owns 64 keys. S, P and dP lie in its registers with a key in a row, so that
// P and dS in 16 bits are the operand A of the products for dV and dK. For dQ, which sums over the
// keys, dS passes through shared memory, and each warpgroup computes a part of it. It does so a
// round later, when the other warpgroup has long stored its dS: so the two need not keep step, and
// the second one begins half a step after the first one. Then one of them multiplies while the
// other one computes exponentials; in step both would do either at the same time.
//
// The tiles and the memory plan are in backward_config.cuh, the plan in plan_backward.cpp, budgets
// and measurements in NOTES.md.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/backward_params.h"
#include "common/math/backward_rounds.cuh"
#include "common/math/backward_work.cuh"
#include "common/math/quad.cuh"
#include "common/math/slab_load.cuh"
#include "common/math/uniform.cuh"
#include "common/ptx/bulk_order.cuh"
#include "common/ptx/bulk_store.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/cvt_relu.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/lg2.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/min.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "common/ptx/wgmma.cuh"
#include "hopper/backward_config.cuh"
#include "hopper/backward_order.cuh"
#include "hopper/backward_params.h"
#include "hopper/drop_weights.cuh"
#include "hopper/tile.cuh"

namespace archflash::hopper {

using math::BackwardWork;
using math::BlockNote;
using math::BlockPosition;
using math::CtaWork;

// What a main kernel is given: with DROPS it is told of dropout, too.
template <class C>
using BackwardParamsOf = std::conditional_t<C::DROPS, DroppingBackwardParams, BackwardKernelParams>;

template <class C>
__device__ __forceinline__ const BackwardKernelParams& call_of(const BackwardParamsOf<C>& params) {
  if constexpr (C::DROPS) {
    return params.call;
  } else {
    return params;
  }
}

// The barriers, as addresses in shared memory. "Bytes": the loader arrives once and says how many
// bytes TMA will bring; the phase ends when they have landed.
//
// clang-format off
//   barrier                  arrives               waits           so that
//   k_full, v_full           loader, bytes         consumers       the CTA's keys have landed before
//                                                                  wgmma reads them
//   q_full of each stage     loader, bytes;        consumers       Q has landed, and its terms are
//                            terms warp                            there
//   q_empty of each stage    each consumer warp    loader, terms   every warp's products have read Q,
//                                                                  and every warp the terms, before
//                                                                  the next ones come
//   dout_full of each stage  loader, bytes         consumers       dO has landed
//   dout_empty               each consumer warp    loader          every warp's products have read dO
//     of each stage
//   ds_full of each stage    each consumer warp    consumers       dS of all keys is there before a
//                                                                  warpgroup multiplies it by K
//   dq_full of each          each of its warps     a dQ warp       dQ of a round is in shared memory
//     warpgroup, for even                                          before TMA adds it
//     and for odd rounds
//   dq_empty of each         a dQ warp             its warps       TMA has read dQ before that of the
//     warpgroup                                                    next round comes
//   ragged                   loader, bytes         loader          a tile some of whose rows have to
//                                                                  do with none of the other side has
//                                                                  landed before the loader clears
//                                                                  them
// clang-format on
//
// A stage of dS needs no empty barrier. A warp that writes dS of round r has waited for ds_full of
// round r - 1. There a warp arrives when its dQ of round r - 3 is complete, so three stages
// suffice; with two blocks in a round, where dQ of round r - 2 is complete by then, two.
template <class C>
struct BackwardBarriers {
  uint32_t first_smem;

  __device__ __forceinline__ uint32_t k_full() const { return first_smem; }
  __device__ __forceinline__ uint32_t v_full() const { return first_smem + 8; }
  __device__ __forceinline__ uint32_t ragged() const { return first_smem + 16; }
  __device__ __forceinline__ uint32_t ds_full(int stage) const {
    return first_smem + 24 + 8 * stage;
  }
  __device__ __forceinline__ uint32_t q_full(int stage) const {
    return ds_full(stage) + 8 * C::DS_STAGES;
  }
  __device__ __forceinline__ uint32_t q_empty(int stage) const {
    return q_full(stage) + 8 * C::Q_STAGES;
  }
  __device__ __forceinline__ uint32_t dout_full(int stage) const {
    return q_full(stage) + 16 * C::Q_STAGES;
  }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const {
    return dout_full(stage) + 8 * C::DOUT_STAGES;
  }
  // Even and odd rounds have barriers of their own, because in turns a warp waits for one of the
  // two kinds only.
  __device__ __forceinline__ uint32_t dq_full(int group, uint32_t round) const {
    return dout_full(2 * group) + 16 * C::DOUT_STAGES + round % 2 * 8;
  }
  __device__ __forceinline__ uint32_t dq_empty(int group) const {
    return dq_full(C::WARPGROUPS, 0) + 8 * group;
  }

  // Called by one thread: those of K, V, Q and dO.
  __device__ __forceinline__ void initialise_inputs() const {
    ptx::mbarrier_init(k_full(), 1);
    ptx::mbarrier_init(v_full(), 1);
    ptx::mbarrier_init(ragged(), 1);
    for (int stage = 0; stage < C::Q_STAGES; ++stage) {
      // The warp of the terms, and the loader.
      ptx::mbarrier_init_for_warps(q_full(stage), 1, 1);
      ptx::mbarrier_init_for_warps(q_empty(stage), C::WARPS);
    }
    for (int stage = 0; stage < C::DOUT_STAGES; ++stage) {
      ptx::mbarrier_init(dout_full(stage), 1);
      ptx::mbarrier_init_for_warps(dout_empty(stage), C::WARPS);
    }
  }
};

// --- what comes before: the terms of all query rows, and zeros for the sums of dQ and the turns
// ---

template <DType DTYPE>
__device__ __forceinline__ void prepare(const BackwardKernelParams& params) {
  ptx::griddepcontrol_launch_dependents();  // the main kernel waits for what this one writes
  math::prepare_rounds<DTYPE>(params);
}

// --- loader, one warp: K, V, Q and dO -> shared memory ---

template <class C>
__device__ __forceinline__ void load(const BackwardKernelParams& params, const CtaWork& work,
                                     unsigned char* shared, uint32_t shared_smem) {
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  RingPosition<C::Q_STAGES> q_ring;
  RingPosition<C::DOUT_STAGES> dout_ring;
  math::load_rounds<C>(params, work, shared, shared_smem, barriers, q_ring, dout_ring);
}

// --- one more warp: the terms of a block's rows, and a note about it -> shared memory ---

template <class C>
__device__ __forceinline__ void load_terms(const BackwardKernelParams& params, const CtaWork& work,
                                           unsigned char* shared, uint32_t shared_smem) {
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  math::load_terms_of_rounds<C>(params, work, shared, barriers);
}

// --- two warps: dQ of each round -> the sums in the workspace ---

// A part of the sums of a round, which have no more rows and columns than dQ needs. Parts come one
// after another, in a part the rows of each warp, and of these eight columns after eight others.
template <class C>
struct SumsPart {
  int rows, columns;
  int start;  // in floats from those of the round
  __device__ __forceinline__ SumsPart(const BackwardKernelParams& params, int number) {
    const int all_rows = math::sums_rows<C>(params);
    const int all = math::sums_columns<C>(params.backward.attention.d);
    if constexpr (C::SHARES_ROWS) {
      rows = min(all_rows - number * C::PART_ROWS, C::PART_ROWS);
      columns = all;
      start = number * C::PART_ROWS * all;
    } else {
      const int before = min(number * C::PART_COLUMNS, all);
      rows = all_rows;
      columns = min(all - before, C::PART_COLUMNS);
      start = all_rows * before;
    }
  }
};

// TMA adds a part at once, which is faster than additions of 16 bytes. Warp `number` adds the parts
// of a consumer warpgroup. In turns it adds both parts of every second round, because to wait for a
// turn, to add and to hand it on takes longer than a round.
template <class C>
__device__ __forceinline__ void add_dq(const BackwardKernelParams& params, const CtaWork& work,
                                       uint32_t shared_smem, uint32_t number) {
  constexpr int PART_BYTES = 4 * C::PART_ROWS * C::PART_COLUMNS;
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();
  const bool in_turns = params.turns_gmem != nullptr;
  const int first_group = in_turns ? 0 : static_cast<int>(number);
  const int end_group = in_turns ? C::WARPGROUPS : first_group + 1;
  BlockPosition<C> block{0, work.start};
  const uint32_t rounds = work.blocks / C::BLOCKS_OF_ROUND;
  ptx::griddepcontrol_wait();  // the sums and the turns are zero
#pragma unroll 1
  for (uint32_t count = 0; count < rounds; ++count, block.next_round(work)) {
    if (in_turns && count % 2 != number) continue;
    const math::DqTurn turn = math::dq_turn<C>(params, work, block);
    // It looks for its turn while dQ is computed, because that takes a while even if it has come.
    if (leader && turn.waits) {
      const int own_turn = work.turn;
      while (ptx::ld_acquire_s32(params.turns_gmem + turn.sum) < own_turn) {
      }
    }
    __syncwarp();
    for (int group = first_group; group < end_group; ++group)
      ptx::mbarrier_wait_parity(barriers.dq_full(group, count), count / 2 % 2);
    if (leader) {
      if (turn.waits) ptx::fence_proxy_async_global();  // the turn has come before TMA adds
      float* const round_gmem = math::sums_of_round<C>(params, turn.sum);
      const auto add = [&](int start, uint32_t offset, uint32_t bytes) {
        const uint32_t from_smem = shared_smem + C::DQ_SMEM + offset;
        if (in_turns && !turn.waits) {
          ptx::cp_async_bulk_store(round_gmem + start, from_smem, bytes);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(round_gmem + start, from_smem, bytes);
        }
      };
      if constexpr (C::SUMS_STEP == C::HEAD_DIM) {
        add(first_group * (PART_BYTES / 4), first_group * PART_BYTES,
            (end_group - first_group) * PART_BYTES);
      } else {  // what dQ has of each warp's rows
#pragma unroll 1
        for (int group = first_group; group < end_group; ++group) {
          const SumsPart<C> part(params, group);
#pragma unroll 1
          for (int warp = 0; warp * C::WARP_ROWS < part.rows && part.columns > 0; ++warp) {
            add(part.start + warp * C::WARP_ROWS * part.columns,
                group * PART_BYTES + warp * 4 * C::WARP_SUMS, 4 * C::WARP_ROWS * part.columns);
          }
        }
      }
      ptx::cp_async_bulk_commit_group();
      ptx::cp_async_bulk_wait_group_read_0();
      for (int group = first_group; group < end_group; ++group)
        ptx::mbarrier_arrive(barriers.dq_empty(group));
      if (in_turns) {  // the CTA of the next turn may add when this one has
        ptx::cp_async_bulk_wait_group_0();
        ptx::st_release_s32(params.turns_gmem + turn.sum, work.turn + 1);
      }
    }
    __syncwarp();
  }
}

// --- consumers, two warpgroups: S, P, dP, dS and the gradients ---

// 64 keys by the queries of a block, in the registers of a warpgroup: keys lane/4 + 8r of a warp's
// 16, queries 8n + 2*(lane%4) + i at [n][2r + i].
template <class C>
using KeysByQueries = float[C::BLOCK / 8][4];
template <class C>
using KeysByQueries16 = uint32_t[C::BLOCK / 16][4];  // in 16 bits, as fragments of A
template <class C>
using KeyGradient = float[C::HEAD_DIM / 8][4];

// Sets to 0 what belongs to a key and a query that does not see it, as none sees a key behind the
// end. Selecting (not multiplying) makes the old value irrelevant, even if it was NaN. It is rarely
// called, so it keeps no register for itself.
template <class C>
__device__ __forceinline__ void clear_unseen(KeysByQueries<C>& x_rmem, const BackwardWork& work,
                                             int block_row) {
  const math::VisibleKeys& visible = work.visible;
  const int thread = ptx::mov_tid_x_volatile();
  const int first_key =
      work.first_row + thread / 32 % C::KEY_WARPS * C::WARP_ROWS + thread % 32 / 4;
  const int first_query = block_row + thread % 4 * 2;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int key = first_key + 8 * r;
    const int first = visible.first(key) - first_query;
    const int last = (key < work.own_rows ? visible.last(key) : -1) - first_query;
#pragma unroll
    for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int query = 8 * n + i;
        if (query < first || query > last) x_rmem[n][2 * r + i] = 0.0f;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void cap_scores(KeysByQueries<C>& s_rmem,
                                           const AttentionParams& params) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s_rmem[n][i] = math::cap_score(s_rmem[n][i], params);
  }
}

// P = 2^(S - LSE), which may lie in the registers of S. terms: as consume() has them.
template <class C>
__device__ __forceinline__ void weigh_scores(KeysByQueries<C>& p_rmem, KeysByQueries<C>& s_rmem,
                                             const float2* terms,
                                             const AttentionParams& attention) {
  if constexpr (C::SOFTCAP) cap_scores<C>(s_rmem, attention);
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
    const float2 lse = terms[4 * n];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float exponent =
            fmaf(s_rmem[n][2 * r + i], attention.exp2_scale, -(i == 0 ? lse.x : lse.y));
        // P is at most 1. The LSE of huge scores is rounded, which must not make P infinite.
        p_rmem[n][2 * r + i] = ptx::ex2_approx_ftz(ptx::min_nan(exponent, 0.0f));
      }
    }
  }
}

// Gives what is dropped of P, which is at least 0, the sign of negative numbers. key, query: the
// lane's first ones.
template <class C>
__device__ __forceinline__ void mark_dropped(KeysByQueries<C>& p_rmem, const math::Dropout& dropout,
                                             int key, int query) {
  const uint32_t threshold = dropout.threshold * 0x10001;
  const auto mark = [](float& p, uint32_t flags) {
    p = __uint_as_float(__float_as_uint(p) | (~flags & 0x80000000));
  };
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; n += 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const math::DropoutBits bits = dropout.bits(query + 8 * n + i, key);
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // queries 8 apart
        const uint32_t of_keys = key & 16 ? bits.words[2 * half + 1] : bits.words[2 * half];
        const uint32_t flags = kept_flags(of_keys, threshold);
        mark(p_rmem[n + half][i], flags << 16);
        mark(p_rmem[n + half][2 + i], flags);  // 8 keys on
      }
    }
  }
}

// dS of a block of which mark_dropped() has marked P, over the factor of the weights that are kept:
// P * dP of those that are, minus P * delta of all. kept_share: what delta is multiplied by.
template <class C>
__device__ __forceinline__ void differentiate_kept(KeysByQueries<C>& ds_rmem,
                                                   const KeysByQueries<C>& p_rmem,
                                                   const KeysByQueries<C>& dp_rmem,
                                                   const float2* terms, float kept_share) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
    const float2 delta = terms[C::BLOCK / 2 + 4 * n];
    const float deltas[2] = {delta.x * kept_share, delta.y * kept_share};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float p = p_rmem[n][i];
      ds_rmem[n][i] = fmaf(fmaxf(p, 0.0f), dp_rmem[n][i], -(fabsf(p) * deltas[i % 2]));
    }
  }
}

// dS = P * (dP - delta), the gradient of a score before its scale. With a softcap it is that of the
// score before softcap.
template <class C>
__device__ __forceinline__ float differentiate_score(float p, float dp, float delta, float lse,
                                                     float uncap) {
  const float ds = p * (dp - delta);
  if constexpr (!C::SOFTCAP) return ds;
  return ds * math::softcap_derivative(p, lse, uncap);
}

// dS of a block. terms: as consume() has them.
template <class C>
__device__ __forceinline__ void differentiate(KeysByQueries<C>& ds_rmem,
                                              const KeysByQueries<C>& p_rmem,
                                              const KeysByQueries<C>& dp_rmem, const float2* terms,
                                              float uncap) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
    const float2 lse = C::SOFTCAP ? terms[4 * n] : float2{};
    const float2 delta = terms[C::BLOCK / 2 + 4 * n];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ds_rmem[n][2 * r + i] =
            differentiate_score<C>(p_rmem[n][2 * r + i], dp_rmem[n][2 * r + i],
                                   i == 0 ? delta.x : delta.y, i == 0 ? lse.x : lse.y, uncap);
      }
    }
  }
}

// NEGATIVE_TO_0: what is below 0 becomes 0.
template <class C, bool NEGATIVE_TO_0 = false>
__device__ __forceinline__ void round_to_16_bits(KeysByQueries16<C>& rounded_rmem,
                                                 const KeysByQueries<C>& x_rmem) {
#pragma unroll
  for (int n = 0; n < C::BLOCK / 8; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* const x = &x_rmem[n][2 * r];
      rounded_rmem[n / 2][n % 2 * 2 + r] = NEGATIVE_TO_0
                                               ? ptx::cvt_rn_relu_x2_f32<C::DTYPE>(x[0], x[1])
                                               : ptx::cvt_rn_x2_f32<C::DTYPE>(x[0], x[1]);
    }
  }
}

// Starts K Q^T or V dO^T for the 64 keys of a warpgroup, which `a` describes.
template <class C>
__device__ __forceinline__ void start_keys_by_queries(KeysByQueries<C>& x_rmem,
                                                      ptx::WgmmaDescriptor a, uint32_t b_smem) {
  using Product = ptx::Wgmma<C::DTYPE, C::BLOCK>;
  const ptx::WgmmaDescriptor b = describe_tile<typename C::QTile>(b_smem, 16);
#pragma unroll
  for (int i = 0; i < C::HEAD_DIM / 16; ++i) {
    Product::ss(&x_rmem[0][0], advance(a, column_step<typename C::KTile>(i)),
                advance(b, column_step<typename C::QTile>(i)), i != 0);
  }
  ptx::wgmma_commit_group();
}

// Starts the addition of P^T dO to dV, or of dS^T Q to dK, at most 128 columns at a time: ptxas
// refuses a product that takes more registers than a thread has when the kernel starts.
template <class C>
__device__ __forceinline__ void start_gradient(KeyGradient<C>& sum_rmem,
                                               const KeysByQueries16<C>& a_rmem, uint32_t b_smem) {
  using Tile = typename C::QTile;
  constexpr int COLUMNS = C::HEAD_DIM < 128 ? C::HEAD_DIM : 128;
  using Product = ptx::Wgmma<C::DTYPE, COLUMNS>;
  const ptx::WgmmaDescriptor b =
      describe_tile<Tile>(b_smem, Tile::SLABS > 1 ? Tile::SLAB_BYTES : 0);
#pragma unroll
  for (int i = 0; i < C::BLOCK / 16; ++i) {
#pragma unroll
    for (int column = 0; column < C::HEAD_DIM; column += COLUMNS) {
      Product::rs(&sum_rmem[column / 8][0], a_rmem[i],
                  advance(b, column / Tile::SLAB * Tile::SLAB_BYTES + 16 * i * Tile::ROW_BYTES), 1);
    }
  }
  ptx::wgmma_commit_group();
}

// Starts a warpgroup's part of dQ = dS K of a round.
template <class C>
__device__ __forceinline__ void start_dq(float* dq, uint32_t ds_smem, uint32_t k_smem, int group) {
  using DsTile = typename C::DsTile;
  using KTile = typename C::KTile;
  using Product = ptx::Wgmma<C::DTYPE, C::PART_COLUMNS>;
  static_assert(KTile::SLAB == C::PART_COLUMNS, "a slab has the columns of a part");
  if constexpr (C::SHARES_ROWS) {
    ds_smem += group * C::PART_ROWS * DsTile::ROW_BYTES;
  } else {
    k_smem += group * KTile::SLAB_BYTES;
  }
  const ptx::WgmmaDescriptor ds = describe_tile<DsTile>(ds_smem, 16);
  const ptx::WgmmaDescriptor k = describe_tile<KTile>(k_smem, 0);
#pragma unroll
  for (int i = 0; i < C::ROWS / 16; ++i) {
    Product::template ss<true>(dq, advance(ds, column_step<DsTile>(i)),
                               advance(k, 16 * i * KTile::ROW_BYTES), i != 0);
  }
  ptx::wgmma_commit_group();
}

// Writes dS of a block to its rows of a tile, in which a query has a row.
template <class C>
__device__ __forceinline__ void store_ds(uint32_t rows_smem, const KeysByQueries16<C>& ds_rmem) {
  using DsTile = typename C::DsTile;
  // With a softcap no register is left for the address, which is then computed anew.
  const int thread = C::SOFTCAP ? ptx::mov_tid_x_volatile() : static_cast<int>(threadIdx.x);
  const int lane = thread % 32;
  // Lanes 8j to 8j + 7 name the rows of matrix j of a fragment: queries 8 * (j / 2) to + 7 of 16,
  // keys 8 * (j % 2) to + 7 of the warp's 16.
  const int row = lane / 16 * 8 + lane % 8;
  const int chunk = thread / 32 % C::KEY_WARPS * 2 + lane / 8 % 2;
  const uint32_t first_smem = rows_smem + DsTile::offset(row, chunk);
#pragma unroll
  for (int i = 0; i < C::BLOCK / 16; ++i)
    ptx::stmatrix_x4_trans(first_smem + 16 * i * DsTile::ROW_BYTES, ds_rmem[i]);
}

// Writes, or adds, a warp's rows of a gradient times `factor`.
template <class C>
__device__ __forceinline__ void store_gradient(const KeyGradient<C>& x_rmem,
                                               const GradientParams& gradient,
                                               const BackwardWork& work, int columns,
                                               float factor) {
  const int lane = threadIdx.x % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32 % C::KEY_WARPS;
  const int first = work.first_row + warp * C::WARP_ROWS + lane / 4;
  const int64_t start = work.batch * gradient.batch + work.head * gradient.head +
                        (static_cast<int64_t>(work.own_start) + first) * gradient.row;
  if (gradient.dtype != DType::F32 && !gradient.accumulate) {
    // A lane has two neighbouring columns of eight. The lanes of a quad exchange them, so that each
    // writes all eight: the next CTA cannot begin before the stores are issued.
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint16_t* const row_gmem =
          static_cast<uint16_t*>(gradient.gmem) + start + 8 * r * gradient.row;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM / 8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(x_rmem[n + i][2 * r] * factor,
                                                  x_rmem[n + i][2 * r + 1] * factor);
        }
        math::transpose_in_quad(words);
        const int column = 8 * (n + lane % 4);
        if (first + 8 * r < work.own_rows && column < columns)
          ptx::st_global_v4_b32(row_gmem + column, words[0], words[1], words[2], words[3]);
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (first + 8 * r >= work.own_rows) continue;
    const int64_t row = start + 8 * r * gradient.row;
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM / 8; ++n) {
      const int column = 8 * n + lane % 4 * 2;
      if (column >= columns) continue;
      const float2 x = {x_rmem[n][2 * r] * factor, x_rmem[n][2 * r + 1] * factor};
      math::store_gradient_pair<C::DTYPE>(gradient, row + column, x);
    }
  }
}

// What keys that no query sees get: 0. Called by the first `warps` warps of a CTA.
template <class C>
__device__ __forceinline__ void clear_gradients(const BackwardKernelParams& params,
                                                const CtaWork& work, int warps) {
  const int lane = threadIdx.x % 32;
  const int end = min(work.first_row + C::ROWS, work.own_rows);
  for (int row = work.first_row + static_cast<int>(threadIdx.x) / 32; row < end; row += warps) {
    const AttentionParams& attention = params.backward.attention;
    const int64_t row_of_tensor = static_cast<int64_t>(work.own_start) + row;
    math::clear_gradient_row(params.backward.dk, work.batch, work.head, row_of_tensor, attention.d,
                             lane, 32);
    math::clear_gradient_row(params.backward.dv, work.batch, work.head, row_of_tensor, attention.dv,
                             lane, 32);
  }
}

// The named barrier at which the second consumer warpgroup waits before its first step.
constexpr int START_BARRIER = 1;

// Goes over the blocks of queries, of which there is at least one, sums up dK and dV, and writes
// them while the last dQ is computed.
template <class C>
__device__ __forceinline__ void consume(const BackwardParamsOf<C>& all_params, const CtaWork& work,
                                        unsigned char* shared, uint32_t shared_smem) {
  const BackwardKernelParams& params = call_of<C>(all_params);
  constexpr int SCORES = C::BLOCK / 2, SUMS = C::HEAD_DIM / 2, WORDS = C::BLOCK / 4,
                PART = C::PART_COLUMNS / 2;
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const AttentionParams& attention = params.backward.attention;
  const int group = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int lane = threadIdx.x % 32;

  KeyGradient<C> dk_rmem = {}, dv_rmem = {};
  KeysByQueries<C> s_rmem, dp_rmem;
  KeysByQueries<C> own_p_rmem;  // P, and later dS, if S_AHEAD
  float own_dq_rmem[C::PART_COLUMNS / 8][4];
  KeysByQueries<C>& p_rmem = C::S_AHEAD ? own_p_rmem : s_rmem;
  KeysByQueries<C>& ds_rmem = C::S_AHEAD ? own_p_rmem : dp_rmem;
  KeysByQueries16<C> a_rmem;  // P or dS, as operand A
  float* const s = &s_rmem[0][0];
  float* const dp = &dp_rmem[0][0];
  float* const p = &p_rmem[0][0];
  float* const ds = &ds_rmem[0][0];
  float* const dq = C::S_AHEAD ? &own_dq_rmem[0][0] : dp;
  float* const dk = &dk_rmem[0][0];
  float* const dv = &dv_rmem[0][0];
  uint32_t* const a = &a_rmem[0][0];

  const int own_rows = group * C::GROUP_ROWS * C::KTile::ROW_BYTES;
  const ptx::WgmmaDescriptor k =
      describe_tile<typename C::KTile>(shared_smem + C::K_SMEM + own_rows, 16);
  const ptx::WgmmaDescriptor v =
      describe_tile<typename C::KTile>(shared_smem + C::V_SMEM + own_rows, 16);
  const auto blocks = static_cast<uint32_t>(uniform(work.blocks));
  uint32_t number = 0;  // of the block
  RingPosition<C::Q_STAGES> q_ring;
  RingPosition<C::DOUT_STAGES> dout_ring;
  const auto q_at = [&](int stage) { return shared_smem + C::Q_SMEM + stage * C::QTile::BYTES; };

  // Stores the warp's part of the dQ of round `round`, and hands it to the warp that adds it in the
  // workspace. In between the next products may start.
  const auto store_dq = [&](uint32_t round) {
    ptx::mbarrier_wait_parity(barriers.dq_empty(group), round % 2 ^ 1);
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
    start_keys_by_queries<C>(s_rmem, k, q_smem);
  };
  // S becomes P.
  const float2* terms;  // of two queries each: LSEs, and from BLOCK / 2 on deltas
  bool masks;
  const auto note_of = [&](int q_stage) {
    return reinterpret_cast<const BlockNote*>(shared + C::TERMS_SMEM + q_stage * C::TERMS_BYTES +
                                              8 * C::BLOCK);
  };
  [[maybe_unused]] auto dropout = [&] {
    if constexpr (C::DROPS) {
      const DroppedHeads& heads = all_params.dropped_heads;
      return find_dropout(all_params.dropout, heads.first + work.batch * heads.of_sequence +
                                                  work.head * attention.heads_per_kv);
    } else {
      return nullptr;
    }
  }();
  [[maybe_unused]] int weighed = 0, head = 0;  // blocks; the next one's head
  const auto weigh = [&](int q_stage) {
    terms = reinterpret_cast<const float2*>(shared + C::TERMS_SMEM + q_stage * C::TERMS_BYTES) +
            lane % 4;
    masks = note_of(q_stage)->masked_warps >> warp & 1;
    weigh_scores<C>(p_rmem, s_rmem, terms, attention);
    if (masks) clear_unseen<C>(p_rmem, work, note_of(q_stage)->row);
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

  RingPosition<C::DS_STAGES> ds_ring;  // of the dS to be written
  const auto ds_at = [&](int stage) { return shared_smem + C::DS_SMEM + stage * C::DsTile::BYTES; };
  // The round before the first one: its dS is 0, and nobody takes its dQ.
#pragma unroll
  for (int i = 0; i < WORDS; ++i) a[i] = 0;
#pragma unroll
  for (int row = 0; row < C::ROUND; row += C::BLOCK)
    store_ds<C>(ds_at(0) + row * C::DsTile::ROW_BYTES, a_rmem);
  ptx::fence_proxy_async_shared();  // the stores come before wgmma reads them
  release(barriers.ds_full(0));
  ds_ring.advance();
  // The second warpgroup begins half a step after the first one, which tells it when.
  const auto hand_over_start = [&] {
    if (group == 0 && number == 0) ptx::bar_arrive(START_BARRIER, C::CONSUMER_THREADS);
  };
  if (group != 0) ptx::bar_sync(START_BARRIER, C::CONSUMER_THREADS);
  const auto begin_dq = [&] {  // of the round before that
    const bool wraps = ds_ring.stage == 0;
    const int stage = (wraps ? C::DS_STAGES : ds_ring.stage) - 1;
    ptx::mbarrier_wait_parity(barriers.ds_full(stage), ds_ring.parity ^ (wraps ? 1 : 0));
    ptx::registers_change<PART>(dq);
    ptx::wgmma_fence();  // the last uses of dQ come before the product
    start_dq<C>(dq, ds_at(stage), shared_smem + C::K_SMEM, group);
  };
  ptx::mbarrier_wait_parity(barriers.k_full(), 0);  // K has landed
  ptx::mbarrier_wait_parity(barriers.q_full(0), 0);
  begin_s(q_at(0));
  ptx::wgmma_wait_group<0>();
  ptx::registers_change<SCORES>(s);
  if constexpr (C::S_AHEAD) weigh(0);
  ptx::mbarrier_wait_parity(barriers.v_full(), 0);  // V has landed

  // A block, whose S is there: with S_AHEAD its P. dK of the block before and dQ of the round
  // before that may be unfinished, and the next ones are left so. Returns whether there is a next
  // one. Its products are not in branches more than they have to be: ptxas would wait for each of
  // them (NOTES.md).
  const auto step = [&]<bool LAST_OF_ROUND>() {
    constexpr bool FIRST_OF_ROUND = !LAST_OF_ROUND || C::BLOCKS_OF_ROUND == 1;
    const auto finish_dk = [&] {
      ptx::registers_change<SUMS>(dk);
      ptx::registers_change<WORDS>(a);
      const int before = (q_ring.stage == 0 ? C::Q_STAGES : q_ring.stage) - 1;
      if (number > 0) release(barriers.q_empty(before));
    };
    const bool more = !LAST_OF_ROUND || number + 1 < blocks;
    RingPosition<C::Q_STAGES> next = q_ring;  // of the next block; of this one if it is the last
    if (more) next.advance();
    if constexpr (!C::S_AHEAD) {
      weigh(q_ring.stage);
      ptx::wgmma_wait_group<0>();
      finish_dk();
      ptx::registers_change<PART>(dq);
      if (number > 1) store_dq(number - 2);
    }
    const int dout_stage = dout_ring.stage;
    ptx::mbarrier_wait_parity(barriers.dout_full(dout_stage), dout_ring.parity);
    dout_ring.advance();
    const uint32_t dout_smem = shared_smem + C::DOUT_SMEM + dout_stage * C::QTile::BYTES;
    ptx::registers_change<SCORES>(dp);
    ptx::wgmma_fence();  // the last uses of dP come before the product
    start_keys_by_queries<C>(dp_rmem, v, dout_smem);
    if constexpr (C::S_AHEAD) {
      // Behind the last block S is that of the same queries once more, which nobody uses.
      ptx::mbarrier_wait_parity(barriers.q_full(next.stage), next.parity);
      begin_s(q_at(next.stage));
      ptx::wgmma_wait_group<2>();
      finish_dk();
    }
    round_to_16_bits<C, C::DROPS>(a_rmem, p_rmem);
    ptx::registers_change<WORDS>(a);
    ptx::registers_change<SUMS>(dv);
    ptx::wgmma_fence();  // P is rounded before the product
    start_gradient<C>(dv_rmem, a_rmem, dout_smem);
    hand_over_start();
    if constexpr (!C::S_AHEAD) {
      if (number > 1) hand_on_dq(number);
    }
    ptx::wgmma_wait_group<C::S_AHEAD ? 2 : 1>();  // dP
    ptx::registers_change<SCORES>(dp);
    if constexpr (C::DROPS) {
      differentiate_kept<C>(ds_rmem, p_rmem, dp_rmem, terms, all_params.kept_share);
    } else {
      differentiate<C>(ds_rmem, p_rmem, dp_rmem, terms, C::SOFTCAP ? params.uncap : 0.0f);
    }
    if (masks) clear_unseen<C>(ds_rmem, work, note_of(q_ring.stage)->row);
    ptx::registers_change<SCORES>(ds);
    if constexpr (C::S_AHEAD) {
      ptx::wgmma_wait_group<0>();  // S of the next block and dV
      ptx::registers_change<SCORES>(s);
    } else {
      ptx::mbarrier_wait_parity(barriers.q_full(next.stage), next.parity);
      if (more) {
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
    constexpr int BLOCK_OF_ROUND = LAST_OF_ROUND ? C::BLOCKS_OF_ROUND - 1 : 0;
    store_ds<C>(ds_at(ds_ring.stage) + BLOCK_OF_ROUND * C::BLOCK * C::DsTile::ROW_BYTES, a_rmem);
    ptx::registers_change<SUMS>(dk);
    ptx::wgmma_fence();  // dS is rounded before the product
    start_gradient<C>(dk_rmem, a_rmem, q_at(q_ring.stage));
    ptx::fence_proxy_async_shared();  // the stores come before wgmma reads them
    if constexpr (LAST_OF_ROUND) {
      release(barriers.ds_full(ds_ring.stage));
      ds_ring.advance();
    }
    ++number;
    q_ring = next;
    if constexpr (C::S_AHEAD) {
      weigh(q_ring.stage);
      if constexpr (FIRST_OF_ROUND) {
        ptx::wgmma_wait_group<1>();
        ptx::registers_change<PART>(dq);
        if (number > C::BLOCKS_OF_ROUND) {
          const uint32_t round = (number - 1) / C::BLOCKS_OF_ROUND - 1;
          store_dq(round);
          hand_on_dq(round);
        }
      }
    } else {
      ptx::wgmma_wait_group<2>();  // S of the next block
      ptx::registers_change<SCORES>(s);
    }
    return more;
  };
#pragma unroll 1
  while (true) {
    if constexpr (C::BLOCKS_OF_ROUND == 2) step.template operator()<false>();
    if (!step.template operator()<true>()) break;
  }
  ptx::wgmma_wait_group<0>();
  ptx::registers_change<SUMS>(dk);
  if constexpr (!C::S_AHEAD) {
    ptx::registers_change<PART>(dq);
    if (number > 1) {
      store_dq(number - 2);
      hand_on_dq(number);
    }
  }
  begin_dq();  // of the last round
  store_gradient<C>(dk_rmem, params.backward.dk, work, attention.d, params.backward.scale);
  float dv_factor = 1.0f;
  if constexpr (C::DROPS) dv_factor = all_params.dropout.scale;
  store_gradient<C>(dv_rmem, params.backward.dv, work, attention.dv, dv_factor);
  ptx::wgmma_wait_group<0>();
  ptx::registers_change<PART>(dq);
  store_dq(number / C::BLOCKS_OF_ROUND - 1);
  hand_on_dq(number / C::BLOCKS_OF_ROUND - 1);
}

// What each CTA of a main kernel begins with: one warp finds what it works on, and writes that to
// shared memory, which __syncthreads() then makes known; first_row < 0: nothing.
template <class C>
__device__ __forceinline__ void begin_backward(const BackwardKernelParams& params,
                                               unsigned char* shared) {
  static_assert(sizeof(CtaWork) <= C::WORK_BYTES);
  // This kernel has started early: its warps wait where they use what the one before has written,
  // and in each CTA one does, so that this kernel ends behind that one. The inputs were there
  // before that one began.
  if (threadIdx.x == C::THREADS - 1 && params.rounds > 0) {  // without queries there are no maps
    ptx::prefetch_tensormap(params.k_map);
    ptx::prefetch_tensormap(params.q_map);
    ptx::prefetch_tensormap(params.v_map);
    ptx::prefetch_tensormap(params.dout_map);
  }
  math::clear_keys_of_no_sequence<C::ROWS, DK | DV>(params.backward, blockIdx.x, C::THREADS / 32);
  if (uniform(static_cast<int>(threadIdx.x) / 32) != 0) return;
  const TileOfCta tile = find_tile<C>(params, static_cast<int>(blockIdx.x));
  const BackwardWork found =
      math::find_backward_work<Owns::Keys, C::ROWS>(params.backward.attention, tile.index);
  if (threadIdx.x != 0) return;
  CtaWork& work = *reinterpret_cast<CtaWork*>(shared + C::WORK_SMEM);
  if (found.first_row < 0) {
    work.first_row = found.first_row;
  } else {
    work = math::find_queries<C>(params, found, tile.upwards);
  }
}

template <class C>
__device__ __forceinline__ void attention_bwd(const BackwardParamsOf<C>& all_params) {
  const BackwardKernelParams& params = call_of<C>(all_params);
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const CtaWork& work = *reinterpret_cast<const CtaWork*>(shared + C::WORK_SMEM);
  begin_backward<C>(params, shared);
  if (threadIdx.x == C::CONSUMER_THREADS) {
    const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
    barriers.initialise_inputs();
    for (int stage = 0; stage < C::DS_STAGES; ++stage)
      ptx::mbarrier_init_for_warps(barriers.ds_full(stage), C::WARPS);
    for (int group = 0; group < C::WARPGROUPS; ++group) {
      ptx::mbarrier_init_for_warps(barriers.dq_full(group, 0), C::WARPS / C::WARPGROUPS);
      ptx::mbarrier_init_for_warps(barriers.dq_full(group, 1), C::WARPS / C::WARPGROUPS);
      ptx::mbarrier_init(barriers.dq_empty(group), 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised and `work` is written before any warp uses them
  if (work.first_row < 0) {
    ptx::griddepcontrol_wait();
    return;
  }

  const bool any_block = work.blocks > 0;
  if (threadIdx.x < C::CONSUMER_THREADS) {
    ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    if (any_block) {
      consume<C>(all_params, work, shared, shared_smem);
    } else {
      clear_gradients<C>(params, work, C::WARPS);
    }
  } else {
    ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (!any_block) {
      ptx::griddepcontrol_wait();
      return;
    }
    if (threadIdx.x < C::CONSUMER_THREADS + 32) {
      load<C>(params, work, shared, shared_smem);
    } else if (threadIdx.x < C::CONSUMER_THREADS + 64) {
      load_terms<C>(params, work, shared, shared_smem);
    } else {
      add_dq<C>(params, work, shared_smem, threadIdx.x / 32 % 2);
    }
  }
}

// --- what comes behind: dQ, when all CTAs have added to its sums ---

// Writes dQ of a round of queries: the sums, times the scale.
template <class C>
__device__ __forceinline__ void write_dq(const BackwardKernelParams& params) {
  const AttentionParams& attention = params.backward.attention;
  const GradientParams& gradient = params.backward.dq;
  const int index = static_cast<int>(blockIdx.x);
  const math::SummedRound round = math::find_summed_round<C>(params, index);
  if (round.rows < 0) return;
  const math::SumsOfRound<C> sums_of_round(params, index);
  const int64_t start = math::gradient_of_sequence(params, round);
  // A thread takes what four lanes have of eight columns: of two rows, 8 apart.
#pragma unroll
  for (int i = 0; i < C::ROUND_SUMS / 16 / BACKWARD_DQ_THREADS; ++i) {
    const int number = i * BACKWARD_DQ_THREADS + static_cast<int>(threadIdx.x);
    const int n = number % 8, lane_row = number / 8 % 8, warp = number / 64;
    const int part = warp / 4;
    const int column = (C::SHARES_ROWS ? 0 : part * C::PART_COLUMNS) + 8 * n;
    const SumsPart<C> of_part(params, part);
    if (C::SUMS_STEP < C::HEAD_DIM &&
        (column >= attention.d || warp % 4 * C::WARP_ROWS >= of_part.rows))
      continue;
    const int of_warp = (of_part.start + warp % 4 * C::WARP_ROWS * of_part.columns) / 4;
    float x[2][8];
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const float4 sums = sums_of_round.at(of_warp + n * 32 + lane_row * 4 + t);
      const float scale = params.backward.scale;
      x[0][2 * t] = sums.x * scale, x[0][2 * t + 1] = sums.y * scale;
      x[1][2 * t] = sums.z * scale, x[1][2 * t + 1] = sums.w * scale;
    }
    const int row = round.first_row + (C::SHARES_ROWS ? part * C::PART_ROWS : 0) +
                    warp % 4 * C::WARP_ROWS + lane_row;
    if (column >= attention.d) continue;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row + 8 * r >= round.rows) continue;
      math::store_gradient_chunk<C::DTYPE>(gradient, start + (row + 8 * r) * gradient.row + column,
                                           x[r]);
    }
  }
}

}  // namespace archflash::hopper

// Entry points, under the names that plan_backward.cpp asks for. __grid_constant__ keeps the
// parameter in constant memory, where TMA reads the tensor maps.
#define ARCHFLASH_HOPPER_PREPARE_KERNEL(NAME, DTYPE)                                 \
  extern "C" __global__ void __launch_bounds__(archflash::BACKWARD_ROWS_THREADS)     \
      NAME(const __grid_constant__ archflash::hopper::BackwardKernelParams params) { \
    archflash::hopper::prepare<DTYPE>(params);                                       \
  }
#define ARCHFLASH_HOPPER_BACKWARD_KERNEL(NAME, CONFIG)                                   \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, 1)                       \
      NAME(const __grid_constant__ archflash::hopper::BackwardParamsOf<CONFIG> params) { \
    archflash::hopper::attention_bwd<CONFIG>(params);                                    \
  }
#define ARCHFLASH_HOPPER_DQ_KERNEL(NAME, CONFIG)                                     \
  extern "C" __global__ void __launch_bounds__(archflash::BACKWARD_DQ_THREADS)       \
      NAME(const __grid_constant__ archflash::hopper::BackwardKernelParams params) { \
    archflash::hopper::write_dq<CONFIG>(params);                                     \
  }
