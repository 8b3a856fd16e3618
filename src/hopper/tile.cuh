// The moving parts of the hopper kernel: the barriers, the positions in the rings, the messages
// about tiles, the products and the softmax of a block.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/math/attention_work.cuh"
#include "common/math/fp8_softmax.cuh"
#include "common/math/masks.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/ring.cuh"
#include "common/math/uniform.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/mov.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/swizzle.h"
#include "hopper/config.cuh"

namespace archflash::hopper {

using math::clear_rows;
using math::release;
using math::RingPosition;
using math::uniform;

// The barriers, as addresses in shared memory. "Bytes": the producer arrives once and says how many
// bytes TMA will bring; the phase ends when they have landed.
//
// clang-format off
//   barrier                 arrives             waits      so that
//   q_full of each stage    producer, bytes     consumers  the tile's message and Q are there before
//                                                          they are read
//   q_empty of each stage   each consumer warp  producer   the message was read, the products have
//                                                          read Q, and output rows that pass
//                                                          through Q's part of shared memory have
//                                                          left it, before the next message and the
//                                                          next Q come
//   k_full, v_full          producer, bytes     consumers  the block has landed before wgmma reads it
//     of each stage
//   k_empty, v_empty        each consumer warp  producer   every warp's products have read the block
//     of each stage                                        before TMA overwrites it
//   v_ragged                producer, bytes     producer   a block of which some rows do not count
//                                                          has landed before the producer clears
//                                                          them; then it arrives at v_full
//   v_tile_full             producer            V's        the message for V's producer is there
//                                               producer   before it is read,
//   v_tile_empty            V's producer        producer   and was read before the next one comes
//   Where turns_v():
//   v_full of each stage    each turning warp   consumers  the block has been turned before wgmma
//                                                          reads it; v_empty then holds back the
//                                                          turning warps, not TMA
//   raw_full of each stage  producer, bytes     turning    the block has landed before it is turned
//                                               warps
//   raw_empty               each turning warp   producer   every warp has read its part of the block
//     of each stage                                        before TMA overwrites it
// clang-format on
template <class C>
struct Barriers {
  uint32_t first_smem;

  __device__ __forceinline__ uint32_t q_full(int stage) const { return first_smem + 8 * stage; }
  __device__ __forceinline__ uint32_t q_empty(int stage) const {
    return q_full(stage) + 8 * C::Q_STAGES;
  }
  __device__ __forceinline__ uint32_t k_full(int stage) const {
    return first_smem + 16 * C::Q_STAGES + 8 * stage;
  }
  __device__ __forceinline__ uint32_t k_empty(int stage) const {
    return k_full(stage) + 8 * C::STAGES;
  }
  __device__ __forceinline__ uint32_t v_full(int stage) const {
    return k_full(stage) + 16 * C::STAGES;
  }
  __device__ __forceinline__ uint32_t v_empty(int stage) const {
    return k_full(stage) + 24 * C::STAGES;
  }
  __device__ __forceinline__ uint32_t v_ragged() const {
    return first_smem + 16 * C::Q_STAGES + 32 * C::STAGES;
  }
  __device__ __forceinline__ uint32_t v_tile_full() const { return v_ragged() + 8; }
  __device__ __forceinline__ uint32_t v_tile_empty() const { return v_ragged() + 16; }
  __device__ __forceinline__ uint32_t raw_full(int stage) const {
    return v_ragged() + 8 + 16 * (C::PRODUCERS - 1) + 8 * stage;
  }
  __device__ __forceinline__ uint32_t raw_empty(int stage) const {
    return raw_full(stage) + 8 * C::RAW_STAGES;
  }

