// The online softmax of a warp whose scores and outputs are fragments of mma.sync: masks, running
// bases, P in 16 bits, and the output rows written at the end. C is a kernel's Config, of which
// this uses DTYPE, M_TILES (row tiles of 16), WARP_ROWS, STEP_KEYS (keys at a time), HEAD_DIM_V and
// ROWS_ALONE. With ROWS_ALONE the bits of a row depend on that row and the keys that it sees alone;
// else the rows of a warp raise their bases together.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/quad.cuh"
#include "common/device/uniform.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/lg2.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::device {

constexpr float LOWEST = -3.402823466e38f;

// When the base of a row moves. P is 2^(score - base); scores and bases here are logarithms to base
// 2, scaled already. Raising a base means rescaling the row's sum and outputs, so the base does not
// follow every rise of the row maximum:
//   - A maximum that exceeds the base by more than BASE_LAG always raises it. P therefore stays
//     below 2^9 in 16 bits, far from the limits of fp16.
//   - A smaller rise raises the base only if the new largest weight is more than RAISE_FRACTION of
//     the sum of a lane's weights so far. A weight that dominates its row is then exactly 1 in 16
//     bits, as in kernels that rescale at every rise. Without this rule it would be rounded like
//     any other, and the largest errors would grow by half (docs/numerics.md).
// The base is raised to P_LOG2 below the row maximum, so that the largest P becomes 2^P_LOG2. Bases
// beyond LARGE_BASE are the maximum itself. There the rounding error of the base can exceed what P
// may grow by, and update_row_max rounds scores the same way.
struct Weights16 {
  static constexpr float P_LOG2 = 0.0f;
  static constexpr float BASE_LAG = 8.0f;
  static constexpr float RAISE_FRACTION = 0.25f;  // 0: only the first rule raises the base
  static constexpr float LARGE_BASE = 1 << 24;
  static constexpr float ZERO = 0.0f;  // the number that stands for a score of 0
};

// For scores that are integers below 2^22, stored as the floats 1.5 * 2^23 + score. The
// accumulators of the integer product start at the bits of 1.5 * 2^23 (ZERO_BITS), so their results
// are these floats without a conversion. ZERO * scale becomes part of the base and is rounded like
// it, by at most 0.75 * scale. Beyond LARGEST_SCALE that error would be visible in 16 bits, and
// each score is multiplied on its own.
struct WeightsOfIntegers : Weights16 {
  static constexpr float ZERO = 12582912.0f;
  static constexpr int32_t ZERO_BITS = 0x4B400000;
  static constexpr float LARGEST_SCALE = 1.0f / 1024;
};

// The softmax so far of a warp's rows. Index [m][r] is row lane/4 + 8r of row tile m.
template <class C, class Flag = bool>
struct RowState {
  float base[C::M_TILES][2];  // scaled for 2^x; equal in the four lanes that share a row
  float sum[C::M_TILES][2];   // sum of P over the keys of this lane
  // With KEEPS_LIMITS: a scaled score up to which the base is not raised. It may be lower than
  // need be, because it is only found anew where a score exceeds it.
  float limit[C::M_TILES][2];
  Flag large;  // whether any row's base is beyond LARGE_BASE; equal in all lanes
};

template <class C>
using Scores = float[C::M_TILES][C::STEP_KEYS / 8][4];
template <class C>
using Probabilities = uint32_t[C::M_TILES][C::STEP_KEYS / 16][4];
template <class C>
using Outputs = float[C::M_TILES][C::HEAD_DIM_V / 8][4];

// Sets the state of rows that have seen no key.
template <class C, class Flag>
__device__ __forceinline__ void clear(RowState<C, Flag>& state) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.base[m][r] = LOWEST;  // finite, because -inf - (-inf) would be NaN
      state.sum[m][r] = 0.0f;
      state.limit[m][r] = LOWEST;
    }
  }
}

// Scales the scores before the softmax. Only needed for a softcap, or for a scale that cannot be
// folded into the exponential because it is zero or negative.
template <class C>
__device__ __forceinline__ void transform_scores(Scores<C>& s_rmem, ScoreRule rule) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) s_rmem[m][n][i] = rule.score(s_rmem[m][n][i]);
    }
  }
}

// Sets the scores of keys that a row does not see to -inf. Selecting (not adding) makes the old
// value irrelevant, even if it was NaN. m and r name the row as in RowState; first_key is this
// lane's first key.
template <class C>
__device__ __forceinline__ void mask_row(Scores<C>& s_rmem, const VisibleKeys& visible, int m,
                                         int r, int row, int first_key) {
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

// Masks a warp's scores. first_row and first_key are those of this lane.
template <class C>
__device__ __forceinline__ void mask_scores(Scores<C>& s_rmem, const VisibleKeys& visible,
                                            int first_row, int first_key) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      mask_row<C>(s_rmem, visible, m, r, first_row + 16 * m + 8 * r, first_key);
  }
}

