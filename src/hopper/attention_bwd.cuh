// Attention backward on TMA, mbarriers and wgmma, for compute capability 9.0: fp16 or bf16 inputs,
// products summed in fp32.
//
// A CTA owns a tile of 128 keys of a head and goes over the blocks of 64 query rows that see any of
// them, of all query heads that share its head of K. It sums up dK and dV of its keys in registers.
// All CTAs of a head add their parts of dQ to sums in the workspace, in an order that is not known,
// or in turns: in an order that is fixed, so that the same inputs always give the same bits. A
// kernel of its own (write_dq) then scales and rounds the sums.
//
// Where there are more tiles than SMs, CTAs of some kernels stay (TILE_STAGES): they take one after
// another by a counter, and the loader brings K and V of the next one while the consumers are at
// work, or, without room for them (KEY_STAGES), while they write dK and dV. Where tiles are few and
// long, several CTAs share out the query heads or the rows of a tile, and a further kernel
// (backward_shares.cuh) adds up their dK and dV.
//
// In turns, a tile waits only for tiles with smaller numbers, which were taken before it. All CTAs
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
//   (with S_AHEAD S of b + 1 comes behind dP of b, and dQ is stored while dK is computed;
//   a round of two blocks has a dQ in every second step)
// clang-format on
//
// A consumer warpgroup owns 64 keys. S, P and dP lie in its registers with a key in a row, so that
// P and dS in 16 bits are the operand A of the products for dV and dK. For dQ, which sums over the
// keys, dS passes through shared memory, and each warpgroup computes a part of it. It does so a
// round later, when the other warpgroup has long stored its dS: so the two need not keep step, and
// the second one begins half a step after the first one. Then one of them multiplies while the
// other one computes exponentials; in step both would do either at the same time.
//
// The roles: load() and load_terms() below, with SWAPS_KEYS those of backward_swap.cuh, consume()
// in backward_mainloop.cuh, add_dq() or end_dq() in backward_dq.cuh. The mainloop takes
// backward_products.cuh (wgmma), backward_scores.cuh (P and dS) and backward_epilogue.cuh (dK, dV).
// backward_pipeline.cuh lists the barriers and their hazards, backward_order.cuh the order of CTAs.
// Tiles and the memory plan are in backward_config.cuh, the plan in plan_backward.cpp.
#pragma once

#include <cstdint>
#include <type_traits>

#include "hopper/backward/backward_added.cuh"
#include "hopper/backward/backward_config.cuh"
#include "hopper/backward/backward_dense.cuh"
#include "hopper/backward/backward_dq.cuh"
#include "hopper/backward/backward_epilogue.cuh"
#include "hopper/backward/backward_lists.cuh"
#include "hopper/backward/backward_mainloop.cuh"
#include "hopper/backward/backward_no_keys.cuh"
#include "hopper/backward/backward_order.cuh"
#include "hopper/backward/backward_params.h"
#include "hopper/backward/backward_parts.cuh"
#include "hopper/backward/backward_pipeline.cuh"
#include "hopper/backward/backward_swap.cuh"

