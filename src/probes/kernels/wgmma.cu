// targets: 90a:90a
// Matrix products of a warpgroup, with each shape, layout and swizzle that kernels use.
#include "common/device/slab_tile.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "probes/probe.cuh"

namespace archflash::probes {

// Writes numbers into a tile, 16 bits each or pairs of 8 bits.
template <DType DTYPE, class Tile>
__device__ __forceinline__ void fill(unsigned char* tile, int first) {
  for (int i = threadIdx.x; i < Tile::ROWS * Tile::COLUMNS / 8; i += 128) {
    const int row = i / (Tile::COLUMNS / 8), chunk = i % (Tile::COLUMNS / 8);
    uint32_t* const words = reinterpret_cast<uint32_t*>(tile + Tile::offset(row, chunk));
    for (int word = 0; word < 4; ++word)
      words[word] = numbers<DTYPE>(first + (4 * i + word) * IN_WORD<DTYPE>);
  }
}

// The descriptor of a tile, with the two swizzles that kernels use.
template <class Tile>
__device__ __forceinline__ ptx::WgmmaDescriptor describe(const unsigned char* tile, int leading) {
  constexpr uint32_t SWIZZLE = Tile::SWIZZLE == Swizzle::B128 ? 1 : 2;
  return {(shared_address(tile) & 0x3FFFF) >> 4 | static_cast<uint32_t>(leading >> 4) << 16,
          static_cast<uint32_t>(8 * Tile::ROW_BYTES >> 4) | SWIZZLE << 30};
}
template <class Tile>
__device__ __forceinline__ ptx::WgmmaDescriptor advance(ptx::WgmmaDescriptor descriptor,
                                                        int column) {
  const int bytes = column / Tile::SLAB * Tile::SLAB_BYTES + column % Tile::SLAB * 2;
  return {descriptor.low + static_cast<uint32_t>(bytes >> 4), descriptor.high};
}

// D = A B for 64 rows of A, N columns of B and all COLUMNS 16-bit columns (or pairs of 8 bits)
// that are summed over. A comes from registers if A_REGISTERS. B's rows are those columns if
// B_MN_MAJOR.
template <DType DTYPE, int N, int COLUMNS, bool A_REGISTERS = false, bool B_MN_MAJOR = false>
__device__ __forceinline__ void wgmma(const Params& params) {
  using ATile = device::SlabTile<COLUMNS, 64>;
  using BTile =
      std::conditional_t<B_MN_MAJOR, device::SlabTile<N, COLUMNS>, device::SlabTile<COLUMNS, N>>;
  extern __shared__ __align__(1024) unsigned char tiles[];
  unsigned char* const b_tile = tiles + ATile::BYTES;
  fill<DTYPE, ATile>(tiles, 0);
  fill<DTYPE, BTile>(b_tile, 100000);
  ptx::fence_proxy_async_shared();
  __syncthreads();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float d[N / 2];
  for (int i = 0; i < N / 2; ++i) d[i] = 0;
  ptx::registers_change<N / 2>(d);
  ptx::wgmma_fence();
  const ptx::WgmmaDescriptor a = describe<ATile>(tiles, 16);
  const ptx::WgmmaDescriptor b =
      describe<BTile>(b_tile, B_MN_MAJOR && BTile::SLABS > 1 ? BTile::SLAB_BYTES : 16);
  uint32_t a_rmem[COLUMNS / 16][4];
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp * 16 + lane / 4 + i % 2 * 8, chunk = 2 * k + i / 2;
      a_rmem[k][i] =
          *reinterpret_cast<const uint32_t*>(tiles + ATile::offset(row, chunk) + lane % 4 * 4);
    }
  }
  using Product = ptx::Wgmma<DTYPE, N>;
  ptx::registers_change<COLUMNS / 16 * 4>(a_rmem[0]);
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < COLUMNS / 16; ++k) {
    const ptx::WgmmaDescriptor b_k =
        B_MN_MAJOR
            ? ptx::WgmmaDescriptor{b.low + static_cast<uint32_t>(16 * k * BTile::ROW_BYTES >> 4),
                                   b.high}
            : advance<BTile>(b, 16 * k);
    if constexpr (A_REGISTERS) {
      Product::template rs<B_MN_MAJOR>(d, a_rmem[k], b_k, k > 0);
    } else {
      Product::template ss<B_MN_MAJOR>(d, advance<ATile>(a, 16 * k), b_k, k > 0);
    }
  }
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>();
  ptx::registers_change<N / 2>(d);
  for (int i = 0; i < N / 2; ++i) params.out[threadIdx.x * (N / 2) + i] = __float_as_uint(d[i]);
}

constexpr DType F16 = DType::F16, BF16 = DType::BF16, E4M3 = DType::E4M3;

}  // namespace archflash::probes

#define WGMMA(NAME, ...) \
  ARCHFLASH_ENTRY(probe_wgmma_##NAME, (128, 1), archflash::probes::wgmma<__VA_ARGS__>)

using namespace archflash::probes;
WGMMA(f16_n64, F16, 64, 64)
WGMMA(bf16_n80, BF16, 80, 128)
WGMMA(bf16_n96_swizzle_64, BF16, 96, 32)
WGMMA(bf16_n128, BF16, 128, 64)
WGMMA(bf16_n192, BF16, 192, 64)
WGMMA(bf16_n256, BF16, 256, 64)
WGMMA(bf16_n64_mn_major, BF16, 64, 64, false, true)
WGMMA(bf16_n128_mn_major, BF16, 128, 64, false, true)
WGMMA(bf16_n96_a_registers, BF16, 96, 64, true, true)
WGMMA(f16_n128_a_registers, F16, 128, 64, true, true)
WGMMA(bf16_n64_a_registers_k_major, BF16, 64, 64, true, false)
WGMMA(e4m3_n64, E4M3, 64, 64)
WGMMA(e4m3_n128, E4M3, 128, 64)
WGMMA(e4m3_n192_a_registers, E4M3, 192, 64, true, false)
