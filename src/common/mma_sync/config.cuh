// The tile sizes of a kernel on mma.sync. Compile-time numbers only, in plain C++: kernels and
// plans both include them.
#pragma once

#include <cstdint>

#include "common/device/swizzled_tile.cuh"
#include "common/dtype.h"
#include "common/mask_params.h"

namespace archflash::mma_sync {

// How the inputs are stored: the number of elements in a unit of 16 bits, which ldmatrix moves as
// one, for Q and K and for V; and the bytes that the kernel needs for its CtaContext.
struct Inputs16 {
  static constexpr int QK_PACK = 1;
  static constexpr int V_PACK = 1;
  static constexpr int CONTEXT_BYTES = 64;
};

// Where a warp has its fragments of Q: it reads them once, or from shared memory in every step.
enum class QIn { Registers, Shared };

// A CTA owns BLOCK_Q query rows of one head and visits the keys in blocks of BLOCK_K. A warp owns
// M_TILES row tiles of 16 rows, which share every fragment of K and V that it reads. It takes
// STEP_KEYS keys at a time from scores to output. d may be at most HEAD_DIM, dv HEAD_DIM_V.
template <DType DTYPE_, int HEAD_DIM_, int HEAD_DIM_V_, int WARPS_, int M_TILES_, int BLOCK_K_,
          int STEP_KEYS_, int STAGES_, QIn Q_IN, int CTAS_PER_SM_, class Inputs = Inputs16,
          bool CAN_SPLIT_ = false>
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
  // Buffers for K and V. With 2, the next K and V are copied during the whole of the current block.
  // With 1, V is copied during Q K^T, and the next K during P V.
  static constexpr int STAGES = STAGES_;
  static constexpr bool Q_IN_REGISTERS = Q_IN == QIn::Registers;
  static constexpr int CTAS_PER_SM = CTAS_PER_SM_;  // ptxas limits the registers to allow as many
  // For few query rows: the keys of a tile may be split over several CTAs, and heads that share a
  // head of K may be packed into a tile.
  static constexpr bool CAN_SPLIT = CAN_SPLIT_;
  static constexpr bool ROWS_ALONE = CAN_SPLIT;  // device/online_softmax.cuh
  // device/online_softmax.cuh. For (192, 128) the registers would not suffice.
  static constexpr bool KEEPS_LIMITS = !CAN_SPLIT && QK_PACK == 1 && HEAD_DIM == HEAD_DIM_V;
  static constexpr bool CACHE = false;              // see CacheConfig
  static constexpr bool FP8_CACHE = false;          // only a DecodeConfig reads one
  static constexpr int KEY_GROUPS = 1;              // see KeyGroupsConfig
  static constexpr bool LATE_EXPONENTIALS = false;  // see LateConfig
  static constexpr bool DROPS = false;              // see DropoutConfig
  static constexpr bool V_WITH_K = STAGES == 2;     // see ShortConfig

  // Layouts in shared memory. Their columns are units of 16 bits.
  using QKTile = device::SwizzledTile<HEAD_DIM / QK_PACK>;
  using QTile = QKTile;
  using KTile = QKTile;
  using VTile = device::SwizzledTile<HEAD_DIM_V / V_PACK>;

  // Shared memory: Q | K, V of each stage | CtaContext. Offsets and sizes in bytes.
  static constexpr int K_BYTES = BLOCK_K * QKTile::ROW_BYTES;
  static constexpr int V_BYTES = BLOCK_K * VTile::ROW_BYTES;
  static constexpr int Q_SMEM = 0;
  static constexpr int K_SMEM = Q_SMEM + BLOCK_Q * QKTile::ROW_BYTES;
  static constexpr int V_SMEM = K_SMEM + K_BYTES;
  static constexpr int STAGE_BYTES = K_BYTES + V_BYTES;
  static constexpr int CONTEXT_SMEM = K_SMEM + STAGES * STAGE_BYTES;
  static constexpr int CONTEXT_BYTES = Inputs::CONTEXT_BYTES;
  static constexpr int SHARED_BYTES = CONTEXT_SMEM + CONTEXT_BYTES;

