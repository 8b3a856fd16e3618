// Attention backward on tcgen05 and tensor memory, for compute capability 10.x and 11.0: fp16 or
// bf16 inputs, products summed in fp32.
//
// A CTA owns 128 keys of a head and goes over the blocks of 128 query rows that see any of them, of
// all query heads that share its head of K. It sums up dK and dV of its keys in tensor memory. All
// CTAs of a head add their parts of dQ to sums in the workspace, in an order that is not known, or
// in turns: in the order of their keys, so that the same inputs always give the same bits. A kernel
// of its own (write_dq) then scales and rounds the sums.
//
// In turns, a CTA waits only for CTAs with smaller indices, which have started before it. All CTAs
// go from later blocks of queries to earlier ones, and over the heads that share a head of K inside
// of a block's rows. Each begins with a later block than that of the keys before, so that the turn
// has mostly come. Behind its first block it goes on with the last one; what it adds from there on
// has a sum of its own, because it may come to these blocks before the CTAs of earlier keys do.
//
// clang-format off
//   role     warps       work
//   score    0-3, 4-7    S -> P, dP -> dS, a thread for each key; at the end dK, dV -> gradients
//   dq       8-11        dQ -> shared memory -> sums in the workspace, by TMA
//   mma      12          the five products
//   load     13          K, V, Q, dO -> shared memory, by TMA
//   terms    14          the LSEs and deltas of a block's rows -> shared memory
//
//   mma      S0 dP0 | dV0 | S1 dK0 dQ0 dP1 | dV1 | S2 dK1 dQ1 dP2 | dV2 | ... dK dQ
//   score       P0     dS0      P1            dS1      P2           dS2
//   dq                             dQ0                    dQ1
//   (if dQ has columns of its own: S1 dK0 dP1 dQ0)
// clang-format on
//
// The tiles and the memory plan are in backward_config.cuh, the plan in plan_backward.cpp, the
// budget in BACKWARD.md.
#pragma once

#include <cstdint>

#include "blackwell_dc/backward_config.cuh"
#include "blackwell_dc/backward_params.h"
#include "common/backward_params.h"
#include "common/device/backward_rounds.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/matrix_descriptor.h"
#include "common/device/slab_load.cuh"
#include "common/device/uniform.cuh"
#include "common/ptx/bulk_order.cuh"
#include "common/ptx/bulk_store.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/f32x2.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/lg2.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/min.cuh"
#include "common/ptx/named_barrier.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_dc::backward {

using device::BackwardWork;
using device::BlockNote;
using device::BlockPosition;
using device::CtaWork;
using device::release;
using device::RingPosition;
using device::uniform;

// The barriers, as addresses in shared memory. "Bytes": the loader arrives once and says how many
// bytes TMA will bring; the phase ends when they have landed. "Commit": tcgen05.commit arrives once
// all products that were started before are done.
//
// clang-format off
//   barrier                  arrives                waits        so that
//   k_full, v_full           load, bytes            mma          the CTA's keys have landed
//   q_full of each stage     load, bytes; terms     mma, score   Q has landed, its terms are there
//   q_empty of each stage    mma, commit;           load, terms  S and dK have read Q, and all score
//                            score, each warp                    warps the terms, before the next
//   dout_full of each stage  load, bytes            mma          dO has landed
//   dout_empty               mma, commit            load         dP and dV have read dO
//   s_ready                  mma, commit            score        S is complete
//   p_ready                  score, each warp       mma          S is read, and P written
//   dp_ready                 mma, commit            score        dP is complete
//   ds_ready                 score, each warp       mma          dP is read, and dS written to both
//                                                                memories
//   ds_empty                 mma, commit            score        dQ has read dS in shared memory
//                                                                before the next one; with
//                                                                DQ_OVER_DS dp_ready says so
//   dq_ready                 mma, commit            dq           dQ is complete
//   dq_empty                 dq, each warp          mma          dQ is read before its columns are
//                                                                overwritten
//   sums_ready               mma, commit            score        dK and dV are complete
//   drained                  mma, commit            mma          without TRUST_ISSUE_ORDER: all
//                                                                products so far are done
//   ragged                   load, bytes            load         a tile some of whose rows have to
//                                                                do with none of the other side has
//                                                                landed before the loader clears
//                                                                them
// clang-format on
template <class C>
struct BackwardBarriers {
  uint32_t smem;  // address of the first barrier

