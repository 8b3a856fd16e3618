// Attention backward on TMA, mbarriers and wgmma for head dimensions above 128, for compute
// capability 9.0: fp16 or bf16 inputs, products summed in fp32.
//
// dK and dV of 64 keys and 256 columns fill most of the registers of two warpgroups. So the
// warpgroups of a CTA share out the products, where those of attention_bwd.cuh share out the keys,
// and hand P and dS on through shared memory. What a CTA goes over, and what comes before and
// behind, is as in attention_bwd.cuh.
//
// clang-format off
//                      once         each block of queries
//
//   loader, 1 warp     load K, V    wait q_empty    load Q            wait dout_empty  load dO
//   terms, 1 warp                   wait q_empty    LSEs, deltas, a note   |
//                        |            | q_full                             | dout_full
//                        v            v                                    v
//   weights,           wait k_full  S^T = K Q^T, P^T = 2^(S^T - LSE)       dV += P^T dO
//   1 warpgroup                                     | p_full
//                                                   v
//   keys,              wait v_full  dP^T = V dO^T   dS^T = P^T (dP^T - delta)   dK += dS^T Q
//   1 warpgroup                                                       | ds_full
//                                                                     v
//   queries,           wait k_full                                    dQ = dS K, added in the workspace
//   1 warpgroup
//   turns, 2 warps     in turns only: wait for the turn | turn_come    wait added, hand the turn on
//
//   One step of each; what is started is waited for in the next step.
//   weights   P of b -> shared memory | start S of b + 1, dV of b  | exponentials of b + 1
//   keys      dS of b -> shared memory | start dK of b, dP of b + 1 | dS of b + 1
// clang-format on
//
// P passes on rounded to 16 bits, as the product for dV takes it.
//
// Up to 192 columns CTAs stay. There is room for K of the next tile beside that of this one, while
// V comes when the warps of keys have multiplied it for the last time, before they write dK.
#pragma once

#include <cstdint>

#include "common/ptx/red_global.cuh"
#include "hopper/attention_bwd.cuh"

namespace archflash::hopper {

// The barriers, beside those of BackwardBarriers that K, V, Q and dO have there, too. At q_empty
// and dout_empty the warps of weights and of keys arrive.
//
// clang-format off
//   barrier               arrives                waits    so that
//   p_full of each stage  each warp of weights   keys     P is there before it is read
//   p_empty of each one   each warp of keys      weights  P was read before the next one comes
//   ds_full of each one   each warp of keys      queries  dS of all keys is there before the product
//   ds_empty of each one  each warp of queries   keys     the product has read dS before the next one
//                                                         comes
//   turn_come, of even    a warp of turns        queries  in turns: no thread adds before the turn has
//     and of odd rounds                                   come
//   added, of these       each warp of queries   turns    all have added before the turn goes on
// clang-format on
template <class C>
struct WideBarriers : BackwardBarriers<C> {
  // A stage of P or dS, of STAGES that lie behind the barriers of dO.
  __device__ __forceinline__ uint32_t p_full(int stage) const {
    return this->dout_full(0) + 16 * C::DOUT_STAGES + 8 * stage;
  }
  __device__ __forceinline__ uint32_t p_empty(int stage) const {
    return p_full(stage) + 8 * C::P_STAGES;
  }
  __device__ __forceinline__ uint32_t ds_empty(int stage) const {
    return p_full(stage) + 16 * C::P_STAGES;
  }
  __device__ __forceinline__ uint32_t turn_come(int stage) const {
    return ds_empty(C::DS_STAGES) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t added(int stage) const {
    return turn_come(C::TURN_STAGES) + 8 * stage;
  }
};

template <class C>
__device__ __forceinline__ const BlockNote* note_of_stage(const unsigned char* shared, int stage) {
  return reinterpret_cast<const BlockNote*>(shared + C::TERMS_SMEM + stage * C::TERMS_BYTES +
                                            8 * C::BLOCK);
}
// The terms of a block as a lane reads them: of two queries each, LSEs, and from BLOCK / 2 on
// deltas.
template <class C>
__device__ __forceinline__ const float2* terms_of_stage(const unsigned char* shared, int stage) {
  return reinterpret_cast<const float2*>(shared + C::TERMS_SMEM + stage * C::TERMS_BYTES) +
         threadIdx.x % 4;
}

// --- weights, one warpgroup: S, P, dV ---

template <class C>
__device__ __forceinline__ void consume_weights(const BackwardParamsOf<C>& all_params,
                                                const CtaWork& work, unsigned char* shared,
                                                uint32_t shared_smem,
                                                const RingPosition<C::TILE_STAGES>& tile,
                                                uint32_t behind) {
  const BackwardKernelParams& params = call_of<C>(all_params);
  constexpr int SCORES = C::BLOCK / 2, SUMS = C::HEAD_DIM_V / 2, WORDS = C::BLOCK / 4;
  const WideBarriers<C> barriers{{shared_smem + C::BARRIER_SMEM}};
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32 % C::KEY_WARPS);
  const int lane = threadIdx.x % 32;
  KeyGradient<typename C::VTile> dv_rmem = {};
  KeysByQueries<C> p_rmem;    // S, then P
  KeysByQueries16<C> a_rmem;  // P, as operand A
  float* const p = &p_rmem[0][0];
  float* const dv = &dv_rmem[0][0];
  uint32_t* const a = &a_rmem[0][0];
  const ptx::WgmmaDescriptor k =
      describe_tile<typename C::KTile>(shared_smem + k_offset<C>(tile.stage), 16);
  auto q_ring = ring_behind<C::Q_STAGES>(behind);
  auto dout_ring = ring_behind<C::DOUT_STAGES>(behind);
  auto p_ring = ring_behind<C::P_STAGES>(behind);
  const auto begin_s = [&](int stage) {
    ptx::registers_change<SCORES>(p);
    ptx::wgmma_fence();  // the last uses of P come before the product
    start_keys_by_queries<C, typename C::KTile, typename C::QTile>(
        p_rmem, k, shared_smem + C::Q_SMEM + stage * C::QTile::BYTES);
  };

