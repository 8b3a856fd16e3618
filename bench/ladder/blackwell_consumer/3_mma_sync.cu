// Rung 3: tensor cores. Four warps have 16 rows each. Q, scores, P and outputs stay in the
// fragments of mma.sync, so that warps wait for each other only because they share the loads.
#include "fragments.cuh"

using namespace archflash::ladder;
using Rows = PaddedRows;

__device__ __forceinline__ void load_tile(unsigned char* tile_smem, const uint16_t* rows_gmem) {
#pragma unroll
  for (int i = threadIdx.x; i < BLOCK_K * CHUNKS; i += THREADS) {
    *reinterpret_cast<uint4*>(tile_smem + Rows::offset(i / CHUNKS, i % CHUNKS)) =
        *reinterpret_cast<const uint4*>(rows_gmem + 8 * i);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    ladder_rung(const __grid_constant__ Params params) {
  __shared__ alignas(16) unsigned char q_smem[Rows::BYTES], k_smem[Rows::BYTES];
  __shared__ alignas(16) unsigned char v_smem[Rows::BYTES];
  const auto address = [](const void* smem) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  };
  const int64_t head = head_start(params);
  load_tile(q_smem, params.q_gmem + head + blockIdx.x * BLOCK_Q * HEAD_DIM);
  __syncthreads();  // Q is complete, before any warp reads it
  WarpState state;
  start_rows<Rows>(state, address(q_smem));
  for (int key = 0; key < params.n; key += BLOCK_K) {
    __syncthreads();  // all warps have read K and V of the previous block, overwritten below
    load_tile(k_smem, params.k_gmem + head + key * HEAD_DIM);
    load_tile(v_smem, params.v_gmem + head + key * HEAD_DIM);
    __syncthreads();  // K and V are complete, before any warp reads them
    attend_block<Rows>(state, address(k_smem), address(v_smem), params.exp2_scale);
  }
  store_rows(state, params);
}
