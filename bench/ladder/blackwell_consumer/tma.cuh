// The copy of a tile by TMA, and the kernel of rungs 4 and 5, which differ only in how the rows of
// a tile lie in shared memory.
#pragma once

#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "fragments.cuh"

namespace archflash::ladder {

constexpr uint32_t TILE_BYTES = PlainRows::BYTES;

__device__ __forceinline__ uint32_t address(const void* smem) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
}

// One thread starts the copy of the 64 rows from `row` on of this CTA's head. The barrier must
// already expect TILE_BYTES.
__device__ __forceinline__ void start_tile(uint32_t tile_smem, const TensorMap& map, int row,
                                           uint32_t barrier_smem) {
  ptx::cp_async_bulk_tensor_4d_load(tile_smem, map, 0, row, blockIdx.y, 0, barrier_smem);
}

template <class Rows>
__device__ __forceinline__ void attend_by_tma(const Params& params) {
  __shared__ alignas(1024) unsigned char q_smem[TILE_BYTES], k_smem[TILE_BYTES], v_smem[TILE_BYTES];
  __shared__ uint64_t full;
  const uint32_t full_smem = address(&full);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full_smem, 1);  // one arrival: the thread that starts the copies
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barrier is initialised, before any thread waits at it
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(full_smem, TILE_BYTES);
    start_tile(address(q_smem), params.q_map, blockIdx.x * BLOCK_Q, full_smem);
  }
  ptx::mbarrier_wait_parity(full_smem, 0);  // Q has arrived
  WarpState state;
  start_rows<Rows>(state, address(q_smem));
  uint32_t parity = 1;
  for (int key = 0; key < params.n; key += BLOCK_K) {
    ptx::fence_proxy_async_shared();  // this thread's reads come before the copies below
    __syncthreads();  // all warps have read K and V of the previous block, overwritten next
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(full_smem, 2 * TILE_BYTES);
      start_tile(address(k_smem), params.k_map, key, full_smem);
      start_tile(address(v_smem), params.v_map, key, full_smem);
    }
    ptx::mbarrier_wait_parity(full_smem, parity);  // K and V have arrived
    parity ^= 1;
    attend_block<Rows>(state, address(k_smem), address(v_smem), params.exp2_scale);
  }
  store_rows(state, params);
}

}  // namespace archflash::ladder
