// K and V of a cache of 8-bit numbers: they are copied as they are, and each thread converts what
// it has copied itself into the tiles in 16 bits that the products read. So a copy needs no barrier
// before it is converted, and the next one overlaps the products.
#pragma once

#include <cstdint>

#include "common/math/fp8_to_16_bits.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// The 16-byte chunks of a block of keys of COLUMNS 8-bit columns: chunk number `index` is one of
// row index / CHUNKS.
template <class C, int COLUMNS>
struct RawChunks {
  static constexpr int CHUNKS = COLUMNS / 16;
  static constexpr int PER_THREAD = C::BLOCK_K * CHUNKS / C::THREADS;
  static_assert(COLUMNS % 16 == 0 && C::BLOCK_K * CHUNKS % C::THREADS == 0);
};

// Starts the copy of BLOCK_K rows of K or V from `key` on, `columns` columns of each. Rows from nk
// on become zeros. Strides are in bytes.
template <class C, int COLUMNS>
__device__ __forceinline__ void start_raw_keys(uint32_t raw_smem, const void* keys_gmem,
                                               int64_t page_stride, int64_t row_stride, int columns,
                                               int key, const CacheContext& cta) {
  using Raw = RawChunks<C, COLUMNS>;
  const char* first = static_cast<const char*>(keys_gmem);
  const int thread = ptx::mov_tid_x_volatile();
#pragma unroll
  for (int i = 0; i < Raw::PER_THREAD; ++i) {
    const int index = thread + i * C::THREADS;
    const int row = key + index / Raw::CHUNKS, column = index % Raw::CHUNKS * 16;
    if (column >= columns) continue;
    const bool valid = row < cta.visible.nk;
    const char* source = first;
    if (valid) {
      source += column + (cta.pages_gmem == nullptr ? row * row_stride
                                                    : cta.offset(row, page_stride, row_stride));
    }
    ptx::cp_async_cg_16(raw_smem + index * 16, source, valid ? 16 : 0);
  }
}

// Converts what this thread has copied. `raw` and `tile` are in shared memory.
template <class C, class Tile, int COLUMNS>
__device__ __forceinline__ void convert_keys(unsigned char* tile, const unsigned char* raw,
                                             int columns, const math::Fp8Format& format) {
  using Raw = RawChunks<C, COLUMNS>;
  const int thread = ptx::mov_tid_x_volatile();
#pragma unroll
  for (int i = 0; i < Raw::PER_THREAD; ++i) {
    const int index = thread + i * C::THREADS;
    const int row = index / Raw::CHUNKS, chunk = index % Raw::CHUNKS;
    if (chunk * 16 >= columns) continue;
    const uint4 bytes = *reinterpret_cast<const uint4*>(raw + index * 16);
    const uint32_t words[4] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t pairs[4];
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const uint32_t word = words[2 * half + pair / 2];
        pairs[pair] = format.to_16_bits<C::DTYPE>(pair % 2 == 0 ? word : word >> 16);
      }
      *reinterpret_cast<uint4*>(tile + Tile::offset(row, 2 * chunk + half)) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}

}  // namespace archflash::mma_sync