// mask_scores() for a warp whose rows do not follow one another. rows: the two of this lane.
template <class C>
__device__ __forceinline__ void mask_rows(Scores<C>& s_rmem, const VisibleKeys& visible,
                                          const int (&rows)[2], int first_key) {
  static_assert(C::M_TILES == 1);
#pragma unroll
  for (int r = 0; r < 2; ++r) mask_row<C>(s_rmem, visible, 0, r, rows[r], first_key);
}

// Whether scores are rounded as their row's base is.
template <class Weights>
__device__ __forceinline__ bool is_large(float base) {
  return fabsf(base) > Weights::LARGE_BASE - Weights::P_LOG2 && base != LOWEST;
}

// Raises the bases of a warp's rows to their maxima (less P_LOG2) and rescales sums and outputs.
// lane_max: for each row, the largest score among this lane's keys. raises(m, r): whether the base
// of that row is raised, the same in the four lanes of the row.
template <class C, class Weights, class Flag, class Raises>
__device__ __forceinline__ void raise_bases(const float (&lane_max)[C::M_TILES][2],
                                            RowState<C, Flag>& state, Outputs<C>& o_rmem,
                                            float exp2_scale, const Raises& raises) {
  bool large = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float row_max = lane_max[m][r];
      // mutants: maximum-of-four-lanes (tests/sim/tags.py)
      row_max = fmaxf(row_max, __shfl_xor_sync(FULL_WARP, row_max, 1));
      row_max = fmaxf(row_max, __shfl_xor_sync(FULL_WARP, row_max, 2));
      float base = __fmul_rn(row_max, exp2_scale);
      if (Weights::P_LOG2 != 0.0f && fabsf(base) <= Weights::LARGE_BASE) base -= Weights::P_LOG2;
      base = fmaxf(state.base[m][r], base);
      if (!raises(m, r)) base = state.base[m][r];
      const float correction = ptx::ex2_approx_ftz(state.base[m][r] - base);
      state.base[m][r] = base;
      state.sum[m][r] *= correction;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        o_rmem[m][n][2 * r] *= correction;
        o_rmem[m][n][2 * r + 1] *= correction;
      }
      large |= is_large<Weights>(base);
    }
  }
  state.large = __any_sync(FULL_WARP, large);
}

// How far a row's maximum may exceed its base before the base is raised; see Weights16. `sum` is
// the sum of P so far over the keys of a lane.
template <class Weights>
__device__ __forceinline__ float allowed_rise(float sum) {
  return fminf(fmaxf(ptx::lg2_approx_ftz(sum * Weights::RAISE_FRACTION), 0.0f), Weights::BASE_LAG);
}

// For each row of this lane, the scaled score beyond which its base is raised.
template <class C>
struct RaiseLimits {
  float rmem[C::M_TILES][2];

  template <class Flag>
  __device__ __forceinline__ explicit RaiseLimits(const RowState<C, Flag>& state) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r)
        rmem[m][r] = state.base[m][r] + allowed_rise<Weights16>(state.sum[m][r]);
    }
  }
};

// The largest score of each row among the keys of this lane.
template <class C, class Weights>
__device__ __forceinline__ void find_lane_maxima(const Scores<C>& s_rmem,
                                                 float (&lane_max)[C::M_TILES][2]) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float max = s_rmem[m][0][2 * r];
#pragma unroll
      for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
        max = fmaxf(max, fmaxf(s_rmem[m][n][2 * r], s_rmem[m][n][2 * r + 1]));
      }
      if constexpr (Weights::ZERO != 0.0f) max -= Weights::ZERO;
      lane_max[m][r] = max;
    }
  }
}

// Whether the scaled maximum of any row in any lane exceeds the row's limit by more than `lag`.
template <class C>
__device__ __forceinline__ bool any_exceeds(const float (&lane_max)[C::M_TILES][2],
                                            float exp2_scale, float lag,
                                            const float (&limits)[C::M_TILES][2]) {
  bool exceeds = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) exceeds |= fmaf(lane_max[m][r], exp2_scale, -lag) > limits[m][r];
  }
  return __any_sync(FULL_WARP, exceeds);
}

// Whether a Config's kernel keeps RowState::limit. It then looks at no sum in most blocks.
template <class C>
consteval bool keeps_limits() {
  if constexpr (requires { C::KEEPS_LIMITS; }) return C::KEEPS_LIMITS;
  return false;
}

