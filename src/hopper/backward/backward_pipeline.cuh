// How the roles of a CTA of the backward pass hand blocks over to one another: the barriers and the
// hazards that they close.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/device/backward_round_loads.cuh"
#include "common/device/backward_rounds.cuh"
#include "common/device/backward_work.cuh"
#include "hopper/backward/backward_config.cuh"
#include "hopper/backward/backward_params.h"
#include "hopper/forward/pipeline.cuh"

namespace archflash::hopper {

using device::BackwardWork;
using device::BlockNote;
using device::BlockPosition;
using device::CtaWork;

// With ENDS_DQ, what is to be done with dQ of a round, in shared memory.
struct DqNote {
  bool begun;  // the sums of the CTA before are where dQ comes to lie, and dQ is added to them
  bool ends;   // it is complete: it becomes rows of 16 bits
};

// What a main kernel is given: with DROPS it is told of dropout, with lists of rounds of
// block_mask, and with ENDS_DQ of dQ by TMA, too.
template <class C>
using BackwardParamsOf = std::conditional_t<
    C::DROPS, DroppingBackwardParams,
    std::conditional_t<
        C::READS_MASK, DenseBackwardParams,
        std::conditional_t<C::ADDS_MASK, AddingBackwardParams,
                           std::conditional_t<device::lists_rounds<C>(), ListingBackwardParams,
                                              std::conditional_t<C::ENDS_DQ, EndingBackwardParams,
                                                                 BackwardKernelParams>>>>>;

template <class C>
__device__ __forceinline__ const BackwardKernelParams& call_of(const BackwardParamsOf<C>& params) {
  if constexpr (C::DROPS || device::lists_rounds<C>() || C::ADDS_MASK || C::ENDS_DQ) {
    return params.call;
  } else {
    return params;
  }
}

// What a CTA works on.
template <class C>
__device__ __forceinline__ CtaWork& work_of(unsigned char* shared, int stage = 0) {
  return *reinterpret_cast<CtaWork*>(shared + C::WORK_SMEM + stage * C::WORK_BYTES);
}

// Whether CTAs take more tiles than their first ones.
template <class C>
__device__ __forceinline__ bool takes_more(const BackwardKernelParams& params) {
  return C::STAYS && params.tiles > static_cast<int>(gridDim.x);
}

// The barriers, as addresses in shared memory. "Bytes": the loader arrives once and says how many
// bytes TMA will bring; the phase ends when they have landed.
//
// clang-format off
//   barrier                  arrives               waits           so that
//   k_full, v_full           loader, bytes         consumers       the tile's keys have landed before
//     of each tile                                                 wgmma reads them
//   tile_full of each tile,  loader                all others      the tile's CtaWork is written
//     where CTAs stay                                              before it is read
//   tile_empty               all others            loader          every warp is done with CtaWork, K
//                                                                  and V, before those of the tile
//                                                                  after the next one come
//   keys_empty, where K and  each consumer warp    loader          every warp's products have read K
//     V have one stage                                             and V before those of the next
//                                                                  tile come (with SWAPS_KEYS K)
//   values_empty, with       each consumer warp    loader          every warp's products have read V
//     SWAPS_KEYS, or where     that multiplies it                  before the next K comes, or the
//     V alone has one stage                                        next V
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
//     with ENDS_DQ           and bytes                             the sums that a round goes on with
//                                                                  and its DqNote are there
//   mask_full of each stage, loader, bytes         consumers       the mask's elements have landed
//     with ADDS_MASK
//   mask_empty               each consumer warp    loader          every warp has read the elements
//     of each stage                                                before the next ones come
//   dq_read, with ENDS_DQ    a dQ warp             the other one   TMA has read dQ before the sums
//                                                                  of the next round come
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

