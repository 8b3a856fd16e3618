// Attention forward on mma.sync tensor cores, for every GPU from compute capability 8.0 on: fp16 or
// bf16 inputs, fp32 scores, sums and output accumulators. Work: one CTA per (BLOCK_Q query rows,
// head, batch). It visits the visible key blocks from the last (ragged) one back to the first with
// an online softmax. A warp owns WARP_ROWS rows: scores, P and outputs never leave its registers;
// shared memory holds Q, K and V only.
//   two stages:  wait K, V | barrier | start the next K, V | S = Q K^T, softmax, O += P V
//   one stage:   wait K | barrier | start V | S = Q K^T, softmax
//                wait V | barrier | start next K | O += P V
// Loads, lane maps, products: tile.cuh. Tiles: config.cuh. Choice of tile: plan.cpp. Numbers:
// NOTES.md.
#pragma once

#include <cstdint>

#include "ampere/config.cuh"
#include "ampere/params.h"
#include "ampere/tile.cuh"
#include "common/math/attention_work.cuh"
#include "common/math/visible_keys.cuh"
#include "common/problem.h"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::ampere {

using math::MINUS_INFINITY;

constexpr unsigned FULL_WARP = 0xFFFFFFFFu;
constexpr float LOWEST = -3.402823466e38f;

// P is 2^(score - base) with a base that follows the row maximum only when that has risen by more
// than this (in powers of two): P stays below 2^9, far from the limits of fp16, and the outputs are
// rescaled in few blocks instead of all.
constexpr float BASE_LAG = 8.0f;
// From here on, score * scale - base in one FMA would leave the rounding of base alone, which is
// more than P may grow by: see weigh_scores.
constexpr float LARGE_BASE = 1 << 24;

// The running state of a warp's rows. Index [m][r]: row lane/4 + 8r of row tile m.
template <class C>
struct RowState {
  float base[C::M_TILES][2];  // scaled for 2^x; the same in the four lanes of a row
  float sum[C::M_TILES][2];   // of P over the keys of this lane
  bool large;                 // some base is beyond LARGE_BASE; the same in the whole warp
};

template <class C>
using Scores = float[C::M_TILES][C::STEP_KEYS / 8][4];
template <class C>
using Probabilities = uint32_t[C::M_TILES][C::STEP_KEYS / 16][4];
template <class C>
using Outputs = float[C::M_TILES][C::HEAD_DIM_V / 8][4];

// Softcap, or a scale that cannot be folded into the exponential (zero or negative): rare, one
// branch per step. tanh(y) = 1 - 2 / (1 + e^2y): its error is 2^-22 of 1, where tanh.approx has
// 2^-11.
template <class C>
__device__ __forceinline__ void transform_scores(Scores<C>& s_rmem, const Params& params) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = s_rmem[m][n][i] * params.tanh_scale;
        const float power = ptx::ex2_approx_ftz(x * (2 * math::LOG2_E));
        const float tanh = fmaf(-2.0f, ptx::rcp_approx_ftz(1.0f + power), 1.0f);
        s_rmem[m][n][i] = params.softcap == 0.0f ? x : params.softcap * tanh;
      }
    }
  }
}

// Only where the step has an edge in it. A select: what a masked score was does not matter.
template <class C>
__device__ __forceinline__ void mask_scores(Scores<C>& s_rmem, const math::VisibleKeys& visible,
                                            int first_row /* of this lane */,
                                            int first_key /* of this lane */) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + 16 * m + 8 * r;
      const int first = visible.first(row) - first_key;
      const int last = visible.last(row) - first_key;
#pragma unroll
      for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int key = 8 * n + i;
          if (key < first || key > last) s_rmem[m][n][2 * r + i] = MINUS_INFINITY;
        }
      }
    }
  }
}

