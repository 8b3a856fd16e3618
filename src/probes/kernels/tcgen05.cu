// targets: 100f:100f 110f:110f
// Tensor memory, its products for one CTA and for a pair, and launch control.
#include "common/device/matrix_descriptor.h"
#include "common/device/slab_tile.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/f32x2.cuh"
#include "common/ptx/launch_control.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tcgen05.cuh"
#include "common/ptx/tcgen05_pair.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "probes/probe.cuh"

namespace archflash::probes {

constexpr int COLUMNS_OF_SUMS = 256;  // of tensor memory; what lies behind is for A

// Allocates all tensor memory for the life of an object. Four warps call everything together.
struct TensorMemory {
  uint32_t own;  // address of this warp's lanes
  bool pair;

  __device__ __forceinline__ explicit TensorMemory(bool of_pair) : pair(of_pair) {
    __shared__ uint32_t address;
    if (threadIdx.x < 32) {
      if (pair) {
        ptx::tcgen05_pair_alloc<ptx::TMEM_COLUMNS>(shared_address(&address));
        ptx::tcgen05_pair_relinquish_alloc_permit();
      } else {
        ptx::tcgen05_alloc<ptx::TMEM_COLUMNS>(shared_address(&address));
        ptx::tcgen05_relinquish_alloc_permit();
      }
    }
    __syncthreads();
    own = address + ptx::tmem_lanes_of_warp(threadIdx.x / 32);
  }
  __device__ __forceinline__ void free() const {
    ptx::tcgen05_fence_before_thread_sync();
    if (pair) {
      ptx::barrier_cluster_arrive();
      ptx::barrier_cluster_wait();
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      ptx::tcgen05_fence_after_thread_sync();
      if (pair) {
        ptx::tcgen05_pair_dealloc<ptx::TMEM_COLUMNS>(0);
      } else {
        ptx::tcgen05_dealloc<ptx::TMEM_COLUMNS>(0);
      }
    }
  }
};

// Stores of one size, then loads of the other, that overlap in part: each lane gets its own back.
template <int STORED, int LOADED>
__device__ __forceinline__ void copy_through(const Params& params) {
  const TensorMemory memory(false);
  constexpr int COLUMNS = 64;
  for (int column = 0; column < COLUMNS; column += STORED) {
    uint32_t words[STORED];
    for (int i = 0; i < STORED; ++i)
      words[i] = (threadIdx.x * COLUMNS + column + i) * 0x9E3779B1u | 1u;
    ptx::tcgen05_st(memory.own + 128 + column, words);
  }
  ptx::tcgen05_wait_st();
  for (int column = 0; column < COLUMNS; column += LOADED) {
    float words[LOADED];
    ptx::tcgen05_ld(words, memory.own + 128 + column);
    ptx::tcgen05_wait_ld(words);
    for (int i = 0; i < LOADED; ++i)
      params.out[threadIdx.x * COLUMNS + column + i] = __float_as_uint(words[i]);
  }
  memory.free();
}
__device__ __forceinline__ void tmem_st8_ld16(const Params& params) { copy_through<8, 16>(params); }
__device__ __forceinline__ void tmem_st16_ld32(const Params& params) {
  copy_through<16, 32>(params);
}

// Writes numbers into a tile: 16 bits each, or pairs of 8 bits.
template <DType DTYPE, class Tile>
__device__ __forceinline__ void fill(unsigned char* tile, int first) {
  for (int i = threadIdx.x; i < Tile::ROWS * Tile::COLUMNS / 8; i += 128) {
    const int row = i / (Tile::COLUMNS / 8), chunk = i % (Tile::COLUMNS / 8);
    uint32_t* const words = reinterpret_cast<uint32_t*>(tile + Tile::offset(row, chunk));
    for (int word = 0; word < 4; ++word)
      words[word] = numbers<DTYPE>(first + (4 * i + word) * IN_WORD<DTYPE>);
  }
}

__device__ __forceinline__ void write_sums(const Params& params, uint32_t tmem, int columns) {
  const int row = static_cast<int>(blockIdx.x * 128 + threadIdx.x);
  for (int column = 0; column < columns; column += 16) {
    float sums[16];
    ptx::tcgen05_ld(sums, tmem + column);
    ptx::tcgen05_wait_ld(sums);
    for (int i = 0; i < 16; ++i) params.out[row * columns + column + i] = __float_as_uint(sums[i]);
  }
}

enum class A { Shared, SharedMnMajor, TensorMemory };

// D = A B for 128 rows of A, N columns of B, and DEPTH 16-bit columns (or pairs of 8 bits) that are
// summed over, with A in shared memory, K-major or MN-major, or in tensor memory.
template <DType DTYPE, int N, int DEPTH, A PLACE = A::Shared, bool B_MN_MAJOR = false>
__device__ __forceinline__ void product(const Params& params) {
  constexpr bool A_MN_MAJOR = PLACE == A::SharedMnMajor, FP8 = IN_WORD<DTYPE> == 4;
  constexpr int PACK = IN_WORD<DTYPE> / 2, ROWS = PACK * DEPTH;  // of an MN-major tile
  using ATile = std::conditional_t<A_MN_MAJOR, device::SlabTile<128 / PACK, ROWS>,
                                   device::SlabTile<DEPTH, 128>>;
  using BTile =
      std::conditional_t<B_MN_MAJOR, device::SlabTile<N / PACK, ROWS>, device::SlabTile<DEPTH, N>>;
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t barrier_smem = shared_address(&barrier);
  unsigned char* const b_tile = tiles + ATile::BYTES;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier_smem, 1);
    ptx::fence_mbarrier_init();
  }
  const TensorMemory memory(false);
  fill<DTYPE, ATile>(tiles, 0);
  fill<DTYPE, BTile>(b_tile, 100000);
  if constexpr (PLACE == A::TensorMemory) {
    __syncthreads();
    for (int column = 0; column < DEPTH / 2; column += 8) {
      uint32_t words[8];
      for (int i = 0; i < 8; ++i) {
        const int chunk = (column + i) / 4;
        words[i] = *reinterpret_cast<const uint32_t*>(
            tiles + ATile::offset(static_cast<int>(threadIdx.x), chunk) + (column + i) % 4 * 4);
      }
      ptx::tcgen05_st(memory.own + COLUMNS_OF_SUMS + column, words);
    }
    ptx::tcgen05_wait_st();
    ptx::tcgen05_fence_before_thread_sync();
  }
  ptx::fence_proxy_async_shared();
  __syncthreads();
  if (threadIdx.x < 32 && ptx::elect_sync()) {
    ptx::tcgen05_fence_after_thread_sync();
    constexpr uint32_t INSTRUCTION =
        device::instruction_descriptor(DTYPE, 128, N, B_MN_MAJOR, A_MN_MAJOR);
    const uint64_t a_address = device::matrix_descriptor_address(shared_address(tiles));
    const uint64_t b_address = device::matrix_descriptor_address(shared_address(b_tile));
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
      uint64_t a, b;
      if constexpr (A_MN_MAJOR) {
        a = device::MN_MAJOR_FIELDS<ATile> + a_address + device::mn_major_step<ATile, 16 * PACK>(k);
      } else {
        a = device::K_MAJOR_FIELDS<ATile> + a_address + device::k_major_step<ATile>(k);
      }
      if constexpr (B_MN_MAJOR) {
        b = device::MN_MAJOR_FIELDS<BTile> + b_address + device::mn_major_step<BTile, 16 * PACK>(k);
      } else {
        b = device::K_MAJOR_FIELDS<BTile> + b_address + device::k_major_step<BTile>(k);
      }
      const uint32_t a_tmem = memory.own + COLUMNS_OF_SUMS + 8 * k;
      if constexpr (FP8 && PLACE == A::TensorMemory) {
        ptx::tcgen05_mma_f8f6f4(memory.own, a_tmem, b, INSTRUCTION, k > 0);
      } else if constexpr (FP8) {
        ptx::tcgen05_mma_f8f6f4(memory.own, a, b, INSTRUCTION, k > 0);
      } else if constexpr (PLACE == A::TensorMemory) {
        ptx::tcgen05_mma_f16(memory.own, a_tmem, b, INSTRUCTION, k > 0);
      } else {
        ptx::tcgen05_mma_f16(memory.own, a, b, INSTRUCTION, k > 0);
      }
    }
    ptx::tcgen05_commit(barrier_smem);
  }
  __syncwarp();
  ptx::mbarrier_wait_parity(barrier_smem, 0);
  ptx::tcgen05_fence_after_thread_sync();
  write_sums(params, memory.own, N);
  memory.free();
}

