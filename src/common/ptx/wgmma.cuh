// Matrix products of a warpgroup (four warps): B comes from shared memory, A from shared memory or
// registers, and the sums stay in registers while the product runs beside other instructions.
#pragma once

#include <cstdint>

#include "common/dtype.h"

namespace archflash::ptx {

// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions" (sm_90a only). All wrappers are
// called by all threads of a warpgroup, and are volatile with "memory" where they order accesses.

// wgmma.fence comes before the first product, and before a product whose registers (sums or A)
// other instructions have used since.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// wgmma.commit_group makes a group of the products since the last one.
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group waits until at most PENDING groups are unfinished, the newest ones. Only then
// may their registers be used, or their tiles in shared memory be overwritten.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// No instruction: tells the compiler that these registers change here. It does not know that a
// product writes its sums until wgmma_wait_group(), and would move their uses across the wait.
template <int COUNT>
__device__ __forceinline__ void registers_change(float* rmem) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(rmem[i])::"memory");
}
template <int COUNT>
__device__ __forceinline__ void registers_change(uint32_t* rmem) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(rmem[i])::"memory");
}

// registers_change() of registers whose values nobody needs, which then take none before here.
template <int COUNT>
__device__ __forceinline__ void registers_begin(float* rmem) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "=f"(rmem[i])::"memory");
}

// A shared-memory descriptor of wgmma in two registers, so that the steps inside a tile are added
// to 32 bits only.
struct WgmmaDescriptor {
  uint32_t low, high;
};

// wgmma.mma_async.sync.aligned.m64nNk16.f32: D = A B, or D += A B if `add`, for 64 x 16 of A and
// 16 x N of B in 16 bits; in 8 bits m64nNk32 for 64 x 32 of A and 32 x N of B. Each warp has 16
// rows. With g = lane / 4 and t = lane % 4, a lane's sums are d[4n + 0, 1]: row g, columns 8n + 2t,
// + 1, and d[4n + 2, 3]: row g + 8, the same columns.
//   ss: A and B are K-major tiles of shared memory; with B_MN_MAJOR B is an MN-major one
//       (16 bits only).
//   rs: A is in registers, with the lane's fragment of mma_m16n8k16; B is an MN-major tile, of
//       which a row holds the N columns of one k, and without B_MN_MAJOR a K-major one; in 8 bits
//       always a K-major tile.
template <DType DTYPE, int N>
struct Wgmma;

// The operand lists for N: names and constraints of N / 2 sums, then the numbers of the operands
// that follow.
// clang-format off
#define ARCHFLASH_TEN(T) "%" #T "0,%" #T "1,%" #T "2,%" #T "3,%" #T "4,%" #T "5,%" #T "6,%" #T "7,%" #T "8,%" #T "9"
#define ARCHFLASH_NAMES_24 ARCHFLASH_TEN() "," ARCHFLASH_TEN(1) ",%20,%21,%22,%23"
#define ARCHFLASH_NAMES_32 ARCHFLASH_TEN() "," ARCHFLASH_TEN(1) "," ARCHFLASH_TEN(2) ",%30,%31"
#define ARCHFLASH_NAMES_40 ARCHFLASH_TEN() "," ARCHFLASH_TEN(1) "," ARCHFLASH_TEN(2) "," ARCHFLASH_TEN(3)
#define ARCHFLASH_NAMES_48 ARCHFLASH_NAMES_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define ARCHFLASH_NAMES_64 ARCHFLASH_NAMES_40 "," ARCHFLASH_TEN(4) "," ARCHFLASH_TEN(5) ",%60,%61,%62,%63"
#define ARCHFLASH_NAMES_96                                                                        \
  ARCHFLASH_NAMES_40 "," ARCHFLASH_TEN(4) "," ARCHFLASH_TEN(5) "," ARCHFLASH_TEN(6) ","           \
  ARCHFLASH_TEN(7) "," ARCHFLASH_TEN(8) ",%90,%91,%92,%93,%94,%95"
