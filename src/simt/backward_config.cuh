// The tile sizes of each backward kernel of simt. Compile-time numbers only, in plain C++: the
// kernel and plan_backward.cpp both include them.
#pragma once

#include "common/backward_params.h"
#include "common/dtype.h"
#include "common/mask_params.h"
#include "common/masked_backward_params.h"

namespace archflash::simt {

// A CTA owns ROWS rows of one side; BLOCK rows of the other side pass by at a time. For the scores
// the threads form a grid of GRID_ROWS x GRID_COLS, for the gradients groups of HEAD_DIM / 4, one
// for 4 columns. d and dv may be at most HEAD_DIM.
template <Owns OWNS_, int HEAD_DIM_, int THREADS_, int ROWS_, int BLOCK_, int GRID_COLS_>
struct BackwardConfig {
  using Params = BackwardParams;
  static constexpr bool MASKED = false;
  static constexpr DType DTYPE = DType::F32;
  static constexpr Owns OWNS = OWNS_;
  static constexpr int GRADIENTS = OWNS == Owns::Keys ? DK | DV : DQ;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_;
  static constexpr int THREADS = THREADS_;
  static constexpr int ROWS = ROWS_;
  static constexpr int BLOCK = BLOCK_;
  static constexpr int GRID_COLS = GRID_COLS_;
  static constexpr int GRID_ROWS = THREADS / GRID_COLS;
  static constexpr int THREAD_ROWS = ROWS / GRID_ROWS;   // scores of a thread: rows,
  static constexpr int THREAD_COLS = BLOCK / GRID_COLS;  // and columns
  static constexpr int COLUMN_GROUPS = HEAD_DIM / 4;     // threads that share a gradient's row
  static constexpr int ROW_GROUPS = THREADS / COLUMN_GROUPS;
  static constexpr int OUT_ROWS = ROWS / ROW_GROUPS;  // rows of a gradient of a thread

  // Shared memory, offsets and pitches in floats. Rows are padded by 16 bytes, so that 16-byte
  // reads of 8 rows at the same column hit all 32 banks.
  static constexpr int PITCH = HEAD_DIM + 4;
  static constexpr int OWN_FIRST_SMEM = 0;
  static constexpr int OWN_SECOND_SMEM = OWN_FIRST_SMEM + ROWS * PITCH;
  static constexpr int FIRST_SMEM = OWN_SECOND_SMEM + ROWS * PITCH;
  static constexpr int SECOND_SMEM = FIRST_SMEM + BLOCK * PITCH;
  static constexpr int P_SMEM = SECOND_SMEM + BLOCK * PITCH;
  static constexpr int P_PITCH = BLOCK + 1;
  static constexpr int DS_SMEM = P_SMEM + ROWS * P_PITCH;
  static constexpr int SHARED_BYTES = 4 * (DS_SMEM + ROWS * P_PITCH);

  static_assert(GRID_ROWS * GRID_COLS == THREADS && THREAD_ROWS * GRID_ROWS == ROWS &&
                    THREAD_COLS * GRID_COLS == BLOCK,
                "threads must tile the scores");
  static_assert(ROW_GROUPS * COLUMN_GROUPS == THREADS && OUT_ROWS * ROW_GROUPS == ROWS,
                "threads must tile the gradients");
  static_assert(SHARED_BYTES <= 64 * 1024, "7.5 gives a CTA 64 KB");
};

// A BackwardConfig whose kernel takes masks as data and drops weights.
template <class Backward>
struct MaskedBackwardConfig : Backward {
  using Params = MaskedBackwardParams;
  static constexpr bool MASKED = true;
  static_assert(MASK_BLOCK % Backward::ROWS == 0 && MASK_BLOCK % Backward::BLOCK == 0,
                "a tile lies in one block of block_mask");
};

// clang-format off
//                                            head        rows      grid
//                                            _dim threads    block  cols
template <Owns O>
using BackwardD64  = BackwardConfig<O,         64, 256,  32,  32,    16>;
template <Owns O>
using BackwardD128 = BackwardConfig<O,        128, 256,  32,  16,    16>;
template <Owns O>
using BackwardD256 = BackwardConfig<O,        256, 128,  16,   8,     8>;
// clang-format on

}  // namespace archflash::simt