// A pair of CTAs allocates tensor memory, multiplies 256 rows of A, of which each has 128, by N
// columns of B, of which each has half, and commits to barriers of both.
template <int N>
__device__ __forceinline__ void product_of_pair(const Params& params) {
  constexpr int DEPTH = 64;
  using ATile = device::SlabTile<DEPTH, 128>;
  using BTile = device::SlabTile<DEPTH, N / 2>;
  extern __shared__ __align__(1024) unsigned char tiles[];
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t barrier_smem = shared_address(&barrier);
  unsigned char* const b_tile = tiles + ATile::BYTES;
  const int rank = static_cast<int>(blockIdx.x % 2);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier_smem, 1);
    ptx::fence_mbarrier_init();
  }
  ptx::barrier_cluster_arrive();  // both CTAs run before they allocate together
  ptx::barrier_cluster_wait();
  const TensorMemory memory(true);
  fill<DType::BF16, ATile>(tiles, 50000 * rank);
  fill<DType::BF16, BTile>(b_tile, 200000 + 50000 * rank);
  ptx::fence_proxy_async_shared();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (rank == 0 && threadIdx.x < 32 && ptx::elect_sync()) {
    ptx::tcgen05_fence_after_thread_sync();
    constexpr uint32_t INSTRUCTION =
        device::instruction_descriptor(DType::BF16, 256, N, false, false);
    const uint64_t a_address = device::matrix_descriptor_address(shared_address(tiles));
    const uint64_t b_address = device::matrix_descriptor_address(shared_address(b_tile));
#pragma unroll
    for (int k = 0; k < DEPTH / 16; ++k) {
      ptx::tcgen05_pair_mma_f16(
          memory.own, device::K_MAJOR_FIELDS<ATile> + a_address + device::k_major_step<ATile>(k),
          device::K_MAJOR_FIELDS<BTile> + b_address + device::k_major_step<BTile>(k), INSTRUCTION,
          k > 0);
    }
    ptx::tcgen05_pair_commit(barrier_smem, 0b11);
  }
  __syncwarp();
  ptx::mbarrier_wait_parity(barrier_smem, 0);
  ptx::tcgen05_fence_after_thread_sync();
  write_sums(params, memory.own, N);
  memory.free();
}

