// A kernel for at most 16 query rows against a KV cache. Compile-time numbers only, in plain C++.
#pragma once

#include <cstdint>

#include "common/device/swizzled_tile.cuh"
#include "common/dtype.h"
#include "common/mma_sync/config.cuh"

namespace archflash::mma_sync {

// A CTA owns 16 query rows, mostly heads of one position, packed. It visits the keys in blocks of
// BLOCK_K, of which each warp takes WARP_KEYS keys for all rows: see decode_fwd.cuh. DTYPE is that
// of q and out. An FP8_CACHE is multiplied in fp16, which holds all of its numbers.
template <DType DTYPE_, int HEAD_DIM_, int WARPS_, int WARP_KEYS_, int STAGES_, QIn Q_IN,
          int CTAS_PER_SM_, bool FP8_CACHE_ = false>
struct DecodeConfig {
  static constexpr DType DTYPE = DTYPE_;
  static constexpr DType PRODUCT = FP8_CACHE_ ? DType::F16 : DTYPE;
  static constexpr int HEAD_DIM = HEAD_DIM_;
  static constexpr int HEAD_DIM_V = HEAD_DIM_;
  static constexpr int WARPS = WARPS_;
  static constexpr int THREADS = 32 * WARPS;
  static constexpr int BLOCK_Q = 16;
  static constexpr int WARP_ROWS = 0;  // warps share the rows
  static constexpr int WARP_KEYS = WARP_KEYS_;
  static constexpr int BLOCK_K = WARPS * WARP_KEYS;
  static constexpr int STAGES = STAGES_;  // of each warp
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;
  static constexpr bool Q_IN_REGISTERS = Q_IN == QIn::Registers;
  static constexpr bool CAN_SPLIT = true;
  static constexpr bool CACHE = true;
  static constexpr bool FP8_CACHE = FP8_CACHE_;
  static constexpr bool MASKED = false;  // takes attn_mask
  static constexpr bool PLAIN = false;   // see PlainDecodeConfig
  static constexpr bool JOINED = false;  // see JoinedDecodeConfig
  static constexpr int ELEMENT_BYTES = FP8_CACHE ? 1 : 2;

  // What device/online_softmax.cuh needs to know of a warp.
  struct Warp {
    static constexpr DType DTYPE = PRODUCT;
    static constexpr int HEAD_DIM_V = HEAD_DIM_;
    static constexpr int M_TILES = 1;
    static constexpr int WARP_ROWS = 16;
    static constexpr int STEP_KEYS = WARP_KEYS;
    static constexpr bool ROWS_ALONE = true;
  };

  // The layout of K and V in shared memory. Its columns are units of 16 bits.
  using Tile = device::SwizzledTile<HEAD_DIM * ELEMENT_BYTES / 2>;

  // Shared memory: for each warp K, V of its stages | fragments of Q | base and sum of each warp's
  // rows | context. In the end a warp's stages hold its outputs in fp32. Offsets and sizes in
  // bytes.
  static constexpr int K_BYTES = WARP_KEYS * Tile::ROW_BYTES;
  static constexpr int STAGE_BYTES = 2 * K_BYTES;
  static constexpr int WARP_BYTES = STAGES * STAGE_BYTES;
  static constexpr int Q_SMEM = WARPS * WARP_BYTES;
  static constexpr int Q_BYTES = Q_IN_REGISTERS ? 0 : BLOCK_Q * HEAD_DIM * 2;
  static constexpr int ENDS_SMEM = Q_SMEM + Q_BYTES;
  static constexpr int CONTEXT_SMEM = ENDS_SMEM + WARPS * BLOCK_Q * 8;
  static constexpr int CONTEXT_BYTES = 96;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + CONTEXT_BYTES;
  // Floats from one row of outputs to the next. What is added to a row puts the rows that lanes
  // write together into different banks.
  static constexpr int OUT_STRIDE = HEAD_DIM_V + (FP8_CACHE ? 16 : 8);

  static_assert(BLOCK_Q * OUT_STRIDE * 4 <= WARP_BYTES, "a warp's outputs fit its stages");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0, 10.0)");
};

// A DecodeConfig for calls without a KV cache and cu_seqlens whose rows are one tile for each head
// of K, or for a part of its query heads. The grid says what a CTA computes: (sequences, tiles of a
// sequence, shares of the keys). Of a call of few keys, finding it out otherwise is the half.
template <class Base>
struct PlainDecodeConfig : Base {
  static constexpr bool PLAIN = true;
};

// A PlainDecodeConfig for calls with attn_mask.
template <class Base>
struct MaskedDecodeConfig : PlainDecodeConfig<Base> {
  static constexpr bool MASKED = true;
};

// A PlainDecodeConfig for up to MOST_JOINED shares of the keys, whose CTAs are a cluster: they join
// what they have found in each other's shared memory (decode_join.cuh), and no kernel comes behind.
template <class Base>
struct JoinedDecodeConfig : Base {
  static constexpr bool JOINED = true;
  static constexpr int MOST_JOINED = 8;  // CTAs of a cluster that every GPU of 9.0 takes
  // Behind the context: base and sum of the CTA's rows.
  static constexpr int JOINED_SMEM = Base::SHARED_BYTES;
  static constexpr int SHARED_BYTES = JOINED_SMEM + Base::BLOCK_Q * 8;
};

// A DecodeConfig for a cache of 8-bit numbers.
template <DType DTYPE, int HEAD_DIM, int WARPS, int WARP_KEYS, int STAGES, QIn Q_IN,
          int CTAS_PER_SM>
using Fp8DecodeConfig =
    DecodeConfig<DTYPE, HEAD_DIM, WARPS, WARP_KEYS, STAGES, Q_IN, CTAS_PER_SM, true>;

}  // namespace archflash::mma_sync