// Moves the bases of a warp's rows up to their maxima, and sums and outputs with them.
template <class C>
__device__ __forceinline__ void raise_bases(const float (&lane_max)[C::M_TILES][2],
                                            RowState<C>& state, Outputs<C>& o_rmem,
                                            float exp2_scale) {
  bool large = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_max = lane_max[m][r];
      row_max = fmaxf(row_max, __shfl_xor_sync(FULL_WARP, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(FULL_WARP, row_max, 2));
      const float base = fmaxf(state.base[m][r], row_max * exp2_scale);
      const float correction = ptx::ex2_approx_ftz(state.base[m][r] - base);
      state.base[m][r] = base;
      state.sum[m][r] *= correction;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        o_rmem[m][n][2 * r] *= correction;
        o_rmem[m][n][2 * r + 1] *= correction;
      }
      large |= fabsf(base) > LARGE_BASE && base != LOWEST;
    }
  }
  state.large = __any_sync(FULL_WARP, large);
}

// S -> P = 2^(S * exp2_scale - base), in 16 bits; its sums in fp32.
template <class C>
__device__ __forceinline__ void weigh_scores(Scores<C>& s_rmem, Probabilities<C>& p_rmem,
                                             RowState<C>& state, Outputs<C>& o_rmem,
                                             float exp2_scale) {
  float lane_max[C::M_TILES][2];
  bool rises = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = s_rmem[m][0][2 * r];
#pragma unroll
      for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
        max = fmaxf(max, fmaxf(s_rmem[m][n][2 * r], s_rmem[m][n][2 * r + 1]));
      }
      lane_max[m][r] = max;
      rises |= fmaf(max, exp2_scale, -BASE_LAG) > state.base[m][r];
    }
  }
  if (__any_sync(FULL_WARP, rises)) raise_bases<C>(lane_max, state, o_rmem, exp2_scale);

  // base is a rounded product. Scores beyond LARGE_BASE are rounded the same way before base is
  // subtracted: the largest of a row meets its own base and gives 1.
  if (state.large) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s_rmem[m][n][i] = __fmul_rn(s_rmem[m][n][i], exp2_scale);
      }
    }
    exp2_scale = 1.0f;
  }
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float p[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          p[i] = ptx::ex2_approx_ftz(fmaf(s_rmem[m][n][2 * r + i], exp2_scale, -state.base[m][r]));
          state.sum[m][r] += p[i];
        }
        p_rmem[m][n / 2][n % 2 * 2 + r] = ptx::cvt_rn_x2_f32<C::DTYPE>(p[0], p[1]);
      }
    }
  }
}

// Rows go through the warp's own rows of Q in shared memory, so that each lane writes 16
// bytes to global memory and a row is written whole.
template <class C>
__device__ __forceinline__ void store_out(const Outputs<C>& o_rmem, const RowState<C>& state,
                                          const Params& params, const math::Work& work,
                                          unsigned char* q_smem) {
  using Tile = typename C::VTile;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  const int batch = work.batch_head / params.heads_q;
  const int head = work.batch_head % params.heads_q;
  const int64_t packed_row =
      math::sequence_start(params.cu_seqlens_q_gmem, batch, params.nq) + work.first_row + warp_row;
  const int rows = work.nq - work.first_row - warp_row;  // of this warp and beyond
  unsigned char* rows_smem = q_smem + warp_row * C::QKTile::ROW_BYTES;
  const float sink = math::load_sink(params, head);

#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = state.sum[m][r];
      sum += __shfl_xor_sync(FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(FULL_WARP, sum, 2);
      const float keys_max = sum == 0.0f ? MINUS_INFINITY : state.base[m][r] * math::LN_2;
      const math::RowEnd end = math::finish_row(keys_max, sum, sink);
      const int row = 16 * m + 8 * r + lane / 4;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        const float* o = &o_rmem[m][n][2 * r];
        const uint32_t pair = ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * end.factor, o[1] * end.factor);
        const int offset = Tile::offset(row, n);
        *reinterpret_cast<uint32_t*>(rows_smem + offset + lane % 4 * 4) = pair;
      }
      if (params.lse_gmem != nullptr && lane % 4 == 0 && row < rows) {
        params.lse_gmem[batch * params.lse_batch + head * params.lse_head + packed_row + row] =
            end.lse;
      }
    }
  }
  __syncwarp();  // the warp's rows are complete before any lane reads them

  uint16_t* out_gmem = static_cast<uint16_t*>(params.out_gmem) + batch * params.out_batch +
                       head * params.out_head + packed_row * params.out_row;
