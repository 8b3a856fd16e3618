// The tile sizes of each simt kernel. Compile-time numbers only, in plain C++: the kernel and
// plan.cpp both include them.
#pragma once

#include "common/image_dtype.h"
#include "common/mask_params.h"

namespace archflash::simt {

// How many products are added in one chain. Short: at most 16, in place of HEAD_DIM / 2 (Q K^T) and
// BLOCK_K (P V), so that sums round less. The small variants need it: with few rows, one unlucky
// sum decides the measured error. NOTES.md says what it costs in registers.
enum class Sums { Long, Short };

// A CTA owns BLOCK_Q query rows of one head and visits the keys in blocks of BLOCK_K. A warp owns
// WARP_ROWS of these rows. Its lanes form a grid of LANE_ROWS x LANE_COLS; each lane holds
// THREAD_ROWS x THREAD_KEYS scores and THREAD_ROWS x 4*OUT_GROUPS outputs. d and dv may be at most
// HEAD_DIM, which fixes the row pitches and the output tile; the product over d stops at d.
template <DType DTYPE_, int HEAD_DIM_, int WARPS_, int LANE_ROWS_, int THREAD_ROWS_, int BLOCK_K_,
          int P_KEYS_, int D_STEP_, int KEY_STEP_, int CTAS_PER_SM_, Sums SUMS>
struct Config {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int WARPS = WARPS_;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int LANE_ROWS = LANE_ROWS_;
  static constexpr int LANE_COLS = 32 / LANE_ROWS;
  static constexpr int THREAD_ROWS = THREAD_ROWS_;
  static constexpr int WARP_ROWS = LANE_ROWS * THREAD_ROWS;
  static constexpr int BLOCK_Q = WARPS * WARP_ROWS;
  static constexpr int BLOCK_K = BLOCK_K_;
  static constexpr int THREAD_KEYS = BLOCK_K / LANE_COLS;
  static constexpr int OUT_GROUPS = HEAD_DIM / (4 * LANE_COLS);  // groups of 4 columns per thread
  static constexpr int D_STEP = D_STEP_;            // columns per iteration of the Q K^T loop
  static constexpr int KEY_STEP = KEY_STEP_;        // keys per iteration of the P V loop
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;  // ptxas limits the registers to allow as many
  static constexpr bool SHORT_SUMS = SUMS == Sums::Short;
  static constexpr int SUM_COLUMNS = 32;  // columns of a short sum of Q K^T: 16 even, 16 odd

  // Shared memory, offsets and pitches in floats. Q and K rows are padded by 16 bytes, so that
  // 16-byte reads of 8 rows at the same column hit all 32 banks. V rows need no padding, because
  // each read covers one row. The pitch of P is LANE_COLS modulo 32, so that the
  // LANE_ROWS x LANE_COLS scalars which a warp stores at once hit all banks.
  static constexpr int QK_PITCH = HEAD_DIM + 4;
  static constexpr int V_PITCH = HEAD_DIM;
  static constexpr int P_KEYS = P_KEYS_;  // keys of P that a warp has in shared memory at a time
  static constexpr int P_PARTS = BLOCK_K / P_KEYS;
  static constexpr int P_PITCH = P_KEYS + (LANE_COLS - P_KEYS % 32 + 32) % 32;
  static constexpr int Q_SMEM = 0;
  static constexpr int K_SMEM = Q_SMEM + BLOCK_Q * QK_PITCH;
  static constexpr int V_SMEM = K_SMEM + BLOCK_K * QK_PITCH;
  static constexpr int P_SMEM = V_SMEM + BLOCK_K * V_PITCH;
  static constexpr int SHARED_BYTES = 4 * (P_SMEM + BLOCK_Q * P_PITCH);

  static_assert(LANE_ROWS * LANE_COLS == 32 && (LANE_COLS == 8 || LANE_COLS == 16),
                "the lane map of tile.cuh has 8 or 16 columns");
  static_assert(8 % D_STEP == 0 && SUM_COLUMNS % D_STEP == 0,
                "head dims and short sums are whole trips of the loop of Q K^T");
  static_assert(P_KEYS % KEY_STEP == 0, "a part of P is whole trips of the loop of P V");
  static_assert(OUT_GROUPS >= 1 && OUT_GROUPS * 4 * LANE_COLS == HEAD_DIM,
                "lanes must tile the output columns");
  static_assert(THREAD_KEYS * LANE_COLS == BLOCK_K && P_PARTS * P_KEYS == BLOCK_K,
                "lanes and parts must tile the keys");
  static_assert(P_KEYS % LANE_COLS == 0 && P_KEYS % 8 == 0,
                "a part of P is whole columns of scores, read 4 keys at a time");
  static_assert(P_PITCH % 32 == LANE_COLS % 32, "stores of P must not conflict");
  static_assert(THREADS <= 1024, "CUDA: at most 1024 threads in a CTA");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0, 10.0)");
};