  // Called by one thread. The producer arrives once at a full barrier and says how many bytes will
  // come, or `v_arrivals` turning warps do at v_full. Each consumer warp arrives once at the empty
  // barriers of Q, K and V, each turning warp at raw_empty, V's producer at v_tile_empty.
  __device__ __forceinline__ void initialise(int v_arrivals = 1) const {
    for (int stage = 0; stage < C::Q_STAGES; ++stage) {
      if constexpr (C::PREPARES_TILES)  // the message is of all lanes of the producer
        ptx::mbarrier_init_for_warps(q_full(stage), 1);
      else
        ptx::mbarrier_init(q_full(stage), 1);
      ptx::mbarrier_init_for_warps(q_empty(stage), C::WARPS);
    }
    for (int stage = 0; stage < C::STAGES; ++stage) {
      ptx::mbarrier_init(k_full(stage), 1);
      ptx::mbarrier_init_for_warps(k_empty(stage), C::WARPS);
      ptx::mbarrier_init(v_full(stage), v_arrivals);
      ptx::mbarrier_init_for_warps(v_empty(stage), C::WARPS);
    }
    ptx::mbarrier_init(v_ragged(), 1);
    for (int stage = 0; stage < C::RAW_STAGES; ++stage) {
      ptx::mbarrier_init(raw_full(stage), 1);
      ptx::mbarrier_init_for_warps(raw_empty(stage), C::TURNING_WARPS);
    }
    if constexpr (C::PRODUCERS > 1) {
      ptx::mbarrier_init(v_tile_full(), 1);
      ptx::mbarrier_init_for_warps(v_tile_empty(), 1);
    }
    ptx::fence_mbarrier_init();
  }
};

// A row tile and the number of a share of it: of its keys, or of the columns of V. first_row is
// negative behind the last tile.
struct Tile : math::Work {
  int split;
  int end_row;  // one behind its last row

