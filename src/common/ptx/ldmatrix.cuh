// Moves 8x8 matrices of 16-bit elements between shared memory and the fragments of mma.sync.
#pragma once

#include <cstdint>

namespace archflash::ptx {

// ldmatrix.sync.aligned.m8n8.x4.shared.b16: PTX ISA, "Warp Level Matrix Instructions: ldmatrix"
// (sm_75 and up). Lanes 8i to 8i+7 give the 16-byte rows of matrix i; lane l receives in r[i]
// elements 2*(l%4) and 2*(l%4)+1 of row l/4. All lanes of the warp call it together. volatile and
// "memory": it reads memory that others write, and must stay on its side of a barrier.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_smem)
               : "memory");
}

// ldmatrix with .trans: lane l receives in r[i] element l/4 of rows 2*(l%4) and 2*(l%4)+1.
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row_smem)
               : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 (sm_90 and up): the way back. Lane l gives in r[i]
// elements l/4 of rows 2*(l%4) and 2*(l%4)+1 of matrix i.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row_smem, const uint32_t (&r)[4]) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_smem),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
      : "memory");
}

}  // namespace archflash::ptx
