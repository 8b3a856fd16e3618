// Rungs 2 to 5: a producer warp copies by TMA into rings of K and of V; consumer warpgroups
// multiply.
//   producer    wait empty | start a block of K, or of V -> full
//   consumers   wait full  | products                    -> empty
#pragma once

#include "common/device/slab_load.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/warp_roles.cuh"
#include "products.cuh"

namespace archflash::ladder {

constexpr int STAGES = 2;  // blocks of K in its ring, and of V in its ring

// The numbers of a rung: consumer warpgroups, and keys of a block.
template <int WARPGROUPS_, int KEYS_>
struct Shape {
  static constexpr int WARPGROUPS = WARPGROUPS_, KEYS = KEYS_;
  static constexpr int CONSUMERS = WARPGROUP * WARPGROUPS;
  // Two warpgroups leave 168 registers for a thread, fewer than outputs, scores and P need. Then
  // the producer is a warpgroup too, of which one warp works: it keeps 24 registers, and consumers
  // take 240.
  static constexpr bool MOVES_REGISTERS = WARPGROUPS > 1;
  static constexpr int THREADS = CONSUMERS + (MOVES_REGISTERS ? WARPGROUP : 32);
  static constexpr int BLOCK_Q = GROUP_ROWS * WARPGROUPS;
  // Shared memory: Q | ring of K | ring of V | barriers.
  static constexpr int K_SMEM = Tile<BLOCK_Q>::BYTES;
  static constexpr int V_SMEM = K_SMEM + STAGES * Tile<KEYS>::BYTES;
  static constexpr int BARRIER_SMEM = V_SMEM + STAGES * Tile<KEYS>::BYTES;
};

// A stage of a ring, and its barriers: full counts the bytes that TMA brings, empty one arrival
// from each consumer warp.
template <class C>
struct Ring {
  uint32_t tiles_smem, barriers_smem;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t tile() const {
    return tiles_smem + stage * Tile<C::KEYS>::BYTES;
  }
  __device__ __forceinline__ uint32_t full() const { return barriers_smem + 8 * stage; }
  __device__ __forceinline__ uint32_t empty() const { return full() + 8 * STAGES; }
  __device__ __forceinline__ void advance() {
    stage ^= 1;
    parity ^= stage == 0;
  }
  __device__ __forceinline__ void init() const {
    for (int i = 0; i < STAGES; ++i) {
      ptx::mbarrier_init(barriers_smem + 8 * i, 1);  // one arrival: the producer
      // One arrival from each consumer warp.
      ptx::mbarrier_init(barriers_smem + 8 * (STAGES + i), C::CONSUMERS / 32);
    }
  }
  // Producer: starts the copy of a block, when all consumer warps have freed the stage.
  __device__ __forceinline__ void fill(const TensorMap& map, int key) {
    ptx::mbarrier_wait_parity(empty(), parity ^ 1);
    device::start_load<Tile<C::KEYS>>(tile(), map, key, blockIdx.y, 0, full());
    advance();
  }
  // Consumer: waits for a block.
  __device__ __forceinline__ void wait() const { ptx::mbarrier_wait_parity(full(), parity); }
  // Consumer: the products of this warp have read the block.
  __device__ __forceinline__ void release() {
    __syncwarp();  // all lanes have waited for the product
    if (ptx::elect_sync()) ptx::mbarrier_arrive(empty());
    advance();
  }
};

// The kernel but for what consumers do: consume(rows, q_smem, k_ring, v_ring, group) is called by
// each consumer warpgroup when Q has arrived.
template <class C, class Consume>
__device__ __forceinline__ void attend(const Params& params, const Consume& consume) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = address(shared), q_full = shared_smem + C::BARRIER_SMEM;
  Ring<C> k_ring{shared_smem + C::K_SMEM, q_full + 8};
  Ring<C> v_ring{shared_smem + C::V_SMEM, q_full + 8 + 16 * STAGES};
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(q_full, 1);  // one arrival: the producer
    k_ring.init();
    v_ring.init();
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised, before any warp waits at them

  if (threadIdx.x >= C::CONSUMERS) {
    if constexpr (C::MOVES_REGISTERS) ptx::setmaxnreg_dec<24>();
    if (threadIdx.x >= C::CONSUMERS + 32 || !ptx::elect_sync()) return;
    device::start_load<Tile<C::BLOCK_Q>>(shared_smem, params.q_map, blockIdx.x * C::BLOCK_Q,
                                         blockIdx.y, 0, q_full);
    for (int key = 0; key < params.n; key += C::KEYS) {
      k_ring.fill(params.k_map, key);
      v_ring.fill(params.v_map, key);
    }
    return;
  }
  if constexpr (C::MOVES_REGISTERS) ptx::setmaxnreg_inc<240>();
  const int group = __shfl_sync(FULL_WARP, threadIdx.x / WARPGROUP, 0);  // uniform in the warp
  const int first_row = blockIdx.x * C::BLOCK_Q + group * GROUP_ROWS;
  ptx::mbarrier_wait_parity(q_full, 0);  // Q has arrived
  Rows<C::KEYS> rows;
  consume(rows, shared_smem + group * GROUP_ROWS * Tile<C::BLOCK_Q>::ROW_BYTES, k_ring, v_ring,
          group);
  rows.store(params.out_gmem + head_start(params) + static_cast<int64_t>(first_row) * HEAD_DIM);
}

// The consumers of rungs 2 and 3: one product, the softmax, the other product.
template <class C>
__device__ __forceinline__ void attend_block_by_block(const Params& params) {
  attend<C>(params,
            [&](Rows<C::KEYS>& rows, uint32_t q_smem, Ring<C>& k_ring, Ring<C>& v_ring, int) {
#pragma unroll 1
              for (int key = 0; key < params.n; key += C::KEYS) {
                k_ring.wait();
                rows.template start_qk<C::BLOCK_Q>(q_smem, k_ring.tile());
                rows.template wait<0>();
                k_ring.release();
                rows.softmax(params.exp2_scale);
                v_ring.wait();
                rows.start_pv(v_ring.tile());
                rows.template wait<0>();
                v_ring.release();
              }
            });
}

}  // namespace archflash::ladder
