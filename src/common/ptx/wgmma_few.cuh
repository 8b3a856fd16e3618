// wgmma of 64 x 16 and 64 x 32 sums with a K-major B, for blocks of few keys; wgmma.cuh has all
// else.
#pragma once

#include "common/ptx/wgmma.cuh"

namespace archflash::ptx {

// Starts D = A B, or D += A B if `add`, with A and B in shared memory, as Wgmma::ss does.
template <DType DTYPE, int N>
__device__ __forceinline__ void wgmma_ss_few(float* d, WgmmaDescriptor a, WgmmaDescriptor b,
                                             int add);

#define ARCHFLASH_WGMMA_FEW(DTYPE, WORD, N, NAMES, I0, I1, I2, I3, I4, ...)                   \
  template <>                                                                                 \
  __device__ __forceinline__ void wgmma_ss_few<DType::DTYPE, N>(float* d, WgmmaDescriptor a,  \
                                                                WgmmaDescriptor b, int add) { \
    asm volatile(                                                                             \
        "{\n.reg .b64 a, b;\n.reg .pred add;\n"                                               \
        "mov.b64 a, {%" #I0 ", %" #I1 "};\nmov.b64 b, {%" #I2 ", %" #I3                       \
        "};\nsetp.ne.b32 add, %" #I4                                                          \
        ", 0;\n"                                                                              \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WORD "." WORD " {" NAMES            \
        "}, a, b, add, 1, 1, 0, 0;\n}\n"                                                      \
        : __VA_ARGS__                                                                         \
        : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(add));                        \
  }
#define ARCHFLASH_SUMS_8(I)                                                                   \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]), \
      "+f"(d[I + 6]), "+f"(d[I + 7])
#define ARCHFLASH_NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define ARCHFLASH_NAMES_16 ARCHFLASH_NAMES_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
ARCHFLASH_WGMMA_FEW(F16, "f16", 16, ARCHFLASH_NAMES_8, 8, 9, 10, 11, 12, ARCHFLASH_SUMS_8(0))
ARCHFLASH_WGMMA_FEW(BF16, "bf16", 16, ARCHFLASH_NAMES_8, 8, 9, 10, 11, 12, ARCHFLASH_SUMS_8(0))
ARCHFLASH_WGMMA_FEW(F16, "f16", 32, ARCHFLASH_NAMES_16, 16, 17, 18, 19, 20, ARCHFLASH_SUMS_8(0),
                    ARCHFLASH_SUMS_8(8))
ARCHFLASH_WGMMA_FEW(BF16, "bf16", 32, ARCHFLASH_NAMES_16, 16, 17, 18, 19, 20, ARCHFLASH_SUMS_8(0),
                    ARCHFLASH_SUMS_8(8))
#undef ARCHFLASH_WGMMA_FEW
#undef ARCHFLASH_SUMS_8
#undef ARCHFLASH_NAMES_8
#undef ARCHFLASH_NAMES_16

}  // namespace archflash::ptx