#pragma unroll 4
  for (int index = lane; index < C::WARP_ROWS * Tile::CHUNKS; index += 32) {
    const int row = index / Tile::CHUNKS;
    const int chunk = index % Tile::CHUNKS;
    const uint4 x = *reinterpret_cast<const uint4*>(rows_smem + Tile::offset(row, chunk));
    if (row < rows && chunk * 8 < params.dv) {
      ptx::st_global_v4_b32(out_gmem + row * params.out_row + chunk * 8, x.x, x.y, x.z, x.w);
    }
  }
}

// What the main loop needs to know of its CTA. In shared memory, read when it is needed: outputs
// and scores leave few registers.
struct Place {
  const uint16_t* k_gmem;  // of the sequence's first key
  const uint16_t* v_gmem;
  math::Work work;
  math::VisibleKeys visible;
};

// The rows of this thread's warp.
template <class C>
struct WarpRows {
  int first, last;  // last before first: none

  __device__ __forceinline__ explicit WarpRows(const Place& place) {
    first = place.work.first_row + ptx::mov_tid_x_volatile() / 32 * C::WARP_ROWS;
    last = min(first + C::WARP_ROWS, place.work.nq) - 1;
  }
  __device__ __forceinline__ bool any_sees(const math::VisibleKeys& visible, int key_first) const {
    return last >= first && !visible.hides(first, last, key_first, key_first + C::STEP_KEYS - 1);
  }
  __device__ __forceinline__ bool all_see(const math::VisibleKeys& visible, int key_first) const {
    return !visible.masks(first, last, key_first, key_first + C::STEP_KEYS - 1);
  }
};

// Starts the copy of a block of keys.
template <class C, class Tile>
__device__ __forceinline__ void start_keys(uint32_t tile_smem, const uint16_t* keys_gmem,
                                           int64_t row_stride, int columns, int key, int nk) {
  keys_gmem += key * row_stride;
  if (key + C::BLOCK_K <= nk)
    start_load<C, Tile, C::BLOCK_K>(tile_smem, keys_gmem, row_stride, columns);
  else
    start_ragged_load<C, Tile, C::BLOCK_K>(tile_smem, keys_gmem, row_stride, nk - key, columns);
}

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  using QKTile = typename C::QKTile;
  using VTile = typename C::VTile;

  static_assert(sizeof(Place) <= C::PLACE_BYTES);
  Place& place = *reinterpret_cast<Place*>(shared + C::PLACE_SMEM);
  {
    const math::Work work = math::find_work<C::BLOCK_Q>(params, blockIdx.x);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      const math::Offsets offsets = math::find_offsets(params, work);
      place = {static_cast<const uint16_t*>(params.k_gmem) + offsets.k,
               static_cast<const uint16_t*>(params.v_gmem) + offsets.v, work,
               math::find_visible_keys(params, work)};
    }
  }
  __syncthreads();  // `place` is written
  const int last_row = min(place.work.first_row + C::BLOCK_Q, place.work.nq) - 1;
  // First keys of the first and of the last block with a visible key. None: last before first.
  const int blocks_begin = place.visible.first(place.work.first_row) & -C::BLOCK_K;
  const int blocks_last = place.visible.last(last_row) & -C::BLOCK_K;
  const auto start_k = [&](int key, uint32_t stage_smem) {
    start_keys<C, QKTile>(stage_smem + C::K_SMEM, place.k_gmem, params.k_row, params.d, key,
                          place.visible.nk);
  };
  const auto start_v = [&](int key, uint32_t stage_smem) {
    start_keys<C, VTile>(stage_smem + C::V_SMEM, place.v_gmem, params.v_row, params.dv, key,
                         place.visible.nk);
  };

  uint32_t stage_smem = shared_smem;  // of this block: what the offsets K_SMEM and V_SMEM start at
  if (blocks_begin <= blocks_last) {
    const uint16_t* q_gmem =
        static_cast<const uint16_t*>(params.q_gmem) + math::find_offsets(params, place.work).q;
    start_ragged_load<C, QKTile, C::BLOCK_Q>(shared_smem + C::Q_SMEM, q_gmem, params.q_row,
                                             place.work.nq - place.work.first_row, params.d);
    clear_columns<C, QKTile>(shared + C::Q_SMEM, C::BLOCK_Q, params.d);
#pragma unroll
    for (int stage = 0; stage < C::STAGES; ++stage) {
      unsigned char* stage_start = shared + stage * C::STAGE_BYTES;
      clear_columns<C, QKTile>(stage_start + C::K_SMEM, C::BLOCK_K, params.d);
      clear_columns<C, VTile>(stage_start + C::V_SMEM, C::BLOCK_K, params.dv);
    }
    start_k(blocks_last, stage_smem);
    if constexpr (C::STAGES == 2) start_v(blocks_last, stage_smem);
  }

  uint32_t q_rmem[C::Q_IN_REGISTERS ? C::HEAD_DIM / 16 : 1][C::M_TILES][4];
  Outputs<C> o_rmem = {};
  RowState<C> state;
  state.large = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.base[m][r] = LOWEST;  // finite: no inf - inf in a row that has seen no key
      state.sum[m][r] = 0.0f;
    }
  }

