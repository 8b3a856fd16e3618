// Attention forward with products of four bits (NVFP4), for approximate="nvfp4" on 12.x: Q K^T and
// P V by mma.sync m16n8k64 with a scale for each 16 numbers; scores, sums and outputs in fp32.
//
// A CTA owns a row tile of a head and visits the blocks of keys that it sees, from the last one
// back to the first. One warp copies chunks of K and V, which nvfp4_prepare.cuh has left in the
// workspace; the others own 16 rows each, whose Q, scores, P and outputs never leave registers.
//
// clang-format off
//   producer    wait k_empty | copy K     wait v_empty | copy V
//   consumers   Q to four bits | wait k_full | S = Q K^T | k_empty | mask, row max
//                              | wait v_full | P = 2^(S - base) to four bits, O += P V | v_empty
// clang-format on
//
// P is not divided by its row sum before it is rounded, and the largest weight of a row lies
// between 2^10.5 and 2^11.25: with scales of ue4m3 up to 448 four bits reach 2688. A weight in a
// group of 16 is off by at most 1/6 of the group's largest.
#pragma once

#include <cstdint>
#include <type_traits>

#include "blackwell_consumer/nvfp4_config.cuh"
#include "blackwell_consumer/nvfp4_params.h"
#include "blackwell_consumer/nvfp4_prepare.cuh"
#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/quad.cuh"
#include "common/device/ring.cuh"
#include "common/device/tile_walk.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/bulk_load.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/mma_block_scaled.cuh"
#include "common/ptx/nvfp4.cuh"
#include "common/ptx/st_global.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/warp_roles.cuh"

namespace archflash::blackwell_consumer {

// As device::WeightsE4m3, with another largest weight.
struct WeightsNvfp4 : device::Weights16 {
  static constexpr float P_LOG2 = 10.5f;
  static constexpr float BASE_LAG = 0.75f;
  static constexpr float RAISE_FRACTION = 0.0f;
  static constexpr float LARGE_BASE = 1 << 18;
  static constexpr float LARGE_BASE_LAG = 0.0f;
};

// Full and empty barriers of the stages of K and V. "Bytes": the producer arrives once and says how
// many bytes will come.
template <class C>
struct Nvfp4Barriers {
  uint32_t first_smem;

  // producer, bytes: the chunk has landed before consumers read it
  __device__ __forceinline__ uint32_t k_full(int stage) const { return first_smem + 32 * stage; }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return k_full(stage) + 8; }
  // each consumer warp: it has read the chunk before the producer overwrites it
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return k_full(stage) + 16; }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return k_full(stage) + 24; }
};

