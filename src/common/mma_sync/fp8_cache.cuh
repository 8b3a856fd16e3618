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

// A 16-byte chunk of a block of keys of COLUMNS 8-bit columns. Chunks lie in shared memory in the
// order of their numbers, of which thread t has t, t + THREADS and so on. Eight neighbours are four
// chunks of two rows, so that the 16-bit halves that they store lie in different banks.
template <class C, int COLUMNS>
struct RawChunk {
  static constexpr unsigned CHUNKS = COLUMNS / 16;  // of a row
  static constexpr int PER_THREAD = C::BLOCK_K * CHUNKS / C::THREADS;
  static_assert(COLUMNS % 16 == 0 && C::BLOCK_K * CHUNKS % C::THREADS == 0);

  unsigned row, column;  // the column in chunks

  // Number `i` of a thread's own.
  __device__ __forceinline__ RawChunk(unsigned thread, unsigned i) {
    // Where a round of all threads ends with a row, only the row differs from round to round.
    constexpr bool WHOLE_ROWS = C::THREADS % (2 * CHUNKS) == 0;
    const unsigned number = WHOLE_ROWS ? thread : thread + i * C::THREADS;
    if constexpr (CHUNKS % 4 == 0) {
      const unsigned place = number % (2 * CHUNKS);
      row = number / (2 * CHUNKS) * 2 + place / 4 % 2;
      column = place / 8 * 4 + place % 4;
    } else {
      row = number / CHUNKS;
      column = number % CHUNKS;
    }
    if constexpr (WHOLE_ROWS) row += i * (C::THREADS / CHUNKS);
  }
  __device__ __forceinline__ static unsigned raw_offset(unsigned thread, unsigned i) {
    return (thread + i * C::THREADS) * 16;
  }
};

// Starts the copy of BLOCK_K rows of K or V from `key` on, `columns` columns of each. Rows from nk
// on become zeros. Strides are in bytes.
template <class C, int COLUMNS>
__device__ __forceinline__ void start_raw_keys(uint32_t raw_smem, const void* keys_gmem,
                                               int64_t page_stride, int64_t row_stride, int columns,
                                               int key, const CacheContext& cta) {
  using Chunk = RawChunk<C, COLUMNS>;
  const char* first = static_cast<const char*>(keys_gmem);
  const unsigned thread = ptx::mov_tid_x_volatile();
#pragma unroll
  for (int i = 0; i < Chunk::PER_THREAD; ++i) {
    const Chunk own(thread, i);
    const int row = key + static_cast<int>(own.row), column = own.column * 16;
    if (column >= columns) continue;
    const bool valid = row < cta.visible.nk;
    const char* source = first;
    if (valid) {
      source += column + (cta.pages_gmem == nullptr ? row * row_stride
                                                    : cta.offset(row, page_stride, row_stride));
    }
    ptx::cp_async_cg_16(raw_smem + Chunk::raw_offset(thread, i), source, valid ? 16 : 0);
  }
}

// Converts what this thread has copied. `raw` and `tile` are in shared memory.
template <class C, class Tile, int COLUMNS>
__device__ __forceinline__ void convert_keys(unsigned char* tile, const unsigned char* raw,
                                             int columns, const math::Fp8Words<C::DTYPE>& format) {
  using Chunk = RawChunk<C, COLUMNS>;
  const unsigned thread = ptx::mov_tid_x_volatile();
  uint32_t special = 0;
#pragma unroll
  for (int i = 0; i < Chunk::PER_THREAD; ++i) {
    const Chunk own(thread, i);
    if (static_cast<int>(own.column) * 16 >= columns) continue;
    const uint4 bytes = *reinterpret_cast<const uint4*>(raw + Chunk::raw_offset(thread, i));
    special |= format.find_special(bytes.x) | format.find_special(bytes.y) |
               format.find_special(bytes.z) | format.find_special(bytes.w);
    const uint2 quarters[4] = {format.convert(bytes.x), format.convert(bytes.y),
                               format.convert(bytes.z), format.convert(bytes.w)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 first = quarters[2 * half], second = quarters[2 * half + 1];
      *reinterpret_cast<uint4*>(tile + Tile::offset(own.row, 2 * own.column + half)) =
          make_uint4(first.x, first.y, second.x, second.y);
    }
  }
  if (!format.any_special(special)) return;
  // Some number is infinity or NaN, which is rare: all are converted once more, slowly.
#pragma unroll 1
  for (int i = 0; i < 4 * Chunk::PER_THREAD; ++i) {
    const int quarter = i % 4;
    const Chunk own(thread, i / 4);
    if (static_cast<int>(own.column) * 16 >= columns) continue;
    const uint32_t bytes =
        *reinterpret_cast<const uint32_t*>(raw + Chunk::raw_offset(thread, i / 4) + quarter * 4);
    *reinterpret_cast<uint2*>(tile + Tile::offset(own.row, 2 * own.column + quarter / 2) +
                              quarter % 2 * 8) = format.convert_any(bytes);
  }
}

}  // namespace archflash::mma_sync