  __device__ __forceinline__ uint32_t k_full() const { return at(0); }
  __device__ __forceinline__ uint32_t v_full() const { return at(1); }
  __device__ __forceinline__ uint32_t ragged() const { return at(2); }
  __device__ __forceinline__ uint32_t s_ready() const { return at(3); }
  __device__ __forceinline__ uint32_t p_ready() const { return at(4); }
  __device__ __forceinline__ uint32_t dp_ready() const { return at(5); }
  __device__ __forceinline__ uint32_t ds_ready() const { return at(6); }
  __device__ __forceinline__ uint32_t ds_empty() const { return at(7); }
  __device__ __forceinline__ uint32_t dq_ready() const { return at(8); }
  __device__ __forceinline__ uint32_t dq_empty() const { return at(9); }
  __device__ __forceinline__ uint32_t sums_ready() const { return at(10); }
  __device__ __forceinline__ uint32_t drained() const { return at(11); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return at(RINGS + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const {
    return at(RINGS + C::Q_STAGES + stage);
  }
  __device__ __forceinline__ uint32_t dout_full(int stage) const {
    return at(RINGS + 2 * C::Q_STAGES + stage);
  }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const {
    return at(RINGS + 2 * C::Q_STAGES + C::DOUT_STAGES + stage);
  }

  // Called by one thread, before any warp uses the barriers.
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < RINGS; ++i) {
      const uint32_t barrier = at(i);
      const bool of_scores = barrier == p_ready() || barrier == ds_ready();
      ptx::mbarrier_init(barrier, of_scores               ? C::SCORE_WARPS
                                  : barrier == dq_empty() ? C::DQ_WARPS
                                                          : 1);
    }
    for (int stage = 0; stage < C::Q_STAGES; ++stage) {
      ptx::mbarrier_init(q_full(stage), 2);
      ptx::mbarrier_init(q_empty(stage), 1 + C::SCORE_WARPS);
    }
    for (int stage = 0; stage < C::DOUT_STAGES; ++stage) {
      ptx::mbarrier_init(dout_full(stage), 1);
      ptx::mbarrier_init(dout_empty(stage), 1);
    }
    ptx::fence_mbarrier_init();
  }

 private:
  static constexpr int RINGS = 12;
  static_assert(RINGS + 2 * C::Q_STAGES + 2 * C::DOUT_STAGES == C::BARRIERS);

  __device__ __forceinline__ uint32_t at(int index) const { return smem + 8 * index; }
};

// --- what comes before: the terms of all query rows, zeros for the sums of dQ and the turns ---

template <DType DTYPE>
__device__ __forceinline__ void prepare(const BackwardKernelParams& params) {
  device::prepare_rounds<DTYPE>(params);
}

// --- load, one warp: K, V, Q and dO -> shared memory ---

template <class C>
__device__ __forceinline__ void load(const BackwardKernelParams& params, const CtaWork& work,
                                     unsigned char* shared, uint32_t shared_smem) {
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  device::LoaderPosition<C> position;
  device::load_rounds<C>(params, work, shared, shared_smem, barriers,
                         {C::K_SMEM, C::V_SMEM, barriers.k_full(), barriers.v_full()}, position);
  RingPosition<C::Q_STAGES>& q_ring = position.q_ring;
  RingPosition<C::DOUT_STAGES>& dout_ring = position.dout_ring;
  // mma's last commits arrive at barriers in shared memory: load stays, and the CTA's shared memory
  // with it, until all of them have.
  for (int i = 0; i < C::Q_STAGES; ++i, q_ring.advance())
    ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
  for (int i = 0; i < C::DOUT_STAGES; ++i, dout_ring.advance())
    ptx::mbarrier_wait_parity(barriers.dout_empty(dout_ring.stage), dout_ring.parity ^ 1);
}

// --- terms, one warp: the terms of a block's rows, and a note about it -> shared memory ---

template <class C>
__device__ __forceinline__ void load_terms(const BackwardKernelParams& params, const CtaWork& work,
                                           unsigned char* shared, uint32_t shared_smem) {
  RingPosition<C::Q_STAGES> q_ring;
  device::load_terms_of_rounds<C>(params, work, shared,
                                  BackwardBarriers<C>{shared_smem + C::BARRIER_SMEM}, q_ring);
}

