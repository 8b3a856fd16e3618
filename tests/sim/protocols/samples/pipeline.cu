// A product of matrices, built like our kernels for 12.x but as small as possible: one warp loads
// tiles with TMA into a ring of two stages, and four warps multiply them with mma.sync. compile.py
// makes the PTX that the simulator and a card run.
//
//   producer warp      wait empty | expect bytes, start A and B of a tile -> full
//   consumer warps     wait full  | ldmatrix, mma.sync | all lanes have read -> empty
#include <cstdint>

#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash {
namespace {

constexpr int ROWS = 64, COLUMNS = 64,
              DEPTH = 64;  // of a tile; DEPTH bf16 fill the 128-byte swizzle
constexpr int STAGES = 2;
constexpr int WARPS = 4;  // consumer warps, each of which multiplies 16 rows
constexpr int ROW_BYTES = DEPTH * 2;
constexpr int A_BYTES = ROWS * ROW_BYTES, B_BYTES = COLUMNS * ROW_BYTES;

// The address of a 16-byte chunk of a row, whose chunks TMA has swizzled.
__device__ uint32_t chunk_smem(uint32_t tile_smem, int row, int chunk) {
  return tile_smem + row * ROW_BYTES + (chunk ^ row % 8) * 16;
}

}  // namespace

// c (64, 64 * gridDim.x) = a (64, 64 * tiles) * b (64 * gridDim.x, 64 * tiles)^T.
extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1))
    test(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
         float* c_gmem, int tiles) {
  extern __shared__ __align__(1024) unsigned char tiles_smem[];
  __shared__ __align__(8) uint64_t barriers_smem[2 * STAGES];  // full, then empty
  const auto base_smem = static_cast<uint32_t>(__cvta_generic_to_shared(tiles_smem));
  const auto full_smem = static_cast<uint32_t>(__cvta_generic_to_shared(barriers_smem));
  const uint32_t empty_smem = full_smem + 8 * STAGES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      ptx::mbarrier_init(full_smem + 8 * stage, 1);       // the producer, and its bytes
      ptx::mbarrier_init(empty_smem + 8 * stage, WARPS);  // one lane of each
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  if (warp == WARPS) {
    if (ptx::elect_sync()) {
      for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % STAGES, round = tile / STAGES;
        const uint32_t a_smem = base_smem + stage * (A_BYTES + B_BYTES);
        ptx::mbarrier_wait_parity(empty_smem + 8 * stage, round % 2 ^ 1);
        ptx::mbarrier_arrive_expect_tx(full_smem + 8 * stage, A_BYTES + B_BYTES);
        ptx::cp_async_bulk_tensor_4d_load(a_smem, a_map, tile * DEPTH, 0, 0, 0,
                                          full_smem + 8 * stage);
        ptx::cp_async_bulk_tensor_4d_load(a_smem + A_BYTES, b_map, tile * DEPTH,
                                          blockIdx.x * COLUMNS, 0, 0, full_smem + 8 * stage);
      }
    }
    return;
  }

  float c[COLUMNS / 8][4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile % STAGES, round = tile / STAGES;
    const uint32_t a_smem = base_smem + stage * (A_BYTES + B_BYTES), b_smem = a_smem + A_BYTES;
    ptx::mbarrier_wait_parity(full_smem + 8 * stage, round % 2);
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
      uint32_t a[4];
      ptx::ldmatrix_x4(a, chunk_smem(a_smem, warp * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
      for (int column = 0; column < COLUMNS; column += 16) {
        uint32_t b[4];
        const int row = column + lane / 16 * 8 + lane % 8;
        ptx::ldmatrix_x4(b, chunk_smem(b_smem, row, 2 * k + lane / 8 % 2));
        ptx::mma_m16n8k16<DType::BF16>(c[column / 8], a, b[0], b[1]);
        ptx::mma_m16n8k16<DType::BF16>(c[column / 8 + 1], a, b[2], b[3]);
      }
    }
    __syncwarp();  // every lane has read the stage
    if (ptx::elect_sync()) ptx::mbarrier_arrive(empty_smem + 8 * stage);
  }
  const int columns = COLUMNS * static_cast<int>(gridDim.x);
  const int row = warp * 16 + lane / 4, first = blockIdx.x * COLUMNS + lane % 4 * 2;
#pragma unroll
  for (int block = 0; block < COLUMNS / 8; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float2* target =
          reinterpret_cast<float2*>(c_gmem + (row + 8 * half) * columns + first + 8 * block);
      *target = make_float2(c[block][2 * half], c[block][2 * half + 1]);
    }
  }
}

}  // namespace archflash
