// The tiles of each backward kernel of blackwell_dc: compile-time numbers only, which the kernel
// and plan_backward.cpp (plain C++) read. BACKWARD.md says why they are so.
#pragma once

#include "common/device/slab_tile.cuh"
#include "common/image_dtype.h"

namespace archflash::blackwell_dc {

// The numbers of one kernel. A CTA owns ROWS keys of a head and goes over blocks of BLOCK query
// rows. HEAD_DIM is the largest d and dv. If DQ_OVER_DS, dQ takes the place of dP and dS in tensor
// memory. TRUST_ISSUE_ORDER: products of one thread run in the order in which they are issued, also
// where the ISA's text does not say so (NOTES.md); else mma waits.
template <DType DTYPE_, int HEAD_DIM_, int Q_STAGES_, int DOUT_STAGES_, bool DQ_OVER_DS_,
          bool TRUST_ISSUE_ORDER_ = true>
struct BackwardConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_;
  static constexpr int ROWS = 128;  // one for each lane of tensor memory
  static constexpr int WARP_ROWS = 32;
  static constexpr int KEY_WARPS = ROWS / WARP_ROWS;
  static constexpr int BLOCK = 128;  // query rows
  // dQ is added for each block (device/backward_round_sums.cuh).
  static constexpr int BLOCKS_OF_ROUND = 1;
  static constexpr int ROUND = BLOCK;
  static constexpr bool USES_PDL = false;  // before the terms of the rows are written
  static constexpr int Q_STAGES = Q_STAGES_;
  static constexpr int DOUT_STAGES = DOUT_STAGES_;
  static constexpr bool DQ_OVER_DS = DQ_OVER_DS_;
  static constexpr bool TRUST_ISSUE_ORDER = TRUST_ISSUE_ORDER_;
  static constexpr int PRODUCT_DEPTH = 16;  // of one instruction

  // The warps of each role. setmaxnreg wants the same number of registers in all four warps of a
  // warpgroup.
  static constexpr int THREADS = 512;
  static constexpr int CTAS_PER_SM = 1;
  static constexpr int SCORE_WARPS = 8;  // from warp 0 on
  static constexpr int GROUPS = 2;       // of four warps, which share out the queries of a block
  static constexpr int GROUP_QUERIES = BLOCK / GROUPS;
  static constexpr int DQ_WARP = 8;
  static constexpr int DQ_WARPS = 4;
  static constexpr int MMA_WARP = 12;
  static constexpr int LOAD_WARP = 13;
  static constexpr int TERMS_WARP = 14;
  static constexpr int REGISTERS_AT_LAUNCH = 65536 / THREADS;
  // At d128 a dQ warp holds 128 columns of dQ in registers.
  static constexpr bool LARGE = HEAD_DIM > 64;
  static constexpr int SCORE_REGISTERS = LARGE ? 144 : 152;
  static constexpr int DQ_REGISTERS = LARGE ? 144 : 120;
  static constexpr int OTHER_REGISTERS = LARGE ? 80 : 88;
  static_assert(128 * (2 * SCORE_REGISTERS + DQ_REGISTERS + OTHER_REGISTERS) <= 65536,
                "CUDA: 65536 registers of an SM");

  // Tiles in shared memory. K and V of the CTA's keys; Q and dO of a block; dS, whose rows are
  // keys.
  using KTile = device::SlabTile<HEAD_DIM, ROWS>;
  using VTile = KTile;
  using QTile = device::SlabTile<HEAD_DIM, BLOCK>;
  using DoutTile = QTile;
  using DsTile = device::SlabTile<BLOCK, ROWS>;

  // dQ goes to the sums in the workspace DQ_COLUMNS columns at a time.
  static constexpr int DQ_COLUMNS = 32;
  static constexpr int DQ_STAGES = 2;
  static constexpr int DQ_BYTES = 4 * BLOCK * DQ_COLUMNS;
  static constexpr int ROUND_SUMS = BLOCK * HEAD_DIM;
  static constexpr int SUMS_STEP = HEAD_DIM;

  // Shared memory, in bytes: K | V | ring of Q | ring of dO | dS | ring of dQ | terms | barriers |
  // work | the address of tensor memory. The terms of a block, which share the ring of Q, are the
  // LSEs of its rows, then their deltas, then a note.
  static constexpr int K_SMEM = 0;
  static constexpr int V_SMEM = K_SMEM + KTile::BYTES;
  static constexpr int Q_SMEM = V_SMEM + KTile::BYTES;
  static constexpr int DOUT_SMEM = Q_SMEM + Q_STAGES * QTile::BYTES;
  static constexpr int DS_SMEM = DOUT_SMEM + DOUT_STAGES * QTile::BYTES;
  static constexpr int DQ_SMEM = DS_SMEM + DsTile::BYTES;
  static constexpr int TERMS_SMEM = DQ_SMEM + DQ_STAGES * DQ_BYTES;
  static constexpr int TERMS_BYTES = 2 * 4 * BLOCK + 16;
  static constexpr int BARRIER_SMEM = TERMS_SMEM + Q_STAGES * TERMS_BYTES;
  static constexpr int BARRIERS = 12 + 2 * Q_STAGES + 2 * DOUT_STAGES;
  static constexpr int WORK_BYTES = 128;
  static constexpr int WORK_SMEM = (BARRIER_SMEM + 8 * BARRIERS + 15) / 16 * 16;
  static constexpr int TMEM_ADDRESS_SMEM = WORK_SMEM + WORK_BYTES;
  static constexpr int SHARED_BYTES = TMEM_ADDRESS_SMEM + 16;
  static_assert(SHARED_BYTES <= 227 * 1024, "CUDA: at most 227 KiB of shared memory in a CTA");

  // Tensor memory, in columns. P lies over S and dS over dP, in two pieces: each group of warps
  // writes over its own half.
  static constexpr int S_COLUMN = 0;
  static constexpr int DP_COLUMN = BLOCK;
  static constexpr int DV_COLUMN = 2 * BLOCK;
  static constexpr int DK_COLUMN = DV_COLUMN + HEAD_DIM;
  static constexpr int DQ_COLUMN = DQ_OVER_DS ? DP_COLUMN : DK_COLUMN + HEAD_DIM;
  static_assert(DQ_COLUMN + HEAD_DIM <= 512 && DK_COLUMN + HEAD_DIM <= 512,
                "tensor memory has 512 columns");
};

// clang-format off
//                                              head_dim  stages    dQ over
//                                                        Q   dO    dS
using BackwardD64  = BackwardConfig<DTYPE,         64,    2,  2,    false>;
using BackwardD128 = BackwardConfig<DTYPE,        128,    2,  1,    true>;
// clang-format on

}  // namespace archflash::blackwell_dc
