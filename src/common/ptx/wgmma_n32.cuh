// wgmma of 64 x 32 sums in 16 bits, for kernels of small head dimensions; wgmma.cuh has all else.
#pragma once

#include "common/ptx/wgmma.cuh"

namespace archflash::ptx {

// SOURCES: the operands a and b. A_SMEM: a is a tile of shared memory. ENDS: which are MN-major.
#define ARCHFLASH_WGMMA_32(WORD, A_SMEM, SOURCES, ENDS, ...)                               \
  asm volatile("{\n.reg .b64 a, b;\n.reg .pred add;\n" A_SMEM                              \
               "mov.b64 b, {%20, %21};\nsetp.ne.b32 add, %22, 0;\n"                        \
               "wgmma.mma_async.sync.aligned.m64n32k16.f32." WORD "." WORD                 \
               " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, " SOURCES        \
               ", b, add, 1, 1" ENDS ";\n}\n"                                              \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),   \
                 "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), \
                 "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                        \
               : __VA_ARGS__, "r"(b.low), "r"(b.high), "r"(add))
#define ARCHFLASH_WGMMA_32_OF(DTYPE, WORD)                                                         \
  template <>                                                                                      \
  struct Wgmma<DType::DTYPE, 32> {                                                                 \
    template <bool B_MN_MAJOR>                                                                     \
    static __device__ __forceinline__ void ss(float* d, WgmmaDescriptor a, WgmmaDescriptor b,      \
                                              int add) {                                           \
      static_assert(B_MN_MAJOR, "not needed: a K-major B of 32 columns");                          \
      ARCHFLASH_WGMMA_32(WORD, "mov.b64 a, {%16, %17};\n", "a", ", 0, 1", "r"(a.low), "r"(a.high), \
                         "r"(0), "r"(0));                                                          \
    }                                                                                              \
    static __device__ __forceinline__ void rs(float* d, const uint32_t (&a)[4], WgmmaDescriptor b, \
                                              int add) {                                           \
      ARCHFLASH_WGMMA_32(WORD, "", "{%16, %17, %18, %19}", ", 1", "r"(a[0]), "r"(a[1]), "r"(a[2]), \
                         "r"(a[3]));                                                               \
    }                                                                                              \
  };
ARCHFLASH_WGMMA_32_OF(F16, "f16")
ARCHFLASH_WGMMA_32_OF(BF16, "bf16")
#undef ARCHFLASH_WGMMA_32_OF
#undef ARCHFLASH_WGMMA_32

}  // namespace archflash::ptx
