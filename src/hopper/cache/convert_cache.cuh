// Makes a 16-bit copy of the rows of an 8-bit KV cache that a call of many query rows reads, in the
// workspace: contiguous sequences of `capacity` rows, whatever pages or rows of a larger cache they
// come from. Descales are left to the attention kernel, so the copies are exact. A CTA copies
// CONVERTED_ROWS rows of K or of V of a sequence, a warp one row of all heads at a time.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/chunked_keys.cuh"
#include "common/device/fp8_rows.cuh"
#include "common/device/kv_cache.cuh"
#include "hopper/cache/cache_params.h"

namespace archflash::hopper {

// The rows of a sequence that its tiles read: whole blocks of keys, from that on in which its first
// row sees a key. Behind its last key come zeros.
struct RowsToConvert {
  int begin, end, end_of_zeros;
};

__device__ __forceinline__ RowsToConvert find_rows_to_convert(const ConvertParams& params,
                                                              int sequence) {
  const AttentionParams& attention = params.attention;
  const int* cu_seqlens_gmem = attention.cu_seqlens_q_gmem;
  const int start = device::sequence_start(cu_seqlens_gmem, sequence, attention.nq);
  const int nq = cu_seqlens_gmem == nullptr
                     ? attention.nq
                     : device::sequence_start(cu_seqlens_gmem, sequence + 1, attention.nq) - start;
  if (nq <= params.few_rows) return {};
  const device::CacheRows rows = device::find_cache_rows(params.cache, sequence);
  const device::Work work{sequence * attention.heads_q, 0, nq, rows.count};
  const device::ChunkedKeys visible{device::find_visible_keys(attention, work),
                                    params.attention_chunk, work.nk - work.nq};
  const int seen = min(max(visible.first(0) - (MOST_CACHE_KEYS - 1), 0), rows.count);
  const int end = rows.first + rows.count;
  return {rows.first + seen, end, min(end + MOST_CACHE_KEYS - 1, params.cache.capacity)};
}

template <DType DTYPE>
__device__ __forceinline__ void convert_cache(const ConvertParams& params) {
  const AttentionParams& attention = params.attention;
  const KvCache& cache = params.cache;
  const bool of_v = blockIdx.x % 2 != 0;
  const int block = static_cast<int>(blockIdx.x / 2);
  const int sequence = block / params.row_blocks;
  const RowsToConvert rows = find_rows_to_convert(params, sequence);
  const int first = block % params.row_blocks * CONVERTED_ROWS;
  const int begin = max(first, rows.begin), end = min(first + CONVERTED_ROWS, rows.end_of_zeros);

  const auto* from_gmem = static_cast<const uint8_t*>(of_v ? attention.v_gmem : attention.k_gmem);
  auto* to_gmem = static_cast<uint4*>(of_v ? params.v_gmem : params.k_gmem);
  const int64_t batch_stride = of_v ? attention.v_batch : attention.k_batch;
  const int64_t head_stride = of_v ? attention.v_head : attention.k_head;
  const int64_t row_stride = of_v ? attention.v_row : attention.k_row;
  const int chunks = (of_v ? attention.dv : attention.d) / CONVERTED_COLUMNS;  // of a head's row
  const int chunks_of_row = attention.heads_q / attention.heads_per_kv * chunks;
  const device::Fp8To16Bits<DTYPE> to_16_bits(params.cache_dtype);

#pragma unroll 1
  for (int row = begin + static_cast<int>(threadIdx.x) / 32; row < end; row += CONVERT_WARPS) {
    const int found = device::find_cache_block(cache, sequence, row);
    const int64_t cache_block = min(max(found, 0), cache.blocks - 1);
    const uint8_t* row_gmem =
        from_gmem + cache_block * batch_stride + row % cache.block_rows * row_stride;
    uint4* copy_gmem =
        to_gmem + (static_cast<int64_t>(sequence) * cache.capacity + row) * chunks_of_row * 2;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % 32; i < chunks_of_row; i += 32) {
      const int head = i / chunks, column = i % chunks * CONVERTED_COLUMNS;
      uint4 bytes{};
      if (row < rows.end)
        bytes = *reinterpret_cast<const uint4*>(row_gmem + head * head_stride + column);
      to_16_bits.convert(bytes, copy_gmem[2 * i], copy_gmem[2 * i + 1]);
    }
  }
}

}  // namespace archflash::hopper
