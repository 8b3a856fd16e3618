// The moving parts of the blackwell_consumer kernel: P V with the exponentials between its
// products, the barriers, and the position in the rings of K and V. common/mma_sync/tile.cuh has
// the lane maps and the products.
#pragma once

#include <cstdint>

#include "blackwell_consumer/block_scales.cuh"
#include "blackwell_consumer/config.cuh"
#include "common/device/fp8_softmax.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/mbarrier.cuh"

namespace archflash::blackwell_consumer {

// A mask for a register with V of the keys `key` and `key` + 1, 16 bits each: the half of a key
// from 0 to keys - 1 is ones, that of another key is zeros.
__device__ __forceinline__ uint32_t v_mask(int key, unsigned keys) {
  const auto first = static_cast<unsigned>(key);
  return (first < keys ? 0x0000FFFFu : 0u) | (first + 1 < keys ? 0xFFFF0000u : 0u);
}

// O += P V for 16 keys, or 32 keys of 8-bit V, from `key` on. RAGGED: of the rows of V only
// `keys` rows count; the others count as zeros, whatever they hold. lane_key: this lane's first key
// in a tile of 8 keys, where the first key that counts has number 0. scales: of V, where its
// numbers have block scales.
template <class C, bool RAGGED>
__device__ __forceinline__ void multiply_pv_group(device::Outputs<C>& o_rmem,
                                                  const uint32_t (&p_rmem)[C::M_TILES][4],
                                                  uint32_t v_smem /* this lane's row */, int key,
                                                  int lane_key, int keys,
                                                  const ScalesOf<C>& scales) {
  constexpr int KEY_TILES = 2 * C::V_PACK;
  uint32_t masks[KEY_TILES];
#pragma unroll
  for (int tile = 0; tile < KEY_TILES; ++tile)
    masks[tile] = RAGGED ? v_mask(key + 8 * tile + lane_key, keys) : 0u;
  const auto correct = [&](uint32_t (&v_rmem)[4]) {
    if constexpr (RAGGED) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v_rmem[i] &= masks[i % KEY_TILES];
    }
  };
  if constexpr (C::BLOCK_SCALES) {
    multiply_scaled_pv_group<C>(o_rmem, p_rmem, v_smem, key, correct, scales);
  } else {
    mma_sync::multiply_pv_group<C>(
        o_rmem, [&](int m) -> const uint32_t (&)[4] { return p_rmem[m]; }, v_smem, key, correct);
  }
}

// device::exponentiate_key_tile() for rows that raise their bases together. Two weights are added
// to one another first, which makes the chain of additions half as long.
template <class C, class State>
__device__ __forceinline__ void exponentiate_rows_together(const device::Scores<C>& s_rmem,
                                                           uint32_t (&p_rmem)[4], State& state,
                                                           int m, int n, float exp2_scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float p[2];
#pragma unroll
    for (int i = 0; i < 2; ++i)
      p[i] = ptx::ex2_approx_ftz(fmaf(s_rmem[m][n][2 * r + i], exp2_scale, -state.base[m][r]));
    state.sum[m][r] += p[0] + p[1];
    p_rmem[n % 2 * 2 + r] = ptx::cvt_rn_x2_f32<C::DTYPE>(p[0], p[1]);
  }
}

// P = 2^(S * exp2_scale - base) and O += P V for a block, 16 or 32 keys at a time. The code of a
// group of keys has no branch, so that the assembler can place its exponentials between the
// products of another group.
template <class C, bool RAGGED, class State>
__device__ __forceinline__ void exponentiate_and_multiply_pv(
    device::Outputs<C>& o_rmem, const device::Scores<C>& s_rmem, State& state, float exp2_scale,
    uint32_t v_smem /* this lane's row */, int lane_key, int keys, const ScalesOf<C>& scales) {
  constexpr int GROUP = 16 * C::V_PACK;
#pragma unroll
  for (int key = 0; key < C::BLOCK_K; key += GROUP) {
    // Keys that do not count have P = 0. In 8 bits a block whose descale of v is 0 comes here with
    // keys = 0: its P counts in the row sums, so no group is skipped.
    if (RAGGED && !C::FP8 && __all_sync(device::FULL_WARP, key + lane_key >= keys)) return;
    uint32_t p_rmem[C::M_TILES][4];
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int n = key / 8; n < (key + GROUP) / 8; n += C::V_PACK) {
        if constexpr (C::FP8) {
          device::exponentiate_key_tiles_e4m3<C>(s_rmem, p_rmem[m], state, m, n, exp2_scale);
        } else if constexpr (C::ROWS_ALONE) {
          device::exponentiate_key_tile<C>(s_rmem, p_rmem[m], state, m, n, exp2_scale);
        } else {
          exponentiate_rows_together<C>(s_rmem, p_rmem[m], state, m, n, exp2_scale);
        }
      }
    }
    multiply_pv_group<C, RAGGED>(o_rmem, p_rmem, v_smem, key, lane_key, keys, scales);
  }
}

// The barriers, as addresses in shared memory. "Bytes": the producer arrives once and says how many
// bytes TMA will bring; the phase ends when they have landed.
//
// clang-format off
//   barrier                 arrives             waits      so that
//   q_full                  producer, bytes     consumers  Q has landed before ldmatrix reads it
//   q_empty                 each consumer warp  producer   output rows, which pass through Q's part
//                                                          of shared memory, have left it before
//                                                          TMA writes the next Q there
//   k_full, v_full          producer, bytes     consumers  the block has landed before ldmatrix
//     of each stage                                        reads it
//   k_empty, v_empty        each consumer warp  producer   every warp has read the block before TMA
//     of each stage                                        overwrites it
// clang-format on
template <class C>
struct Barriers {
  uint32_t first_smem;

  __device__ __forceinline__ uint32_t q_full() const { return first_smem; }
  __device__ __forceinline__ uint32_t q_empty() const { return first_smem + 8; }
  __device__ __forceinline__ uint32_t k_full(int stage) const {
    return first_smem + 16 + 8 * stage;
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

  // Called by one thread. The producer arrives once at a full barrier and says how many bytes will
  // come. Each consumer warp arrives once at an empty barrier.
  __device__ __forceinline__ void initialise() const {
    ptx::mbarrier_init(q_full(), 1);
    ptx::mbarrier_init_for_warps(q_empty(), C::WARPS);
    for (int stage = 0; stage < C::STAGES; ++stage) {
      ptx::mbarrier_init(k_full(stage), 1);
      ptx::mbarrier_init_for_warps(k_empty(stage), C::WARPS);
      ptx::mbarrier_init(v_full(stage), 1);
      ptx::mbarrier_init_for_warps(v_empty(stage), C::WARPS);
    }
    ptx::fence_mbarrier_init();
  }
};

// A position in the rings of K and V, which advance together: `count` blocks lie before it.
template <class C>
struct RingPosition {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % C::STAGES; }
  // The parity of the phase of k_full and v_full in which the block lands in its stage.
  __device__ __forceinline__ uint32_t parity() const { return count / C::STAGES % 2; }
};

}  // namespace archflash::blackwell_consumer
