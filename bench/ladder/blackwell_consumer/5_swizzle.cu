// Rung 5: the 128-byte swizzle. TMA permutes the chunks of each row by its number, and ldmatrix
// reads them where they are: no two of eight rows meet in a bank. The rest is rung 4.
#include "tma.cuh"

using namespace archflash;
using namespace archflash::ladder;
using Rows = SwizzledRows;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  __shared__ alignas(1024) unsigned char q_smem[TILE_BYTES], k_smem[TILE_BYTES], v_smem[TILE_BYTES];
  __shared__ uint64_t full;
  const uint32_t full_smem = address(&full);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full_smem, 1);  // the thread that asks
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barrier is ready
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(full_smem, TILE_BYTES);
    start_tile(address(q_smem), params.q_map, blockIdx.x * BLOCK_Q, full_smem);
  }
  ptx::mbarrier_wait_parity(full_smem, 0);  // Q has landed
  WarpState state;
  start_rows<Rows>(state, address(q_smem));
  uint32_t parity = 1;
  for (int key = 0; key < params.n; key += BLOCK_K) {
    __syncthreads();  // everyone is done with K and V of the block before
    if (threadIdx.x == 0) {
      ptx::mbarrier_arrive_expect_tx(full_smem, 2 * TILE_BYTES);
      start_tile(address(k_smem), params.k_map, key, full_smem);
      start_tile(address(v_smem), params.v_map, key, full_smem);
    }
    ptx::mbarrier_wait_parity(full_smem, parity);  // K and V have landed
    parity ^= 1;
    attend_block<Rows>(state, address(k_smem), address(v_smem), params.exp2_scale);
  }
  store_rows(state, params);
}