// Finds RowState::limit anew. Sums only grow, so the limit of a later block is not lower;
// APPROXIMATE makes up for a logarithm that is not quite monotonic.
template <class C, class Flag>
__device__ __forceinline__ void find_limits(RowState<C, Flag>& state) {
  constexpr float APPROXIMATE = 1.0f / 64;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float rise = allowed_rise<Weights16>(state.sum[m][r]);
      state.limit[m][r] = state.base[m][r] + fmaxf(rise - APPROXIMATE, 0.0f);
    }
  }
}

// Raises the bases of a warp's rows if these scores require it. Returns the scale for
// exponentiate_all_scores: exp2_scale, or 1 if this has scaled the scores already.
// limits: RaiseLimits of `state`, computed before Q K^T, behind whose products they cost no time.
// If null, they are computed here, but only if some maximum exceeds its base. With KEEPS_LIMITS
// they are computed only if some maximum exceeds RowState::limit, and the argument is not used.
template <class C, class Weights = Weights16, class Flag>
__device__ __forceinline__ float update_row_max(Scores<C>& s_rmem, RowState<C, Flag>& state,
                                                Outputs<C>& o_rmem, float exp2_scale,
                                                const RaiseLimits<C>* limits) {
  float lane_max[C::M_TILES][2];
  find_lane_maxima<C, Weights>(s_rmem, lane_max);
  bool raises;
  if constexpr (Weights::RAISE_FRACTION == 0.0f) {
    constexpr float LAG = Weights::P_LOG2 + Weights::BASE_LAG;
    const float lag = state.large ? Weights::LARGE_BASE_LAG : LAG;
    raises = any_exceeds<C>(lane_max, exp2_scale, lag, state.base);
  } else if constexpr (keeps_limits<C>()) {
    raises = any_exceeds<C>(lane_max, exp2_scale, 0.0f, state.limit);
    if (raises) {
      raises = any_exceeds<C>(lane_max, exp2_scale, 0.0f, RaiseLimits<C>(state).rmem);
      if (!raises) find_limits<C>(state);
    }
  } else if (limits != nullptr) {
    raises = any_exceeds<C>(lane_max, exp2_scale, 0.0f, limits->rmem);
  } else {
    raises = any_exceeds<C>(lane_max, exp2_scale, 0.0f, state.base);
    if (raises) raises = any_exceeds<C>(lane_max, exp2_scale, 0.0f, RaiseLimits<C>(state).rmem);
  }
  if constexpr (C::ROWS_ALONE) {
    static_assert(Weights::RAISE_FRACTION != 0.0f && Weights::ZERO == 0.0f, "not written");
    if (raises) {
      const RaiseLimits<C> own(state);
      raise_bases<C, Weights>(lane_max, state, o_rmem, exp2_scale, [&](int m, int r) {
        const bool exceeds = fmaf(lane_max[m][r], exp2_scale, 0.0f) > own.rmem[m][r];
        constexpr unsigned LANES_OF_ROW = 0xF;
        const unsigned lane = threadIdx.x % 32;
        return (__ballot_sync(FULL_WARP, exceeds) >> (lane & ~3u) & LANES_OF_ROW) != 0;
      });
    }
  } else if (raises) {
    raise_bases<C, Weights>(lane_max, state, o_rmem, exp2_scale, [](int, int) { return true; });
    if constexpr (keeps_limits<C>()) find_limits<C>(state);
  }

  // base is a rounded product of a score and the scale. If it is large, scores are rounded the same
  // way before base is subtracted, so that the largest score of a row gives exactly P = 1.
  bool rounds = state.large;
  if constexpr (Weights::ZERO != 0.0f) rounds |= exp2_scale > Weights::LARGEST_SCALE;
  if (rounds) {
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (C::ROWS_ALONE && !is_large<Weights>(state.base[m][i / 2])) continue;
          float score = s_rmem[m][n][i];
          if constexpr (Weights::ZERO != 0.0f) score -= Weights::ZERO;
          s_rmem[m][n][i] = __fmul_rn(score, exp2_scale);
        }
      }
    }
    if (!C::ROWS_ALONE) exp2_scale = 1.0f;  // else exponentiate_key_tile asks each row
  }
  return exp2_scale;
}

// P = 2^(S * exp2_scale - base) for key tile n of row tile m. P is stored in 16 bits, in its half
// of the fragment a that two neighbouring key tiles share; its sum is kept in fp32.
template <class C, class Flag>
__device__ __forceinline__ void exponentiate_key_tile(const Scores<C>& s_rmem,
                                                      uint32_t (&p_rmem)[4],
                                                      RowState<C, Flag>& state, int m, int n,
                                                      float exp2_scale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const bool scaled = C::ROWS_ALONE && is_large<Weights16>(state.base[m][r]);
    const float scale = scaled ? 1.0f : exp2_scale;
    float p[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      p[i] = ptx::ex2_approx_ftz(fmaf(s_rmem[m][n][2 * r + i], scale, -state.base[m][r]));
      state.sum[m][r] += p[i];
    }
    p_rmem[n % 2 * 2 + r] = ptx::cvt_rn_x2_f32<C::DTYPE>(p[0], p[1]);
  }
}

