// Tensor memory and its matrix products, one instruction each.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace archflash::ptx {

// PTX ISA, "TensorCore 5th Generation Family Instructions" (sm_100f, sm_103a and others). The
// tensor memory of an SM has 128 lanes of 512 columns of 32 bits; an address is lane << 16 |
// column. All wrappers are volatile with "memory", because they act on memory that the compiler
// does not see and must not move across waits and barriers.
constexpr int TMEM_COLUMNS = 512;

// The first of the 32 lanes that a warp may access, as the lane field of an address.
__device__ __forceinline__ uint32_t tmem_lanes_of_warp(unsigned warp) {
  return warp % 4 * 32 << 16;
}

// tcgen05.alloc allocates columns and writes the address of the first one to shared memory. It
// waits while other CTAs of the SM hold too many. The whole warp calls it.
template <int COLUMNS>
__device__ __forceinline__ void tcgen05_alloc(uint32_t address_smem) {
  static_assert(COLUMNS >= 32 && COLUMNS <= TMEM_COLUMNS && (COLUMNS & (COLUMNS - 1)) == 0,
                "PTX ISA: a power of two from 32 to 512");
  asm volatile(
      "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(address_smem),
      "n"(COLUMNS)
      : "memory");
}

// tcgen05.relinquish_alloc_permit declares that this CTA will allocate no more columns. The whole
// warp calls it.
__device__ __forceinline__ void tcgen05_relinquish_alloc_permit() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
}

// tcgen05.dealloc frees the columns that tcgen05_alloc returned, which nobody may use any more. The
// whole warp calls it.
template <int COLUMNS>
__device__ __forceinline__ void tcgen05_dealloc(uint32_t address_tmem) {
  asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(address_tmem),
               "n"(COLUMNS)
               : "memory");
}

// An instruction descriptor of operands of a type. Of a text for bf16 the build makes that for fp16
// with the descriptor of the other type, which it knows by the comment (text_for_f16 in
// _build/build_kernel.py). Volatile, so that it stays where it is needed.
template <DType DTYPE, uint32_t DESCRIPTOR>
__device__ __forceinline__ uint32_t mov_instruction_descriptor() {
  uint32_t x = DESCRIPTOR;
  if constexpr (DTYPE == DType::BF16) {
    asm volatile("mov.b32 %0, %1;  // operands bf16" : "=r"(x) : "n"(DESCRIPTOR));
  } else if constexpr (DTYPE == DType::F16) {
    asm volatile("mov.b32 %0, %1;  // operands f16" : "=r"(x) : "n"(DESCRIPTOR));
  }
  return x;
}

// Defines two overloads of NAME, which is the instruction tcgen05.mma.CTA_GROUP_AND_KIND. One
// thread starts d = a b, or d += a b if `accumulate`. d is in tensor memory, b in shared memory,
// given by its matrix descriptor. One overload takes a from shared memory (its descriptor), the
// other from tensor memory (its address).
#define ARCHFLASH_TCGEN05_MMA_WITH_A(NAME, CTA_GROUP_AND_KIND, A_TYPE, A_CONSTRAINT, A_OPERAND) \
  __device__ __forceinline__ void NAME(uint32_t d_tmem, A_TYPE a, uint64_t b_descriptor,        \
                                       uint32_t instruction, bool accumulate) {                 \
    asm volatile(                                                                               \
        "{\n"                                                                                   \
        ".reg .pred accumulate;\n"                                                              \
        "setp.ne.u32 accumulate, %4, 0;\n"                                                      \
        "tcgen05.mma." CTA_GROUP_AND_KIND " [%0], " A_OPERAND                                   \
        ", %2, %3, accumulate;\n"                                                               \
        "}\n" ::"r"(d_tmem),                                                                    \
        A_CONSTRAINT(a), "l"(b_descriptor), "r"(instruction),                                   \
        "r"(static_cast<uint32_t>(accumulate))                                                  \
        : "memory");                                                                            \
  }
#define ARCHFLASH_TCGEN05_MMA(NAME, CTA_GROUP_AND_KIND)                       \
  ARCHFLASH_TCGEN05_MMA_WITH_A(NAME, CTA_GROUP_AND_KIND, uint64_t, "l", "%1") \
  ARCHFLASH_TCGEN05_MMA_WITH_A(NAME, CTA_GROUP_AND_KIND, uint32_t, "r", "[%1]")

// Multiplies 16 columns of 16-bit a. In tensor memory these are eight columns of two elements.
ARCHFLASH_TCGEN05_MMA(tcgen05_mma_f16, "cta_group::1.kind::f16")
// Multiplies 32 columns of 8-bit a. In tensor memory these are eight columns of four elements.
ARCHFLASH_TCGEN05_MMA(tcgen05_mma_f8f6f4, "cta_group::1.kind::f8f6f4")