  // The tile as if its sequence ended with it.
  __device__ __forceinline__ math::Work rows() const {
    return {batch_head, first_row, end_row, nk};
  }
};

// The message about the tile in a stage of Q: a Tile, or what a kernel makes of it.
template <class C, class Message = Tile>
__device__ __forceinline__ Message& tile_message(unsigned char* shared, int stage) {
  static_assert(sizeof(Message) <= TILE_MESSAGE_BYTES);
  return *reinterpret_cast<Message*>(shared + C::MESSAGE_SMEM + stage * TILE_MESSAGE_BYTES);
}

// The message for a producer of V: the tile, and the row of the cache that is its first key.
struct CachedTile : Tile {
  int first_of_cache;
};
template <class C>
__device__ __forceinline__ CachedTile& v_tile_message(unsigned char* shared) {
  return tile_message<C, CachedTile>(shared, C::Q_STAGES);
}

// With masks as data: the tile, and the message that comes with the block in a stage of K.
struct SeekingTile : Tile {
  int any_block;  // whether its rows see any block
};
template <class C>
__device__ __forceinline__ BlockMessage& block_message(unsigned char* shared, int stage) {
  return *reinterpret_cast<BlockMessage*>(shared + C::BLOCK_MESSAGE_SMEM +
                                          stage * BLOCK_MESSAGE_BYTES);
}

// With masks as data: which keys of the tile count. The producer clears the other rows of V, and
// keeps this in shared memory, because it has few registers.
template <class C>
__device__ __forceinline__ math::KeyRange& counted_keys(unsigned char* shared) {
  return *reinterpret_cast<math::KeyRange*>(shared + C::COUNTED_SMEM);
}
template <class C>
__device__ __forceinline__ void set_counted_keys(unsigned char* shared,
                                                 const math::KeyRange& counted) {
  __syncwarp();  // every lane has read the last ones
  if (threadIdx.x % 32 == 0) counted_keys<C>(shared) = counted;
  __syncwarp();  // the new ones are there before every lane reads them
}

// Tells the consumers that no tile follows. Called by the producer's warp, one lane of which is the
// leader, with the stage that the next tile would have.
template <class C, class Message = Tile>
__device__ __forceinline__ void send_no_tile(const Barriers<C>& barriers, unsigned char* shared,
                                             const RingPosition<C::Q_STAGES>& q_ring, bool leader) {
  ptx::mbarrier_wait_parity(barriers.q_empty(q_ring.stage), q_ring.parity ^ 1);
  if (leader) {
    Message none{};
    none.first_row = -1;
    tile_message<C, Message>(shared, q_ring.stage) = none;
    ptx::mbarrier_arrive(barriers.q_full(q_ring.stage));
  }
  if constexpr (C::PREPARES_TILES) math::arrive_beside(leader, barriers.q_full(q_ring.stage));
}

// Hands a stage of Q back to the producer, when a consumer warp needs this Q no longer.
template <class C>
__device__ __forceinline__ void hand_back_q(const Barriers<C>& barriers, int stage) {
  // This thread's reads and writes of output rows in Q's part come before TMA's next write there.
  // mutants: needless-with-one-tile
  ptx::fence_proxy_async_shared();
  release(barriers.q_empty(stage));
}

// --- products ---

// Bytes from 8 rows of a slab to the next 8.
template <class Tile>
__device__ __forceinline__ constexpr int group_step() {
  if constexpr (requires { Tile::GROUP_BYTES; }) {
    return Tile::GROUP_BYTES;
  } else {
    return 8 * Tile::ROW_BYTES;
  }
}

// The shared-memory descriptor of wgmma (PTX ISA, "Matrix Descriptor Format"): bits 0 to 13 are
// address >> 4, 16 to 29 the leading offset >> 4, 32 to 45 the stride offset >> 4, 62 and 63 the
// swizzle. The stride offset is the step to the next 8 rows of a slab. The leading offset of an
// MN-major tile is the step to its next slab; that of a K-major tile is ignored.
template <class Tile>
__device__ __forceinline__ ptx::WgmmaDescriptor describe_tile(uint32_t tile_smem,
                                                              int leading_bytes) {
  constexpr uint32_t ADDRESS_MASK = 0x3FFFF;
  constexpr uint32_t SWIZZLE = Tile::SWIZZLE == Swizzle::B128 ? 1u : 2u;
  return {(tile_smem & ADDRESS_MASK) >> 4 | static_cast<uint32_t>(leading_bytes >> 4) << 16,
          static_cast<uint32_t>(group_step<Tile>() >> 4) | SWIZZLE << 30};
}
__device__ __forceinline__ ptx::WgmmaDescriptor advance(ptx::WgmmaDescriptor descriptor,
                                                        int bytes) {
  return {descriptor.low + static_cast<uint32_t>(bytes >> 4), descriptor.high};
}

// Of a K-major tile, whose columns are summed over: bytes to the columns of product k. A product
// sums over 32 bytes of columns.
template <class Tile>
__device__ __forceinline__ constexpr int column_step(int k) {
  const int column = 16 * k;
  return column / Tile::SLAB * Tile::SLAB_BYTES + column % Tile::SLAB * 2;
}

// The 64 rows of Q of a warpgroup, in a stage of Q.
template <class C>
__device__ __forceinline__ ptx::WgmmaDescriptor describe_q(uint32_t shared_smem, int stage,
                                                           int group) {
  using QTile = typename C::QTile;
  return describe_tile<QTile>(
      shared_smem + C::Q_SMEM + stage * QTile::BYTES + group * C::GROUP_ROWS * QTile::ROW_BYTES,
      16);
}

// Starts S = Q K^T for the 64 rows of a warpgroup, which `q` describes, and the first KEYS keys of
// the K of a stage.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void start_qk(math::Scores<C>& s_rmem, ptx::WgmmaDescriptor q,
                                         uint32_t shared_smem, int stage) {
  using Product = ptx::Wgmma<C::DTYPE, KEYS>;
  float* const s = &s_rmem[0][0][0];
  ptx::registers_change<KEYS / 2>(s);
  ptx::wgmma_fence();  // the last uses of the scores come before the product
  const ptx::WgmmaDescriptor k =
      describe_tile<typename C::KTile>(shared_smem + C::K_SMEM + stage * C::KTile::BYTES, 16);
#pragma unroll
  for (int i = 0; i < C::QTile::COLUMNS / 16; ++i) {
    Product::ss(s, advance(q, column_step<typename C::QTile>(i)),
                advance(k, column_step<typename C::KTile>(i)), i != 0);
  }
  ptx::wgmma_commit_group();
}

// P, as fragments of A.
template <class C>
using Probabilities = std::conditional_t<C::FP8, math::Fp8Probabilities<C>, math::Probabilities<C>>;

// The outputs of a product: of PASS_COLUMNS columns of V.
template <class C>
using PassOutputs = float[1][C::PASS_COLUMNS / 8][4];

// Where products add up: the part, or the outputs themselves.
template <class C>
__device__ __forceinline__ PassOutputs<C>& products_of(math::Outputs<C>& o_rmem,
                                                       PassOutputs<C>& part_rmem) {
  if constexpr (C::SUMS_IN_PARTS) {
    return part_rmem;
  } else {
    return o_rmem;
  }
}