#pragma unroll 1
  for (int block = blocks_last; block >= blocks_begin; block -= C::BLOCK_K) {
    // K (and at first Q; with two stages V) of all threads has landed; all warps are done with the
    // block before.
    ptx::copies_wait_all();
    __syncthreads();
    if constexpr (C::STAGES == 2) {
      const uint32_t other_stage = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
      if (block > blocks_begin) {
        start_k(block - C::BLOCK_K, other_stage);
        start_v(block - C::BLOCK_K, other_stage);
      }
    } else {
      start_v(block, stage_smem);
    }
    const int thread = ptx::mov_tid_x_volatile();
    const int warp_row = thread / 32 * C::WARP_ROWS;
    const uint32_t q_smem = shared_smem + C::Q_SMEM + warp_row * QKTile::ROW_BYTES +
                            rows_first_offset<QKTile>(thread % 32);
    const uint32_t k_smem = stage_smem + C::K_SMEM + columns_first_offset<QKTile>(thread % 32);
    const uint32_t v_smem = stage_smem + C::V_SMEM + rows_first_offset<VTile>(thread % 32);
    if constexpr (C::Q_IN_REGISTERS) {
      if (block == blocks_last) {
#pragma unroll
        for (int column = 0; column < C::HEAD_DIM; column += 16)
          load_q<C>(q_rmem[column / 16], q_smem, column);
      }
    }

#pragma unroll 1
    for (int step = C::BLOCK_K - C::STEP_KEYS; step >= 0; step -= C::STEP_KEYS) {
      const int key_first = block + step;
      // Whether the warp has rows, and one of them sees one of these keys.
      const bool computes = WarpRows<C>(place).any_sees(place.visible, key_first);
      Probabilities<C> p_rmem;
      if (computes) {
        Scores<C> s_rmem;
        multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem + step * QKTile::ROW_BYTES);
        if (params.transform_scores) transform_scores<C>(s_rmem, params);
        const WarpRows<C> rows(place);
        if (!rows.all_see(place.visible, key_first)) {
          const int lane = ptx::mov_tid_x_volatile() % 32;
          mask_scores<C>(s_rmem, place.visible, rows.first + lane / 4, key_first + lane % 4 * 2);
        }
        weigh_scores<C>(s_rmem, p_rmem, state, o_rmem, params.exp2_scale);
      }
      if constexpr (C::STAGES == 1) {
        // V of all threads has landed; all warps are done with K: the next may overwrite it.
        ptx::copies_wait_all();
        __syncthreads();
        if (block > blocks_begin) start_k(block - C::BLOCK_K, stage_smem);
      }
      if (computes) multiply_pv<C>(o_rmem, p_rmem, v_smem + step * VTile::ROW_BYTES);
    }
    if constexpr (C::STAGES == 2) stage_smem = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
  }
  store_out<C>(o_rmem, state, params, place.work, shared + C::Q_SMEM);
}

}  // namespace archflash::ampere

// One entry point: its name is what plan.cpp asks for. The one parameter stays in constant memory.
#define ARCHFLASH_AMPERE_KERNEL(NAME, CONFIG)                                        \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::ampere::Params params) {               \
    archflash::ampere::attention_fwd<CONFIG>(params);                                \
  }