// Each CTA writes its own word, and those of CTAs that it keeps from starting: all words are there
// in the end, whoever wrote them. The shared memory lets one CTA run on an SM.
__device__ __forceinline__ void launch_control(const Params& params) {
  __shared__ __align__(16) uint4 response;
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t response_smem = shared_address(&response), barrier_smem = shared_address(&barrier);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier_smem, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  int cta = static_cast<int>(blockIdx.x);
  uint32_t phase = 0;
  while (cta >= 0) {
    if (ptx::elect_sync()) {
      params.out[cta] = static_cast<uint32_t>(number(cta));
      ptx::mbarrier_arrive_expect_tx(barrier_smem, ptx::LAUNCH_RESPONSE_BYTES);
      ptx::try_cancel_launch(response_smem, barrier_smem);
    }
    __syncthreads();
    ptx::mbarrier_wait_parity(barrier_smem, phase);
    phase ^= 1;
    cta = ptx::canceled_cta(response_smem);
    ptx::fence_proxy_async_shared();  // the read comes before the next response
    __syncthreads();
  }
}

// Launch control for clusters of two: one CTA asks, and both get the response.
__device__ __forceinline__ void launch_control_of_pair(const Params& params) {
  __shared__ __align__(16) uint4 response;
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t response_smem = shared_address(&response), barrier_smem = shared_address(&barrier);
  const int rank = static_cast<int>(blockIdx.x % 2);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier_smem, 1);
    ptx::fence_mbarrier_init();
  }
  __syncwarp();
  int first = static_cast<int>(blockIdx.x) - rank;
  uint32_t phase = 0;
  while (first >= 0) {
    if (ptx::elect_sync()) {
      params.out[first + rank] = static_cast<uint32_t>(number(first + rank));
      ptx::mbarrier_arrive_expect_tx(barrier_smem, ptx::LAUNCH_RESPONSE_BYTES);
    }
    __syncwarp();
    ptx::barrier_cluster_arrive();  // both expect a response, and have read the last one
    ptx::barrier_cluster_wait();
    if (rank == 0 && ptx::elect_sync())
      ptx::try_cancel_launch_for_cluster(response_smem, barrier_smem);
    __syncwarp();
    ptx::mbarrier_wait_parity(barrier_smem, phase);
    phase ^= 1;
    first = ptx::canceled_cta(response_smem);
    ptx::fence_proxy_async_shared();
  }
  ptx::barrier_cluster_arrive();  // neither ends before the other one has its response
  ptx::barrier_cluster_wait();
}