template <class C>
__device__ __forceinline__ void produce_nvfp4(const Nvfp4Params& params, uint32_t shared_smem,
                                              const device::Work& work,
                                              const device::Blocks& blocks) {
  const Nvfp4Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int batch = work.batch_head / params.attention.heads_q;
  const int kv_head = work.batch_head % params.attention.heads_q / params.attention.heads_per_kv;
  const int64_t first = static_cast<int64_t>(batch * params.heads_kv + kv_head) * params.k_blocks;
  device::RingPosition<C::STAGES> ring;
  for (int block = blocks.last; block >= blocks.first; block -= C::BLOCK_K) {
    const int64_t index = first + block / C::BLOCK_K;
    // Every consumer warp has read the K that the stage held, before it is overwritten.
    ptx::mbarrier_wait_parity(barriers.k_empty(ring.stage), ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(barriers.k_full(ring.stage), C::K_BYTES);
    ptx::cp_async_bulk_load(shared_smem + C::K_SMEM + ring.stage * C::K_BYTES,
                            params.k_chunks_gmem + index * C::K_BYTES, C::K_BYTES,
                            barriers.k_full(ring.stage));
    // Every consumer warp has read the V that the stage held, before it is overwritten.
    ptx::mbarrier_wait_parity(barriers.v_empty(ring.stage), ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(barriers.v_full(ring.stage), C::V_BYTES);
    ptx::cp_async_bulk_load(shared_smem + C::V_SMEM + ring.stage * C::V_BYTES,
                            params.v_chunks_gmem + index * C::V_BYTES, C::V_BYTES,
                            barriers.v_full(ring.stage));
    ring.advance();
  }
}

// A fragment a of m16n8k64 and its scales.
struct Fragment {
  uint32_t a[4];
  uint32_t scales;
};

// Rounds numbers to four bits. With g = lane / 4 and t = lane % 4, x[r][h] are places 8t to 8t + 7
// of the half h of row g + 8r. Lanes 2i and 2i + 1 of four share the groups of their halves. In a
// row of which spoils[r] is set the scales are NaN.
__device__ __forceinline__ Fragment rounded(const float (&x)[2][2][8], const bool (&spoils)[2]) {
  Fragment made;
  uint32_t scales[2];  // of row g + 8r: of both halves, in two bytes
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most = fabsf(x[r][h][0]);
#pragma unroll
      for (int i = 1; i < 8; ++i) most = fmaxf(most, fabsf(x[r][h][i]));
      most = fmaxf(most, __shfl_xor_sync(device::FULL_WARP, most, 1));
      largest[h] = most * (1.0f / 6);
    }
    const uint16_t pair = ptx::cvt_rn_satfinite_x2_f32<DType::E4M3>(largest[0], largest[1]);
    const uint32_t halves = ptx::cvt_rn_f16x2_e4m3x2(pair);
    scales[r] = spoils[r] ? NAN_SCALE | NAN_SCALE << 8 : pair;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      constexpr float SMALLEST_SCALE = 0x1p-9f;  // a scale of 0 has numbers that become 0
      const float scale = ptx::cvt_f32_f16(static_cast<uint16_t>(halves >> 16 * h));
      const float factor = ptx::rcp_approx_ftz(fmaxf(scale, SMALLEST_SCALE));
      float scaled[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) scaled[i] = x[r][h][i] * factor;
      made.a[r + 2 * h] = ptx::cvt_rn_satfinite_e2m1x8_f32(scaled);
    }
  }
  // Lane 4g gives the scales of row g and lane 4g + 1 those of row g + 8: of each half, its own
  // group's and those of the lane two further.
  const uint32_t mine = threadIdx.x % 2 == 0 ? scales[0] : scales[1];
  const uint32_t other = __shfl_xor_sync(device::FULL_WARP, mine, 2);
  made.scales = __byte_perm(mine, other, 0x5140);
  return made;
}

// Q of a warp's rows, and what it adds to their scores.
template <class C>
struct QRows {
  static constexpr int STEPS = C::HEAD_DIM / 64;
  Fragment fragments[STEPS];
  float unit;
  float shift[2];  // q times the mean of K, which scores lack: of rows g and g + 8

  __device__ __forceinline__ QRows(const Nvfp4Params& params, const device::Work& work,
                                   int warp_row) {
    const AttentionParams& attention = params.attention;
    const int batch = work.batch_head / attention.heads_q;
    const int head = work.batch_head % attention.heads_q;
    const int lane = threadIdx.x % 32;
    const float* mean_gmem =
        params.k_mean_gmem +
        (batch * params.heads_kv + head / attention.heads_per_kv) * C::HEAD_DIM;
    float x[STEPS][2][2][8];
    float largest = 0.0f;
    bool spoils[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = work.first_row + warp_row + lane / 4 + 8 * r;
      const uint16_t* row_gmem = static_cast<const uint16_t*>(attention.q_gmem) +
                                 batch * attention.q_batch + head * attention.q_head +
                                 row * attention.q_row;
      float dot = 0.0f;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int column = 64 * step + 32 * h + lane % 4 * 8;
          float (&y)[8] = x[step][r][h];
          uint4 data = make_uint4(0, 0, 0, 0);
          if (row < work.nq && column < attention.d)
            data = *reinterpret_cast<const uint4*>(row_gmem + column);
          floats_of(data, params.dtype, y);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            dot = fmaf(y[i], mean_gmem[column + i], dot);
            if (!is_finite(y[i])) {
              spoils[r] = true;
              y[i] = 0.0f;
            }
            largest = fmaxf(largest, fabsf(y[i]));
          }
        }
      }
      dot = device::sum_of_quad(dot);
      // Beyond this the log-sum-exp is not right, but the output is.
      constexpr float LARGEST_SHIFT = 0x1p120f;
      shift[r] = fminf(fmaxf(dot * params.scale, -LARGEST_SHIFT), LARGEST_SHIFT);
      const unsigned lanes = __ballot_sync(device::FULL_WARP, spoils[r]);
      spoils[r] = (lanes >> (lane & ~3) & 0xF) != 0;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      largest = fmaxf(largest, __shfl_xor_sync(device::FULL_WARP, largest, distance));
    unit = unit_of(largest);
    const float factor = ptx::rcp_approx_ftz(unit);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int i = 0; i < 8; ++i) x[step][r][h][i] *= factor;
        }
      }
      fragments[step] = rounded(x[step], spoils);
    }
  }
};

