// Stores fragments of mma.sync and wgmma as 8x8 matrices of 16-bit elements to shared memory.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// stmatrix.sync.aligned.m8n8.x4.shared.b16: PTX ISA, "Warp Level Matrix Instructions: stmatrix"
// (sm_90 and up). Lanes 8i to 8i+7 give the 16-byte rows of matrix i; lane l gives in r[i] elements
// 2*(l%4) and 2*(l%4)+1 of row l/4. All lanes of the warp call it together. volatile and "memory":
// it writes memory that others read, and must stay on its side of a barrier.
__device__ __forceinline__ void stmatrix_x4(uint32_t row_smem, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_smem),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace archflash::ptx
