// Copies of tensors whose rows kernels of attention cannot read or write: gather() copies them into
// dense rows of whole chunks, with zeros behind their columns, and scatter() copies dense rows
// back. A CTA copies up to ROWS rows of one head, a thread one chunk of 16 bytes at a time.
#pragma once

#include <cstdint>

#include "copy/params.h"

namespace archflash::copy {

// The Unit at `offset` bytes.
template <class Unit>
__device__ __forceinline__ Unit& unit_at(void* row_gmem, int64_t offset) {
  return *reinterpret_cast<Unit*>(static_cast<unsigned char*>(row_gmem) + offset);
}

template <class Unit>
__device__ __forceinline__ void gather_chunk(const Copy& copy, void* given_row_gmem,
                                             uint4* dense_gmem, int chunk) {
  constexpr int UNITS = CHUNK_BYTES / sizeof(Unit);
  constexpr int UNITS_OF_WORD = sizeof(Unit) < 8 ? 8 / sizeof(Unit) : 1;
  uint64_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    const int unit = chunk * UNITS + i;
    if (unit >= copy.units) continue;
    const uint64_t bits = unit_at<Unit>(given_row_gmem, unit * copy.given_unit);
    words[i / UNITS_OF_WORD] |= bits << (i % UNITS_OF_WORD * 8 * sizeof(Unit));
  }
  *dense_gmem = {static_cast<uint32_t>(words[0]), static_cast<uint32_t>(words[0] >> 32),
                 static_cast<uint32_t>(words[1]), static_cast<uint32_t>(words[1] >> 32)};
}

template <class Unit>
__device__ __forceinline__ void scatter_chunk(const Copy& copy, void* given_row_gmem,
                                              const uint4* dense_gmem, int chunk) {
  constexpr int UNITS = CHUNK_BYTES / sizeof(Unit);
  constexpr int UNITS_OF_WORD = sizeof(Unit) < 8 ? 8 / sizeof(Unit) : 1;
  const uint4 bits = *dense_gmem;
  const uint64_t words[2] = {bits.x | static_cast<uint64_t>(bits.y) << 32,
                             bits.z | static_cast<uint64_t>(bits.w) << 32};
#pragma unroll
  for (int i = 0; i < UNITS; ++i) {
    const int unit = chunk * UNITS + i;
    if (unit >= copy.units) continue;
    unit_at<Unit>(given_row_gmem, unit * copy.given_unit) =
        static_cast<Unit>(words[i / UNITS_OF_WORD] >> (i % UNITS_OF_WORD * 8 * sizeof(Unit)));
  }
}

template <bool GATHERS>
__device__ __forceinline__ void copy_chunk(const Copy& copy, void* given_row_gmem,
                                           void* dense_row_gmem, int chunk) {
  uint4* dense_gmem = static_cast<uint4*>(dense_row_gmem) + chunk;
  const auto move = [&]<class Unit>(Unit) {
    if constexpr (GATHERS) {
      gather_chunk<Unit>(copy, given_row_gmem, dense_gmem, chunk);
    } else {
      scatter_chunk<Unit>(copy, given_row_gmem, dense_gmem, chunk);
    }
  };
  switch (copy.unit_bytes) {
    case 8:
      return move(uint64_t{});
    case 4:
      return move(uint32_t{});
    case 2:
      return move(uint16_t{});
    default:
      return move(uint8_t{});
  }
}

template <bool GATHERS>
__device__ __forceinline__ void copy_rows(const Params& params) {
  const int32_t block = static_cast<int32_t>(blockIdx.x);
  Copy copy = params.copy[0];
#pragma unroll
  for (int i = 1; i < MOST_COPIES; ++i) {  // numbers of parameters must be constants
    if (i < params.copies && block >= params.copy[i].first_block) copy = params.copy[i];
  }
  const int32_t of_copy = block - copy.first_block;
  const int32_t plane = of_copy / copy.row_blocks;
  const int32_t first_row = of_copy % copy.row_blocks * ROWS;
  const int64_t batch = plane / copy.heads, head = plane % copy.heads;
  const int32_t rows = min(ROWS, copy.rows - first_row);
  unsigned char* given_gmem = static_cast<unsigned char*>(copy.given_gmem) +
                              batch * copy.given_batch + head * copy.given_head;
  unsigned char* dense_gmem = static_cast<unsigned char*>(copy.dense_gmem) +
                              batch * copy.dense_batch + head * copy.dense_head;
  for (int item = threadIdx.x; item < ROWS * copy.chunks; item += THREADS) {
    const int row = copy.rows_first ? item % ROWS : item / copy.chunks;
    const int chunk = copy.rows_first ? item / ROWS : item % copy.chunks;
    if (row >= rows) continue;
    const int64_t of_head = first_row + row;
    copy_chunk<GATHERS>(copy, given_gmem + of_head * copy.given_row,
                        dense_gmem + of_head * copy.dense_row, chunk);
  }
}

}  // namespace archflash::copy
