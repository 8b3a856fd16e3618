// The tile sizes of the kernels on tensor cores (tensor_fwd.cuh, tensor_bwd.cuh). Compile-time
// numbers only, in plain C++: kernels and plans both include them.
#pragma once

#include "common/backward_params.h"
#include "common/dtype.h"

namespace archflash::simt {

// A CTA owns BLOCK_Q query rows of one head and visits the keys in blocks of BLOCK_K. A warp owns
// 16 of these rows. d and dv may be at most HEAD_DIM.
template <int HEAD_DIM_, int WARPS_, int BLOCK_K_, int CTAS_PER_SM_>
struct TensorConfig {
  static constexpr DType DTYPE = DType::F32;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_;
  static constexpr int WARPS = WARPS_;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int M_TILES = 1;
  static constexpr int WARP_ROWS = 16 * M_TILES;
  static constexpr int BLOCK_Q = WARPS * WARP_ROWS;
  static constexpr int BLOCK_K = BLOCK_K_;
  static constexpr int STEP_KEYS = BLOCK_K;
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;  // ptxas limits the registers to allow as many
  static constexpr bool ROWS_ALONE = false;         // device/online_softmax.cuh
  static constexpr bool KEEPS_LIMITS = true;        // device/online_softmax.cuh
  // Columns of Q K^T, and of P V, whose sums are added by themselves (tensor_fwd.cuh).
  static constexpr int SUM_COLUMNS = 64;
  static constexpr int OUT_COLUMNS = 32;

  // Shared memory, offsets and pitches in floats. Eight lanes that read 16 bytes each hit all
  // banks: in Q and K they read four neighbouring chunks of two rows, in V two of every second row.
  static constexpr int QK_PITCH = HEAD_DIM + 16;
  static constexpr int V_PITCH = HEAD_DIM + 4;
  static constexpr int Q_SMEM = 0;
  static constexpr int K_SMEM = Q_SMEM + BLOCK_Q * QK_PITCH;
  static constexpr int V_SMEM = K_SMEM + BLOCK_K * QK_PITCH;
  static constexpr int AGAIN_SMEM = V_SMEM + BLOCK_K * V_PITCH;  // of each warp, whether it asks
  // With so many columns there is no register for what the CTA works on: it is read when it is
  // needed.
  static constexpr bool KEEPS_WORK = HEAD_DIM > 128;
  static constexpr int WORK_SMEM = AGAIN_SMEM + WARPS;
  static constexpr int WORK_BYTES = KEEPS_WORK ? 16 : 0;  // of a device::Work
  static constexpr int SHARED_BYTES = 4 * WORK_SMEM + WORK_BYTES;

  static_assert(QK_PITCH % 32 == 16 && V_PITCH % 8 == 4, "reads of 16 bytes must not conflict");
  static_assert(HEAD_DIM % SUM_COLUMNS == 0 && HEAD_DIM % OUT_COLUMNS == 0,
                "sums are whole trips of their loops");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0, 10.0)");
};

// clang-format off
//                        head_dim warps block_k CTAs per SM
using TensorD64  = TensorConfig< 64,     4,    64,     2>;
using TensorD128 = TensorConfig<128,     4,    64,     2>;
using TensorD256 = TensorConfig<256,     8,    32,     1>;
// clang-format on

// What the backward kernels differ in.
struct TensorBackwardVariant {
  int head_dim;     // the largest d and dv
  int block;        // queries that pass by at a time
  int split;        // warps that share 16 keys
  int ctas_per_sm;  // ptxas limits the registers to allow as many
  // Each of these warps has dK and dV of a share of the columns and all queries; else of a share of
  // the queries and all columns, which the two add up at the end.
  bool shares_columns = false;
};

