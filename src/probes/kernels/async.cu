// targets: 90:90,100,120,ptx
// Barriers of shared memory, the copy engine, clusters, and launches that overlap.
#include "common/ptx/bulk_load.cuh"
#include "common/ptx/bulk_store.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cp_async_arrive.cuh"
#include "common/ptx/global_order.cuh"
#include "common/ptx/grid_dependency.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/red_global.cuh"
#include "common/ptx/stmatrix.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "probes/probe.cuh"

namespace archflash::probes {

template <bool TRANS>
__device__ __forceinline__ void store_matrices(const Params& params) {
  __shared__ __align__(16) uint32_t matrices[4 * 32];
  const int lane = threadIdx.x;
  uint32_t r[4];
  for (int i = 0; i < 4; ++i) r[i] = static_cast<uint32_t>(lane * 4 + i) * 0x10001u + 0x70000u;
  if constexpr (TRANS) {
    ptx::stmatrix_x4_trans(shared_address(matrices + lane * 4), r);
  } else {
    ptx::stmatrix_x4(shared_address(matrices + lane * 4), r);
  }
  __syncwarp();
  for (int i = 0; i < 4; ++i) params.out[lane * 4 + i] = matrices[lane * 4 + i];
}
__device__ __forceinline__ void stmatrix(const Params& params) { store_matrices<false>(params); }
__device__ __forceinline__ void stmatrix_trans(const Params& params) {
  store_matrices<true>(params);
}

// Two warps hand a row over and back by two barriers, whose phases go round twice.
__device__ __forceinline__ void mbarrier(const Params& params) {
  __shared__ uint32_t row[32];
  __shared__ __align__(8) uint64_t barriers[2];
  const uint32_t full = shared_address(barriers), empty = full + 8;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(full, 32);
    ptx::mbarrier_init(empty, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  for (uint32_t turn = 0; turn < 4; ++turn) {
    if (threadIdx.x < 32) {
      ptx::mbarrier_wait_parity(empty, (turn & 1) ^ 1);
      row[lane] = static_cast<uint32_t>(number(turn * 32 + lane));
      ptx::mbarrier_arrive(full);
    } else {
      ptx::mbarrier_wait_parity(full, turn & 1);
      params.out[turn * 32 + lane] = row[lane ^ 3];
      __syncwarp();
      if (ptx::elect_sync()) ptx::mbarrier_arrive(empty);
    }
  }
}

// A box of 16-bit numbers comes to shared memory, with the map's swizzle. Parts of it may lie
// outside of the tensor.
__device__ __forceinline__ void tma_load(const Params& params) {
  extern __shared__ __align__(1024) uint32_t box[];
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t barrier_smem = shared_address(&barrier);
  const int words = params.columns * params.rows / 2;
  if (threadIdx.x < 32 && ptx::elect_sync()) {
    ptx::mbarrier_init(barrier_smem, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier_smem, 4 * words);
    ptx::cp_async_bulk_tensor_4d_load(shared_address(box), params.map, params.column, params.row, 0,
                                      0, barrier_smem);
  }
  __syncthreads();
  ptx::mbarrier_wait_parity(barrier_smem, 0);
  for (int i = threadIdx.x; i < words; i += blockDim.x) params.out[i] = box[i];
}

// Rows come without a tensor map.
__device__ __forceinline__ void bulk_load(const Params& params) {
  __shared__ __align__(16) uint32_t rows[3 * 64];
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t barrier_smem = shared_address(&barrier);
  if (threadIdx.x < 32 && ptx::elect_sync()) {
    ptx::mbarrier_init(barrier_smem, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier_smem, sizeof(rows));
    for (int i = 0; i < 3; ++i)
      ptx::cp_async_bulk_load(shared_address(rows + 64 * i), params.in + 4 + 100 * i, 64 * 4,
                              barrier_smem);
  }
  __syncthreads();
  ptx::mbarrier_wait_parity(barrier_smem, 0);
  for (int i = 0; i < 3; ++i) params.out[64 * i + threadIdx.x] = rows[64 * i + (threadIdx.x ^ 5)];
}

// A warp's copies by cp.async arrive at a barrier by themselves.
__device__ __forceinline__ void cp_async_arrival(const Params& params) {
  __shared__ __align__(16) uint32_t rows[4 * 32];
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t barrier_smem = shared_address(&barrier);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier_smem, 32);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    ptx::cp_async_cg_16(shared_address(rows + 4 * lane), params.in + 4 * lane);
    ptx::cp_async_mbarrier_arrive_noinc(barrier_smem);
  }
  ptx::mbarrier_wait_parity(barrier_smem, 0);
  if (threadIdx.x >= 32) {
    for (int i = 0; i < 4; ++i) params.out[4 * lane + i] = rows[4 * (lane ^ 9) + i];
  }
}

