// Rung 6: two buffers. The next block is copied while this one is computed. The rest is rung 5.
#include "tma.cuh"

using namespace archflash;
using namespace archflash::ladder;
using Rows = SwizzledRows;

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  __shared__ alignas(1024) unsigned char q_smem[TILE_BYTES];
  __shared__ alignas(1024) unsigned char k_smem[2][TILE_BYTES], v_smem[2][TILE_BYTES];
  __shared__ uint64_t full[3];  // the barriers of Q and of the two buffers
  const uint32_t full_smem = address(full);
  if (threadIdx.x == 0) {
    // One arrival: the thread that starts the copies.
    for (int i = 0; i < 3; ++i) ptx::mbarrier_init(full_smem + 8 * i, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised, before any thread waits at them
  const auto start_block = [&](int key) {
    const int stage = key / BLOCK_K % 2;
    const uint32_t stage_full = full_smem + 8 + 8 * stage;
    ptx::mbarrier_arrive_expect_tx(stage_full, 2 * TILE_BYTES);
    start_tile(address(k_smem[stage]), params.k_map, key, stage_full);
    start_tile(address(v_smem[stage]), params.v_map, key, stage_full);
  };
  if (threadIdx.x == 0) {
    ptx::mbarrier_arrive_expect_tx(full_smem, TILE_BYTES);
    start_tile(address(q_smem), params.q_map, blockIdx.x * BLOCK_Q, full_smem);
    start_block(0);
  }
  ptx::mbarrier_wait_parity(full_smem, 0);  // Q has arrived
  WarpState state;
  start_rows<Rows>(state, address(q_smem));
  for (int key = 0; key < params.n; key += BLOCK_K) {
    const int block = key / BLOCK_K;
    ptx::fence_proxy_async_shared();  // this thread's reads come before the copies below
    __syncthreads();  // all warps have read the previous block, whose buffer is filled next
    if (threadIdx.x == 0 && key + BLOCK_K < params.n) start_block(key + BLOCK_K);
    ptx::mbarrier_wait_parity(full_smem + 8 + 8 * (block % 2), block / 2 % 2);
    attend_block<Rows>(state, address(k_smem[block % 2]), address(v_smem[block % 2]),
                       params.exp2_scale);
  }
  store_rows(state, params);
}
