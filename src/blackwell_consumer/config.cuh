// The tiles of each blackwell_consumer kernel: compile-time numbers only, which the kernel and
// plan.cpp (plain C++) read.
#pragma once

#include <cstdint>

#include "common/block_scales.h"
#include "common/device/slab_tile.cuh"
#include "common/image_dtype.h"

namespace archflash::blackwell_consumer {

// How the registers of an SM are divided between the warps.
enum class Registers {
  Even,   // Every warp has the same number; the producer is a single warp.
  Roles,  // setmaxnreg moves registers to the consumers, so the producer has a whole warpgroup.
};

// The numbers of one kernel. A CTA owns one row tile at a time, BLOCK_Q query rows of one head, and
// walks over its keys, BLOCK_K at a time. A consumer warp owns M_TILES tiles of 16 rows, which
// share every fragment of K and V that the warp reads. HEAD_DIM is the largest d, HEAD_DIM_V the
// largest dv. A consumer warp keeps its WarpContext (attention_fwd.cuh) in CONTEXT_BYTES_ of shared
// memory, or in registers where there are enough.
template <DType DTYPE_, int HEAD_DIM_, int HEAD_DIM_V_, int WARPS_, int M_TILES_, int BLOCK_K_,
          int STAGES_, bool Q_IN_REGISTERS_, Registers REGISTERS_, int CTAS_PER_SM_,
          bool CONTEXT_IN_REGISTERS_ = false, int CONTEXT_BYTES_ = 96, bool CAN_SPLIT_ = false>
struct Config {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr bool FP8 = is_fp8(DTYPE);
  static constexpr bool BLOCK_SCALES = false;  // of 8-bit inputs; see BlockScaled
  // How many elements of Q and K, and of V, are in the 16 bits that ldmatrix moves as one.
  static constexpr int QK_PACK = FP8 ? 2 : 1;
  static constexpr int V_PACK = QK_PACK;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int WARPS = WARPS_;  // consumers
  static constexpr int M_TILES = M_TILES_;
  static constexpr int WARP_ROWS = 16 * M_TILES;
  static constexpr int BLOCK_Q = WARPS * WARP_ROWS;
  static constexpr int BLOCK_K = BLOCK_K_;
  static constexpr int STEP_KEYS = BLOCK_K;
  static constexpr int STAGES = STAGES_;  // blocks of K in its ring, and blocks of V in its ring
  // Consumers read Q from shared memory once for each tile; else once for each block.
  static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_;
  static constexpr Registers REGISTERS = REGISTERS_;
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;  // the registers must suffice for so many
  // For few query rows: the keys of a tile may be split over several CTAs, and heads that share a
  // head of K may be packed into a tile.
  static constexpr bool CAN_SPLIT = CAN_SPLIT_;
  static constexpr bool ROWS_ALONE = CAN_SPLIT;  // device/online_softmax.cuh
  // Whether blocks that need no mask have a loop of their own.
  static constexpr bool HAS_PLAIN_LOOP = !FP8 && !CAN_SPLIT;
  // Whether that loop waits for the next K before it hands V back. Measured on an H200 (NOTES.md).
  static constexpr bool WAITS_AHEAD = HEAD_DIM > 64 || CTAS_PER_SM > 2;
  // Whether a block of K is handed back behind the maxima of its scores, where the fence finds the
  // reads done, and not before.
  static constexpr bool RELEASES_K_LATE = STAGES == 1 && !FP8;

  static constexpr int WARPGROUP = 128;  // threads
  static constexpr int CONSUMER_THREADS = 32 * WARPS;
  static constexpr int PRODUCER_THREADS = REGISTERS == Registers::Roles ? WARPGROUP : 32;
  static constexpr int THREADS = CONSUMER_THREADS + PRODUCER_THREADS;
  // Registers::Roles: every thread starts with LAUNCH_REGISTERS, as __launch_bounds__ demands; then
  // the producer's warpgroup keeps PRODUCER_REGISTERS and the consumers share out the rest.
  static constexpr int SM_REGISTERS = 65536;
  static constexpr int LAUNCH_REGISTERS = SM_REGISTERS / CTAS_PER_SM / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = 24;
  static constexpr int CONSUMER_REGISTERS =
      (LAUNCH_REGISTERS * THREADS - PRODUCER_REGISTERS * PRODUCER_THREADS) / CONSUMER_THREADS / 8 *
      8;