// --- mma, one warp: the five products ---

// The descriptor of what one product reads of an operand: `fields` and `step` are from
// matrix_descriptor.h. Only the lower half is computed at run time.
__device__ __forceinline__ uint64_t operand(uint64_t fields, uint32_t address, uint64_t step) {
  constexpr uint64_t LOWER = 0xFFFFFFFF;
  return (fields & ~LOWER) |
         (static_cast<uint32_t>(fields) + address + static_cast<uint32_t>(step));
}

// D = A B^T of two tiles, summed over their columns.
template <class C, class A, class B>
__device__ __forceinline__ void multiply_rows(uint32_t d_tmem, uint32_t a_address,
                                              uint32_t b_address) {
  constexpr uint32_t INSTRUCTION =
      device::instruction_descriptor(C::DTYPE, A::ROWS, B::ROWS, false);
#pragma unroll
  for (int i = 0; i < A::COLUMNS / C::PRODUCT_DEPTH; ++i) {
    ptx::tcgen05_mma_f16(d_tmem,
                         operand(device::K_MAJOR_FIELDS<A>, a_address, device::k_major_step<A>(i)),
                         operand(device::K_MAJOR_FIELDS<B>, b_address, device::k_major_step<B>(i)),
                         INSTRUCTION, i > 0);
  }
}

// D += A B, summed over the block's queries. A, P or dS, is in tensor memory, in the pieces that
// the two groups of score warps wrote; the rows of B are the queries.
template <class C>
__device__ __forceinline__ void add_gradient(uint32_t d_tmem, uint32_t a_tmem, uint32_t b_address,
                                             bool accumulate) {
  using Tile = typename C::QTile;
  constexpr uint32_t INSTRUCTION =
      device::instruction_descriptor(C::DTYPE, C::ROWS, C::HEAD_DIM, true);
  constexpr int PIECE = C::GROUP_QUERIES / C::PRODUCT_DEPTH;  // products
#pragma unroll
  for (int i = 0; i < C::BLOCK / C::PRODUCT_DEPTH; ++i) {
    ptx::tcgen05_mma_f16(d_tmem,
                         a_tmem + i / PIECE * C::GROUP_QUERIES + i % PIECE * (C::PRODUCT_DEPTH / 2),
                         operand(device::MN_MAJOR_FIELDS<Tile>, b_address,
                                 device::mn_major_step<Tile, C::PRODUCT_DEPTH>(i)),
                         INSTRUCTION, i > 0 || accumulate);
  }
}

// dQ = dS K, summed over the CTA's keys, which are the rows of both tiles.
template <class C>
__device__ __forceinline__ void multiply_dq(uint32_t dq_tmem, uint32_t ds_address,
                                            uint32_t k_address) {
  using DsTile = typename C::DsTile;
  using KTile = typename C::KTile;
  constexpr uint32_t INSTRUCTION =
      device::instruction_descriptor(C::DTYPE, C::BLOCK, C::HEAD_DIM, true, true);
#pragma unroll
  for (int i = 0; i < C::ROWS / C::PRODUCT_DEPTH; ++i) {
    ptx::tcgen05_mma_f16(dq_tmem,
                         operand(device::MN_MAJOR_FIELDS<DsTile>, ds_address,
                                 device::mn_major_step<DsTile, C::PRODUCT_DEPTH>(i)),
                         operand(device::MN_MAJOR_FIELDS<KTile>, k_address,
                                 device::mn_major_step<KTile, C::PRODUCT_DEPTH>(i)),
                         INSTRUCTION, i > 0);
  }
}

