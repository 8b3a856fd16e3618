// A tile of the kernel in attention_fwd.cuh: compile-time numbers only, read by the kernel and by
// plans (plain C++).
#pragma once

#include <cstdint>

#include "common/math/swizzled_tile.cuh"
#include "common/problem.h"

namespace archflash::mma_sync {

// What the elements of a tile are: how many share the 16 bits that ldmatrix moves as one, of Q and
// K and of V; and what the kernel keeps of its CTA's work in shared memory.
struct Inputs16 {
  static constexpr int QK_PACK = 1;
  static constexpr int V_PACK = 1;
  static constexpr int PLACE_BYTES = 64;
};

// A CTA owns BLOCK_Q query rows of one head and walks over the keys, BLOCK_K at a time. A warp owns
// M_TILES tiles of 16 rows, which share every fragment of K and V that it reads, and takes
// STEP_KEYS keys at a time from scores to output. HEAD_DIM bounds d, HEAD_DIM_V bounds dv.
template <DType DTYPE_, int HEAD_DIM_, int HEAD_DIM_V_, int WARPS_, int M_TILES_, int BLOCK_K_,
          int STEP_KEYS_, int STAGES_, bool Q_IN_REGISTERS_, int CTAS_PER_SM_,
          class Inputs = Inputs16>
struct Config {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr int QK_PACK = Inputs::QK_PACK;
  static constexpr int V_PACK = Inputs::V_PACK;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_V_;
  static constexpr int WARPS = WARPS_;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int M_TILES = M_TILES_;
  static constexpr int WARP_ROWS = 16 * M_TILES;
  static constexpr int BLOCK_Q = WARPS * WARP_ROWS;
  static constexpr int BLOCK_K = BLOCK_K_;
  static constexpr int STEP_KEYS = STEP_KEYS_;
  // Buffers for K and V. 2: the next block of both is on its way during the whole of this one.
  // 1: V is on its way during Q K^T, the next K during P V.
  static constexpr int STAGES = STAGES_;
  static constexpr bool Q_IN_REGISTERS = Q_IN_REGISTERS_;  // read once; else anew for every step
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;         // what the registers must allow

  // In units of 16 bits.
  using QKTile = math::SwizzledTile<HEAD_DIM / QK_PACK>;
  using QTile = QKTile;
  using KTile = QKTile;
  using VTile = math::SwizzledTile<HEAD_DIM_V / V_PACK>;

  // Shared memory, in bytes: Q | K, V of each stage | Place.
  static constexpr int K_BYTES = BLOCK_K * QKTile::ROW_BYTES;
  static constexpr int V_BYTES = BLOCK_K * VTile::ROW_BYTES;
  static constexpr int Q_SMEM = 0;
  static constexpr int K_SMEM = Q_SMEM + BLOCK_Q * QKTile::ROW_BYTES;
  static constexpr int V_SMEM = K_SMEM + K_BYTES;
  static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
  static constexpr int PLACE_SMEM = K_SMEM + STAGES * STAGE_BYTES;
  static constexpr int PLACE_BYTES = Inputs::PLACE_BYTES;
  static constexpr int SHARED_BYTES = PLACE_SMEM + PLACE_BYTES;

  static_assert(STAGES == 1 || STAGES == 2, "the main loop knows one or two buffers");
  static_assert(STAGES == 2 || STEP_KEYS == BLOCK_K,
                "with one buffer V may only be awaited once, after all scores of the block");
  static_assert(BLOCK_K % STEP_KEYS == 0 && STEP_KEYS % (16 * V_PACK) == 0,
                "mma.sync: 16 keys of P V, or 32 of 8 bits");
  static_assert(THREADS <= 1024, "CUDA: at most 1024 threads in a CTA");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0, 10.0)");
};

}  // namespace archflash::mma_sync
