// Rung 7: warps have two roles. The producer warp only starts copies, as soon as all consumer warps
// have freed a buffer. Consumer warps wait for data and never for each other. The rest is rung 6.
//   producer    wait empty | start K, V -> full
//   consumers   wait full  | attend     -> empty
#include "common/ptx/warp_roles.cuh"
#include "tma.cuh"

using namespace archflash;
using namespace archflash::ladder;
using Rows = SwizzledRows;

constexpr int STAGES = 2;

extern "C" __global__ void __launch_bounds__(THREADS + 32)
    ladder_rung(const __grid_constant__ Params params) {
  __shared__ alignas(1024) unsigned char q_smem[TILE_BYTES];
  __shared__ alignas(1024) unsigned char k_smem[STAGES][TILE_BYTES], v_smem[STAGES][TILE_BYTES];
  __shared__ uint64_t barriers[1 + 2 * STAGES];
  const uint32_t q_full = address(barriers);
  const auto full = [&](int stage) { return q_full + 8 + 8 * stage; };
  const auto empty = [&](int stage) { return full(stage) + 8 * STAGES; };
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(q_full, 1);  // one arrival: the producer
    for (int stage = 0; stage < STAGES; ++stage) {
      ptx::mbarrier_init(full(stage), 1);       // one arrival: the producer
      ptx::mbarrier_init(empty(stage), WARPS);  // one arrival from each consumer warp
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised, before any warp waits at them

  if (threadIdx.x >= THREADS) {
    if (!ptx::elect_sync()) return;
    ptx::mbarrier_arrive_expect_tx(q_full, TILE_BYTES);
    start_tile(address(q_smem), params.q_map, blockIdx.x * BLOCK_Q, q_full);
    for (int block = 0; block < params.n / BLOCK_K; ++block) {
      const int stage = block % STAGES;
      // At first the buffers are free: waiting for parity 1 at a new barrier returns at once.
      ptx::mbarrier_wait_parity(empty(stage), block / STAGES % 2 ^ 1);
      ptx::mbarrier_arrive_expect_tx(full(stage), 2 * TILE_BYTES);
      start_tile(address(k_smem[stage]), params.k_map, block * BLOCK_K, full(stage));
      start_tile(address(v_smem[stage]), params.v_map, block * BLOCK_K, full(stage));
    }
    return;
  }
  ptx::mbarrier_wait_parity(q_full, 0);  // Q has arrived
  WarpState state;
  start_rows<Rows>(state, address(q_smem));
  for (int block = 0; block < params.n / BLOCK_K; ++block) {
    const int stage = block % STAGES;
    ptx::mbarrier_wait_parity(full(stage), block / STAGES % 2);  // K and V have arrived
    attend_block<Rows>(state, address(k_smem[stage]), address(v_smem[stage]), params.exp2_scale);
    ptx::fence_proxy_async_shared();  // this thread's reads come before the copies that overwrite
    __syncwarp();                     // all lanes have read the buffer, before one of them frees it
    if (ptx::elect_sync()) ptx::mbarrier_arrive(empty(stage));
  }
  store_rows(state, params);
}