// One lane starts the products. All lanes wait and count.
template <class C>
__device__ __forceinline__ void mma(const CtaWork& work, uint32_t shared_smem, uint32_t tmem) {
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const bool leader = ptx::elect_sync();
  const auto address = [&](int offset) {
    return static_cast<uint32_t>(device::matrix_descriptor_address(shared_smem + offset));
  };
  const auto q_at = [&](int stage) { return address(C::Q_SMEM + stage * C::QTile::BYTES); };
  const uint32_t blocks = uniform(work.blocks);
  RingPosition<C::Q_STAGES> q_ring;
  RingPosition<C::DOUT_STAGES> dout_ring;
  int last_q_stage = 0;  // that of the block before
  uint32_t drained_parity = 0;

  // Waits, if issue order is not trusted, until all products so far are done.
  const auto drain = [&] {
    if constexpr (!C::TRUST_ISSUE_ORDER) {
      if (leader) ptx::tcgen05_commit(barriers.drained());
      ptx::mbarrier_wait_parity(barriers.drained(), drained_parity);
      ptx::tcgen05_fence_after_thread_sync();
      drained_parity ^= 1;
    }
  };
  // dK of block `number`, whose dS is awaited here.
  const auto add_dk = [&](uint32_t number) {
    ptx::mbarrier_wait_parity(barriers.ds_ready(), number & 1);
    ptx::tcgen05_fence_after_thread_sync();
    if (leader) {
      add_gradient<C>(tmem + C::DK_COLUMN, tmem + C::DP_COLUMN, q_at(last_q_stage), number > 0);
      ptx::tcgen05_commit(barriers.q_empty(last_q_stage));
    }
    drain();  // dK has read dS before dQ, or the next dP, overwrites it
  };
  const auto start_dq = [&](uint32_t number) {
    if (!C::DQ_OVER_DS && number > 0) {  // dQ of the block before is read
      ptx::mbarrier_wait_parity(barriers.dq_empty(), (number - 1) & 1);
      ptx::tcgen05_fence_after_thread_sync();
    }
    if (leader) {
      // findings: overwrites-what-was-multiplied (tests/sim/tags.py)
      multiply_dq<C>(tmem + C::DQ_COLUMN, address(C::DS_SMEM), address(C::K_SMEM));
      ptx::tcgen05_commit(barriers.dq_ready());
      // There is no dS behind the last block's.
      if (!C::DQ_OVER_DS && number + 1 < blocks) ptx::tcgen05_commit(barriers.ds_empty());
    }
  };

  ptx::mbarrier_wait_parity(barriers.k_full(), 0);
#pragma unroll 1
  for (uint32_t number = 0; number < blocks; ++number) {
    const int q_stage = q_ring.stage;
    ptx::mbarrier_wait_parity(barriers.q_full(q_stage), q_ring.parity);
    q_ring.advance();
    // No fence is needed: P of the block before was awaited, whose warps had read S.
    if (leader) {
      // findings: overwrites-what-was-multiplied
      multiply_rows<C, typename C::KTile, typename C::QTile>(tmem + C::S_COLUMN, address(C::K_SMEM),
                                                             q_at(q_stage));
      ptx::tcgen05_commit(barriers.s_ready());
    }
    if (number > 0) {
      add_dk(number - 1);
      if constexpr (C::DQ_OVER_DS) {
        start_dq(number - 1);
        ptx::mbarrier_wait_parity(barriers.dq_empty(), (number - 1) & 1);  // dQ is read
        ptx::tcgen05_fence_after_thread_sync();
      }
    } else {
      ptx::mbarrier_wait_parity(barriers.v_full(), 0);
    }
    const uint32_t dout_address = address(C::DOUT_SMEM + dout_ring.stage * C::QTile::BYTES);
    ptx::mbarrier_wait_parity(barriers.dout_full(dout_ring.stage), dout_ring.parity);
    if (leader) {
      // findings: overwrites-what-was-multiplied
      multiply_rows<C, typename C::KTile, typename C::QTile>(tmem + C::DP_COLUMN,
                                                             address(C::V_SMEM), dout_address);
      ptx::tcgen05_commit(barriers.dp_ready());
    }
    if (!C::DQ_OVER_DS && number > 0) start_dq(number - 1);
    ptx::mbarrier_wait_parity(barriers.p_ready(), number & 1);
    ptx::tcgen05_fence_after_thread_sync();
    if (leader) {
      add_gradient<C>(tmem + C::DV_COLUMN, tmem + C::S_COLUMN, dout_address, number > 0);
      ptx::tcgen05_commit(barriers.dout_empty(dout_ring.stage));
    }
    drain();  // dV has read P before the next S overwrites it
    dout_ring.advance();
    last_q_stage = q_stage;
  }
  add_dk(blocks - 1);
  start_dq(blocks - 1);
  if (leader) ptx::tcgen05_commit(barriers.sums_ready());
}

// --- dq, four warps: dQ -> the sums in the workspace ---

constexpr int DQ_NAMED_BARRIER = 1;