// tcgen05.commit makes one arrival at the barrier when all earlier products of this thread are
// done. It implies fence::before_thread_sync.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier_smem) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(
                   barrier_smem)
               : "memory");
}

// tcgen05.fence::before_thread_sync orders this thread's earlier tcgen05 instructions before the
// barrier that follows. tcgen05.fence::after_thread_sync orders its later tcgen05 instructions
// after the barrier that came before.
__device__ __forceinline__ void tcgen05_fence_before_thread_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_fence_after_thread_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// tcgen05.ld.32x32b: lane l of the warp receives N columns from `tmem` on of tensor-memory lane
// 32 * (warp % 4) + l. The results may be used after tcgen05_wait_ld().
template <int N>
__device__ __forceinline__ void tcgen05_ld(float (&r)[N], uint32_t tmem) {
  static_assert(N == 16 || N == 32, "the sizes that kernels use");
  if constexpr (N == 16) {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x16.b32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, [%16];"
        : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3]), "=f"(r[4]), "=f"(r[5]), "=f"(r[6]),
          "=f"(r[7]), "=f"(r[8]), "=f"(r[9]), "=f"(r[10]), "=f"(r[11]), "=f"(r[12]), "=f"(r[13]),
          "=f"(r[14]), "=f"(r[15])
        : "r"(tmem)
        : "memory");
  } else {
    asm volatile(
        "tcgen05.ld.sync.aligned.32x32b.x32.b32 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, [%32];"
        : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3]), "=f"(r[4]), "=f"(r[5]), "=f"(r[6]),
          "=f"(r[7]), "=f"(r[8]), "=f"(r[9]), "=f"(r[10]), "=f"(r[11]), "=f"(r[12]), "=f"(r[13]),
          "=f"(r[14]), "=f"(r[15]), "=f"(r[16]), "=f"(r[17]), "=f"(r[18]), "=f"(r[19]), "=f"(r[20]),
          "=f"(r[21]), "=f"(r[22]), "=f"(r[23]), "=f"(r[24]), "=f"(r[25]), "=f"(r[26]), "=f"(r[27]),
          "=f"(r[28]), "=f"(r[29]), "=f"(r[30]), "=f"(r[31])
        : "r"(tmem)
        : "memory");
  }
}

// tcgen05.wait::ld waits until all earlier tcgen05.ld of this warp are complete. `r` is what they
// loaded; passing it keeps the compiler from moving its uses before the wait.
template <int N>
__device__ __forceinline__ void tcgen05_wait_ld(float (&r)[N]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i]));
}
template <int M, int N>
__device__ __forceinline__ void tcgen05_wait_ld(float (&r)[M][N]) {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#pragma unroll
  for (int i = 0; i < M; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) asm volatile("" : "+f"(r[i][j]));
  }
}

// tcgen05.st.32x32b: lane l of the warp writes N columns from `tmem` on of tensor-memory lane
// 32 * (warp % 4) + l. Other warps may read them after tcgen05_wait_st() and a barrier.
template <int N>
__device__ __forceinline__ void tcgen05_st(uint32_t tmem, const uint32_t (&r)[N]) {
  static_assert(N == 8 || N == 16, "the sizes that kernels use");
  if constexpr (N == 8) {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x8.b32 [%0], {%1, %2, %3, %4, %5, %6, %7, %8};" ::"r"(tmem),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7])
        : "memory");
  } else {
    asm volatile(
        "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], "
        "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16};" ::"r"(tmem),
        "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(r[4]), "r"(r[5]), "r"(r[6]), "r"(r[7]),
        "r"(r[8]), "r"(r[9]), "r"(r[10]), "r"(r[11]), "r"(r[12]), "r"(r[13]), "r"(r[14]), "r"(r[15])
        : "memory");
  }
}
__device__ __forceinline__ void tcgen05_st(uint32_t tmem, const float (&r)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%0], "
      "{%1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16};" ::"r"(tmem),
      "f"(r[0]), "f"(r[1]), "f"(r[2]), "f"(r[3]), "f"(r[4]), "f"(r[5]), "f"(r[6]), "f"(r[7]),
      "f"(r[8]), "f"(r[9]), "f"(r[10]), "f"(r[11]), "f"(r[12]), "f"(r[13]), "f"(r[14]), "f"(r[15])
      : "memory");
}

// tcgen05.wait::st waits until all earlier tcgen05.st of this warp are complete.
__device__ __forceinline__ void tcgen05_wait_st() {
  asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory");
}

}  // namespace archflash::ptx