  __device__ __forceinline__ uint32_t k_full(int stage = 0) const { return first_smem + 8 * stage; }
  __device__ __forceinline__ uint32_t v_full(int stage = 0) const {
    return k_full(C::TILE_STAGES) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t ragged() const { return v_full(C::TILE_STAGES); }
  __device__ __forceinline__ uint32_t tile_full(int stage) const {
    return ragged() + 8 + 8 * stage;
  }
  __device__ __forceinline__ uint32_t tile_empty(int stage) const {
    return tile_full(C::TILE_STAGES) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t keys_empty() const { return tile_empty(C::TILE_STAGES); }
  __device__ __forceinline__ uint32_t values_empty() const {
    return keys_empty() + (C::HANDS_VALUES_BACK ? 0 : 8);
  }
  __device__ __forceinline__ uint32_t ds_full(int stage) const {
    return first_smem + 8 * C::TILE_BARRIERS + 8 * stage;
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
  __device__ __forceinline__ uint32_t dq_read() const { return dq_empty(C::WARPGROUPS); }
  __device__ __forceinline__ uint32_t mask_full(int stage) const {
    return dq_empty(C::WARPGROUPS) + 8 * C::ENDS_DQ + 8 * stage;
  }
  __device__ __forceinline__ uint32_t mask_empty(int stage) const {
    return mask_full(C::MASK_STAGES) + 8 * stage;
  }

  // Called by one thread: those of K, V, Q and dO.
  __device__ __forceinline__ void initialise_inputs() const {
    for (int stage = 0; stage < C::TILE_STAGES; ++stage) {
      ptx::mbarrier_init(k_full(stage), 1);
      ptx::mbarrier_init(v_full(stage), 1);
      if constexpr (C::STAYS) {
        ptx::mbarrier_init_for_warps(tile_full(stage), 1);
        ptx::mbarrier_init_for_warps(tile_empty(stage), C::TILE_WARPS);
      }
    }
    if constexpr (C::HANDS_KEYS_BACK) ptx::mbarrier_init_for_warps(keys_empty(), C::WARPS);
    if constexpr (C::SWAPS_KEYS) ptx::mbarrier_init_for_warps(values_empty(), C::WARPS);
    if constexpr (C::HANDS_VALUES_BACK) ptx::mbarrier_init_for_warps(values_empty(), C::KEY_WARPS);
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

// What a CTA that stays works on, with COUNTS_BLOCKS.
struct CountedWork : CtaWork {
  int blocks_before;  // of its tiles before
};

// The blocks of the tiles before; and a position of a ring that goes on from tile to tile.
template <class C>
__device__ __forceinline__ int blocks_before(const CtaWork& work) {
  return C::COUNTS_BLOCKS ? uniform(static_cast<const CountedWork&>(work).blocks_before) : 0;
}
template <int STAGES>
__device__ __forceinline__ RingPosition<STAGES> ring_behind(uint32_t blocks) {
  return {static_cast<int>(blocks % STAGES), blocks / STAGES % 2};
}

// Where K and V of a tile lie, whose stage is `tile_stage`.
template <class C>
__device__ __forceinline__ int k_offset(int tile_stage) {
  if constexpr (C::SWAPS_KEYS) return tile_stage == 0 ? C::K_SMEM : C::V_SMEM;
  return C::K_SMEM + (C::HANDS_KEYS_BACK ? 0 : tile_stage) * C::KTile::BYTES;
}
template <class C>
__device__ __forceinline__ int v_offset(int tile_stage) {
  if constexpr (C::SWAPS_KEYS) return tile_stage == 0 ? C::V_SMEM : C::K_SMEM;
  return C::V_SMEM +
         (C::HANDS_KEYS_BACK || C::HANDS_VALUES_BACK ? 0 : tile_stage) * C::VTile::BYTES;
}

// Calls each(work, position) for each tile of the CTA, where `position` is that of K, V and of
// `work`. Called by the warps of all roles but the loader.
template <class C, class Each>
__device__ __forceinline__ void for_each_tile(const BackwardKernelParams& params,
                                              unsigned char* shared, uint32_t shared_smem,
                                              const Each& each) {
  if constexpr (!C::STAYS) {
    each(work_of<C>(shared), RingPosition<C::TILE_STAGES>());
  } else {
    const BackwardBarriers<C> barriers{shared_smem + C::BARRIER_SMEM};
#pragma unroll 1
    for (uint32_t number = 0;; ++number) {  // one register says where the ring is
      const RingPosition<C::TILE_STAGES> position{static_cast<int>(number % C::TILE_STAGES),
                                                  number / C::TILE_STAGES % 2};
      if (number > 0) {
        ptx::mbarrier_wait_parity(barriers.tile_full(position.stage), position.parity);
        if (work_of<C>(shared, position.stage).first_row < 0) return;
      }
      each(work_of<C>(shared, position.stage), position);
      if constexpr (C::COUNTS_BLOCKS) {  // asked anew: no register is left to keep the answer
        if (params.tiles <= ptx::mov_nctaid_x_volatile()) return;
      } else {
        if (!takes_more<C>(params)) return;
      }
      release(barriers.tile_empty(position.stage));
    }
  }
}

}  // namespace archflash::hopper
