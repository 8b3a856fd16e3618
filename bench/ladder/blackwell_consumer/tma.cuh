// One tile by TMA, and the barrier that says when it is there.
#pragma once

#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "fragments.cuh"

namespace archflash::ladder {

constexpr uint32_t TILE_BYTES = PlainRows::BYTES;

__device__ __forceinline__ uint32_t address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// One thread: rows `row` on of this CTA's head. The barrier must have been told the bytes.
__device__ __forceinline__ void start_tile(uint32_t tile_smem, const TensorMap& map, int row,
                                           uint32_t barrier_smem) {
  ptx::cp_async_bulk_tensor_4d_load(tile_smem, map, 0, row, blockIdx.y, 0, barrier_smem);
}

}  // namespace archflash::ladder
