// The tiles of each blackwell_dc kernel: compile-time numbers only, which the kernel and plan.cpp
// (plain C++) read.
#pragma once

#include <bit>
#include <cstdint>

#include "common/device/slab_tile.cuh"
#include "common/image_dtype.h"

namespace archflash::blackwell_dc {

// Mechanisms that can be switched off, to measure what each is worth (bench/switches). How many
// CTAs share out the tiles is not a switch of the kernel: plan.cpp decides it.
struct Switches {
  // How many of every 16 pairs of scores get their exponentials from a polynomial on the FMA units.
  // The MUFU computes the others.
  int polynomial_pairs = 0;
  // The last quarter of a block has polynomials too. Off: it is ready sooner, for mma waits for it.
  bool polynomial_in_last_quarter = true;
  // A base follows its row's maximum, and correction rescales O, only where that is needed
  // (RowWeights). Off: bases follow every rise, and O is rescaled in every block.
  bool lazy_rescale = true;
  // P is handed over to mma in two parts, 3/4 and 1/4 of the keys. Off: all of P at once.
  bool split_p = true;
  // setmaxnreg gives the warps of each role their REGISTERS. Off: every thread has 128.
  bool move_registers = true;
  // A product's descriptor is a sum of constants and the tile's address. Off: it is encoded anew.
  bool precomputed_descriptors = true;
  // TMA stores the output rows. Off: the store warp copies them, 16 bytes a lane.
  bool tma_store = true;
  // mma starts the S that overwrites P directly behind the product that reads that P. Off: it first
  // waits until that product is done.
  bool trust_issue_order = true;
  // correction waits for o_ready only where nothing else says that O is complete: at a tile's end.
  // Off: in every block.
  bool implied_o_ready = true;
  // The next row tile's first O of each of the CTA's tiles begins when correction has read that
  // tile's O. Off: when it has read all of them.
  bool release_each_tile = true;
  // TMA tells L2 to keep K and V, which other tiles read again, rather than Q and the output rows.
  bool l2_hints = true;
  // A causal call begins with its last row tiles, which see the most keys. Off: with its first.
  bool longest_first = true;
  // A CTA that is done takes the work of one that has not started. Off: the tiles of each of as
  // many CTAs as there is room for are fixed.
  bool dynamic_walk = true;
};

// How many registers a thread of each role has.
struct Registers {
  int softmax, correction, other;
};

// The numbers of one kernel. A CTA owns TILES tiles of 128 query rows of one head at a time and
// walks over their keys, BLOCK_K at a time. HEAD_DIM is the largest d, HEAD_DIM_V the largest dv.
// If V_STAGES is 0, K and V share one ring of K_STAGES. If CTAS is 2, two CTAs work as a pair: tile
// t of both CTAs is multiplied by one product, for which each CTA holds half of K's rows and half
// of V's columns (pair_pipeline.cuh).
template <DType DTYPE_, int HEAD_DIM_, int HEAD_DIM_V_, int TILES_, int BLOCK_K_, int K_STAGES_,
          int V_STAGES_, bool O_OVER_Q_, Registers REGISTERS_, Switches SWITCHES_, int CTAS_ = 1>
struct Config {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr bool FP8 = is_fp8(DTYPE);
  static constexpr int PACK = FP8 ? 2 : 1;         // elements in 16 bits
  static constexpr int PRODUCT_DEPTH = 16 * PACK;  // columns of Q and K, or keys, in one product
  static constexpr int P_PER_COLUMN = 2 * PACK;    // keys in a 32-bit column of tensor memory
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int TILES = TILES_;
  static constexpr int TILE_ROWS = 128;  // one for each lane of tensor memory
  static constexpr int CTAS = CTAS_;
  static constexpr int CTA_ROWS = TILES * TILE_ROWS;
  static constexpr int BLOCK_Q = CTAS * CTA_ROWS;
  static constexpr int BLOCK_Q_BITS = std::countr_zero(static_cast<unsigned>(BLOCK_Q));
  // Whether the keys of a tile can be split into shares for several CTAs.
  static constexpr bool CAN_SPLIT = TILES == 1 && !FP8;
  // Whether a tile can have rows of several heads.
  static constexpr bool CAN_PACK = TILES == 1 && !FP8;
  static constexpr int BLOCK_K = BLOCK_K_;
  static constexpr bool SHARED_RING = V_STAGES_ == 0;
  static constexpr int K_STAGES = K_STAGES_;
  static constexpr int V_STAGES = V_STAGES_;
  static constexpr int SLOTS = K_STAGES + V_STAGES;
  static constexpr bool O_OVER_Q = O_OVER_Q_;  // output rows are staged where Q was
  static constexpr Registers REGISTERS = REGISTERS_;
  static constexpr Switches SWITCHES = SWITCHES_;

