// The tile sizes of each backward kernel of simt. Compile-time numbers only, in plain C++: the
// kernel and plan_backward.cpp both include them.
#pragma once

#include "common/backward_params.h"
#include "common/dtype.h"
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
  static constexpr int CTAS_PER_SM = 1;
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

// The kernels for lists of keys (list_bwd.cuh). A CTA that owns queries also adds to dK and dV
// of the keys that pass by, THREAD_KEYS of them and 4 columns in each thread.
template <class Base>
struct ListBackwardConfig : Base {
  static constexpr int BLOCK_Q = Base::ROWS;
  static constexpr int THREAD_KEYS = Base::BLOCK / Base::ROW_GROUPS;
  static_assert(THREAD_KEYS * Base::ROW_GROUPS == Base::BLOCK, "threads must tile the keys");
  static_assert(Base::BLOCK <= Base::THREADS, "a thread looks a key up");
};
using D64Lists = ListBackwardConfig<BackwardD64<Owns::Queries>>;
using D128Lists = ListBackwardConfig<BackwardD128<Owns::Queries>>;
using D256Lists = ListBackwardConfig<BackwardD256<Owns::Queries>>;

// A warp computes dQ of 16 queries and 64 columns, and a lane 8 x 4 of these.
constexpr int DQ_WARP_ROWS = 16, DQ_WARP_COLUMNS = 64;

// The tiles for GPUs with more than 64 KB of shared memory for a CTA (tiled_bwd.cuh).
//
// A CTA owns ROWS keys; BLOCK queries pass by at a time. A warp owns WARP_ROWS of the keys, and its
// lanes stand as in Config (config.cuh): each has THREAD_ROWS x THREAD_KEYS scores, where "keys"
// are passing queries, and THREAD_ROWS x 4*OUT_GROUPS elements of dK and of dV. The names are those
// that the functions of tile.cuh take.
template <int HEAD_DIM_, int WARPS_, int THREAD_ROWS_, int BLOCK_, int CTAS_PER_SM_>
struct TiledBackwardConfig {
  using Params = BackwardParams;
  static constexpr DType DTYPE = DType::F32;
  static constexpr int GRADIENTS = DQ | DK | DV;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_;
  static constexpr int WARPS = WARPS_;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int LANE_ROWS = 2;
  static constexpr int LANE_COLS = 16;
  static constexpr int THREAD_ROWS = THREAD_ROWS_;
  static constexpr int WARP_ROWS = LANE_ROWS * THREAD_ROWS;
  static constexpr int ROWS = WARPS * WARP_ROWS;
  static constexpr int BLOCK = BLOCK_;
  static constexpr int THREAD_KEYS = BLOCK / LANE_COLS;
  static constexpr int OUT_GROUPS = HEAD_DIM / (4 * LANE_COLS);
  static constexpr int D_STEP = 8;    // columns per iteration of a product of rows
  static constexpr int KEY_STEP = 8;  // rows per iteration of a product into a gradient
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;  // ptxas limits the registers to allow as many
  static constexpr bool SHORT_SUMS = false;
  static constexpr int DQ_COLUMN_WARPS = HEAD_DIM / DQ_WARP_COLUMNS;

  // Shared memory, offsets and pitches in floats, with the padding of Config: owned first and
  // second | passing first and second | P or dS of each warp. "first" is Q or K, "second" dO or V.
  static constexpr int QK_PITCH = HEAD_DIM + 4;
  static constexpr int V_PITCH = QK_PITCH;
  static constexpr int P_KEYS = BLOCK;
  static constexpr int P_PITCH = P_KEYS + 16;
  static constexpr int OWN_FIRST_SMEM = 0;
  static constexpr int OWN_SECOND_SMEM = OWN_FIRST_SMEM + ROWS * QK_PITCH;
  static constexpr int FIRST_SMEM = OWN_SECOND_SMEM + ROWS * QK_PITCH;
  static constexpr int SECOND_SMEM = FIRST_SMEM + BLOCK * QK_PITCH;
  static constexpr int P_SMEM = SECOND_SMEM + BLOCK * QK_PITCH;
  static constexpr int SHARED_BYTES = 4 * (P_SMEM + ROWS * P_PITCH);

  static_assert(WARPS / DQ_COLUMN_WARPS * DQ_WARP_ROWS == BLOCK, "warps must tile dQ");
  static_assert(OUT_GROUPS >= 1 && OUT_GROUPS * 4 * LANE_COLS == HEAD_DIM,
                "lanes must tile the columns of a gradient");
  static_assert(THREAD_KEYS * LANE_COLS == BLOCK && P_KEYS % 32 == 0, "lanes must tile the scores");
  static_assert(P_PITCH % 32 == LANE_COLS, "stores of P must not conflict");
};

// clang-format off
//                                          head       thread     CTAs
//                                          _dim warps _rows block per SM
using TiledD64  = TiledBackwardConfig<        64, 4,    8,    64,   2>;
using TiledD128 = TiledBackwardConfig<       128, 8,    4,    64,   1>;
// clang-format on

}  // namespace archflash::simt
