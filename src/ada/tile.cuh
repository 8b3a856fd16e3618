// P V of 8-bit V. common/mma_sync/tile.cuh has the lane maps and the other products.
#pragma once

#include <cstdint>

#include "common/device/online_softmax.cuh"
#include "common/dtype.h"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/fp8_sums.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"

namespace archflash::ada {

// O += P V for STEP_KEYS keys, as mma_sync::multiply_pv, which sums up all keys in the tensor
// cores. Where these keep 13 bits that would lose most of what is added late, so 16 columns of one
// step are summed from zero there, and these sums are added to O in fp32.
template <class C>
__device__ __forceinline__ void multiply_pv(device::Outputs<C>& o_rmem,
                                            const mma_sync::Probabilities<C>& p_rmem,
                                            uint32_t v_smem /* this lane's row */) {
  static_assert(C::V_PACK == 2, "8-bit V only");
  if constexpr (!ptx::FP8_SUMS_KEEP_13_BITS) {
    mma_sync::multiply_pv<C>(o_rmem, p_rmem, v_smem);
    return;
  }
  constexpr int GROUP = 32;  // keys of a product
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
    // ptxas starts products early, but not before this: with 256 columns registers would spill.
    if (n == 16) __syncwarp();
    float sums_rmem[C::M_TILES][2][4] = {};  // of even and of odd columns
#pragma unroll
    for (int key = 0; key < C::STEP_KEYS; key += GROUP) {
      uint32_t v_rmem[4];
      ptx::ldmatrix_x4_trans(v_rmem,
                             C::VTile::advance(v_smem, n / C::V_PACK) + key * C::VTile::ROW_BYTES);
      const mma_sync::Fp8VFragments v(v_rmem);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        const auto& p = p_rmem[m][key / GROUP];
        ptx::mma_m16n8k32<DType::E4M3, C::DTYPE>(sums_rmem[m][0], p, v.even[0], v.even[1]);
        ptx::mma_m16n8k32<DType::E4M3, C::DTYPE>(sums_rmem[m][1], p, v.odd[0], v.odd[1]);
      }
    }
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o_rmem[m][n + half][i] += sums_rmem[m][half][i];
      }
    }
  }
}

}  // namespace archflash::ada