  ptx::mbarrier_wait_parity(barriers.k_full(tile.stage), tile.parity);  // K has landed
  ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);
  ptx::registers_change<SUMS>(dv);  // it is 0 before any product starts
  begin_s(q_ring.stage);
  // Which of the thread's scores attn_mask keeps, of the next block.
  [[maybe_unused]] uint32_t seen = 0;
  const auto look_ahead = [&](int stage) {
    if constexpr (C::READS_MASK) seen = load_seen<C>(all_params, dense_note<C>(shared, stage));
  };
  look_ahead(q_ring.stage);
  ptx::wgmma_wait_group<0>();
  const int blocks = uniform(work.blocks);
#pragma unroll 1
  for (int left = blocks; left > 0; --left) {
    // S of this block is there, and dV of the one before may be unfinished.
    ptx::registers_change<SCORES>(p);
    const float2* terms = terms_of_stage<C>(shared, q_ring.stage);
    const BlockNote* note = note_of_stage<C>(shared, q_ring.stage);
    if constexpr (C::READS_MASK) {
      exponentiate_masked<C>(p_rmem, terms, all_params, work, *note,
                             dense_note<C>(shared, q_ring.stage), seen, warp);
    } else {
      exponentiate_scores<C>(p_rmem, p_rmem, terms, params.backward.attention);
      if (note->masked_warps >> warp & 1) clear_unseen<C>(p_rmem, work, note->row);
    }
    ptx::registers_change<SCORES>(p);
    if (left > 1) release(barriers.q_empty(q_ring.stage));
    ptx::wgmma_wait_group<0>();  // dV
    ptx::registers_change<SUMS>(dv);
    ptx::registers_change<WORDS>(a);
    if (left < blocks) {
      release(barriers.dout_empty(dout_ring.stage));
      dout_ring.advance();
    }

    round_to_16_bits<C>(a_rmem, p_rmem);
    ptx::mbarrier_wait_parity(barriers.p_empty(p_ring.stage), p_ring.parity ^ 1);
    unsigned char* const p_of_lane =
        shared + C::P_SMEM + p_ring.stage * C::P_BYTES + (warp * 32 + lane) * 16;
#pragma unroll
    for (int i = 0; i < C::BLOCK / 16; ++i) {
      *reinterpret_cast<uint4*>(p_of_lane + i * C::WARPGROUP * 16) =
          uint4{a_rmem[i][0], a_rmem[i][1], a_rmem[i][2], a_rmem[i][3]};
    }
    release(barriers.p_full(p_ring.stage));
    p_ring.advance();

    // Behind the last block S is that of the same queries once more, which nobody uses.
    if (left > 1) q_ring.advance();
    ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);
    ptx::registers_change<WORDS>(a);
    begin_s(q_ring.stage);
    look_ahead(q_ring.stage);
    ptx::mbarrier_wait_parity(barriers.dout_full(dout_ring.stage), dout_ring.parity);
    ptx::registers_change<SUMS>(dv);
    ptx::wgmma_fence();  // P is rounded before the product
    start_gradient<C, typename C::DoutTile>(
        dv_rmem, a_rmem, shared_smem + C::DOUT_SMEM + dout_ring.stage * C::DoutTile::BYTES);
    ptx::wgmma_wait_group<1>();  // S of the next block
  }
  release(barriers.q_empty(q_ring.stage));
  ptx::wgmma_wait_group<0>();
  ptx::registers_change<SUMS>(dv);
  release(barriers.dout_empty(dout_ring.stage));
  store_gradient<C, typename C::VTile>(dv_rmem, params.backward.dv, work,
                                       params.backward.attention.dv, 1.0f);
}