#define ARCHFLASH_NAMES_128                                                                       \
  ARCHFLASH_NAMES_40 "," ARCHFLASH_TEN(4) "," ARCHFLASH_TEN(5) "," ARCHFLASH_TEN(6) ","           \
  ARCHFLASH_TEN(7) "," ARCHFLASH_TEN(8) "," ARCHFLASH_TEN(9) "," ARCHFLASH_TEN(10) ","            \
  ARCHFLASH_TEN(11) ",%120,%121,%122,%123,%124,%125,%126,%127"
#define ARCHFLASH_SUMS_8(I)                                                                       \
  "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3]), "+f"(d[I + 4]), "+f"(d[I + 5]),     \
  "+f"(d[I + 6]), "+f"(d[I + 7])
#define ARCHFLASH_SUMS_32(I) ARCHFLASH_SUMS_8(I), ARCHFLASH_SUMS_8(I + 8), ARCHFLASH_SUMS_8(I + 16), ARCHFLASH_SUMS_8(I + 24)
// clang-format on

// Wgmma<DTYPE, N>. WORD is the type's name in PTX, K the shape's last part; the four ENDs say
// for 16 bits whether A and B are MN-major (8-bit tiles are always K-major). I0 to I6 are the
// numbers behind those of the sums, which NAMES lists and the remaining arguments bind.
#define ARCHFLASH_WGMMA_SS(WORD, K, END, N, NAMES, I0, I1, I2, I3, I4, ...)     \
  asm volatile(                                                                 \
      "{\n.reg .b64 a, b;\n.reg .pred add;\n"                                   \
      "mov.b64 a, {%" #I0 ", %" #I1 "};\nmov.b64 b, {%" #I2 ", %" #I3           \
      "};\n"                                                                    \
      "setp.ne.b32 add, %" #I4                                                  \
      ", 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n" #N K ".f32." WORD "." WORD " {" NAMES \
      "}, a, b, add, 1, 1" END ";\n}\n"                                         \
      : __VA_ARGS__                                                             \
      : "r"(a.low), "r"(a.high), "r"(b.low), "r"(b.high), "r"(add))
#define ARCHFLASH_WGMMA_RS(WORD, K, END, N, NAMES, I0, I1, I2, I3, I4, I5, I6, ...)         \
  asm volatile(                                                                             \
      "{\n.reg .b64 b;\n.reg .pred add;\n"                                                  \
      "mov.b64 b, {%" #I4 ", %" #I5 "};\nsetp.ne.b32 add, %" #I6                            \
      ", 0;\n"                                                                              \
      "wgmma.mma_async.sync.aligned.m64n" #N K ".f32." WORD "." WORD " {" NAMES "}, {%" #I0 \
      ", %" #I1 ", %" #I2 ", %" #I3 "}, b, add, 1, 1" END ";\n}\n"                          \
      : __VA_ARGS__                                                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.low), "r"(b.high), "r"(add))
#define ARCHFLASH_WGMMA(DTYPE, WORD, K, SS_END, SS_MN_END, RS_END, RS_MN_END, N, NAMES, I0, I1,    \
                        I2, I3, I4, I5, I6, ...)                                                   \
  template <>                                                                                      \
  struct Wgmma<DType::DTYPE, N> {                                                                  \
    template <bool B_MN_MAJOR = false>                                                             \
    static __device__ __forceinline__ void ss(float* d, WgmmaDescriptor a, WgmmaDescriptor b,      \
                                              int add) {                                           \
      if constexpr (B_MN_MAJOR) {                                                                  \
        ARCHFLASH_WGMMA_SS(WORD, K, SS_MN_END, N, NAMES, I0, I1, I2, I3, I4, __VA_ARGS__);         \
      } else {                                                                                     \
        ARCHFLASH_WGMMA_SS(WORD, K, SS_END, N, NAMES, I0, I1, I2, I3, I4, __VA_ARGS__);            \
      }                                                                                            \
    }                                                                                              \
    template <bool B_MN_MAJOR = true>                                                              \
    static __device__ __forceinline__ void rs(float* d, const uint32_t (&a)[4], WgmmaDescriptor b, \
                                              int add) {                                           \
      if constexpr (B_MN_MAJOR) {                                                                  \
        ARCHFLASH_WGMMA_RS(WORD, K, RS_MN_END, N, NAMES, I0, I1, I2, I3, I4, I5, I6, __VA_ARGS__); \
      } else {                                                                                     \
        ARCHFLASH_WGMMA_RS(WORD, K, RS_END, N, NAMES, I0, I1, I2, I3, I4, I5, I6, __VA_ARGS__);    \
      }                                                                                            \
    }                                                                                              \
  };