__device__ __forceinline__ float unit_of_head(const Nvfp4Unit& unit, int batch, int head) {
  return unit.gmem[batch * unit.batch + head * unit.head];
}

// Q of a warp's rows that has four bits as it comes.
template <class C>
struct StoredQRows {
  static constexpr int STEPS = C::HEAD_DIM / 64;
  Fragment fragments[STEPS];
  float unit;
  float shift[2] = {};

  __device__ __forceinline__ StoredQRows(const Nvfp4Params& params, const device::Work& work,
                                         int warp_row) {
    const AttentionParams& attention = params.attention;
    const int batch = work.batch_head / attention.heads_q;
    const int head = work.batch_head % attention.heads_q;
    const int lane = threadIdx.x % 32;
    const int first_row = work.first_row + warp_row + lane / 4;
    const auto* head_gmem = static_cast<const unsigned char*>(attention.q_gmem) +
                            batch * attention.q_batch + head * attention.q_head;
    const unsigned char* scales_gmem = scales_of_head(params.scales.q, batch, head);
    const int scaled_row = first_row + lane % 2 * 8;  // see rounded()
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = first_row + i % 2 * 8, column = 64 * step + i / 2 * 32 + lane % 4 * 8;
        fragments[step].a[i] = 0;
        if (row < work.nq && column < attention.d) {
          fragments[step].a[i] =
              *reinterpret_cast<const uint32_t*>(head_gmem + row * attention.q_row + column / 2);
        }
      }
      fragments[step].scales = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int group = 4 * step + i;
        if (scaled_row < work.nq && group * NVFP4_GROUP < attention.d) {
          const uint32_t scale = scales_gmem[scaled_row * params.scales.q.block + group];
          fragments[step].scales |= scale << 8 * i;
        }
      }
    }
    unit = unit_of_head(params.q_unit, batch, head);
  }
};

// The scales of 8 * TILES rows of a chunk: lane 4g + t has in word[step][i] those of row g of tile
// 4i + t, for 64 places from 64 * step on.
template <int STEPS, int TILES>
struct RowScales {
  uint32_t word[STEPS][TILES / 4];

  __device__ __forceinline__ explicit RowScales(const unsigned char* scales_smem) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < TILES / 4; ++i) {
      const int row = 32 * i + lane % 4 * 8 + lane / 4;
      const auto* words = reinterpret_cast<const uint32_t*>(scales_smem + row * STEPS * 4);
#pragma unroll
      for (int step = 0; step < STEPS; ++step) word[step][i] = words[step];
    }
  }
};

// d[n] += a b for the row tiles n of a chunk and 64 places from 64 * step on.
template <class Tile, int STEPS, int TILES>
__device__ __forceinline__ void multiply_rows(float (&d)[TILES][4], const Fragment& a,
                                              uint32_t lane_smem /* this lane's row */,
                                              const RowScales<STEPS, TILES>& scales, int step) {
#pragma unroll
  for (int n = 0; n < TILES; n += 2) {
    uint32_t b[4];
    // The two chunks of a step differ in a bit of the address, as do those of another step.
    ptx::ldmatrix_x4(b, (lane_smem ^ static_cast<uint32_t>(step * 32)) + n * 8 * Tile::ROW_BYTES);
    const uint32_t word = scales.word[step][n / 4];
    if (n % 4 == 0) {
      ptx::mma_nvf4_m16n8k64<ptx::ScalePlace{.b_lane = 0}>(d[n], a.a, b[0], b[1], a.scales, word);
      ptx::mma_nvf4_m16n8k64<ptx::ScalePlace{.b_lane = 1}>(d[n + 1], a.a, b[2], b[3], a.scales,
                                                           word);
    } else {
      ptx::mma_nvf4_m16n8k64<ptx::ScalePlace{.b_lane = 2}>(d[n], a.a, b[0], b[1], a.scales, word);
      ptx::mma_nvf4_m16n8k64<ptx::ScalePlace{.b_lane = 3}>(d[n + 1], a.a, b[2], b[3], a.scales,
                                                           word);
    }
  }
}