// --- keys, one warpgroup: dP, dS, dK ---

template <class C>
__device__ __forceinline__ void consume_keys(const BackwardParamsOf<C>& all_params,
                                             const CtaWork& work, unsigned char* shared,
                                             uint32_t shared_smem,
                                             const RingPosition<C::TILE_STAGES>& tile,
                                             uint32_t behind) {
  const BackwardKernelParams& params = call_of<C>(all_params);
  constexpr int SCORES = C::BLOCK / 2, SUMS = C::HEAD_DIM / 2, WORDS = C::BLOCK / 4;
  const WideBarriers<C> barriers{{shared_smem + C::BARRIER_SMEM}};
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32 % C::KEY_WARPS);
  const int lane = threadIdx.x % 32;
  KeyGradient<typename C::KTile> dk_rmem = {};
  KeysByQueries<C> ds_rmem;   // dP, then dS
  KeysByQueries16<C> a_rmem;  // dS, as operand A
  float* const ds = &ds_rmem[0][0];
  float* const dk = &dk_rmem[0][0];
  uint32_t* const a = &a_rmem[0][0];
  const ptx::WgmmaDescriptor v = describe_tile<typename C::VTile>(shared_smem + C::V_SMEM, 16);
  auto q_ring = ring_behind<C::Q_STAGES>(behind);
  auto dout_ring = ring_behind<C::DOUT_STAGES>(behind);
  auto p_ring = ring_behind<C::P_STAGES>(behind);
  auto ds_ring = ring_behind<C::DS_STAGES>(behind);
  const auto begin_dp = [&] {
    ptx::mbarrier_wait_parity(barriers.dout_full(dout_ring.stage), dout_ring.parity);
    ptx::registers_change<SCORES>(ds);
    ptx::wgmma_fence();  // the last uses of dS come before the product
    start_keys_by_queries<C, typename C::VTile, typename C::DoutTile>(
        ds_rmem, v, shared_smem + C::DOUT_SMEM + dout_ring.stage * C::DoutTile::BYTES);
  };

  ptx::mbarrier_wait_parity(barriers.v_full(tile.stage), tile.parity);  // V has landed
  ptx::registers_change<SUMS>(dk);  // it is 0 before any product starts
  begin_dp();
  const int blocks = uniform(work.blocks);
