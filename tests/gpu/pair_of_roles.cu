// A kernel in the shape of blackwell_dc's pairs of CTAs but without tcgen05, so that GPUs of
// compute capability 9.0 run it, too: clusters of two CTAs that walk over tiles, 16 warps in roles
// that hand registers to each other, copies by TMA through a ring that fills shared memory, and
// arrivals and stores in the other CTA. tests/gpu/pair_of_roles.py plans it.
//
// A tile is 2 x 256 rows of 64 numbers, and each CTA copies 256 of them. It gives their weighted
// sums to the other CTA, which writes them.
//
//     sum    w0-7   a thread for each row: stage -> sum -> `sums` of the other CTA
//     write  w8-11  `sums` -> global memory, two rows a thread
//     load   w12    TMA: 256 rows -> stage
//
// | barrier    | who arrives                         | who waits | why                           |
// |------------|-------------------------------------|-----------|-------------------------------|
// | full       | load, and TMA with its bytes        | sum       | the rows are in the stage     |
// | empty      | each warp of sum, of both CTAs      | load      | the stage may be overwritten  |
// | sums_ready | each warp of sum of the other CTA   | write     | `sums` has all sums           |
// | sums_free  | each warp of write of the other CTA | sum       | its `sums` may be overwritten |
#include <cuda_bf16.h>

#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "common/tensor_map.h"

namespace {

using namespace archflash;

constexpr int CTAS = 2, ROWS = 256, COLUMNS = 64, STAGES = 7;
constexpr int SUM_WARPS = 8, WRITE_WARPS = 4, THREADS = 512;
constexpr int STAGE_BYTES = ROWS * COLUMNS * 2;
constexpr int SUMS = STAGES * STAGE_BYTES;  // offsets in shared memory
constexpr int BARRIERS = SUMS + ROWS * 4;

struct Params {
  float* out;    // (2 * tiles, ROWS)
  int tiles;     // pairs of ROWS rows
  TensorMap in;  // (2 * tiles * ROWS, COLUMNS), bf16; boxes of ROWS rows
};

// The addresses of the barriers, and of what the CTAs share.
struct Shared {
  uint32_t base;  // the first byte of shared memory
  __device__ uint32_t full(int stage) const { return base + BARRIERS + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return full(STAGES + stage); }
  __device__ uint32_t sums_ready() const { return full(2 * STAGES); }
  __device__ uint32_t sums_free() const { return full(2 * STAGES + 1); }
  __device__ uint32_t sums(int row) const { return base + SUMS + 4 * row; }
};

// A place in the ring of stages, and the phase of its barriers.
struct Turn {
  int stage = 0;
  uint32_t phase = 0;
  __device__ void next() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// st.shared::cluster: the address is a result of mapa.
__device__ __forceinline__ void st_shared_cluster(uint32_t cluster_smem, float value) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_smem), "f"(value) : "memory");
}

__device__ __forceinline__ void load(const Params& params, Shared shared, int rank) {
  Turn turn;
  for (int tile = blockIdx.x / CTAS; tile < params.tiles; tile += gridDim.x / CTAS) {
    if (ptx::elect_sync()) {
      // A new barrier passes for phase 1: the first turn of the ring waits for nobody.
      ptx::mbarrier_wait_parity(shared.empty(turn.stage), turn.phase ^ 1);
      ptx::mbarrier_arrive_expect_tx(shared.full(turn.stage), STAGE_BYTES);
      ptx::cp_async_bulk_tensor_4d_load(shared.base + turn.stage * STAGE_BYTES, params.in, 0,
                                        (tile * CTAS + rank) * ROWS, 0, 0, shared.full(turn.stage));
    }
    __syncwarp();
    turn.next();
  }
}