// Starts O += P V, or O = P V if not `add`, with the V of a stage; if it is of 8 bits, with its
// columns from `first_column` on.
template <class C>
__device__ __forceinline__ void start_pv(PassOutputs<C>& o_rmem, const Probabilities<C>& p_rmem,
                                         uint32_t shared_smem, int stage, int add,
                                         int first_column = 0) {
  using VTile = typename C::VTile;
  using Product = ptx::Wgmma<C::DTYPE, C::PASS_COLUMNS>;
  float* const o = &o_rmem[0][0][0];
  ptx::registers_change<C::PASS_COLUMNS / 2>(o);
  ptx::wgmma_fence();  // the last uses of P and the outputs come before the product
  const int leading_bytes = C::FP8 ? 16 : VTile::SLABS > 1 ? VTile::SLAB_BYTES : 0;
  const ptx::WgmmaDescriptor v = describe_tile<VTile>(
      shared_smem + C::V_SMEM + stage * VTile::BYTES + first_column * VTile::ROW_BYTES,
      leading_bytes);
#pragma unroll
  for (int i = 0; i < C::BLOCK_K / (16 * C::PACK); ++i) {
    const int step = C::FP8 ? column_step<VTile>(i) : 2 * i * group_step<VTile>();
    Product::rs(o, p_rmem[0][i], advance(v, step), add || i > 0);
  }
  ptx::wgmma_commit_group();
}

// --- softmax ---

template <class C>
using Weights = std::conditional_t<C::FP8, math::WeightsE4m3, math::Weights16>;

// Raises the bases of a warp's rows if these scores require it, by the rules of Weights, and
// rescales their sums; then `raised` is called with the corrections that their outputs need. FIRST:
// these are the first scores of the rows, so that their bases rise in any case. KEYS: the scores of
// so many keys, the first ones.
// Returns the scale for weigh_rows: exp2_scale, or 1 if this has scaled the scores already. What is
// rare is behind one branch, as each branch would drain the pipelines. In there a warp is on its
// own: it must not wait for a product, because all four warps of a warpgroup have to execute each
// wgmma.wait_group (PTX ISA, .aligned).
template <class C, bool FIRST = false, int KEYS = C::BLOCK_K, class Raised>
__device__ __forceinline__ float follow_maxima(math::Scores<C>& s_rmem, math::RowState<C>& state,
                                               float exp2_scale, Raised raised) {
  using W = Weights<C>;
  constexpr int HALF = KEYS / 16;  // two maxima of a row are found side by side
  float max[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float halves[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* first = &s_rmem[0][half * HALF][2 * r];
      halves[half] = fmaxf(first[0], first[1]);
#pragma unroll
      for (int n = 1; n < HALF; ++n)
        halves[half] = fmaxf(halves[half], fmaxf(first[4 * n], first[4 * n + 1]));
    }
    max[r] = fmaxf(halves[0], halves[1]);
  }
  // Without short cuts, so that there is no branch.
  const auto exceed = [&](float limit_0, float limit_1) {
    return static_cast<int>(max[0] * exp2_scale > limit_0) |
           static_cast<int>(max[1] * exp2_scale > limit_1);
  };
  float (&base)[2] = state.base[0];
  float (&sum)[2] = state.sum[0];
  float lag = 0.0f;
  if constexpr (W::RAISE_FRACTION == 0.0f)
    lag = state.large ? W::LARGE_BASE_LAG : W::P_LOG2 + W::BASE_LAG;
  const bool rare = FIRST || __any_sync(math::FULL_WARP, exceed(base[0] + lag, base[1] + lag) |
                                                             static_cast<int>(state.large));
  if (!rare) return exp2_scale;
  const bool raises =
      FIRST || __any_sync(math::FULL_WARP, W::RAISE_FRACTION == 0.0f
                                               ? exceed(base[0] + lag, base[1] + lag)
                                               : exceed(base[0] + math::allowed_rise<W>(sum[0]),
                                                        base[1] + math::allowed_rise<W>(sum[1])));
  if (raises) {
    float corrections[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_max = max[r];
      // mutants: maximum-of-four-lanes
      row_max = fmaxf(row_max, __shfl_xor_sync(math::FULL_WARP, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(math::FULL_WARP, row_max, 2));
      float new_base = __fmul_rn(row_max, exp2_scale);
      if (W::P_LOG2 != 0.0f && fabsf(new_base) <= W::LARGE_BASE) new_base -= W::P_LOG2;
      new_base = fmaxf(base[r], new_base);
      corrections[r] = ptx::ex2_approx_ftz(base[r] - new_base);
      base[r] = new_base;
      sum[r] *= corrections[r];
    }
    raised(corrections);
    const auto is_large = [](float x) {
      return fabsf(x) > W::LARGE_BASE - W::P_LOG2 && x != math::LOWEST;
    };
    state.large = __any_sync(math::FULL_WARP, is_large(base[0]) || is_large(base[1]));
  }
  if (!state.large) return exp2_scale;
  // Scores are rounded as their base is, so that the largest of a row gives exactly P = 1.
#pragma unroll
  for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s_rmem[0][n][i] = __fmul_rn(s_rmem[0][n][i], exp2_scale);
  }
  return 1.0f;
}

