// S, P and O += P V for a step of keys that all rows see (dense_fwd.cuh, bounded_fwd.cuh).
#pragma once

#include <cstdint>

#include "common/device/kept_weights.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::mma_sync {

// A DenseConfig that takes 16 keys at a time.
template <class C>
struct PieceOf : C {
  static constexpr int STEP_KEYS = 16;
};

// The default for `drop` of exponentiate_and_multiply, which does nothing.
struct DropsNothing {
  template <class P>
  __device__ __forceinline__ void operator()(P&) const {}
};

// P and O += P V of the masked scores of STEP_KEYS keys. before_v() is called before V is read, and
// may do nothing; without C::LATE_EXPONENTIALS drop(p_rmem) before the products of P V.
template <class C, class BeforeV, class Drop = DropsNothing>
__device__ __forceinline__ void exponentiate_and_multiply(
    device::Outputs<C>& o_rmem, device::RowState<C>& state, device::Scores<C>& s_rmem,
    uint32_t v_smem, float exp2_scale, const BeforeV& before_v, const Drop& drop = Drop()) {
  constexpr const device::RaiseLimits<C>* KEPT = nullptr;  // in the state
  const float scale = device::update_row_max<C>(s_rmem, state, o_rmem, exp2_scale, KEPT);
  before_v();
  if constexpr (C::LATE_EXPONENTIALS) {
#pragma unroll
    for (int key = 0; key < C::STEP_KEYS; key += 16) {
      uint32_t p_rmem[C::M_TILES][4];
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int n = 0; n < 2; ++n)
          device::exponentiate_key_tile<C>(s_rmem, p_rmem[m], state, m, key / 8 + n, scale);
      }
      multiply_pv_group<C>(
          o_rmem, [&](int m) -> const uint32_t (&)[4] { return p_rmem[m]; }, v_smem, key,
          [](uint32_t (&)[4]) {});
    }
  } else {
    Probabilities<C> p_rmem;
    device::exponentiate_all_scores<C>(s_rmem, p_rmem, state, scale);
    drop(p_rmem);
    multiply_pv<C>(o_rmem, p_rmem, v_smem);
  }
}

// S, P and O += P V for STEP_KEYS keys, of which the first `keys` exist. before_v() is called when
// K has been read, with one buffer, and before V is; drop(p_rmem) before the products of P V.
template <class C, class BeforeV, class Drop>
__device__ __forceinline__ void dense_step(device::Outputs<C>& o_rmem, device::RowState<C>& state,
                                           const QFragments<C>& q_rmem, uint32_t q_smem,
                                           uint32_t k_smem, uint32_t v_smem, int keys,
                                           float exp2_scale, const BeforeV& before_v,
                                           const Drop& drop) {
  device::Scores<C> s_rmem;
  multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
  if constexpr (C::STAGES == 1) before_v();  // so that the next K may come
  if (keys < C::STEP_KEYS) {
    const int keys_of_lane = keys - ptx::mov_tid_x_volatile() % 4 * 2;
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (8 * n + i % 2 >= keys_of_lane) s_rmem[m][n][i] = device::MINUS_INFINITY;
        }
      }
    }
  }
  exponentiate_and_multiply<C>(o_rmem, state, s_rmem, v_smem, exp2_scale, before_v, drop);
}

// Sets the dropped weights of a warp's P to 0, of STEP_KEYS keys from key_first on. first_row: the
// warp's first one. The lane finds its rows anew, because there are no registers to keep what
// depends on them.
template <class C>
__device__ __forceinline__ void drop_some(Probabilities<C>& p_rmem, const device::Dropout& dropout,
                                          int first_row, int key_first) {
  const unsigned lane = ptx::mov_tid_x_volatile() % 32;
#pragma unroll
  for (int key = 0; key < C::STEP_KEYS; key += 32) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
      uint32_t kept_rmem[2][4];
      device::draw_kept(kept_rmem[0], kept_rmem[1], dropout, first_row + lane / 4 + 16 * m,
                        key_first + key + lane % 4 * 2);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) p_rmem[m][key / 16 + half][i] &= kept_rmem[half][i];
      }
    }
  }
}

// Copies a softmax state to the type that steps of another number of keys use.
template <class To, class From>
__device__ __forceinline__ void copy_state(device::RowState<To>& to,
                                           const device::RowState<From>& from) {
  to.large = from.large;
#pragma unroll
  for (int m = 0; m < From::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      to.base[m][r] = from.base[m][r];
      to.sum[m][r] = from.sum[m][r];
      to.limit[m][r] = from.limit[m][r];
    }
  }
}

}  // namespace archflash::mma_sync