__device__ __forceinline__ void sum(const Params& params, Shared shared, int rank) {
  extern __shared__ __align__(1024) __nv_bfloat16 stages[];
  const int row = threadIdx.x;
  const uint32_t other_sum = ptx::mapa_shared_cluster(shared.sums(row), rank ^ 1);
  const uint32_t other_ready = ptx::mapa_shared_cluster(shared.sums_ready(), rank ^ 1);
  const uint32_t other_empty = ptx::mapa_shared_cluster(shared.empty(0), rank ^ 1);
  Turn turn;
  uint32_t phase = 0;
  for (int tile = blockIdx.x / CTAS; tile < params.tiles; tile += gridDim.x / CTAS) {
    ptx::mbarrier_wait_parity(shared.full(turn.stage), turn.phase);
    const __nv_bfloat16* numbers = stages + (turn.stage * ROWS + row) * COLUMNS;
    float sum = 0;
    for (int i = 0; i < COLUMNS; ++i) sum += (i + 1) * __bfloat162float(numbers[i]);
    // Note: reads of a stage come before TMA overwrites it only with this fence. Without it, on an
    // H200 (2026-11-23, ptxas 13.0.88), the arrival came before the last reads, which have bank
    // conflicts, and sums had numbers of a later tile.
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (ptx::elect_sync()) {
      ptx::mbarrier_arrive(shared.empty(turn.stage));
      ptx::mbarrier_arrive_shared_cluster(other_empty + 8 * turn.stage);
    }
    // The other CTA has written the sums of the tile before.
    ptx::mbarrier_wait_parity_acquire_cluster(shared.sums_free(), phase ^ 1);
    st_shared_cluster(other_sum, sum);
    __syncwarp();
    if (ptx::elect_sync()) ptx::mbarrier_arrive_release_cluster(other_ready);
    __syncwarp();
    turn.next();
    phase ^= 1;
  }
}

__device__ __forceinline__ void write(const Params& params, Shared shared, int rank) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const float* sums = reinterpret_cast<const float*>(bytes + SUMS);
  const uint32_t other_free = ptx::mapa_shared_cluster(shared.sums_free(), rank ^ 1);
  uint32_t phase = 0;
  for (int tile = blockIdx.x / CTAS; tile < params.tiles; tile += gridDim.x / CTAS) {
    ptx::mbarrier_wait_parity_acquire_cluster(shared.sums_ready(), phase);
    float* out = params.out + (tile * CTAS + (rank ^ 1)) * ROWS;
    for (int row = threadIdx.x - SUM_WARPS * 32; row < ROWS; row += WRITE_WARPS * 32) {
      out[row] = rank == 0 ? sums[row] : -sums[row];  // the sign says which CTA wrote it
    }
    __syncwarp();
    if (ptx::elect_sync()) ptx::mbarrier_arrive_release_cluster(other_free);
    __syncwarp();
    phase ^= 1;
  }
}

}  // namespace

extern "C" __global__ __launch_bounds__(THREADS, 1) void pair_of_roles(
    const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char bytes[];
  const Shared shared{static_cast<uint32_t>(__cvta_generic_to_shared(bytes))};
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), rank = blockIdx.x % CTAS;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; ++stage) {
      ptx::mbarrier_init(shared.full(stage), 1);
      ptx::mbarrier_init(shared.empty(stage), CTAS * SUM_WARPS);
    }
    ptx::mbarrier_init(shared.sums_ready(), SUM_WARPS);
    ptx::mbarrier_init(shared.sums_free(), WRITE_WARPS);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  // Both CTAs run and have their barriers before either arrives at the other's.
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (warp < SUM_WARPS) {
    ptx::setmaxnreg_inc<192>();
    sum(params, shared, rank);
  } else if (warp < SUM_WARPS + WRITE_WARPS) {
    ptx::setmaxnreg_dec<80>();
    write(params, shared, rank);
  } else {
    ptx::setmaxnreg_dec<48>();
    if (warp == SUM_WARPS + WRITE_WARPS) load(params, shared, rank);
  }
  // Neither CTA leaves while the other may still store or arrive in its shared memory.
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}