// Each CTA of a pair loads a box; the bytes of both count at the barrier of the first.
__device__ __forceinline__ void tma_load_of_pair(const Params& params) {
  extern __shared__ __align__(1024) uint32_t box[];
  __shared__ __align__(8) uint64_t barrier;
  const uint32_t barrier_smem = shared_address(&barrier);
  const int words = params.columns * params.rows / 2, rank = static_cast<int>(blockIdx.x % 2);
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(barrier_smem, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  ptx::barrier_cluster_arrive();
  ptx::barrier_cluster_wait();
  if (threadIdx.x < 32 && ptx::elect_sync()) {
    if (rank == 0) ptx::mbarrier_arrive_expect_tx(barrier_smem, 2 * 4 * words);
    ptx::cp_async_bulk_tensor_4d_load_of_pair(shared_address(box), params.map, params.column,
                                              params.row + rank * params.rows, 0, 0,
                                              ptx::mapa_shared_cluster(barrier_smem, 0));
  }
  __syncthreads();
  if (rank == 0) ptx::mbarrier_wait_parity(barrier_smem, 0);
  ptx::barrier_cluster_arrive();  // the second CTA knows from the first that its box is there
  ptx::barrier_cluster_wait();
  for (int i = threadIdx.x; i < words; i += blockDim.x) params.out[rank * words + i] = box[i];
}

// Pairs of floats: sums whose rounding shows, products and maxima.
__device__ __forceinline__ void packed_floats(const Params& params) {
  const int lane = threadIdx.x;
  const auto pair = [&](int first, float unit) {
    return make_float2(static_cast<float>(number(first + 2 * lane)) * unit,
                       static_cast<float>(number(first + 2 * lane + 1)) * unit);
  };
  const float2 a = pair(0, 1.0f), b = pair(100, 0x1p-25f), c = pair(200, 1.0f);
  const float2 results[] = {ptx::add_rn_f32x2(a, b), ptx::add_rm_f32x2(a, b),
                            ptx::sub_rn_f32x2(a, b), ptx::mul_rn_f32x2(a, b),
                            ptx::fma_rn_f32x2(a, c, b)};
  for (int i = 0; i < 5; ++i) {
    params.out[64 * i + 2 * lane] = __float_as_uint(results[i].x);
    params.out[64 * i + 2 * lane + 1] = __float_as_uint(results[i].y);
  }
  params.out[320 + lane] = __float_as_uint(ptx::max_nan_f32(a.x, b.y, c.x));
}

constexpr DType F16 = DType::F16, BF16 = DType::BF16, E4M3 = DType::E4M3;

}  // namespace archflash::probes

#define TCGEN05(NAME, ...) \
  ARCHFLASH_ENTRY(probe_tcgen05_##NAME, (128, 1), archflash::probes::product<__VA_ARGS__>)
#define TCGEN05_PAIR(NAME, N) \
  ARCHFLASH_ENTRY(probe_tcgen05_##NAME, (128, 1), archflash::probes::product_of_pair<N>)

using namespace archflash::probes;
PROBE(tmem_st8_ld16, 128)
PROBE(tmem_st16_ld32, 128)
TCGEN05(f16_n64, F16, 64, 64)
TCGEN05(bf16_n128, BF16, 128, 128)
TCGEN05(bf16_n256, BF16, 256, 64)
TCGEN05(bf16_n96_swizzle_64, BF16, 96, 96)
TCGEN05(bf16_n64_b_mn_major, BF16, 64, 64, A::Shared, true)
TCGEN05(bf16_n192_b_mn_major, BF16, 192, 64, A::Shared, true)
TCGEN05(bf16_n128_a_mn_major, BF16, 128, 64, A::SharedMnMajor, true)
TCGEN05(f16_n128_a_in_tmem, F16, 128, 64, A::TensorMemory, true)
TCGEN05(bf16_n256_a_in_tmem, BF16, 256, 128, A::TensorMemory, true)
TCGEN05(e4m3_n64, E4M3, 64, 64)
TCGEN05(e4m3_n256, E4M3, 256, 64)
TCGEN05(e4m3_n128_a_in_tmem, E4M3, 128, 64, A::TensorMemory, true)
TCGEN05_PAIR(pair_n128, 128)
TCGEN05_PAIR(pair_n256, 256)
PROBE(launch_control, 32)
PROBE(launch_control_of_pair, 32)
PROBE(tma_load_of_pair, 64)
PROBE(packed_floats, 32)