template <class C>
__device__ __forceinline__ void rescale(math::Outputs<C>& o_rmem, const float (&corrections)[2]) {
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) o_rmem[0][n][i] *= corrections[i / 2];
  }
}

// P = 2^(S * scale - base) of row r, in place of S, for the first KEYS keys.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void weigh_row(math::Scores<C>& s_rmem, math::RowState<C>& state, int r,
                                          float scale) {
  float sums[2] = {0.0f, 0.0f};
#pragma unroll
  for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& p = s_rmem[0][n][2 * r + i];
      p = ptx::ex2_approx_ftz(fmaf(p, scale, -state.base[0][r]));
      sums[i] += p;
    }
  }
  state.sum[0][r] += sums[0] + sums[1];
}
// weigh_row() for both rows of a lane.
template <class C, int KEYS = C::BLOCK_K>
__device__ __forceinline__ void weigh_rows(math::Scores<C>& s_rmem, math::RowState<C>& state,
                                           float scale) {
  weigh_row<C, KEYS>(s_rmem, state, 0, scale);
  weigh_row<C, KEYS>(s_rmem, state, 1, scale);
}

// Rounds P to fragments of A. In 8 bits a register has the keys 2t and 2t + 1 (t = lane % 4) of two
// neighbouring groups of 8 keys: a product takes them for the keys 4t to 4t + 3 of 16, an order
// that transpose_v() and turn_block() give to V as well.
template <class C>
__device__ __forceinline__ void pack(const math::Scores<C>& s_rmem, Probabilities<C>& p_rmem) {
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; n += C::PACK) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float* s = &s_rmem[0][n][2 * r];
      if constexpr (C::FP8) {
        const float* next = &s_rmem[0][n + 1][2 * r];
        p_rmem[0][n / 4][n % 4 + r] =
            ptx::mov_b32_b16x2(ptx::cvt_rn_satfinite_x2_f32<C::DTYPE>(s[0], s[1]),
                               ptx::cvt_rn_satfinite_x2_f32<C::DTYPE>(next[0], next[1]));
      } else {
        p_rmem[0][n / 2][n % 2 * 2 + r] = ptx::cvt_rn_x2_f32<C::DTYPE>(s[0], s[1]);
      }
    }
  }
}

// weigh_rows() and pack() for 16 keys of 8 bits at a time, so that scores and P need few registers
// together.
template <class C>
__device__ __forceinline__ void weigh_and_pack(const math::Scores<C>& s_rmem,
                                               Probabilities<C>& p_rmem, math::RowState<C>& state,
                                               float scale) {
  float sums[2][2] = {};
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; n += 2) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint16_t pairs[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          p[i] =
              ptx::ex2_approx_ftz(fmaf(s_rmem[0][n + half][2 * r + i], scale, -state.base[0][r]));
          sums[r][i] += p[i];
        }
        pairs[half] = ptx::cvt_rn_satfinite_x2_f32<C::DTYPE>(p[0], p[1]);
      }
      p_rmem[0][n / 4][n % 4 + r] = ptx::mov_b32_b16x2(pairs[0], pairs[1]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) state.sum[0][r] += sums[r][0] + sums[r][1];
}

}  // namespace archflash::hopper
