// A kernel on mma.sync that takes masks as data. Compile-time numbers only, in plain C++.
#pragma once

#include "common/mask_params.h"
#include "common/mma_sync/config.cuh"

namespace archflash::mma_sync {

// A FewRowsConfig whose kernel reads attn_mask, key_ranges, alibi_slopes and block_mask.
template <class FewRows>
struct MaskedConfig : FewRows {
  static constexpr bool MASKED = true;
  static constexpr bool LOADS_ADDED_LATE = false;  // math/lane_masks.cuh
  static_assert(FewRows::CAN_SPLIT && FewRows::STAGES == 2 && FewRows::M_TILES == 1 &&
                    FewRows::STEP_KEYS == FewRows::BLOCK_K,
                "mma_sync/masked_fwd.cuh: two buffers, and all keys of a block at once");
  static_assert(MASK_BLOCK % FewRows::BLOCK_Q == 0 && MASK_BLOCK % FewRows::BLOCK_K == 0,
                "a tile lies in one block of block_mask");
};

}  // namespace archflash::mma_sync