  // Tiles in shared memory. Their columns count units of 16 bits.
  using QTile = device::SlabTile<HEAD_DIM / QK_PACK, BLOCK_Q>;
  using KTile = device::SlabTile<HEAD_DIM / QK_PACK, BLOCK_K>;
  using VTile = device::SlabTile<HEAD_DIM_V / V_PACK, BLOCK_K>;

  // Shared memory, in bytes: Q | ring of K | ring of V | barriers | WarpContext of each consumer
  // warp. With 16-bit inputs the output rows of a tile pass through the part of its Q.
  static constexpr int Q_SMEM = 0;
  static constexpr int K_SMEM = Q_SMEM + QTile::BYTES;
  static constexpr int V_SMEM = K_SMEM + STAGES * KTile::BYTES;
  static constexpr int BARRIER_SMEM = V_SMEM + STAGES * VTile::BYTES;
  static constexpr int BARRIERS = 2 + 4 * STAGES;  // full and empty: Q, each stage of K and of V
  static constexpr int CONTEXT_SMEM = BARRIER_SMEM + (8 * BARRIERS + 15) / 16 * 16;
  static constexpr bool CONTEXT_IN_REGISTERS = CONTEXT_IN_REGISTERS_;
  static constexpr int CONTEXT_BYTES = CONTEXT_IN_REGISTERS ? 0 : CONTEXT_BYTES_;  // for each warp
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + WARPS * CONTEXT_BYTES;

