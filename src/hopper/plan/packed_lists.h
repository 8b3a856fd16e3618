// Which tiles of packed sequences a kernel lists before the attention kernels (order_packed.cuh).
#pragma once

#include <cstdint>

#include "hopper/params.h"

namespace archflash::hopper {

// The list of an attention kernel.
struct PackedList {
  PackedTiles* gmem;
  int32_t tile_rows;  // of a head
  uint32_t room;      // for so many tiles; 0: there is no such kernel
};

// The one parameter of the kernel that lists tiles.
struct PackedListsParams {
  const int32_t *cu_seqlens_q_gmem, *cu_seqlens_k_gmem;
  PackedList many, few;
  int32_t few_rows;  // sequences of up to so many rows are in the list `few`; -1: none
  int32_t batch, nq, nk;
};
constexpr int ORDER_PACKED_WARPS = 8;  // of a CTA
constexpr int ORDER_PACKED_THREADS = 32 * ORDER_PACKED_WARPS;

}  // namespace archflash::hopper