// TMA adds 32 columns at once. A thread has a query row.
template <class C>
__device__ __forceinline__ void add_dq(const BackwardKernelParams& params, const CtaWork& work,
                                       unsigned char* shared, uint32_t shared_smem) {
  constexpr int PIECES = C::HEAD_DIM / C::DQ_COLUMNS;
  static_assert(PIECES % C::DQ_STAGES == 0);
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int row = threadIdx.x % C::BLOCK;
  const uint32_t dq_tmem = uniform(ptx::tmem_lanes_of_warp(threadIdx.x / 32)) + C::DQ_COLUMN;
  // One thread starts the additions: the elected one of the first warp. The branches are two, so
  // that ptxas sees that it is one lane.
  const bool first_warp = uniform(static_cast<int>(threadIdx.x) / 32) == C::DQ_WARP;
  const auto as_leader = [&](const auto& act) {
    if (first_warp) {
      if (ptx::elect_sync()) act();
    }
  };
  const auto sync = [] { ptx::bar_sync(DQ_NAMED_BARRIER, 32 * C::DQ_WARPS); };
  BlockPosition<C> block{0, work.start};
  uint32_t parity = 0;
#pragma unroll 1
  for (int left = work.blocks; left > 0; --left) {
    const device::DqTurn turn = device::dq_turn<C>(params, work, block);
    const bool in_turns = params.turns_gmem != nullptr;
    float* sums_gmem = params.dq_sums_gmem + static_cast<int64_t>(turn.sum) * C::ROUND_SUMS;
    ptx::mbarrier_wait_parity(barriers.dq_ready(), parity);
    ptx::tcgen05_fence_after_thread_sync();
    parity ^= 1;
    // All of dQ is taken over before any of it goes on: the tensor cores wait for its columns.
    float dq_rmem[PIECES][C::DQ_COLUMNS];
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece)
      ptx::tcgen05_ld(dq_rmem[piece], dq_tmem + piece * C::DQ_COLUMNS);
    ptx::tcgen05_wait_ld(dq_rmem);
    ptx::tcgen05_fence_before_thread_sync();
    release(barriers.dq_empty());
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
      const int offset = C::DQ_SMEM + piece % C::DQ_STAGES * C::DQ_BYTES;
      // TMA has read the piece that lay here.
      as_leader([] { ptx::cp_async_bulk_wait_group_read_1(); });
      sync();
#pragma unroll
      for (int i = 0; i < C::DQ_COLUMNS / 4; ++i) {
        const float* const dq = &dq_rmem[piece][4 * i];
        *reinterpret_cast<float4*>(shared + offset + (i * C::BLOCK + row) * 16) =
            float4{dq[0], dq[1], dq[2], dq[3]};
      }
      ptx::fence_proxy_async_shared();  // the stores come before TMA reads them
      sync();
      as_leader([&] {
        if (piece == 0 && turn.waits) {
          const int own_turn = work.turn;
          while (ptx::ld_acquire_s32(params.turns_gmem + turn.sum) < own_turn) {
          }
          ptx::fence_proxy_async_global();  // the turn has come before TMA adds
        }
        float* const piece_gmem = sums_gmem + piece * (C::DQ_BYTES / 4);
        if (in_turns && !turn.waits) {
          ptx::cp_async_bulk_store(piece_gmem, shared_smem + offset, C::DQ_BYTES);
        } else {
          ptx::cp_reduce_async_bulk_add_f32(piece_gmem, shared_smem + offset, C::DQ_BYTES);
        }
        ptx::cp_async_bulk_commit_group();
      });
    }
    as_leader([&] {
      if (!in_turns) return;
      ptx::cp_async_bulk_wait_group_0();  // the next tile of keys may add when this one has
      ptx::st_release_s32(params.turns_gmem + turn.sum, work.turn + 1);
    });
    __syncwarp();
    block.next_round(work);
  }
  // Shared memory stays until TMA has read it.
  as_leader([] { ptx::cp_async_bulk_wait_group_read_0(); });
}

// --- score, eight warps: S -> P, dP -> dS, a thread for each key ---

// The queries of a block that a thread works on.
template <class C>
using Queries = float[C::GROUP_QUERIES];