#pragma unroll 1
  for (int left = blocks; left > 0; --left) {
    ptx::wgmma_wait_group<1>();  // dK of the block before
    ptx::registers_change<SUMS>(dk);
    ptx::registers_change<WORDS>(a);
    if (left < blocks) {
      release(barriers.q_empty(q_ring.stage));
      q_ring.advance();
    }
    ptx::mbarrier_wait_parity(barriers.q_full(q_ring.stage), q_ring.parity);
    ptx::mbarrier_wait_parity(barriers.p_full(p_ring.stage), p_ring.parity);
    ptx::wgmma_wait_group<0>();  // dP of this block
    ptx::registers_change<SCORES>(ds);
    if (left > 1) {
      release(barriers.dout_empty(dout_ring.stage));
      dout_ring.advance();
    }

    const float2* terms = terms_of_stage<C>(shared, q_ring.stage);
    const unsigned char* const p_of_lane =
        shared + C::P_SMEM + p_ring.stage * C::P_BYTES + (warp * 32 + lane) * 16;
#pragma unroll
    for (int j = 0; j < C::BLOCK / 16; ++j) {
      const uint4 words = *reinterpret_cast<const uint4*>(p_of_lane + j * C::WARPGROUP * 16);
      const uint32_t p[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int n = 2 * j + half;
        const float2 delta = terms[C::BLOCK / 2 + 4 * n];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            float& x = ds_rmem[n][2 * r + i];
            const float weight = device::element_of_chunk<C::DTYPE>(p, 2 * (2 * half + r) + i);
            x = weight * (x - (i == 0 ? delta.x : delta.y));
            // The value of a hidden key, NaN perhaps, does not matter.
            if (C::READS_MASK && weight == 0.0f) x = 0.0f;
          }
        }
      }
    }
    const BlockNote* note = note_of_stage<C>(shared, q_ring.stage);
    if (!C::READS_MASK && (note->masked_warps >> warp & 1) != 0)
      clear_unseen<C>(ds_rmem, work, note->row);
    release(barriers.p_empty(p_ring.stage));
    p_ring.advance();
    if constexpr (C::MASK_GRADIENT)
      add_mask_gradient<C>(ds_rmem, all_params, work, *note, dense_note<C>(shared, q_ring.stage));

    ptx::registers_change<SCORES>(ds);
    round_to_16_bits<C>(a_rmem, ds_rmem);
    ptx::registers_change<WORDS>(a);
    ptx::registers_change<SUMS>(dk);
    ptx::wgmma_fence();  // dS is rounded before the product
    start_gradient<C, typename C::QTile>(dk_rmem, a_rmem,
                                         shared_smem + C::Q_SMEM + q_ring.stage * C::QTile::BYTES);
    ptx::mbarrier_wait_parity(barriers.ds_empty(ds_ring.stage), ds_ring.parity ^ 1);
    store_ds<C>(shared_smem + C::DS_SMEM + ds_ring.stage * C::DsTile::BYTES, a_rmem);
    ptx::fence_proxy_async_shared();  // the stores come before wgmma reads them
    release(barriers.ds_full(ds_ring.stage));
    ds_ring.advance();
    // Behind the last block dP is that of the same queries once more, which nobody uses.
    begin_dp();
  }
  ptx::wgmma_wait_group<0>();
  ptx::registers_change<SUMS>(dk);
  if constexpr (C::HANDS_VALUES_BACK) release(barriers.values_empty());
  release(barriers.dout_empty(dout_ring.stage));
  release(barriers.q_empty(q_ring.stage));
  store_gradient<C, typename C::KTile>(dk_rmem, params.backward.dk, work,
                                       params.backward.attention.d, params.backward.scale);
}

// --- queries, one warpgroup: dQ, added to the sums in the workspace ---