  // The warps of each role. setmaxnreg wants the same number of registers in all four warps of a
  // warpgroup.
  static constexpr int WARPS = 16;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int CTAS_PER_SM = 1;
  static constexpr int SOFTMAX_WARPS = 4;  // for each tile, from warp 0 on
  static constexpr int CORRECTION_WARP = 8;
  static constexpr int CORRECTION_WARPS = 4;
  static constexpr int MMA_WARP = 12;
  static constexpr int STORE_WARP = 13;
  static constexpr int LOAD_WARP = 14;
  static constexpr int CLEAN_WARP = 15;
  // The warps of a CTA, or of a pair, that walk over tiles; where any_ragged() clean does, too.
  static constexpr int WALKING_WARPS = CTAS * (TILES * SOFTMAX_WARPS + CORRECTION_WARPS + 2) + 1;

  // Tiles in shared memory. Their columns count units of 16 bits.
  using QTile = device::SlabTile<HEAD_DIM / PACK, TILE_ROWS>;
  using KTile = device::SlabTile<HEAD_DIM / PACK, BLOCK_K / CTAS>;
  using VTile = device::SlabTile<HEAD_DIM_V / CTAS / PACK, BLOCK_K>;
  using OTile = device::SlabTile<HEAD_DIM_V, TILE_ROWS>;

  // Shared memory, in bytes: Q | K and V | O, unless O_OVER_Q | row statistics | barriers |
  // responses | the address of tensor memory.
  static constexpr int Q_SMEM = 0;
  static constexpr int RING_SMEM = Q_SMEM + TILES * QTile::BYTES;
  static constexpr int K_SLOT_BYTES =
      SHARED_RING && VTile::BYTES > KTile::BYTES ? VTile::BYTES : KTile::BYTES;
  static constexpr int RING_BYTES = K_STAGES * K_SLOT_BYTES + V_STAGES * VTile::BYTES;
  static constexpr int O_SMEM = O_OVER_Q ? Q_SMEM : RING_SMEM + RING_BYTES;
  static constexpr int O_STRIDE = O_OVER_Q ? QTile::BYTES : OTile::BYTES;  // to the next tile
  static constexpr int STATS_SMEM = RING_SMEM + RING_BYTES + (O_OVER_Q ? 0 : TILES * OTile::BYTES);
  static constexpr int STATS_BYTES = 2 * 4 * TILE_ROWS;  // for each tile: two floats a row
  static constexpr int BARRIER_SMEM = STATS_SMEM + TILES * STATS_BYTES;
  static constexpr int S_BUFFERS = 2;
  static constexpr int RESPONSES = 4;  // buffers for the names of the next tiles (next_tile.cuh)
  static constexpr int BARRIERS = 7 * TILES + 3 * S_BUFFERS + 4 * SLOTS + 2 * RESPONSES;
  static constexpr int RESPONSE_SMEM = (BARRIER_SMEM + 8 * BARRIERS + 15) / 16 * 16;
  static constexpr int TMEM_ADDRESS_SMEM = RESPONSE_SMEM + 16 * RESPONSES;
  static constexpr int SHARED_BYTES = (TMEM_ADDRESS_SMEM + 4 + 15) / 16 * 16;