// Writes, or adds, a key's row of a gradient times `factor`; without `any` the gradient is 0.
template <class C>
__device__ __forceinline__ void store_gradient(const GradientParams& gradient,
                                               const BackwardWork& work, uint32_t sum_tmem,
                                               bool any, int columns, float factor) {
  const int row = work.first_row + static_cast<int>(threadIdx.x) % C::ROWS;
  const int64_t start = work.batch * gradient.batch + work.head * gradient.head +
                        (static_cast<int64_t>(work.own_start) + row) * gradient.row;
#pragma unroll 1
  for (int column = 0; column < C::HEAD_DIM; column += 16) {
    float sums[16] = {};
    if (any) {
      ptx::tcgen05_ld(sums, sum_tmem + column);
      ptx::tcgen05_wait_ld(sums);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row >= work.own_rows || column + 8 * half >= columns) continue;
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = sums[8 * half + i] * factor;
      device::store_gradient_chunk<C::DTYPE>(gradient, start + column + 8 * half, x);
    }
  }
}

template <class C>
__device__ __forceinline__ void score(const BackwardKernelParams& params, const CtaWork& work,
                                      unsigned char* shared, uint32_t shared_smem) {
  using DsTile = typename C::DsTile;
  constexpr int QUERIES = C::GROUP_QUERIES, PART = 32;  // a part is what one tcgen05.ld brings
  static_assert(QUERIES == 2 * PART);
  const AttentionParams& attention = params.backward.attention;
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  const int group = warp / 4;
  const int key_of_tile = threadIdx.x % C::ROWS;
  const int key = work.first_row + key_of_tile;
  const uint32_t lanes_tmem = uniform(ptx::tmem_lanes_of_warp(warp));
  const uint32_t s_tmem = lanes_tmem + C::S_COLUMN + group * QUERIES;
  const uint32_t dp_tmem = lanes_tmem + C::DP_COLUMN + group * QUERIES;
  const auto blocks = static_cast<uint32_t>(uniform(work.blocks));
  const float scale = attention.exp2_scale;
  RingPosition<C::Q_STAGES> q_ring;
#pragma unroll 1
  for (uint32_t number = 0; number < blocks; ++number) {
    ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);  // the terms are there
    const float* of_stage =
        reinterpret_cast<const float*>(shared + C::TERMS_SMEM + q_ring.stage * C::TERMS_BYTES);
    const float4* lse = reinterpret_cast<const float4*>(of_stage + group * QUERIES);
    const float4* delta = reinterpret_cast<const float4*>(of_stage + C::BLOCK + group * QUERIES);
    const BlockNote note = *reinterpret_cast<const BlockNote*>(of_stage + 2 * C::BLOCK);
    const bool masks = uniform(note.masked_warps) >> warp % 4 & 1;
    // The queries of this thread that see its key: none if it lies behind the end.
    const int first_query = note.row + group * QUERIES;
    const int first = work.visible.first(key) - first_query;
    const int last = (key < work.own_rows ? work.visible.last(key) : -1) - first_query;

    Queries<C> p_rmem;
    ptx::mbarrier_wait_parity(barriers.s_ready(), number & 1);  // S is complete
    ptx::tcgen05_fence_after_thread_sync();
    {
      float s_rmem[2][PART];
      ptx::tcgen05_ld(s_rmem[0], s_tmem);
      ptx::tcgen05_ld(s_rmem[1], s_tmem + PART);
      ptx::tcgen05_wait_ld(s_rmem);
#pragma unroll
      for (int i = 0; i < QUERIES; ++i) p_rmem[i] = s_rmem[i / PART][i % PART];
    }
    const bool capped = attention.rule.softcap != 0.0f;
    if (capped) {
#pragma unroll
      for (int i = 0; i < QUERIES; ++i) p_rmem[i] = device::cap_score(p_rmem[i], attention);
    }
#pragma unroll
    for (int i = 0; i < QUERIES; i += 4) {
      const float4 of_rows = lse[i / 4];
      const float2 low =
          ptx::fma_rn_f32x2({p_rmem[i], p_rmem[i + 1]}, {scale, scale}, {-of_rows.x, -of_rows.y});
      const float2 high = ptx::fma_rn_f32x2({p_rmem[i + 2], p_rmem[i + 3]}, {scale, scale},
                                            {-of_rows.z, -of_rows.w});
      // P is at most 1. The LSE of huge scores is rounded, which must not make P infinite.
      p_rmem[i] = ptx::ex2_approx_ftz(ptx::min_nan(low.x, 0.0f));
      p_rmem[i + 1] = ptx::ex2_approx_ftz(ptx::min_nan(low.y, 0.0f));
      p_rmem[i + 2] = ptx::ex2_approx_ftz(ptx::min_nan(high.x, 0.0f));
      p_rmem[i + 3] = ptx::ex2_approx_ftz(ptx::min_nan(high.y, 0.0f));
    }
    // Selecting (not multiplying) makes the old value irrelevant, even if it was NaN.
    if (masks) {
#pragma unroll
      for (int i = 0; i < QUERIES; ++i) {
        if (i < first || i > last) p_rmem[i] = 0.0f;
      }
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      uint32_t words[PART / 2];
#pragma unroll
      for (int i = 0; i < PART / 2; ++i) {
        words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(p_rmem[part * PART + 2 * i],
                                                p_rmem[part * PART + 2 * i + 1]);
      }
      ptx::tcgen05_st(s_tmem + part * (PART / 2), words);
    }
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    release(barriers.p_ready());

    // dS = P * (dP - delta), the gradient of the scores before their scale. With a softcap it is
    // that of the scores before softcap.
    if (capped) {
#pragma unroll
      for (int i = 0; i < QUERIES; ++i) {
        p_rmem[i] *= device::softcap_derivative(p_rmem[i], reinterpret_cast<const float*>(lse)[i],
                                                params.uncap);
      }
    }
    ptx::mbarrier_wait_parity(barriers.dp_ready(), number & 1);  // dP is complete
    ptx::tcgen05_fence_after_thread_sync();
    if constexpr (!C::DQ_OVER_DS) ptx::mbarrier_wait_parity(barriers.ds_empty(), (number & 1) ^ 1);
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      float dp_rmem[PART];
      ptx::tcgen05_ld(dp_rmem, dp_tmem + part * PART);
      ptx::tcgen05_wait_ld(dp_rmem);
#pragma unroll
      for (int i = 0; i < PART; i += 4) {
        const float4 of_rows = delta[(part * PART + i) / 4];
        const float* p = &p_rmem[part * PART + i];
        const float2 low = ptx::mul_rn_f32x2(
            {p[0], p[1]}, ptx::sub_rn_f32x2({dp_rmem[i], dp_rmem[i + 1]}, {of_rows.x, of_rows.y}));
        const float2 high = ptx::mul_rn_f32x2(
            {p[2], p[3]},
            ptx::sub_rn_f32x2({dp_rmem[i + 2], dp_rmem[i + 3]}, {of_rows.z, of_rows.w}));
        dp_rmem[i] = low.x, dp_rmem[i + 1] = low.y;
        dp_rmem[i + 2] = high.x, dp_rmem[i + 3] = high.y;
      }
      if (masks) {
#pragma unroll
        for (int i = 0; i < PART; ++i) {
          if (part * PART + i < first || part * PART + i > last) dp_rmem[i] = 0.0f;
        }
      }
      uint32_t words[PART / 2];
#pragma unroll
      for (int i = 0; i < PART / 2; ++i)
        words[i] = ptx::cvt_rn_x2_f32<C::DTYPE>(dp_rmem[2 * i], dp_rmem[2 * i + 1]);
      ptx::tcgen05_st(dp_tmem + part * (PART / 2), words);
#pragma unroll
      for (int i = 0; i < PART / 8; ++i) {
        const int chunk = (group * QUERIES + part * PART) / 8 + i;
        *reinterpret_cast<uint4*>(shared + C::DS_SMEM + DsTile::offset(key_of_tile, chunk)) =
            uint4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
      }
    }
    ptx::fence_proxy_async_shared();  // the stores come before the tensor cores' reads
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
    release(barriers.ds_ready());
    release(barriers.q_empty(q_ring.stage));
    q_ring.advance();
  }
  if (blocks > 0) {
    ptx::mbarrier_wait_parity(barriers.sums_ready(), 0);
    ptx::tcgen05_fence_after_thread_sync();
  }
  const bool of_k = group == 0;
  store_gradient<C>(of_k ? params.backward.dk : params.backward.dv, work,
                    lanes_tmem + (of_k ? C::DK_COLUMN : C::DV_COLUMN), blocks > 0,
                    of_k ? attention.d : attention.dv, of_k ? params.backward.scale : 1.0f);
  ptx::tcgen05_fence_before_thread_sync();
}

