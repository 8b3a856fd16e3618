// The tile sizes of the simt kernels that take masks as data: the smallest tiles for float32, which
// every GPU has the shared memory for. A kernel serves every head dimension up to its own.
#pragma once

#include "common/mask_params.h"
#include "simt/config.cuh"

namespace archflash::simt {

template <class Base, int CTAS_PER_SM_ = Base::CTAS_PER_SM>
struct MaskedConfig : Base {
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;
  static_assert(MASK_BLOCK % Base::BLOCK_Q == 0 && MASK_BLOCK % Base::BLOCK_K == 0,
                "a tile lies in one block of block_mask");
};

using F32D64Masked = MaskedConfig<F32D64Small>;
using F32D128Masked = MaskedConfig<F32D128Small>;
using F32D256Masked = MaskedConfig<F32D256Small, 2>;

}  // namespace archflash::simt
