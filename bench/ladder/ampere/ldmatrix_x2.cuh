// The instruction that loads one fragment of V, which only the first rungs use.
#pragma once

#include <cstdint>

namespace archflash::ladder {

// ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16: PTX ISA, "Warp Level Matrix Instructions:
// ldmatrix" (sm_75 and up). Lanes 0 to 7 and 8 to 15 give the 16-byte rows of two matrices; lane l
// receives of each element l/4 of rows 2*(l%4) and 2*(l%4)+1. volatile and "memory": it reads
// memory that others write, and must stay on its side of a barrier.
__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t& r0, uint32_t& r1, uint32_t row_smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r0), "=r"(r1)
               : "r"(row_smem)
               : "memory");
}

}  // namespace archflash::ladder