template <class C>
__device__ __forceinline__ void attention_bwd(const BackwardKernelParams& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  static_assert(sizeof(CtaWork) <= C::WORK_BYTES);
  CtaWork& work = *reinterpret_cast<CtaWork*>(shared + C::WORK_SMEM);
  device::clear_keys_of_no_sequence<C::ROWS, DK | DV>(params.backward, blockIdx.x, C::THREADS / 32);
  {
    const BackwardWork found =
        device::find_backward_work<Owns::Keys, C::ROWS>(params.backward.attention, blockIdx.x);
    if (found.first_row < 0) return;
    if (threadIdx.x == 0) device::find_queries<C>(params, found, work);
  }
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
  if (warp == C::MMA_WARP) {
    ptx::tcgen05_alloc<ptx::TMEM_COLUMNS>(shared_smem + C::TMEM_ADDRESS_SMEM);
    ptx::tcgen05_relinquish_alloc_permit();
  }
  if (threadIdx.x == 0) BackwardBarriers<C>{shared_smem + C::BARRIER_SMEM}.init();
  // The barriers are initialised, tensor memory is allocated and `work` is written before any warp
  // uses them. All columns of tensor memory are this CTA's.
  __syncthreads();

  const bool any_block = work.blocks > 0;
  if (warp < C::DQ_WARP) {
    ptx::setmaxnreg_inc<C::SCORE_REGISTERS>();
    score<C>(params, work, shared, shared_smem);
  } else if (warp < C::MMA_WARP) {
    if constexpr (C::DQ_REGISTERS > C::REGISTERS_AT_LAUNCH)
      ptx::setmaxnreg_inc<C::DQ_REGISTERS>();
    else
      ptx::setmaxnreg_dec<C::DQ_REGISTERS>();
    if (any_block) add_dq<C>(params, work, shared, shared_smem);
  } else {
    ptx::setmaxnreg_dec<C::OTHER_REGISTERS>();
    if (!any_block) {
    } else if (warp == C::MMA_WARP) {
      mma<C>(work, shared_smem, *reinterpret_cast<uint32_t*>(shared + C::TMEM_ADDRESS_SMEM));
    } else if (warp == C::LOAD_WARP) {
      load<C>(params, work, shared, shared_smem);
    } else if (warp == C::TERMS_WARP) {
      load_terms<C>(params, work, shared, shared_smem);
    }
  }
  // All warps are done with tensor memory before it is freed. Each role has fenced its last use.
  __syncthreads();
  if (warp == C::MMA_WARP) {
    ptx::tcgen05_fence_after_thread_sync();
    ptx::tcgen05_dealloc<ptx::TMEM_COLUMNS>(0);
  }
}