namespace archflash::hopper {

// --- what comes before: the terms of all query rows, and zeros for the sums of dQ and the turns
// ---

template <DType DTYPE>
__device__ __forceinline__ void prepare(const BackwardKernelParams& params) {
  ptx::griddepcontrol_wait();               // what comes before this call is done
  ptx::griddepcontrol_launch_dependents();  // the main kernel waits for what this one writes
  if (params.taken_gmem != nullptr && blockIdx.x == 0 && threadIdx.x == 0)
    params.taken_gmem[0] = params.taken_gmem[1] = 0;
  if (params.parts > 0) device::clear_by_grid(params.parts_done_gmem, params.parts_done_bytes);
  device::prepare_rounds<DTYPE>(params);
}

// prepare(), and the order of the tiles of a table of blocks.
template <DType DTYPE>
__device__ __forceinline__ void prepare_table(const ListingBackwardParams& params) {
  prepare<DTYPE>(params.call);
  order_tiles_of_keys(params);
}

// --- which tiles a CTA takes ---

// Finds what the CTA works on in its tile number `number` of all; first_row < 0: nothing. Called by
// a whole warp. order_gmem: that of tables of blocks, or null.
template <class C>
__device__ __forceinline__ void find_work(const BackwardKernelParams& params, int number,
                                          CtaWork& work, const int32_t* order_gmem = nullptr) {
  const NumberInParts in_parts = find_part<C>(params, number);
  TileOfCta tile = find_tile<C>(params, in_parts.number);
  if constexpr (C::LISTS_ROUNDS) {
    if (order_gmem != nullptr) tile.index = ordered_tile<C>(params, order_gmem, tile.index);
  }
  const int shares = params.shares;
  const int index = shares > 1 ? tile.index / shares : tile.index;
  const BackwardWork found = device::find_backward_work<Owns::Keys, C::ROWS, C::UNEVEN_SHARES>(
      params.backward.attention, index);
  if (threadIdx.x % 32 != 0) return;
  if (found.first_row < 0) {
    work.first_row = found.first_row;
  } else {
    device::find_queries<C>(params, found, work, tile.upwards, tile.index - index * shares,
                            in_parts.part);
    if constexpr (C::MERGES_PARTS)
      work.tile_in_parts = static_cast<int16_t>(in_parts.number - params.first_in_parts);
  }
}

// Whether a tile waits for another one: in turns, unless each tile of a head has sums of its own.
template <class C>
__device__ __forceinline__ bool waits_in_turns(const BackwardKernelParams& params) {
  return params.turns_gmem != nullptr &&
         device::count_chains(params) * C::ROWS < params.backward.attention.nk;
}

// The number of the next tile of a CTA that stays, whose first one is that with the CTA's index. In
// turns it takes the first one in this way, too: a tile waits for tiles that were taken before it,
// and so for no CTA that has not started.
template <class C>
__device__ __forceinline__ int take_number(const BackwardKernelParams& params) {
  ptx::griddepcontrol_wait();  // the counter is zero
  int taken = 0;
  if (threadIdx.x % 32 == 0) taken = atomicAdd(params.taken_gmem, 1);
  return uniform(taken) + (waits_in_turns<C>(params) ? 0 : static_cast<int>(gridDim.x));
}

// The next tile for the loader of a CTA that stays, which writes it to `work` when the CTA is done
// with the one that it had there; false: there is none. The CTA that asks first takes the next one.
template <class C>
__device__ __forceinline__ bool take_next_tile(const BackwardKernelParams& params,
                                               const BackwardBarriers<C>& barriers,
                                               const RingPosition<C::TILE_STAGES>& position,
                                               unsigned char* shared) {
  CtaWork& work = work_of<C>(shared, position.stage);
  __builtin_assume(params.backward.attention.cu_seqlens_q_gmem == nullptr);
  __builtin_assume(params.backward.attention.cu_seqlens_k_gmem == nullptr);
  const int number = take_number<C>(params);
  ptx::mbarrier_wait_parity(barriers.tile_empty(position.stage), position.parity ^ 1);
  const bool any = number < params.tiles;
  if (any) {
    find_work<C>(params, number, work);
    if constexpr (C::COUNTS_BLOCKS) {
      const auto& before = static_cast<CountedWork&>(work_of<C>(shared, position.stage ^ 1));
      if (ptx::mov_tid_x_volatile() % 32 == 0)
        static_cast<CountedWork&>(work).blocks_before = before.blocks_before + before.blocks;
    }
  } else if (threadIdx.x % 32 == 0) {
    work.first_row = -1;
  }
  release(barriers.tile_full(position.stage));
  return any;
}

// --- loader, one warp: K, V, Q and dO -> shared memory ---

template <class C>
__device__ __forceinline__ void load(const BackwardParamsOf<C>& all_params, unsigned char* shared,
                                     uint32_t shared_smem) {
  const BackwardKernelParams& params = call_of<C>(all_params);
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  device::LoaderPosition<C> position;
  [[maybe_unused]] uint32_t masks = 0;  // blocks of elements that were asked for
  RingPosition<C::TILE_STAGES> tile;
  if constexpr (C::STAYS) release(barriers.tile_full(0));  // the first tile is there already
#pragma unroll 1
  while (true) {
    const CtaWork& work = work_of<C>(shared, tile.stage);
    if constexpr (C::HANDS_KEYS_BACK)  // the first one of two tiles has stage 0
      ptx::mbarrier_wait_parity(barriers.keys_empty(), tile.stage ^ 1);
    [[maybe_unused]] const auto wait_for_values = [&] {
      ptx::mbarrier_wait_parity(barriers.values_empty(), tile.stage ^ 1);
    };
    if constexpr (C::COUNTS_BLOCKS) {
      position.q_ring = ring_behind<C::Q_STAGES>(blocks_before<C>(work));
      position.dout_ring = ring_behind<C::DOUT_STAGES>(blocks_before<C>(work));
    }
    if (!C::STAYS || work.blocks > 0) {
      const device::KeyStage keys{k_offset<C>(tile.stage), v_offset<C>(tile.stage),
                                  barriers.k_full(tile.stage), barriers.v_full(tile.stage)};
      if constexpr (C::ADDS_MASK) {
        device::load_rounds<C>(
            params, work, shared, shared_smem, barriers, keys, position, [&](int head, int row) {
              load_elements<C>(all_params, work, shared_smem, masks++, head, row);
            });
      } else if constexpr (C::HANDS_VALUES_BACK) {
        // Between the first Q and V. Behind the next Q of the tile there is nothing to wait for.
        device::load_rounds<C>(params, work, shared, shared_smem, barriers, keys, position,
                               [&](int, int) { wait_for_values(); });
      } else {
        device::load_rounds<C>(params, work, shared, shared_smem, barriers, keys, position);
      }
    } else {
      if constexpr (C::HANDS_VALUES_BACK) wait_for_values();
      if (ptx::elect_sync()) {  // the consumers count its phases, too
        ptx::mbarrier_arrive(barriers.k_full(tile.stage));
        ptx::mbarrier_arrive(barriers.v_full(tile.stage));
      }
    }
    if (!takes_more<C>(params)) break;
    tile.advance();
    if (!take_next_tile<C>(params, barriers, tile, shared)) break;
  }
}

// --- one more warp: the terms of a block's rows, and a note about it -> shared memory ---

template <class C>
__device__ __forceinline__ void load_terms(const BackwardParamsOf<C>& all_params,
                                           unsigned char* shared, uint32_t shared_smem) {
  const BackwardKernelParams& params = call_of<C>(all_params);
  const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  RingPosition<C::Q_STAGES> q_ring;
  for_each_tile<C>(params, shared, shared_smem, [&](const CtaWork& work, const auto&) {
    if constexpr (C::READS_MASK) {
      device::load_terms_of_rounds<C>(params, work, shared, barriers, q_ring,
                                      DenseNotes<C>{all_params, work});
    } else if constexpr (C::ADDS_MASK) {
      device::load_terms_of_rounds<C>(params, work, shared, barriers, q_ring, AddedNotes{});
    } else {
      device::load_terms_of_rounds<C>(params, work, shared, barriers, q_ring);
    }
  });
}

// What each CTA of a main kernel begins with: one warp finds what it works on, and writes that to
// shared memory, which __syncthreads() then makes known; first_row < 0: nothing. order_gmem: as
// find_work() takes it.
template <class C>
__device__ __forceinline__ void begin_backward(const BackwardKernelParams& params,
                                               unsigned char* shared,
                                               const int32_t* order_gmem = nullptr) {
  static_assert(sizeof(CountedWork) <= C::WORK_BYTES);
  // This kernel has started early: its warps wait where they use what the one before has written,
  // and in each CTA one does, so that this kernel ends behind that one. The inputs were there
  // before that one began.
  if (threadIdx.x == C::THREADS - 1 && params.rounds > 0) {  // without queries there are no maps
    ptx::prefetch_tensormap(params.k_map);
    ptx::prefetch_tensormap(params.q_map);
    ptx::prefetch_tensormap(params.v_map);
    ptx::prefetch_tensormap(params.dout_map);
  }
  device::clear_keys_of_no_sequence<C::ROWS, DK | DV>(params.backward, blockIdx.x, C::THREADS / 32);
  if (uniform(static_cast<int>(threadIdx.x) / 32) != 0) return;
  int number = static_cast<int>(blockIdx.x);
  if (!C::SWAPS_KEYS && takes_more<C>(params) && waits_in_turns<C>(params))
    number = take_number<C>(params);
  if (takes_more<C>(params) && number >= params.tiles) {
    if (threadIdx.x == 0) work_of<C>(shared).first_row = -1;
  } else {
    find_work<C>(params, number, work_of<C>(shared), order_gmem);
    if constexpr (C::COUNTS_BLOCKS) {
      if (threadIdx.x == 0) static_cast<CountedWork&>(work_of<C>(shared)).blocks_before = 0;
    }
  }
}

template <class C>
__device__ __forceinline__ void attention_bwd(const BackwardParamsOf<C>& all_params) {
  const BackwardKernelParams& params = call_of<C>(all_params);
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if constexpr (std::is_same_v<BackwardParamsOf<C>, ListingBackwardParams>) {
    begin_backward<C>(params, shared, all_params.order_gmem);
  } else {
    begin_backward<C>(params, shared);
  }
  if constexpr (C::READS_MASK) ptx::griddepcontrol_wait();  // the states of blocks are written
  if constexpr (C::LISTS_ROUNDS) {
    if (threadIdx.x < 32) list_rounds<C>(all_params, work_of<C>(shared));
  }
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
    if constexpr (C::ENDS_DQ) ptx::mbarrier_init(barriers.dq_read(), 1);
    for (int stage = 0; stage < C::MASK_STAGES; ++stage) {
      ptx::mbarrier_init(barriers.mask_full(stage), 1);
      ptx::mbarrier_init_for_warps(barriers.mask_empty(stage), C::WARPS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised and the work is written before any warp uses it
  if (work_of<C>(shared).first_row < 0) {
    ptx::griddepcontrol_wait();
    return;
  }

  if (threadIdx.x < C::CONSUMER_THREADS) {
    ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    ConsumerPosition<C> position;
    for_each_tile<C>(params, shared, shared_smem, [&](const CtaWork& work, const auto& tile) {
      if (work.blocks > 0 && has_no_keys<C>(work)) {
        if constexpr (C::LEAVES_OUT_KEYS)
          pass_without_keys<C>(params, work, shared, shared_smem, tile, position);
      } else if (work.blocks > 0) {
        consume<C>(all_params, work, shared, shared_smem, tile, position);
      } else {
        clear_gradients<C>(params, work, C::WARPS);
        if constexpr (C::HANDS_KEYS_BACK) {
          const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
          // The loader has seen what the tile before has handed back.
          ptx::mbarrier_wait_parity(barriers.k_full(tile.stage), tile.parity);
          release(barriers.keys_empty());
        }
      }
    });
  } else {
    ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (!C::STAYS && work_of<C>(shared).blocks == 0) {
      ptx::griddepcontrol_wait();
      return;
    }
    if (threadIdx.x < C::CONSUMER_THREADS + 32) {
      if constexpr (C::SWAPS_KEYS) {
        device::LoaderPosition<C> position;
        for_each_tile<C>(params, shared, shared_smem, [&](const CtaWork& work, const auto& tile) {
          load_swapping<C>(params, work, shared_smem, tile.stage, position);
        });
      } else {
        load<C>(all_params, shared, shared_smem);
      }
    } else if (threadIdx.x < C::CONSUMER_THREADS + 64) {
      if constexpr (C::SWAPS_KEYS) {
        load_terms_and_take<C>(params, shared, shared_smem);
      } else {
        load_terms<C>(all_params, shared, shared_smem);
      }
    } else if constexpr (C::ENDS_DQ) {
      end_dq<C>(all_params, shared, shared_smem, threadIdx.x / 32 % 2);
    } else {
      add_dq<C>(params, shared, shared_smem, threadIdx.x / 32 % 2);
    }
  }
}

}  // namespace archflash::hopper