// The address of the row that this lane names to ldmatrix.x4: of rows 0 to 7 the first and second
// chunk, then of rows 8 to 15.
template <class Tile>
__device__ __forceinline__ uint32_t lane_row(uint32_t tile_smem) {
  const unsigned lane = threadIdx.x % 32;
  return tile_smem + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Masks the scores of a block, of which a lane holds keys in the order of key_at().
template <class C>
__device__ __forceinline__ void mask_nvfp4(device::Scores<C>& s_rmem,
                                           const device::VisibleKeys& visible, int first_row,
                                           int first_key) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int first = visible.first(first_row + 8 * r) - first_key;
    const int last = visible.last(first_row + 8 * r) - first_key;
#pragma unroll
    for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = C::key_at(8 * n) + i;
        if (key < first || key > last) s_rmem[0][n][2 * r + i] = device::MINUS_INFINITY;
      }
    }
  }
}

// Hands a stage back that the warp has read (attention_fwd.cuh says why the fence is there).
__device__ __forceinline__ void release_nvfp4(uint32_t barrier_smem) {
  ptx::fence_proxy_async_shared();
  device::release(barrier_smem);
}

// Divides the outputs by the row sums and writes them, and the LSE where it is asked for. Of every
// 16 columns of a row a lane holds four neighbouring ones (Nvfp4Config::v_row). The rounded weights
// of a row may add up to more than their sum: no output may exceed the largest number of V, which
// could make an infinity of it.
template <class C>
__device__ __forceinline__ void store_nvfp4_out(const device::Outputs<C>& o_rmem,
                                                const device::RowState<C>& state,
                                                const Nvfp4Params& params, const device::Work& work,
                                                int warp_row, const float (&shift)[2],
                                                float v_unit) {
  const AttentionParams& attention = params.attention;
  const device::OutRows out(attention, work, warp_row);
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = device::sum_of_quad(state.sum[0][r]);
    const float keys_max =
        sum == 0.0f ? device::MINUS_INFINITY : state.base[0][r] * device::LN_2 + shift[r];
    const device::RowEnd end = device::finish_row(keys_max, sum, out.sink);
    const float factor = end.factor * v_unit, limit = v_unit * NVFP4_LARGEST;
    const auto output = [&](float sum) {  // NaN stays NaN
      const float x = sum * factor;
      return x > limit ? limit : x < -limit ? -limit : x;
    };
    const int row = 8 * r + lane / 4;
    if (row >= out.rows) continue;
    uint16_t* row_gmem = out.out_gmem(attention) + row * attention.out_row + lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
      if (n * 8 + lane % 4 * 4 >= attention.dv) continue;
      uint32_t pair[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float low = output(o_rmem[0][n][2 * r + i]);
        const float high = output(o_rmem[0][n + 1][2 * r + i]);
        pair[i] = params.dtype == DType::F16 ? ptx::cvt_rn_x2_f32<DType::F16>(low, high)
                                             : ptx::cvt_rn_x2_f32<DType::BF16>(low, high);
      }
      ptx::st_global_v2_b32(row_gmem + n * 8, pair[0], pair[1]);
    }
    if (attention.lse_gmem != nullptr && lane % 4 == 0) out.store_lse(attention, row, end.lse);
  }
}

