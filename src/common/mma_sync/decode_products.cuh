// The two products of a warp of a decoding call (decode_fwd.cuh).
#pragma once

#include <cstdint>

#include "common/device/fp8_to_16_bits.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/decode_config.cuh"
#include "common/mma_sync/decode_query.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mma_sync.cuh"

namespace archflash::mma_sync {

// S = Q K^T of a warp's keys.
template <class C, DType FORMAT>
__device__ __forceinline__ void multiply_decode_qk(device::Scores<typename C::Warp>& s_rmem,
                                                   const DecodeQuery<C>& query, uint32_t k_smem) {
  using Tile = typename C::Tile;
  auto& s = s_rmem[0];
#pragma unroll
  for (int n = 0; n < C::WARP_KEYS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
  }
#pragma unroll
  for (int chunk = 0; chunk < Tile::CHUNKS; chunk += 2) {
    constexpr int STEPS = C::FP8_CACHE ? 2 : 1;  // of 16 columns in two chunks
    uint32_t q_rmem[STEPS][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) query.get(q_rmem[step], chunk * STEPS / 2 + step);
#pragma unroll
    for (int n = 0; n < C::WARP_KEYS / 8; n += 2) {
      // Keys 0 to 7 and 8 to 15 of the first chunk, then of the second.
      uint32_t k_rmem[4];
      ptx::ldmatrix_x4(k_rmem, Tile::advance(k_smem, chunk) + n * 8 * Tile::ROW_BYTES);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (C::FP8_CACHE) {
#pragma unroll
          for (int step = 0; step < STEPS; ++step) {
            const device::Fp8Pairs<FORMAT> k(k_rmem[2 * step + i]);
            ptx::mma_m16n8k16<C::PRODUCT>(s[n + i], q_rmem[step], k.even, k.odd);
          }
        } else {
          ptx::mma_m16n8k16<C::PRODUCT>(s[n + i], q_rmem[0], k_rmem[i], k_rmem[2 + i]);
        }
      }
    }
  }
}

// O += P V of a warp's keys. For an FP8 cache o_rmem[0][2j] has the even columns of the 16 from 16j
// on, o_rmem[0][2j + 1] the odd ones. correct(v_rmem, k) may change the fragments of the number k
// of 16 keys.
template <class C, DType FORMAT, class Correct>
__device__ __forceinline__ void multiply_decode_pv(
    device::Outputs<typename C::Warp>& o_rmem,
    const device::Probabilities<typename C::Warp>& p_rmem, uint32_t v_smem,
    const Correct& correct) {
  using Tile = typename C::Tile;
#pragma unroll
  for (int chunk = 0; chunk < Tile::CHUNKS; chunk += 2) {
#pragma unroll
    for (int k = 0; k < C::WARP_KEYS / 16; ++k) {
      const uint32_t (&p)[4] = p_rmem[0][k];
      // Keys 0 to 7 and 8 to 15 of the first chunk, then of the second.
      uint32_t v_rmem[4];
      ptx::ldmatrix_x4_trans(v_rmem, Tile::advance(v_smem, chunk) + k * 16 * Tile::ROW_BYTES);
      correct(v_rmem, k);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (C::FP8_CACHE) {
          float (*o)[4] = &o_rmem[0][2 * (chunk + i)];
          const device::Fp8Pairs<FORMAT> low(v_rmem[2 * i]), high(v_rmem[2 * i + 1]);
          ptx::mma_m16n8k16<C::PRODUCT>(o[0], p, low.even, high.even);
          ptx::mma_m16n8k16<C::PRODUCT>(o[1], p, low.odd, high.odd);
        } else {
          ptx::mma_m16n8k16<C::PRODUCT>(o_rmem[0][chunk + i], p, v_rmem[2 * i], v_rmem[2 * i + 1]);
        }
      }
    }
  }
}

}  // namespace archflash::mma_sync
