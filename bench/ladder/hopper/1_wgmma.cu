// Rung 1: wgmma, and nothing beside it. The threads copy K and V into swizzled tiles, wait for one
// another, wait for each product, and compute the softmax while the tensor cores are idle.
#include "products.cuh"

using namespace archflash;
using namespace archflash::ladder;

constexpr int KEYS = 64;
using Block = Tile<KEYS>;  // of Q as well: 64 rows

__device__ __forceinline__ void copy_tile(unsigned char* tile_smem, const uint16_t* rows_gmem) {
  constexpr int CHUNKS = HEAD_DIM / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < KEYS * CHUNKS; i += WARPGROUP) {
    *reinterpret_cast<uint4*>(tile_smem + Block::offset(i / CHUNKS, i % CHUNKS)) =
        *reinterpret_cast<const uint4*>(rows_gmem + 8 * i);
  }
}

extern "C" __global__ void __launch_bounds__(WARPGROUP)
    ladder_rung(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char *q_smem = shared, *k_smem = q_smem + Block::BYTES, *v_smem = k_smem + Block::BYTES;
  const int64_t head = head_start(params);
  const int64_t rows_start = head + static_cast<int64_t>(blockIdx.x) * GROUP_ROWS * HEAD_DIM;
  copy_tile(q_smem, params.q_gmem + rows_start);
  Rows<KEYS> rows;
#pragma unroll 1
  for (int key = 0; key < params.n; key += KEYS) {
    __syncthreads();  // the products of all warps have read the previous K and V, overwritten next
    copy_tile(k_smem, params.k_gmem + head + key * HEAD_DIM);
    copy_tile(v_smem, params.v_gmem + head + key * HEAD_DIM);
    ptx::fence_proxy_async_shared();  // this thread's stores come before the reads of wgmma
    __syncthreads();                  // Q, K and V are complete, before any warp multiplies them
    rows.start_qk<GROUP_ROWS>(address(q_smem), address(k_smem));
    rows.wait<0>();
    rows.softmax(params.exp2_scale);
    rows.start_pv(address(v_smem));
    rows.wait<0>();
  }
  rows.store(params.out_gmem + rows_start);
}