// clang-format off
//                                   head       lane thread block   p_    d_  key_ CTAs   short
//                                   _dim warps _rows _rows   _k keys step step per SM sums
using F32D32         = Config<DType::F32,   32,    4,    4,    4,   64,  32,   8,   8,   3, Sums::Long>;
using F32D64Large    = Config<DType::F32,   64,    4,    2,    8,   64,  32,   8,   8,   2, Sums::Long>;
using F32D64Medium   = Config<DType::F32,   64,    8,    2,    8,   64,  32,   8,   8,   1, Sums::Long>;
using F32D64Small    = Config<DType::F32,   64,    8,    2,    4,   64,  32,   8,   8,   1, Sums::Short>;
using F32D128Large   = Config<DType::F32,  128,    4,    2,    8,   64,  32,   8,   4,   2, Sums::Long>;
using F32D128Medium  = Config<DType::F32,  128,    4,    2,    8,   32,  32,   8,   4,   2, Sums::Long>;
using F32D128Small   = Config<DType::F32,  128,    4,    2,    4,   32,  32,   8,   8,   2, Sums::Short>;
using F32D256Large   = Config<DType::F32,  256,    8,    2,    4,   64,  32,   8,   8,   1, Sums::Long>;
using F32D256Small   = Config<DType::F32,  256,    4,    2,    2,   16,  16,   4,   4,   3, Sums::Short>;
using F32D512Large   = Config<DType::F32,  512,    8,    2,    2,   32,  32,   4,   4,   1, Sums::Short>;
using F32D512Small   = Config<DType::F32,  512,    4,    2,    2,   16,  16,   4,   4,   2, Sums::Short>;
using HalfD32        = Config<DTYPE,        32,    4,    4,    4,   64,  32,   8,   8,   3, Sums::Long>;
using HalfD64        = Config<DTYPE,        64,    4,    2,    8,   64,  32,   8,   8,   2, Sums::Long>;
using HalfD128       = Config<DTYPE,       128,    4,    2,    4,   32,  32,   8,   8,   3, Sums::Long>;
using HalfD256       = Config<DTYPE,       256,    4,    2,    2,   16,  16,   4,   4,   3, Sums::Long>;
// clang-format on

constexpr int SMALLEST_SHARED_LIMIT = 64 * 1024;  // opt-in shared memory per CTA on 7.5
static_assert(F32D32::SHARED_BYTES <= SMALLEST_SHARED_LIMIT &&
                  F32D64Small::SHARED_BYTES <= SMALLEST_SHARED_LIMIT &&
                  F32D128Small::SHARED_BYTES <= SMALLEST_SHARED_LIMIT &&
                  F32D256Small::SHARED_BYTES <= SMALLEST_SHARED_LIMIT,
              "every head dimension up to 256 needs one kernel that runs on 7.5");
static_assert(F32D512Small::SHARED_BYTES <= 99 * 1024,
              "CUDA: at most 99 KiB of shared memory in a CTA (8.6, 8.9, 12.x)");

// A Config whose kernel takes masks as data and dropout. The smallest tiles serve, because every
// GPU has the shared memory for them; each serves every head dimension up to its own.
template <class Base, int CTAS_PER_SM_ = Base::CTAS_PER_SM>
struct MaskedConfig : Base {
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;
  static_assert(MASK_BLOCK % Base::BLOCK_Q == 0 && MASK_BLOCK % Base::BLOCK_K == 0,
                "a tile lies in one block of block_mask");
};
using F32D64Masked = MaskedConfig<F32D64Small>;
using F32D128Masked = MaskedConfig<F32D128Small>;
using F32D256Masked = MaskedConfig<F32D256Small, 2>;

// A Config whose kernel reads a KV cache: few rows in a warp, so that the packed heads of one
// position waste little, and small enough for every GPU.
template <class Base>
struct CacheConfig : Base {
  static constexpr bool CAN_SPLIT = true;
  static_assert(Base::SHARED_BYTES <= SMALLEST_SHARED_LIMIT);
};
using F32D64Cache = CacheConfig<Config<DType::F32, 64, 4, 2, 4, 64, 32, 8, 8, 3, Sums::Short>>;
using F32D128Cache = CacheConfig<F32D128Small>;
using F32D256Cache = CacheConfig<F32D256Small>;

}  // namespace archflash::simt