template <class C>
__device__ __forceinline__ void consume_queries(const BackwardKernelParams& params,
                                                const CtaWork& work, uint32_t shared_smem,
                                                const RingPosition<C::TILE_STAGES>& tile,
                                                uint32_t behind) {
  constexpr int PART = C::PART_COLUMNS / 2;
  const WideBarriers<C> barriers{{shared_smem + C::BARRIER_SMEM}};
  const int number = threadIdx.x % C::WARPGROUP;
  const bool in_turns = !C::READS_MASK && params.turns_gmem != nullptr;
  BlockPosition<C> block = device::first_block<C>(params, work);
  auto ds_ring = ring_behind<C::DS_STAGES>(behind);
  auto turn_ring = ring_behind<C::TURN_STAGES>(behind);
  const int parts = uniform(device::sums_columns<C>(params.backward.attention.d)) / C::PART_COLUMNS;
  const int rows = params.sums_rows;
  ptx::griddepcontrol_wait();                                           // the sums are zero
  ptx::mbarrier_wait_parity(barriers.k_full(tile.stage), tile.parity);  // K has landed
#pragma unroll 1
  for (int left = uniform(work.blocks); left > 0; --left) {
    const device::DqTurn turn = device::dq_turn<C>(params, work, block);
    // One value for all threads, without which ptxas computes it anew for each store.
    const bool first = uniform(in_turns && !turn.waits ? 1 : 0) != 0;
    ptx::mbarrier_wait_parity(barriers.ds_full(ds_ring.stage), ds_ring.parity);
    float* const sums_gmem =
        device::sums_of_round<C>(params, turn.sum) + number / 32 * C::WARP_SUMS + number % 32 * 4;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
      float dq[PART];
      ptx::registers_change<PART>(dq);
      ptx::wgmma_fence();  // the last uses of dQ come before the product
      start_dq<C>(dq, shared_smem + C::DS_SMEM + ds_ring.stage * C::DsTile::BYTES,
                  shared_smem + k_offset<C>(tile.stage), part);
      ptx::wgmma_wait_group<0>();
      ptx::registers_change<PART>(dq);
      if (part == parts - 1) release(barriers.ds_empty(ds_ring.stage));
      // The next CTA waits for its turn as long as this one has the sums, so it waits here.
      if (part == 0 && in_turns)
        ptx::mbarrier_wait_parity(barriers.turn_come(turn_ring.stage), turn_ring.parity);
      float* const part_gmem = sums_gmem + part * rows * C::PART_COLUMNS;
      if (number / 32 * C::WARP_ROWS >= work.passing_rows - block.row) {
        // dQ has none of the warp's rows.
      } else if (first) {
#pragma unroll
        for (int n = 0; n < C::PART_COLUMNS / 8; ++n) {
          *reinterpret_cast<float4*>(part_gmem + n * 32 * 4) =
              float4{dq[4 * n], dq[4 * n + 1], dq[4 * n + 2], dq[4 * n + 3]};
        }
      } else {
#pragma unroll
        for (int n = 0; n < C::PART_COLUMNS / 8; ++n) {
          ptx::red_add_v4_f32(part_gmem + n * 32 * 4, dq[4 * n], dq[4 * n + 1], dq[4 * n + 2],
                              dq[4 * n + 3]);
        }
      }
    }
    ds_ring.advance();
    if (in_turns) {
      release(barriers.added(turn_ring.stage));
      turn_ring.advance();
    }
    block.next_round(work);
  }
}

// --- turns, two warps, which take every second round each ---

// To look for a turn and to hand it on takes a while, which the warpgroup of dQ has no time for.
// behind: the rounds of all tiles before.
template <class C>
__device__ __forceinline__ void take_turns(const BackwardKernelParams& params, const CtaWork& work,
                                           uint32_t shared_smem, int number, int behind) {
  const WideBarriers<C> barriers{{shared_smem + C::BARRIER_SMEM}};
  const bool leader = ptx::elect_sync();
  const int own_turn = work.turn;
  BlockPosition<C> block = device::first_block<C>(params, work);
  const int end = behind + work.blocks;
  ptx::griddepcontrol_wait();  // the turns are zero
#pragma unroll 1
  for (int count = behind; count < end; ++count, block.next_round(work)) {
    if (count % C::TURN_STAGES != number) continue;
    const device::DqTurn turn = device::dq_turn<C>(params, work, block);
    if (leader) {
      while (turn.waits && ptx::ld_acquire_s32(params.turns_gmem + turn.sum) < turn.come) {
      }
      ptx::mbarrier_arrive(barriers.turn_come(number));
    }
    __syncwarp();
    ptx::mbarrier_wait_parity(barriers.added(number), count / C::TURN_STAGES % 2);
    if (leader) ptx::st_release_s32(params.turns_gmem + turn.sum, own_turn + 1);
    __syncwarp();
  }
}