// Four boxes through two stages: the barriers count the bytes of each phase anew.
__device__ __forceinline__ void tma_ring(const Params& params) {
  extern __shared__ __align__(1024) uint32_t box[];
  __shared__ __align__(8) uint64_t barriers[4];
  const uint32_t full = shared_address(barriers), empty = full + 16;
  const int words = params.columns * params.rows / 2;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; ++stage) {
      ptx::mbarrier_init(full + 8 * stage, 1);
      ptx::mbarrier_init(empty + 8 * stage, 1);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  for (int turn = 0; turn < 4; ++turn) {
    const int stage = turn % 2;
    const uint32_t phase = turn / 2 % 2;
    uint32_t* const tile = box + stage * words;
    if (threadIdx.x < 32) {
      ptx::mbarrier_wait_parity(empty + 8 * stage, phase ^ 1);
      if (ptx::elect_sync()) {
        ptx::mbarrier_arrive_expect_tx(full + 8 * stage, 4 * words);
        ptx::cp_async_bulk_tensor_4d_load(shared_address(tile), params.map, params.column,
                                          params.row + turn, 0, 0, full + 8 * stage);
      }
      __syncwarp();
    } else {
      ptx::mbarrier_wait_parity(full + 8 * stage, phase);
      for (int i = threadIdx.x - 32; i < words; i += 32) params.out[turn * words + i] = tile[i];
      ptx::fence_proxy_async_shared();  // the reads come before the next box is written
      __syncwarp();
      if (ptx::elect_sync()) ptx::mbarrier_arrive(empty + 8 * stage);
    }
  }
}

// A box goes out through the map; what lies outside of the tensor is not written.
__device__ __forceinline__ void tma_store(const Params& params) {
  extern __shared__ __align__(1024) uint32_t box[];
  const int words = params.columns * params.rows / 2;
  for (int i = threadIdx.x; i < words; i += blockDim.x) box[i] = numbers<DType::BF16>(2 * i);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x < 32 && ptx::elect_sync()) {
    ptx::cp_async_bulk_tensor_4d_store(params.map, params.column, params.row, 0, 0,
                                       shared_address(box));
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read_0();
  }
}

// Rows of floats: one is stored, then another is added to it twice.
__device__ __forceinline__ void bulk_stores(const Params& params) {
  __shared__ __align__(16) float rows[2 * 64];
  const int thread = threadIdx.x;
  for (int i = 0; i < 2; ++i) rows[64 * i + thread] = static_cast<float>(number(64 * i + thread));
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (thread < 32 && ptx::elect_sync()) {
    float* const out = reinterpret_cast<float*>(params.out);
    ptx::cp_async_bulk_store(out, shared_address(rows), 64 * 4);
    for (int turn = 0; turn < 2; ++turn)
      ptx::cp_reduce_async_bulk_add_f32(out + 64, shared_address(rows + 64), 64 * 4);
    ptx::cp_async_bulk_commit_group();
    ptx::cp_async_bulk_wait_group_read_0();
  }
}

// A box of a tensor whose columns are two dimensions of the map.
__device__ __forceinline__ void tma_load_5d(const Params& params) {
  extern __shared__ __align__(1024) uint32_t box[];
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t barrier_smem = shared_address(&barrier);
  const int words = params.columns * params.rows;  // of two slabs
  if (threadIdx.x < 32 && ptx::elect_sync()) {
    ptx::mbarrier_init(barrier_smem, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier_smem, 4 * words);
    ptx::cp_async_bulk_tensor_5d_load(shared_address(box), params.map, params.column, 0, params.row,
                                      0, 0, barrier_smem);
  }
  __syncthreads();
  ptx::mbarrier_wait_parity(barrier_smem, 0);
  for (int i = threadIdx.x; i < words; i += blockDim.x) params.out[i] = box[i];
}

