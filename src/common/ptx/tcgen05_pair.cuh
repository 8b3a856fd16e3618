// Tensor memory and its matrix products for a pair of CTAs, one instruction each.
#pragma once

#include <cstdint>

#include "common/ptx/tcgen05.cuh"

namespace archflash::ptx {

// PTX ISA, "TensorCore 5th Generation Family Instructions", with .cta_group::2. A pair is two CTAs
// of a cluster whose ranks differ in bit 0 only. A kernel allocates, multiplies and commits either
// with these wrappers or with those of tcgen05.cuh, never with both. Loads, stores, waits and
// fences are those of tcgen05.cuh.

// tcgen05.alloc for a pair. A whole warp of each CTA calls it; both CTAs get the same columns once
// both have asked.
template <int COLUMNS>
__device__ __forceinline__ void tcgen05_pair_alloc(uint32_t address_smem) {
  static_assert(COLUMNS >= 32 && COLUMNS <= TMEM_COLUMNS && (COLUMNS & (COLUMNS - 1)) == 0,
                "PTX ISA: a power of two from 32 to 512");
  asm volatile(
      "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(address_smem),
      "n"(COLUMNS)
      : "memory");
}
__device__ __forceinline__ void tcgen05_pair_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;" ::: "memory");
}
template <int COLUMNS>
__device__ __forceinline__ void tcgen05_pair_dealloc(uint32_t address_tmem) {
  asm volatile("tcgen05.dealloc.cta_group::2.sync.aligned.b32 %0, %1;" ::"r"(address_tmem),
               "n"(COLUMNS)
               : "memory");
}

// tcgen05.mma.kind::f16 with M = 256. The first CTA of the pair has rows 0 to 127 of a and d, the
// second one has rows 128 to 255; each CTA has half of the columns of b. One thread of one CTA
// starts the product; the addresses it gives are used in both CTAs.
ARCHFLASH_TCGEN05_MMA(tcgen05_pair_mma_f16, "cta_group::2.kind::f16")

// tcgen05.commit with multicast makes one arrival at this barrier in each CTA of the mask `ctas`
// (bit i stands for rank i) when all earlier products of this thread are done.
__device__ __forceinline__ void tcgen05_pair_commit(uint32_t barrier_smem, uint16_t ctas) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
      "[%0], %1;" ::"r"(barrier_smem),
      "h"(ctas)
      : "memory");
}

}  // namespace archflash::ptx