template <class C>
__device__ __forceinline__ void wide_bwd(const BackwardParamsOf<C>& all_params) {
  const BackwardKernelParams& params = call_of<C>(all_params);
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const CtaWork& first_work = work_of<C>(shared);
  begin_backward<C>(params, shared);
  if constexpr (C::READS_MASK) {
    ptx::griddepcontrol_wait();  // the states of blocks are written
    if (threadIdx.x < 32) list_rounds<C>(all_params, work_of<C>(shared));
  }
  const WideBarriers<C> barriers{{shared_smem + C::BARRIER_SMEM}};
  if (threadIdx.x == C::WARPGROUP) {
    barriers.initialise_inputs();
    for (int stage = 0; stage < C::P_STAGES; ++stage) {
      ptx::mbarrier_init_for_warps(barriers.p_full(stage), C::KEY_WARPS);
      ptx::mbarrier_init_for_warps(barriers.p_empty(stage), C::KEY_WARPS);
    }
    for (int stage = 0; stage < C::DS_STAGES; ++stage) {
      ptx::mbarrier_init_for_warps(barriers.ds_full(stage), C::KEY_WARPS);
      ptx::mbarrier_init_for_warps(barriers.ds_empty(stage), C::KEY_WARPS);
    }
    for (int stage = 0; stage < C::TURN_STAGES; ++stage) {
      ptx::mbarrier_init(barriers.turn_come(stage), 1);
      ptx::mbarrier_init_for_warps(barriers.added(stage), C::WARPGROUP / 32);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised and the work is written before any warp uses it
  if (first_work.first_row < 0) {
    ptx::griddepcontrol_wait();
    return;
  }

  const auto for_each = [&](const auto& each) {
    for_each_tile<C>(params, shared, shared_smem, each);
  };
  const int role = uniform(static_cast<int>(threadIdx.x) / C::WARPGROUP);
  if (role == 0) {
    ptx::setmaxnreg_inc<C::WEIGHTS_REGISTERS>();
    for_each([&](const CtaWork& work, const auto& tile) {
      if (work.blocks > 0) {
        consume_weights<C>(all_params, work, shared, shared_smem, tile, blocks_before<C>(work));
      } else {
        clear_gradients<C>(params, work, C::KEY_WARPS);
      }
    });
  } else if (role == 1) {
    ptx::setmaxnreg_inc<C::KEYS_REGISTERS>();
    for_each([&](const CtaWork& work, const auto& tile) {
      if (work.blocks > 0) {
        consume_keys<C>(all_params, work, shared, shared_smem, tile, blocks_before<C>(work));
      } else if constexpr (C::HANDS_VALUES_BACK) {
        // The loader has seen what the tile before has handed back.
        ptx::mbarrier_wait_parity(barriers.v_full(tile.stage), tile.parity);
        release(barriers.values_empty());
      }
    });
  } else if (role == 2) {
    if constexpr (C::QUERIES_REGISTERS > 128) {
      ptx::setmaxnreg_inc<C::QUERIES_REGISTERS>();
    } else {
      ptx::setmaxnreg_dec<C::QUERIES_REGISTERS>();
    }
    for_each([&](const CtaWork& work, const auto& tile) {
      if (work.blocks > 0)
        consume_queries<C>(params, work, shared_smem, tile, blocks_before<C>(work));
    });
  } else {
    ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (!C::STAYS && first_work.blocks == 0) {
      ptx::griddepcontrol_wait();
      return;
    }
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32 % 4);
    if (warp == 0) load<C>(all_params, shared, shared_smem);
    if (warp == 1) load_terms<C>(all_params, shared, shared_smem);
    if (!C::READS_MASK && warp > 1) {
      for_each([&](const CtaWork& work, const auto&) {
        if (params.turns_gmem != nullptr)
          take_turns<C>(params, work, shared_smem, warp - 2, blocks_before<C>(work));
      });
    }
  }
}

}  // namespace archflash::hopper