// P = 2^(S * exp2_scale - base) for all row tiles and STEP_KEYS keys.
template <class C, class Flag>
__device__ __forceinline__ void exponentiate_all_scores(const Scores<C>& s_rmem,
                                                        Probabilities<C>& p_rmem,
                                                        RowState<C, Flag>& state,
                                                        float exp2_scale) {
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n)
      exponentiate_key_tile<C>(s_rmem, p_rmem[m][n / 2], state, m, n, exp2_scale);
  }
}

// Where a warp's output rows go. warp_row is its first row, counted from the CTA's first row.
struct OutRows {
  int batch, head;
  int64_t packed_row;  // the warp's first row in its tensor; with cu_seqlens, in the packed tensor
  int rows;            // rows from there to the end of the sequence; may exceed the warp's
  float sink;          // the head's sink, or -inf

  __device__ __forceinline__ OutRows(const AttentionParams& params, const Work& work, int warp_row)
      : batch(work.batch_head / params.heads_q),
        head(work.batch_head % params.heads_q),
        packed_row(sequence_start(params.cu_seqlens_q_gmem, batch, params.nq) + work.first_row +
                   warp_row),
        rows(work.nq - work.first_row - warp_row),
        sink(load_sink(params, head)) {}

  __device__ __forceinline__ uint16_t* out_gmem(const AttentionParams& params) const {
    return static_cast<uint16_t*>(params.out_gmem) + batch * params.out_batch +
           head * params.out_head + packed_row * params.out_row;
  }
  __device__ __forceinline__ void store_lse(const AttentionParams& params, int row,
                                            float lse) const {
    params.lse_gmem[batch * params.lse_batch + head * params.lse_head + packed_row + row] = lse;
  }
};

// Finishes row lane/4 + 8r of row tile m after the last key. All lanes of the warp call it, because
// the four lanes of a row add their sums.
template <class C, class Flag>
__device__ __forceinline__ RowEnd finish_lane_row(const RowState<C, Flag>& state, int m, int r,
                                                  float sink) {
  const float sum = sum_of_quad(state.sum[m][r]);
  return finish_row(sum == 0.0f ? MINUS_INFINITY : state.base[m][r] * LN_2, sum, sink);
}

// Divides the outputs by the row sums and writes them, and the LSE where it is asked for. The rows
// go through `rows_smem`, a part of shared memory that belongs to the warp and has the layout of
// Tile, so that each lane writes 16 bytes to global memory and rows are written whole. warp_row is
// the warp's first row, counted from the CTA's first row.
template <class C, class Tile, class Flag>
__device__ __forceinline__ void store_out(const Outputs<C>& o_rmem, const RowState<C, Flag>& state,
                                          const AttentionParams& params, const Work& work,
                                          int warp_row, unsigned char* rows_smem) {
  const OutRows out(params, work, warp_row);
  const int lane = threadIdx.x % 32;
  // rows_smem may hold Q. ldmatrix does not order lanes, so wait until every lane has read its
  // fragments of Q before any lane overwrites them.
  // mutants: rows-were-read
  __syncwarp();
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const RowEnd end = finish_lane_row<C>(state, m, r, out.sink);
      const int row = 16 * m + 8 * r + lane / 4;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
        const float* o = &o_rmem[m][n][2 * r];
        const uint32_t pair = ptx::cvt_rn_x2_f32<C::DTYPE>(o[0] * end.factor, o[1] * end.factor);
        const int offset = Tile::offset(row, n);
        *reinterpret_cast<uint32_t*>(rows_smem + offset + lane % 4 * 4) = pair;
      }
      if (params.lse_gmem != nullptr && lane % 4 == 0 && row < out.rows)
        out.store_lse(params, row, end.lse);
    }
  }
  __syncwarp();  // the warp's rows are complete before any lane reads them

  uint16_t* out_gmem = out.out_gmem(params);
#pragma unroll 4
  for (int index = lane; index < C::WARP_ROWS * (C::HEAD_DIM_V / 8); index += 32) {
    // mutants: never-negative
    const int row = index / (C::HEAD_DIM_V / 8);
    const int chunk = index % (C::HEAD_DIM_V / 8);
    const uint4 x = *reinterpret_cast<const uint4*>(rows_smem + Tile::offset(row, chunk));
    if (row < out.rows && chunk * 8 < params.dv) {
      ptx::st_global_v4_b32(out_gmem + row * params.out_row + chunk * 8, x.x, x.y, x.z, x.w);
    }
  }
}

}  // namespace archflash::device