  static_assert(!CAN_SPLIT || (M_TILES == 1 && (BLOCK_Q & (BLOCK_Q - 1)) == 0),
                "device/few_rows.cuh: 16 rows for each warp; packed heads share a power of two");
  static_assert(STAGES == 1 || STAGES == 2, "the main loop knows one or two buffers");
  static_assert(STAGES == 2 || STEP_KEYS == BLOCK_K,
                "with one buffer V is awaited once, after all scores of the block");
  static_assert(BLOCK_K % STEP_KEYS == 0 && STEP_KEYS % (16 * V_PACK) == 0,
                "mma.sync: 16 keys of P V, or 32 of 8 bits");
  static_assert(THREADS <= 1024, "CUDA: at most 1024 threads in a CTA");
  static_assert(SHARED_BYTES <= 227 * 1024,
                "CUDA: at most 227 KiB of shared memory in a CTA (9.0, 10.0)");
};

// A Config of twice as many warps: each row belongs to two, of which each takes half of the keys of
// a block, STEP_KEYS (device/key_groups.cuh).
template <class Base>
struct KeyGroupsConfig : Base {
  static constexpr int KEY_GROUPS = 2;
  static constexpr int WARPS = Base::WARPS * KEY_GROUPS;
  static constexpr int THREADS = Base::THREADS * KEY_GROUPS;
  static_assert(Base::BLOCK_K == Base::STEP_KEYS * KEY_GROUPS && Base::STAGES == 2 &&
                    !Base::CAN_SPLIT,
                "the main loop knows no other key groups");
};

// A Config for calls that have one block of keys: one buffer, and V is copied together with K and
// Q.
template <class Base>
struct ShortConfig : Base {
  static constexpr bool V_WITH_K = true;
  static constexpr bool KEEPS_LIMITS = false;  // only a second block would need them
  static_assert(Base::STAGES == 1, "with two, V is copied with K anyway");
};

// A Config whose exponentials of 16 keys come directly before the P V of those keys: the assembler
// then places them between products.
template <class Base>
struct LateConfig : Base {
  static constexpr bool LATE_EXPONENTIALS = true;
};

// A Config whose kernel drops some of P before P V. It knows no softcap, no masks as data and no
// split keys: calls with those are left to MaskedConfig.
template <class Base>
struct DropoutConfig : Base {
  static constexpr bool DROPS = true;
  static_assert(!Base::CAN_SPLIT && !Base::CACHE && Base::KEY_GROUPS == 1 && Base::QK_PACK == 1 &&
                    Base::V_PACK == 1 && Base::STEP_KEYS % 32 == 0,
                "many query rows in 16 bits, and the random bits of 32 keys at a time");
};

// A Config for few query rows.
template <DType DTYPE, int HEAD_DIM, int HEAD_DIM_V, int BLOCK_K, int STAGES, QIn Q_IN,
          int CTAS_PER_SM>
using FewRowsConfig = Config<DTYPE, HEAD_DIM, HEAD_DIM_V, 4, 1, BLOCK_K, BLOCK_K, STAGES, Q_IN,
                             CTAS_PER_SM, Inputs16, true>;

// A FewRowsConfig whose K and V are a cache, contiguous or in pages, with lengths on the device.
template <class FewRows>
struct CacheConfig : FewRows {
  static constexpr bool CACHE = true;
  static constexpr int CONTEXT_BYTES = 96;
  static constexpr int SHARED_BYTES = FewRows::CONTEXT_SMEM + CONTEXT_BYTES;
  static_assert(FewRows::CAN_SPLIT && FewRows::QK_PACK == 1 && FewRows::V_PACK == 1);
};

// A FewRowsConfig whose kernel reads attn_mask, key_ranges, alibi_slopes and block_mask.
template <class FewRows>
struct MaskedConfig : FewRows {
  static constexpr bool MASKED = true;
  static constexpr bool LOADS_ADDED_LATE = false;  // device/lane_masks.cuh
  static_assert(FewRows::CAN_SPLIT && FewRows::STAGES == 2 && FewRows::M_TILES == 1 &&
                    FewRows::STEP_KEYS == FewRows::BLOCK_K,
                "mma_sync/masked_fwd.cuh: two buffers, and all keys of a block at once");
  static_assert(MASK_BLOCK % FewRows::BLOCK_Q == 0 && MASK_BLOCK % FewRows::BLOCK_K == 0,
                "a tile lies in one block of block_mask");
};

// A MaskedConfig whose K and V are a cache.
template <class FewRows>
struct MaskedCacheConfig : MaskedConfig<FewRows> {
  static constexpr bool CACHE = true;
  static constexpr int CONTEXT_BYTES = 288;
  static constexpr int SHARED_BYTES = FewRows::CONTEXT_SMEM + CONTEXT_BYTES;
};

}  // namespace archflash::mma_sync