// The backward pass: a CTA owns ROWS keys, and BLOCK queries pass by at a time. SPLIT warps share
// 16 keys, and each has the scores of PART of the queries; for dQ each has 16 queries and 64
// columns. d and dv may be at most HEAD_DIM.
template <TensorBackwardVariant VARIANT>
struct TensorBackwardConfig {
  using Params = BackwardParams;
  static constexpr DType DTYPE = DType::F32;
  static constexpr int GRADIENTS = DQ | DK | DV;
  static constexpr int HEAD_DIM = VARIANT.head_dim;
  static constexpr int HEAD_DIM_V = HEAD_DIM;
  static constexpr int ROWS = 64;
  static constexpr int BLOCK = VARIANT.block;
  static constexpr int WARP_ROWS = 16;
  static constexpr int SPLIT = VARIANT.split;
  static constexpr int PART = BLOCK / SPLIT;
  static constexpr bool SHARES_COLUMNS = VARIANT.shares_columns;
  // A warp's share of the products for dK and dV: queries, and columns.
  static constexpr int GRADIENT_QUERIES = SHARES_COLUMNS ? BLOCK : PART;
  static constexpr int GRADIENT_COLUMNS = SHARES_COLUMNS ? HEAD_DIM / SPLIT : HEAD_DIM;
  static constexpr int DQ_COLUMN_WARPS = HEAD_DIM / 64;
  static constexpr int WARPS = ROWS / WARP_ROWS * SPLIT;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int CTAS_PER_SM = VARIANT.ctas_per_sm;
  static constexpr int SUM = 32;  // queries or keys whose products are added by themselves

  // Shared memory, offsets and pitches in floats: K | V | Q | dO | dS, whose rows are queries | P
  // likewise, where warps share columns, else in the place of dS | RowTerms of the queries |
  // TensorWork. A lane reads two neighbours of dS: sixteen lanes hit all banks.
  static constexpr int OWN_FIRST_SMEM = 0;
  static constexpr int OWN_SECOND_SMEM = OWN_FIRST_SMEM + ROWS * HEAD_DIM;
  static constexpr int FIRST_SMEM = OWN_SECOND_SMEM + ROWS * HEAD_DIM;
  static constexpr int SECOND_SMEM = FIRST_SMEM + BLOCK * HEAD_DIM;
  static constexpr int DS_SMEM = SECOND_SMEM + BLOCK * HEAD_DIM;
  static constexpr int DS_PITCH = ROWS + 8;
  static constexpr int P_SMEM = DS_SMEM + (SHARES_COLUMNS ? BLOCK * DS_PITCH : 0);
  static constexpr int TERMS_SMEM = P_SMEM + BLOCK * DS_PITCH;
  static constexpr int WORK_SMEM = TERMS_SMEM + 2 * BLOCK;
  static constexpr int WORK_BYTES = 64;  // of a TensorWork
  static constexpr int SHARED_BYTES = 4 * WORK_SMEM + WORK_BYTES;

  static_assert(WARPS / DQ_COLUMN_WARPS * 16 == BLOCK, "warps must tile dQ");
  static_assert(SPLIT <= 2, "two warps add up what they have of dK and dV, or wait for each other");
  static_assert(GRADIENT_QUERIES % SUM == 0 && ROWS % SUM == 0, "sums are of so many products");
  static_assert(BLOCK <= THREADS, "a thread copies the terms of a row");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0)");
};

constexpr TensorBackwardVariant TENSOR_BACKWARD_D64 = {
    .head_dim = 64, .block = 64, .split = 1, .ctas_per_sm = 2};
constexpr TensorBackwardVariant TENSOR_BACKWARD_D128 = {
    .head_dim = 128, .block = 64, .split = 2, .ctas_per_sm = 1};
constexpr TensorBackwardVariant TENSOR_BACKWARD_D256 = {
    .head_dim = 256, .block = 32, .split = 2, .ctas_per_sm = 1, .shares_columns = true};
using TensorBackwardD64 = TensorBackwardConfig<TENSOR_BACKWARD_D64>;
using TensorBackwardD128 = TensorBackwardConfig<TENSOR_BACKWARD_D128>;
using TensorBackwardD256 = TensorBackwardConfig<TENSOR_BACKWARD_D256>;

}  // namespace archflash::simt