// --- what comes behind: dQ, when all CTAs have added to its sums ---

// Writes dQ of a block of queries: the sums, times the scale.
template <class C>
__device__ __forceinline__ void write_dq(const BackwardKernelParams& params) {
  const AttentionParams& attention = params.backward.attention;
  const GradientParams& gradient = params.backward.dq;
  const int index = static_cast<int>(blockIdx.x);
  const device::SummedRound round = device::find_summed_round<C>(params, index);
  if (round.rows < 0) return;
  const device::SumsOfRound<C> sums_of_round(params, index);
  const int64_t start = device::gradient_of_sequence(params, round);
  const float scale = params.backward.scale;
  // A thread takes eight columns of a row.
#pragma unroll
  for (int i = 0; i < C::ROUND_SUMS / 8 / BACKWARD_DQ_THREADS; ++i) {
    const int number = i * BACKWARD_DQ_THREADS + static_cast<int>(threadIdx.x);
    const int row = number % C::BLOCK, chunk = number / C::BLOCK;
    if (round.first_row + row >= round.rows || 8 * chunk >= attention.d) continue;
    float4 sums[2];
    sums_of_round.template read<2, C::BLOCK>(sums, 2 * chunk * C::BLOCK + row);
    float x[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[4 * half] = sums[half].x * scale, x[4 * half + 1] = sums[half].y * scale;
      x[4 * half + 2] = sums[half].z * scale, x[4 * half + 3] = sums[half].w * scale;
    }
    device::store_gradient_chunk<C::DTYPE>(
        gradient, start + (round.first_row + row) * gradient.row + 8 * chunk, x);
  }
}

}  // namespace archflash::blackwell_dc::backward
