// The moving parts of the blackwell_consumer kernel: lane maps of ldmatrix and mma.sync, the two
// products, and the ring of K and V.
#pragma once

#include <cstdint>

#include "blackwell_consumer/config.cuh"
#include "common/math/online_softmax.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/mma_sync.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_consumer {

// Byte offsets, in a tile, of the 16-byte row that this lane names to ldmatrix.x4. Its four
// matrices are the quarters of a 16x16 square, in one of two orders.
//   rows first:    rows 0-7, rows 8-15 of columns 0-7, then of columns 8-15. Of Q this is the
//                  fragment a of mma.sync; transposed, of V, it is b of two neighbouring column
//                  tiles.
//   columns first: columns 0-7, 8-15 of rows 0-7, then of rows 8-15. Of K (a row is a key) this is
//                  b of two neighbouring key tiles.
template <class Tile>
__device__ __forceinline__ uint32_t rows_first_offset(unsigned lane) {
  return Tile::offset(lane % 16, lane / 16);
}
template <class Tile>
__device__ __forceinline__ uint32_t columns_first_offset(unsigned lane) {
  return Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

template <class C>
using QFragments = uint32_t[C::Q_IN_REGISTERS ? C::HEAD_DIM / 16 : 1][C::M_TILES][4];

// Q fragments of 16 columns.
template <class C>
__device__ __forceinline__ void load_q(uint32_t (&q_rmem)[C::M_TILES][4],
                                       uint32_t q_smem /* this lane's row */, int column) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
    ptx::ldmatrix_x4(q_rmem[m],
                     C::QTile::advance(q_smem, column / 8) + m * 16 * C::QTile::ROW_BYTES);
  }
}

// S = Q K^T for a block of keys. Lane l holds rows l/4 and l/4 + 8 of each row tile, of key tile n
// the keys 8n + 2*(l%4) and the next one.
template <class C>
__device__ __forceinline__ void multiply_qk(math::Scores<C>& s_rmem,
                                            const QFragments<C>& all_q_rmem,
                                            uint32_t q_smem /* this lane's row */,
                                            uint32_t k_smem /* this lane's row */) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s_rmem[m][n][i] = 0.0f;
    }
  }
#pragma unroll
  for (int column = 0; column < C::HEAD_DIM; column += 16) {
    uint32_t q_rmem[C::M_TILES][4];
    if constexpr (C::Q_IN_REGISTERS) {
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) q_rmem[m][i] = all_q_rmem[column / 16][m][i];
      }
    } else {
      load_q<C>(q_rmem, q_smem, column);
    }
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; n += 2) {
      uint32_t k_rmem[4];
      ptx::ldmatrix_x4(k_rmem, C::KTile::advance(k_smem, column / 8) + n * 8 * C::KTile::ROW_BYTES);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        ptx::mma_m16n8k16<C::DTYPE>(s_rmem[m][n], q_rmem[m], k_rmem[0], k_rmem[1]);
        ptx::mma_m16n8k16<C::DTYPE>(s_rmem[m][n + 1], q_rmem[m], k_rmem[2], k_rmem[3]);
      }
    }
  }
}

// Two 16-bit ones or zeros for the keys `key` and `key` + 1 of this lane: V counts only before
// `keys`.
__device__ __forceinline__ uint32_t v_mask(int key, int keys) {
  return (key < keys ? 0x0000FFFFu : 0u) | (key + 1 < keys ? 0xFFFF0000u : 0u);
}

// O += P V for 16 keys. The fragments d of Q K^T of two neighbouring key tiles are, as pairs of
// 16-bit values, the fragment a of P V. RAGGED: rows of V from `keys` on belong to another sequence
// and count as zeros, whatever they are.
template <class C, bool RAGGED>
__device__ __forceinline__ void multiply_pv_group(math::Outputs<C>& o_rmem,
                                                  const uint32_t (&p_rmem)[C::M_TILES][4],
                                                  uint32_t v_smem /* this lane's row */, int key,
                                                  int lane_key, int keys) {
  const uint32_t masks[2] = {RAGGED ? v_mask(key + lane_key, keys) : 0u,
                             RAGGED ? v_mask(key + 8 + lane_key, keys) : 0u};
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
    uint32_t v_rmem[4];
    ptx::ldmatrix_x4_trans(v_rmem, C::VTile::advance(v_smem, n) + key * C::VTile::ROW_BYTES);
    if constexpr (RAGGED) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v_rmem[i] &= masks[i % 2];
    }
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
      ptx::mma_m16n8k16<C::DTYPE>(o_rmem[m][n], p_rmem[m], v_rmem[0], v_rmem[1]);
      ptx::mma_m16n8k16<C::DTYPE>(o_rmem[m][n + 1], p_rmem[m], v_rmem[2], v_rmem[3]);
    }
  }
}

// P = 2^(S * exp2_scale - base) and O += P V, 16 keys at a time: the exponentials of one group lie
// between the products of another.
template <class C, bool RAGGED, class State>
__device__ __forceinline__ void weigh_and_multiply_pv(math::Outputs<C>& o_rmem,
                                                      const math::Scores<C>& s_rmem, State& state,
                                                      float exp2_scale,
                                                      uint32_t v_smem /* this lane's row */,
                                                      int lane_key, int keys) {
#pragma unroll
  for (int key = 0; key < C::BLOCK_K; key += 16) {
    if (RAGGED && key >= keys) return;  // their P is 0
    uint32_t p_rmem[C::M_TILES][4];
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
      math::weigh_key_tile<C>(s_rmem, p_rmem[m], state, m, key / 8, exp2_scale);
      math::weigh_key_tile<C>(s_rmem, p_rmem[m], state, m, key / 8 + 1, exp2_scale);
    }
    multiply_pv_group<C, RAGGED>(o_rmem, p_rmem, v_smem, key, lane_key, keys);
  }
}

// The barriers, as addresses in shared memory.
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
};

// A position in the rings of K and V, which go round together: the number of blocks before it.
template <class C>
struct RingPosition {
  uint32_t count = 0;

  __device__ __forceinline__ uint32_t stage() const { return count % C::STAGES; }
  // Of the phase in which the stage is filled.
  __device__ __forceinline__ uint32_t parity() const { return count / C::STAGES % 2; }
};

}  // namespace archflash::blackwell_consumer