  static_assert(BLOCK_K % (16 * V_PACK) == 0, "mma.sync sums P V over 16 or 32 keys");
  static_assert(FP8 || (HEAD_DIM_V <= HEAD_DIM && QTile::SLAB == VTile::SLAB),
                "output rows pass through Q's part of shared memory, in Q's layout");
  static_assert(!FP8 || (SCALE_ROWS % BLOCK_K == 0 && SCALE_ROWS % WARP_ROWS == 0),
                "the keys of a block share one descale, and so do the rows of a warp");
  static_assert(!CAN_SPLIT || (M_TILES == 1 && (BLOCK_Q & (BLOCK_Q - 1)) == 0),
                "device/few_rows.cuh: 16 rows for each warp; packed heads share a power of two");
  static_assert((STAGES & (STAGES - 1)) == 0,
                "RingPosition counts blocks modulo 2^32: the stages must divide that");
  static_assert(REGISTERS == Registers::Even || CONSUMER_REGISTERS <= 256,
                "setmaxnreg: at most 256 registers for a thread");
  static_assert(REGISTERS == Registers::Even || CONSUMER_THREADS % WARPGROUP == 0,
                "setmaxnreg: whole warpgroups take one role");
  static_assert(SHARED_BYTES <= 99 * 1024, "CUDA: at most 99 KiB of shared memory in a CTA (12.x)");
};

// A Config for few query rows: 4 warps of 16 rows.
template <DType DTYPE, int HEAD_DIM, int HEAD_DIM_V, int BLOCK_K, int STAGES, bool Q_IN_REGISTERS,
          Registers REGISTERS, int CTAS_PER_SM, bool CONTEXT_IN_REGISTERS = false>
using FewRowsConfig = Config<DTYPE, HEAD_DIM, HEAD_DIM_V, 4, 1, BLOCK_K, STAGES, Q_IN_REGISTERS,
                             REGISTERS, CTAS_PER_SM, CONTEXT_IN_REGISTERS, 96, true>;

// Large, Medium and Small serve calls of many, fewer and few row tiles, Short those of few keys. A
// Pair shares an SM with another CTA of the same kernel. Few is for few rows: it can split keys and
// pack heads.
// clang-format off
//                                    head_dim         m_    block         Q in                    CTAs    context in
//                                  q,k   v    warps tiles  _k    stages  regs   registers         per SM  registers
using D64Large   = Config<DTYPE,  64,  64,  8,     2,     64,  4,     true,  Registers::Roles,  1>;
using D64Medium  = Config<DTYPE,  64,  64,  4,     1,     64,  2,     true,  Registers::Roles,  3>;
using D64Short   = Config<DTYPE,  64,  64,  4,     2,     80,  2,     false, Registers::Roles,  2>;
using D64Small   = Config<DTYPE,  64,  64,  4,     1,    128,  2,     true,  Registers::Roles,  2, true>;
using D96Large   = Config<DTYPE,  96,  96,  8,     2,     64,  2,     false, Registers::Roles,  1>;
using D128Large  = Config<DTYPE, 128, 128,  8,     2,     64,  1,     false, Registers::Roles,  1>;
using D128Medium = Config<DTYPE, 128, 128,  8,     1,     64,  2,     true,  Registers::Roles,  1>;
using D192Large  = Config<DTYPE, 192, 128,  8,     1,     64,  1,     false, Registers::Roles,  1>;
using D256Pair   = Config<DTYPE, 256, 256,  4,     1,     64,  1,     false, Registers::Roles,  2>;
using D256Large  = Config<DTYPE, 256, 256,  8,     1,     32,  1,     false, Registers::Roles,  1>;

//                                            head_dim  block       Q in                    CTAs    context in
//                                           q,k   v     _k  stages  regs   registers         per SM  registers
using D64Few     = FewRowsConfig<DTYPE,  64,  64, 128,  2,     true,  Registers::Roles,  2, true>;
using D96Few     = FewRowsConfig<DTYPE,  96,  96,  64,  2,     true,  Registers::Even,   1>;
using D128Few    = FewRowsConfig<DTYPE, 128, 128,  64,  2,     true,  Registers::Even,   1>;
using D192Few    = FewRowsConfig<DTYPE, 192, 128,  32,  2,     false, Registers::Even,   1>;
using D256Few    = FewRowsConfig<DTYPE, 256, 256,  32,  2,     false, Registers::Even,   1>;
// clang-format on

// --- 8-bit inputs ---

constexpr int FP8_CONTEXT_BYTES = 144;  // of a WarpContext with descales

// clang-format off
//                                  head_dim         m_    block         Q in                    CTAs
//                                q,k   v    warps tiles  _k    stages  regs   registers         per SM
template <DType T>
using Fp8D64Pair   = Config<T,  64,  64,  4,     2,     64,  4,     false, Registers::Roles,  2, false, FP8_CONTEXT_BYTES>;
template <DType T>
using Fp8D64Few    = Config<T,  64,  64,  4,     1,     64,  4,     true,  Registers::Even,   2, false, FP8_CONTEXT_BYTES>;
template <DType T>
using Fp8D128Large = Config<T, 128, 128,  8,     1,     64,  2,     false, Registers::Roles,  1, false, FP8_CONTEXT_BYTES>;
template <DType T>
using Fp8D128Few   = Config<T, 128, 128,  4,     1,     64,  4,     true,  Registers::Even,   1, false, FP8_CONTEXT_BYTES>;
template <DType T>
using Fp8D192      = Config<T, 192, 128,  4,     1,     64,  2,     false, Registers::Even,   1, false, FP8_CONTEXT_BYTES>;
template <DType T>
using Fp8D256      = Config<T, 256, 256,  8,     1,     32,  2,     false, Registers::Roles,  1, false, FP8_CONTEXT_BYTES>;
// clang-format on

// A Config for 8-bit inputs with block scales (block_scales.cuh).
template <class Base>
struct BlockScaled : Base {
  static constexpr bool BLOCK_SCALES = true;
  static_assert(Base::FP8 && Base::BLOCK_K % SCALED_NUMBERS == 0 && !Base::Q_IN_REGISTERS);
};

template <DType T>
using MxD64 = BlockScaled<Fp8D64Pair<T>>;
template <DType T>
using MxD128 = BlockScaled<Fp8D128Large<T>>;
template <DType T>
using MxD256 = BlockScaled<Fp8D256<T>>;

}  // namespace archflash::blackwell_consumer