template <class C>
__device__ __forceinline__ void consume_nvfp4(const Nvfp4Params& params, unsigned char* shared,
                                              uint32_t shared_smem, const device::Work& work,
                                              const device::VisibleKeys& visible,
                                              const device::Blocks& blocks) {
  constexpr int K_TILES = C::BLOCK_K / 8, V_TILES = C::HEAD_DIM_V / 8, P_STEPS = C::BLOCK_K / 64;
  using Q = std::conditional_t<C::STORED, StoredQRows<C>, QRows<C>>;
  const AttentionParams& attention = params.attention;
  const Nvfp4Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  const int batch = work.batch_head / attention.heads_q;
  const int kv_head = work.batch_head % attention.heads_q / attention.heads_per_kv;
  const int64_t head_of_k = static_cast<int64_t>(batch * params.heads_kv + kv_head);
  const float* k_units_gmem = params.k_units_gmem + head_of_k * params.k_blocks;
  float k_unit = 1.0f;
  if constexpr (C::STORED) k_unit = unit_of_head(params.k_unit, batch, kv_head);
  const Q q(params, work, warp_row);
  const int first_row = work.first_row + warp_row;
  const int last_row = min(first_row + C::WARP_ROWS, work.nq) - 1;

  device::Outputs<C> o_rmem = {};
  device::RowState<C> state;
  state.large = false;
  device::clear(state);
  device::RingPosition<C::STAGES> ring;
#pragma unroll 1
  for (int block = blocks.last; block >= blocks.first; block -= C::BLOCK_K) {
    device::Scores<C> s_rmem = {};
    ptx::mbarrier_wait_parity(barriers.k_full(ring.stage), ring.parity);  // K has landed
    {
      const int chunk = C::K_SMEM + ring.stage * C::K_BYTES;
      const RowScales<Q::STEPS, K_TILES> scales(shared + chunk + C::K_SCALES);
      const uint32_t lane_smem = lane_row<typename C::KTile>(shared_smem + chunk);
#pragma unroll
      for (int step = 0; step < Q::STEPS; ++step) {
        multiply_rows<typename C::KTile>(s_rmem[0], q.fragments[step], lane_smem, scales, step);
      }
      release_nvfp4(barriers.k_empty(ring.stage));
    }
    // The scale stays a normal number, and products of stored numbers with it stay finite.
    constexpr float SMALLEST_NORMAL = 1.17549435e-38f, LARGEST_SCALE = 0x1p64f;
    if constexpr (!C::STORED) k_unit = k_units_gmem[block / C::BLOCK_K];
    float exp2_scale = attention.exp2_scale * q.unit * k_unit;
    exp2_scale = fminf(fmaxf(exp2_scale, SMALLEST_NORMAL), LARGEST_SCALE);
    if (visible.masks(first_row, last_row, block, block + C::BLOCK_K - 1)) {
      mask_nvfp4<C>(s_rmem, visible, first_row + lane / 4, block + lane % 4 * 8);
    }
    exp2_scale =
        device::update_row_max<C, WeightsNvfp4>(s_rmem, state, o_rmem, exp2_scale, nullptr);
    ptx::mbarrier_wait_parity(barriers.v_full(ring.stage), ring.parity);  // V has landed
    const int chunk = C::V_SMEM + ring.stage * C::V_BYTES;
    const RowScales<P_STEPS, V_TILES> scales(shared + chunk + C::V_SCALES);
    const uint32_t lane_smem = lane_row<typename C::VTile>(shared_smem + chunk);
#pragma unroll
    for (int step = 0; step < P_STEPS; ++step) {
      float p[2][2][8];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float score = s_rmem[0][8 * step + 4 * h + i / 2][2 * r + i % 2];
            p[r][h][i] = ptx::ex2_approx_ftz(fmaf(score, exp2_scale, -state.base[0][r]));
            state.sum[0][r] += p[r][h][i];
          }
        }
      }
      constexpr bool NONE[2] = {};
      multiply_rows<typename C::VTile>(o_rmem[0], rounded(p, NONE), lane_smem, scales, step);
    }
    release_nvfp4(barriers.v_empty(ring.stage));
    ring.advance();
  }
  float v_unit;
  if constexpr (C::STORED)
    v_unit = unit_of_head(params.v_unit, batch, kv_head);
  else
    v_unit = params.v_unit_gmem[head_of_k];
  store_nvfp4_out<C>(o_rmem, state, params, work, warp_row, q.shift, v_unit);
}

template <class C>
__device__ __forceinline__ void nvfp4_attention_fwd(const Nvfp4Params& params) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  if (threadIdx.x == 0) {
    const Nvfp4Barriers<C> barriers{shared_smem + C::BARRIER_SMEM};
    for (int stage = 0; stage < C::STAGES; ++stage) {
      ptx::mbarrier_init(barriers.k_full(stage), 1);
      ptx::mbarrier_init(barriers.v_full(stage), 1);
      ptx::mbarrier_init_for_warps(barriers.k_empty(stage), C::WARPS);
      ptx::mbarrier_init_for_warps(barriers.v_empty(stage), C::WARPS);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();  // the barriers are initialised before any warp uses them
  const device::Work work =
      device::find_work<C::BLOCK_Q>(params.attention, static_cast<int>(blockIdx.x));
  const device::VisibleKeys visible = device::find_visible_keys(params.attention, work);
  const device::Blocks blocks = device::find_blocks<C::BLOCK_Q, C::BLOCK_K>(work, visible);
  if (threadIdx.x < C::CONSUMER_THREADS) {
    ptx::setmaxnreg_inc<C::CONSUMER_REGISTERS>();
    consume_nvfp4<C>(params, shared, shared_smem, work, visible, blocks);
  } else {
    ptx::setmaxnreg_dec<C::PRODUCER_REGISTERS>();
    if (threadIdx.x < C::CONSUMER_THREADS + 32) {
      if (ptx::elect_sync()) produce_nvfp4<C>(params, shared_smem, work, blocks);
    }
  }
}

}  // namespace archflash::blackwell_consumer
