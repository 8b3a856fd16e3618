// Attention forward on TMA, mbarriers and wgmma with mask tensors: attn_mask (bool or added),
// key_ranges, alibi_slopes and block_mask, together with the causal mask and the window.
//
// The kernel is that of attention_fwd.cuh with another walk: the producer finds out which blocks of
// keys a tile sees, 32 blocks at a time, one in each lane, while the consumers multiply, and copies
// no others. With each block's K comes a message for the consumers: where the next block lies and
// what its scores need, or that there is none. They read it while products run, and so know what to
// do with the next block before it is there. A block that the masks do not change runs the same
// step as in a call without masks.
//
// clang-format off
//   role        warps                         code                  work
//   producer    the first one behind          masked_load.cuh       finds tiles and blocks of keys;
//               the consumers'                                      Q, K, V and what is added ->
//                                                                   shared memory, by TMA
//   consumers   4 of each of WARPGROUPS       masked_mainloop.cuh   S = Q K^T, masks, softmax,
//                                                                   O += P V; output rows
//   others      the last three, or none                             rows of no sequence
//
//   policy         blocks that the producer visits      masks of a warp's scores         a tile ends
//   InPlace        by ranges and block_mask:            read by each lane:               from registers, its
//                  masks_in_place.cuh                   masks_in_place.cuh               Q is gone by then
//   Summarized     by what summarize_mask.cuh wrote:    bits of the summary, elements    through Q's part of
//                  masks_summarized.cuh                 by TMA: masks_summarized.cuh    shared memory (up to 128 columns)
//
//   what is handed over           from -> to              barriers: ready / free again
//   Q, the tile's message         producer -> consumers   q_full / q_empty
//   K, the message about the      producer -> consumers   k_full / k_empty; elements that are added
//     next block, elements                                have mask_empty instead
//   V                             producer -> consumers   v_full / v_empty
// clang-format on
//
// pipeline.cuh has the hazards that these barriers close. Beyond those: the message that comes with
// a block is written before the producer arrives at its k_full, and read before a consumer warp
// arrives at its k_empty. K and V of a block have the same stage of their rings. The ring of
// elements moves on only with blocks that have some for any warpgroup; a warp hands a stage back
// when it has read them, which may be before or after its products have read K. With InPlace, and
// 256 columns, Q goes back when the scores of the last block are there. The message about the tile
// is still read then, so there are two: a message is overwritten after the next tile's Q has come
// back, when every warp is done with this tile.
//
// The tiles and the memory plan are in masked_config.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ptx/mbarrier.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_load.cuh"
#include "hopper/masks/masked_mainloop.cuh"
#include "hopper/masks/masked_messages.cuh"
#include "hopper/masks/masks_added.cuh"
#include "hopper/masks/masks_in_place.cuh"
#include "hopper/masks/masks_summarized.cuh"

namespace archflash::hopper {

template <class C>
using MasksOf = std::conditional_t<C::ADDS_ALONE, Added<C>,
                                   std::conditional_t<C::SUMMARIZED, Summarized<C>, InPlace<C>>>;

template <class C>
__device__ __forceinline__ void masked_fwd(const typename MasksOf<C>::Params& params) {
  // Swizzle patterns start at multiples of 1024 bytes.
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (threadIdx.x == 0) {
    if constexpr (C::SUMMARIZED) {
      for (int stage = 0; stage < C::MASK_BARRIERS; ++stage)
        ptx::mbarrier_init_for_warps(mask_empty<C>(shared_smem, stage), C::WARPS);
    }
    Barriers<C>{shared_smem + C::BARRIER_SMEM}.initialise();  // with the fence for all of them
  }
  run_roles<C>([&] { compute_masked<C, MasksOf<C>>(params, shared, shared_smem); },
               [&] { load_masked<C, MasksOf<C>>(params, shared, shared_smem); },
               [&] { write_rows_of_no_sequence<C>(params.call); });
}

}  // namespace archflash::hopper