// Warps add to the same floats.
__device__ __forceinline__ void reductions(const Params& params) {
  float* const out = reinterpret_cast<float*>(params.out);
  const int lane = threadIdx.x % 32, first = static_cast<int>(threadIdx.x) * 4;
  const auto x = [&](int i) { return static_cast<float>(number(first + i)); };
  if (threadIdx.x < 144) out[threadIdx.x] = 0;
  __syncthreads();
  ptx::red_add_v4_f32(out + 4 * lane, x(0), x(1), x(2), x(3));
  ptx::red_add_f32(out + 128 + lane / 2, x(0));
}

// Two CTAs of a cluster write into each other's shared memory and arrive at each other's barrier.
__device__ __forceinline__ void cluster(const Params& params) {
  __shared__ uint32_t row[32];
  __shared__ __align__(8) uint64_t barrier;
  const int lane = threadIdx.x;
  const uint32_t rank = blockIdx.x % 2, barrier_smem = shared_address(&barrier);
  if (lane == 0) {
    ptx::mbarrier_init(barrier_smem, 32);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  const uint32_t other_row = ptx::mapa_shared_cluster(shared_address(row + lane), rank ^ 1);
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(other_row),
               "r"(static_cast<uint32_t>(number(blockIdx.x * 32 + lane)))
               : "memory");
  ptx::mbarrier_arrive_release_cluster(ptx::mapa_shared_cluster(barrier_smem, rank ^ 1));
  ptx::mbarrier_wait_parity_acquire_cluster(barrier_smem, 0);
  params.out[blockIdx.x * 32 + lane] = row[lane];
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

// Two CTAs of a cluster arrive at each other's barrier in turns, which puts nothing else in order.
__device__ __forceinline__ void cluster_turns(const Params& params) {
  __shared__ __align__(8) uint64_t barrier;
  const int lane = threadIdx.x;
  const uint32_t rank = blockIdx.x % 2, barrier_smem = shared_address(&barrier);
  if (lane == 0) {
    ptx::mbarrier_init(barrier_smem, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  for (uint32_t turn = 0; turn < 4; ++turn) {
    if (rank == 1) ptx::mbarrier_wait_parity(barrier_smem, turn & 1);
    params.out[(blockIdx.x * 4 + turn) * 32 + lane] = static_cast<uint32_t>(number(turn + lane));
    if (ptx::elect_sync())
      ptx::mbarrier_arrive_shared_cluster(ptx::mapa_shared_cluster(barrier_smem, rank ^ 1));
    if (rank == 0) ptx::mbarrier_wait_parity(barrier_smem, turn & 1);
  }
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
}

// The first of two kernels lets the second one start before it has written.
__device__ __forceinline__ void dependent_first(const Params& params) {
  ptx::griddepcontrol_launch_dependents();
  for (int turn = 0; turn < 4; ++turn)
    params.out[turn * 32 + threadIdx.x] = static_cast<uint32_t>(number(turn * 32 + threadIdx.x));
}
__device__ __forceinline__ void dependent_second(const Params& params) {
  ptx::griddepcontrol_wait();
  for (int turn = 0; turn < 4; ++turn)
    params.out[(4 + turn) * 32 + threadIdx.x] = 3 * params.out[turn * 32 + (threadIdx.x ^ 7)];
}

}  // namespace archflash::probes

PROBE(stmatrix, 32)
PROBE(stmatrix_trans, 32)
PROBE(mbarrier, 64)
PROBE(tma_load, 64)
PROBE(bulk_load, 64)
PROBE(cp_async_arrival, 64)
PROBE(tma_ring, 64)
PROBE(tma_store, 64)
PROBE(bulk_stores, 64)
PROBE(tma_load_5d, 64)
PROBE(reductions, 256)
PROBE(cluster, 32)
PROBE(cluster_turns, 32)
PROBE(dependent_first, 32)
PROBE(dependent_second, 32)