#define ARCHFLASH_WGMMA_16_BITS(...)                                                \
  ARCHFLASH_WGMMA(F16, "f16", "k16", ", 0, 0", ", 0, 1", ", 0", ", 1", __VA_ARGS__) \
  ARCHFLASH_WGMMA(BF16, "bf16", "k16", ", 0, 0", ", 0, 1", ", 0", ", 1", __VA_ARGS__)
#define ARCHFLASH_WGMMA_8_BITS(...) \
  ARCHFLASH_WGMMA(E4M3, "e4m3", "k32", "", "", "", "", __VA_ARGS__)
#define ARCHFLASH_WGMMA_ALL(...)       \
  ARCHFLASH_WGMMA_16_BITS(__VA_ARGS__) \
  ARCHFLASH_WGMMA_8_BITS(__VA_ARGS__)

ARCHFLASH_WGMMA_16_BITS(48, ARCHFLASH_NAMES_24, 24, 25, 26, 27, 28, 29, 30, ARCHFLASH_SUMS_8(0),
                        ARCHFLASH_SUMS_8(8), ARCHFLASH_SUMS_8(16))
ARCHFLASH_WGMMA_ALL(64, ARCHFLASH_NAMES_32, 32, 33, 34, 35, 36, 37, 38, ARCHFLASH_SUMS_32(0))
ARCHFLASH_WGMMA_16_BITS(80, ARCHFLASH_NAMES_40, 40, 41, 42, 43, 44, 45, 46, ARCHFLASH_SUMS_32(0),
                        ARCHFLASH_SUMS_8(32))
ARCHFLASH_WGMMA_16_BITS(96, ARCHFLASH_NAMES_48, 48, 49, 50, 51, 52, 53, 54, ARCHFLASH_SUMS_32(0),
                        ARCHFLASH_SUMS_8(32), ARCHFLASH_SUMS_8(40))
ARCHFLASH_WGMMA_ALL(128, ARCHFLASH_NAMES_64, 64, 65, 66, 67, 68, 69, 70, ARCHFLASH_SUMS_32(0),
                    ARCHFLASH_SUMS_32(32))
ARCHFLASH_WGMMA_ALL(192, ARCHFLASH_NAMES_96, 96, 97, 98, 99, 100, 101, 102, ARCHFLASH_SUMS_32(0),
                    ARCHFLASH_SUMS_32(32), ARCHFLASH_SUMS_32(64))
ARCHFLASH_WGMMA_16_BITS(256, ARCHFLASH_NAMES_128, 128, 129, 130, 131, 132, 133, 134,
                        ARCHFLASH_SUMS_32(0), ARCHFLASH_SUMS_32(32), ARCHFLASH_SUMS_32(64),
                        ARCHFLASH_SUMS_32(96))

#undef ARCHFLASH_TEN
#undef ARCHFLASH_NAMES_24
#undef ARCHFLASH_NAMES_32
#undef ARCHFLASH_NAMES_40
#undef ARCHFLASH_NAMES_48
#undef ARCHFLASH_NAMES_64
#undef ARCHFLASH_NAMES_96
#undef ARCHFLASH_NAMES_128
#undef ARCHFLASH_SUMS_8
#undef ARCHFLASH_SUMS_32
#undef ARCHFLASH_WGMMA_SS
#undef ARCHFLASH_WGMMA_RS
#undef ARCHFLASH_WGMMA
#undef ARCHFLASH_WGMMA_16_BITS
#undef ARCHFLASH_WGMMA_8_BITS
#undef ARCHFLASH_WGMMA_ALL

}  // namespace archflash::ptx