  // Tensor memory, in columns: two buffers of S, then the O of each tile. P is packed and
  // overwrites the last columns of its S, from P_COLUMN of the buffer on.
  static constexpr int S_COLUMNS = BLOCK_K;
  static constexpr int P_COLUMN = BLOCK_K - BLOCK_K / P_PER_COLUMN;
  static constexpr int O_COLUMN = 256;

  static_assert(DTYPE == DType::F16 || DTYPE == DType::BF16 || DTYPE == DType::E4M3,
                "tcgen05.mma: kind::f16 and kind::f8f6f4");
  static_assert(!FP8 || BLOCK_K % SCALE_ROWS == 0,
                "a block is whole groups of keys with a descale");
  static_assert(BLOCK_K / PRODUCT_DEPTH % 4 == 0 || !SWITCHES.split_p,
                "3/4 of P must be whole products");
  static_assert(TILES == 1 || TILES == 2, "one or two softmax warpgroups");
  static_assert(CTAS == 1 || (CTAS == 2 && TILES == 2), "one CTA, or a pair of CTAs of two tiles");
  static_assert(TILES == 2 || !SHARED_RING,
                "with one tile the next K is multiplied before this V: the rings must be separate");
  static_assert(CTAS == 1 || !FP8, "multiply() has no 8-bit product of a pair");
  static_assert(BLOCK_K == 128 || BLOCK_K == 64,
                "a quarter is whole products, and its mask fits 32 bits");
  static_assert(S_BUFFERS * S_COLUMNS <= O_COLUMN && O_COLUMN + TILES * HEAD_DIM_V <= 512,
                "tensor memory has 512 columns");
  static_assert(!O_OVER_Q || OTile::BYTES <= QTile::BYTES, "O is staged where Q was");
  static_assert(QTile::SLAB == KTile::SLAB && HEAD_DIM_V % 32 == 0,
                "tcgen05.mma: N is a multiple of 16, of 32 for a pair with A in tensor memory");
  static_assert(4 * 32 * (2 * REGISTERS.softmax + REGISTERS.correction + REGISTERS.other) <= 65536,
                "CUDA: 65536 registers of an SM");
  static_assert(SHARED_BYTES <= 227 * 1024, "CUDA: at most 227 KiB of shared memory in a CTA");
};

// clang-format off
constexpr Registers MORE_SOFTMAX{192, 80, 48};
constexpr Registers ONE_SOFTMAX{184, 88, 56};  // for one tile, which has one softmax warpgroup
// As many exponentials come from the polynomial as the MUFU would be behind the tensor cores,
// unless the issue slots run out first (NOTES.md).
constexpr Switches NONE{};
constexpr Switches EIGHTH{.polynomial_pairs = 2};
constexpr Switches THREE_16THS{.polynomial_pairs = 4, .polynomial_in_last_quarter = false};
constexpr Switches FIVE_16THS{.polynomial_pairs = 5};
// About as many as FIVE_16THS, in three quarters.
constexpr Switches SIX_OF_THREE_QUARTERS{.polynomial_pairs = 6,
                                         .polynomial_in_last_quarter = false};

//                                  head_dim        block  stages  O over
//                                 q,k   v    tiles  _k    K   V   Q      registers     switches
using D64  = Config<DTYPE,  64,  64,  2,    128,  8,  0,  false, MORE_SOFTMAX, FIVE_16THS>;
using D96  = Config<DTYPE,  96,  96,  2,    128,  5,  0,  false, MORE_SOFTMAX, SIX_OF_THREE_QUARTERS>;
using D128 = Config<DTYPE, 128, 128,  2,    128,  3,  0,  false, MORE_SOFTMAX, THREE_16THS>;
using D192 = Config<DTYPE, 192, 128,  2,    128,  2,  1,  true,  MORE_SOFTMAX, NONE>;
using D256 = Config<DTYPE, 256, 256,  1,     64,  2,  2,  true,  ONE_SOFTMAX, NONE>;
// Pairs of CTAs, for long sequences: tiles of 2 x 256 rows, half a block of K or V in each stage.
using D128Pair = Config<DTYPE, 128, 128, 2, 128, 6, 0, false, MORE_SOFTMAX, THREE_16THS, 2>;
using D192Pair = Config<DTYPE, 192, 128, 2, 128, 4, 2, true, MORE_SOFTMAX, NONE, 2>;
// For few query rows: one tile, and as many stages of K and V as there is room for.
using D64Few  = Config<DTYPE,  64,  64,  1,    128,  6,  6,  false, ONE_SOFTMAX, FIVE_16THS>;
using D96Few  = Config<DTYPE,  96,  96,  1,    128,  4,  3,  false, ONE_SOFTMAX, SIX_OF_THREE_QUARTERS>;
using D128Few = Config<DTYPE, 128, 128,  1,    128,  3,  2,  false, ONE_SOFTMAX, THREE_16THS>;
using D192Few = Config<DTYPE, 192, 128,  1,    128,  2,  2,  true,  ONE_SOFTMAX, NONE>;
// clang-format on

// --- 8-bit inputs ---

// clang-format off
//                                           head_dim        block  stages  O over
//                                          q,k   v    tiles  _k    K   V   Q      registers     switches
using Fp8D64  = Config<DType::E4M3,  64,  64,  2,    128,  8,  0,  false, MORE_SOFTMAX, FIVE_16THS>;
using Fp8D128 = Config<DType::E4M3, 128, 128,  2,    128,  8,  0,  false, MORE_SOFTMAX, FIVE_16THS>;
using Fp8D192 = Config<DType::E4M3, 192, 128,  2,    128,  3,  2,  false, MORE_SOFTMAX, FIVE_16THS>;
using Fp8D256 = Config<DType::E4M3, 256, 256,  1,    128,  2,  2,  false, MORE_SOFTMAX, EIGHTH>;
// clang-format on

// --- for 10.3 ---

// A kernel of which the MUFU computes all exponentials: that of 10.3 is said to be twice as fast.
constexpr Switches without_polynomials(Switches switches) {
  switches.polynomial_pairs = 0;
  return switches;
}
template <class C>
using WithoutPolynomials =
    Config<C::DTYPE, C::HEAD_DIM, C::HEAD_DIM_V, C::TILES, C::BLOCK_K, C::K_STAGES, C::V_STAGES,
           C::O_OVER_Q, C::REGISTERS, without_polynomials(C::SWITCHES), C::CTAS>;

// The sums of shared memory that NOTES.md shows: Q, K and V, O, in KiB.
constexpr int KIB = 1024;
static_assert(D64::STATS_SMEM == (32 + 8 * 16 + 32) * KIB);
static_assert(D96::STATS_SMEM == (48 + 5 * 24 + 48) * KIB);
static_assert(D128::STATS_SMEM == (64 + 3 * 32 + 64) * KIB);
static_assert(D128Pair::STATS_SMEM == (64 + 6 * 16 + 64) * KIB);
static_assert(D192::STATS_SMEM == (96 + 2 * 48 + 32) * KIB);
static_assert(D192Pair::STATS_SMEM == (96 + 4 * 24 + 2 * 16) * KIB);
static_assert(D256::STATS_SMEM == (64 + 4 * 32) * KIB);
static_assert(D64Few::STATS_SMEM == (16 + 6 * 16 + 6 * 16 + 16) * KIB);
static_assert(D96Few::STATS_SMEM == (24 + 4 * 24 + 3 * 24 + 24) * KIB);
static_assert(D128Few::STATS_SMEM == (32 + 3 * 32 + 2 * 32 + 32) * KIB);
static_assert(D192Few::STATS_SMEM == (48 + 2 * 48 + 2 * 32) * KIB);
static_assert(Fp8D64::STATS_SMEM == (16 + 8 * 8 + 32) * KIB);
static_assert(Fp8D128::STATS_SMEM == (32 + 8 * 16 + 64) * KIB);
static_assert(Fp8D192::STATS_SMEM == (48 + 3 * 24 + 2 * 16 + 64) * KIB);
static_assert(Fp8D256::STATS_SMEM == (32 + 2 * 32 + 2 * 32 + 64) * KIB);

}  // namespace archflash::blackwell_dc
