// Attention forward on 8-bit tensor cores: e4m3 or e5m2 inputs with descales, fp32 scores, sums and
// output accumulators, P in e4m3, fp16 or bf16 outputs. Work, order and overlap are those of
// common/mma_sync/attention_fwd.cuh: one CTA per (BLOCK_Q query rows, head, batch), visible key
// blocks from the last to the first, no roles.
// Descales of q and k multiply the exponent's scale: one number for a warp and a step. That of v
// multiplies the output; where each block of keys has its own, the outputs so far are brought to
// each block's unit first.
// Products, softmax: tile.cuh. Tiles: config.cuh. Choice of tile: plan.cpp. Numbers: NOTES.md.
#pragma once

#include <cstdint>

#include "ada/config.cuh"
#include "ada/params.h"
#include "ada/tile.cuh"
#include "common/math/attention_work.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/visible_keys.cuh"
#include "common/mma_sync/place.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async.cuh"
#include "common/ptx/cvt.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::ada {

constexpr int MOST_WARPS = 8;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// What the main loop needs to know of its CTA, in shared memory.
struct ScaledPlace {
  mma_sync::Place place;
  const float* k_blocks_gmem;  // the first key block's descale; null: all have the same
  const float* v_blocks_gmem;
  int64_t k_block, v_block;     // strides
  float v_factor[MOST_WARPS];   // of each warp's outputs
  float qk_factor[MOST_WARPS];  // of each warp's rows, and of the keys where all have the same
};

__device__ __forceinline__ const float* descale_of_head(const Descale& descale, int batch,
                                                        int head) {
  return descale.gmem + batch * descale.batch + head * descale.head;
}

// Called by a whole CTA.
template <class C>
__device__ __forceinline__ void find_place(const Params& params, const math::Work& work,
                                           ScaledPlace& scaled) {
  static_assert(C::WARPS <= MOST_WARPS);
  const int batch = work.batch_head / params.attention.heads_q;
  const int head = work.batch_head % params.attention.heads_q;
  const int kv_head = head / params.attention.heads_per_kv;
  const bool k_in_blocks = params.k.gmem != nullptr && params.k.block != 0;
  if (threadIdx.x == 0) {
    const math::Offsets offsets = math::find_offsets(params.attention, work);
    scaled.place = {static_cast<const uint16_t*>(params.attention.k_gmem) + offsets.k,
                    static_cast<const uint16_t*>(params.attention.v_gmem) + offsets.v, work,
                    math::find_visible_keys(params.attention, work)};
    const bool v_in_blocks = params.v.gmem != nullptr && params.v.block != 0;
    const float* v_gmem = descale_of_head(params.v, batch, kv_head);
    scaled.k_blocks_gmem = k_in_blocks ? descale_of_head(params.k, batch, kv_head) : nullptr;
    scaled.v_blocks_gmem = v_in_blocks ? v_gmem : nullptr;
    scaled.k_block = params.k.block;
    scaled.v_block = params.v.block;
  }
  const int warp = threadIdx.x;  // one thread for each
  if (warp < C::WARPS) {
    float factor = 1.0f;
    if (params.q.gmem != nullptr) {
      const int row = min(work.first_row + warp * C::WARP_ROWS, work.nq - 1);
      factor = descale_of_head(
          params.q, batch, head / params.heads_per_q_descale)[row / SCALE_ROWS * params.q.block];
    }
    if (params.k.gmem != nullptr && !k_in_blocks)
      factor *= *descale_of_head(params.k, batch, kv_head);
    scaled.qk_factor[warp] = factor;
    scaled.v_factor[warp] =
        params.v.gmem == nullptr ? 1.0f : *descale_of_head(params.v, batch, kv_head);
  }
}

__device__ __forceinline__ float v_descale(const ScaledPlace& scaled, int key) {
  return scaled.v_blocks_gmem[key / SCALE_ROWS * scaled.v_block];
}
// What outputs are counted in: a block that stands for zeros takes any unit.
__device__ __forceinline__ float v_unit(const ScaledPlace& scaled, int key) {
  const float descale = v_descale(scaled, key);
  return descale == 0.0f ? 1.0f : descale;
}

// Brings a warp's outputs from the unit of the block before, which is one key block later, to that
// of this one. In its first block there are none.
template <class C>
__device__ __forceinline__ void change_unit(Outputs<C>& o_rmem, ScaledPlace& scaled, int block,
                                            int blocks_last) {
  const float unit = v_unit(scaled, block);
  const float before = v_unit(scaled, min(block + C::BLOCK_K, blocks_last));
  const int thread = ptx::mov_tid_x_volatile();
  if (thread % 32 == 0) scaled.v_factor[thread / 32] = unit;
  if (unit == before) return;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) o_rmem[m][n][i] *= before / unit;
    }
  }
}

// A lane holds four neighbouring columns of a row in every 16: a quad writes 32 bytes of it.
template <class C>
__device__ __forceinline__ void store_out(const Outputs<C>& o_rmem, const RowState<C>& state,
                                          const Params& all_params, const math::Work& work,
                                          float v_factor) {
  const AttentionParams& params = all_params.attention;
  const int lane = threadIdx.x % 32;
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  const int batch = work.batch_head / params.heads_q;
  const int head = work.batch_head % params.heads_q;
  const int64_t packed_row =
      math::sequence_start(params.cu_seqlens_q_gmem, batch, params.nq) + work.first_row + warp_row;
  const int rows = work.nq - work.first_row - warp_row;  // of this warp and beyond
  const float sink = math::load_sink(params, head);
  uint16_t* out_gmem = static_cast<uint16_t*>(params.out_gmem) + batch * params.out_batch +
                       head * params.out_head + packed_row * params.out_row;

#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float sum = state.sum[m][r];
      sum += __shfl_xor_sync(math::FULL_WARP, sum, 1);
      sum += __shfl_xor_sync(math::FULL_WARP, sum, 2);
      const float keys_max = sum == 0.0f ? math::MINUS_INFINITY : state.base[m][r] * math::LN_2;
      const math::RowEnd end = math::finish_row(keys_max, sum, sink);
      const float factor = end.factor * v_factor;
      const int row = 16 * m + 8 * r + lane / 4;
      if (row >= rows) continue;
      uint16_t* row_gmem = out_gmem + row * params.out_row + lane % 4 * 4;
#pragma unroll
      for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
        if (n * 8 >= params.dv) continue;
        const float* even = &o_rmem[m][n][2 * r];
        const float* odd = &o_rmem[m][n + 1][2 * r];
        uint32_t pair[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float low = even[i] * factor, high = odd[i] * factor;
          pair[i] = all_params.out_dtype == DType::F16 ? ptx::cvt_rn_x2_f32<DType::F16>(low, high)
                                                       : ptx::cvt_rn_x2_f32<DType::BF16>(low, high);
        }
        ptx::st_global_v2_b32(row_gmem + n * 8, pair[0], pair[1]);
      }
      if (params.lse_gmem != nullptr && lane % 4 == 0) {
        params.lse_gmem[batch * params.lse_batch + head * params.lse_head + packed_row + row] =
            end.lse;
      }
    }
  }
}

template <class C>
__device__ __forceinline__ void attention_fwd(const Params& all_params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& params = all_params.attention;
  using QKTile = typename C::QKTile;
  using VTile = typename C::VTile;

  static_assert(sizeof(ScaledPlace) <= C::PLACE_BYTES);
  ScaledPlace& scaled = *reinterpret_cast<ScaledPlace*>(shared + C::PLACE_SMEM);
  const mma_sync::Place& place = scaled.place;
  {
    const math::Work work = math::find_work<C::BLOCK_Q>(params, blockIdx.x);
    if (work.first_row < 0) return;
    find_place<C>(all_params, work, scaled);
  }
  __syncthreads();  // `scaled` is written
  const int last_row = min(place.work.first_row + C::BLOCK_Q, place.work.nq) - 1;
  // First keys of the first and of the last block with a visible key. None: last before first.
  const int blocks_begin = place.visible.first(place.work.first_row) & -C::BLOCK_K;
  const int blocks_last = place.visible.last(last_row) & -C::BLOCK_K;
  const auto start_k = [&](int key, uint32_t stage_smem) {
    mma_sync::start_keys<C, QKTile>(stage_smem + C::K_SMEM, place.k_gmem, params.k_row,
                                    params.d / 2, key, place.visible.nk);
  };
  const auto start_v = [&](int key, uint32_t stage_smem) {
    mma_sync::start_keys<C, VTile>(stage_smem + C::V_SMEM, place.v_gmem, params.v_row,
                                   params.dv / 2, key, place.visible.nk);
  };

  uint32_t stage_smem = shared_smem;  // of this block: what the offsets K_SMEM and V_SMEM start at
  if (blocks_begin <= blocks_last) {
    const uint16_t* q_gmem =
        static_cast<const uint16_t*>(params.q_gmem) + math::find_offsets(params, place.work).q;
    mma_sync::start_ragged_load<C, QKTile, C::BLOCK_Q>(
        shared_smem + C::Q_SMEM, q_gmem, params.q_row, place.work.nq - place.work.first_row,
        params.d / 2);
    mma_sync::clear_columns<C, QKTile>(shared + C::Q_SMEM, C::BLOCK_Q, params.d / 2);
#pragma unroll
    for (int stage = 0; stage < C::STAGES; ++stage) {
      unsigned char* stage_start = shared + stage * C::STAGE_BYTES;
      mma_sync::clear_columns<C, QKTile>(stage_start + C::K_SMEM, C::BLOCK_K, params.d / 2);
      mma_sync::clear_columns<C, VTile>(stage_start + C::V_SMEM, C::BLOCK_K, params.dv / 2);
    }
    start_k(blocks_last, stage_smem);
    if constexpr (C::STAGES == 2) start_v(blocks_last, stage_smem);
  }

  uint32_t q_rmem[C::Q_IN_REGISTERS ? C::HEAD_DIM / 32 : 1][C::M_TILES][4];
  Outputs<C> o_rmem = {};
  RowState<C> state;
  state.large = false;
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      state.base[m][r] = math::LOWEST;  // finite: no inf - inf in a row that has seen no key
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
                            mma_sync::rows_first_offset<QKTile>(thread % 32);
    const uint32_t k_smem =
        stage_smem + C::K_SMEM + mma_sync::columns_first_offset<QKTile>(thread % 32);
    const uint32_t v_smem = stage_smem + C::V_SMEM + VTile::offset(thread % 32, 0);
    if constexpr (C::Q_IN_REGISTERS) {
      if (block == blocks_last) {
#pragma unroll
        for (int pair = 0; pair < C::HEAD_DIM / 2; pair += 16)
          mma_sync::load_q<C>(q_rmem[pair / 16], q_smem, pair);
      }
    }

    // Whether the warp has rows, and one of them sees one of these keys.
    const bool computes = mma_sync::WarpRows<C>(place).any_sees(place.visible, block);
    Probabilities<C> p_rmem;
    if (computes) {
      Scores<C> s_rmem;
      multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
      const int scale_block = block / SCALE_ROWS;
      float factor = scaled.qk_factor[ptx::mov_tid_x_volatile() / 32];
      if (scaled.k_blocks_gmem != nullptr)
        factor *= scaled.k_blocks_gmem[scale_block * scaled.k_block];
      float exp2_scale = params.exp2_scale * factor;
      // An exponent scale must be positive and normal, or -inf would meet 0.
      if (params.transform_scores || !(exp2_scale >= SMALLEST_NORMAL)) {
        transform_scores<C>(s_rmem, params.tanh_scale * factor, params.softcap);
        exp2_scale = math::LOG2_E;
      }
      const mma_sync::WarpRows<C> rows(place);
      if (!rows.all_see(place.visible, block)) {
        const int lane = ptx::mov_tid_x_volatile() % 32;
        math::mask_scores<C>(s_rmem, place.visible, rows.first + lane / 4, block + lane % 4 * 2);
      }
      if (scaled.v_blocks_gmem != nullptr) change_unit<C>(o_rmem, scaled, block, blocks_last);
      weigh_scores<C>(s_rmem, p_rmem, state, o_rmem, exp2_scale);
      if (scaled.v_blocks_gmem != nullptr && v_descale(scaled, block) == 0.0f) {
#pragma unroll
        for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
          for (int i = 0; i < C::STEP_KEYS / 8; ++i) p_rmem[m][i / 4][i % 4] = 0;
        }
      }
    }
    if constexpr (C::STAGES == 1) {
      // V of all threads has landed; all warps are done with K: the next may overwrite it.
      ptx::copies_wait_all();
      __syncthreads();
      if (block > blocks_begin) start_k(block - C::BLOCK_K, stage_smem);
    }
    if (computes) multiply_pv<C>(o_rmem, p_rmem, v_smem);
    if constexpr (C::STAGES == 2) stage_smem = 2 * shared_smem + C::STAGE_BYTES - stage_smem;
  }
  __syncwarp();  // a lane wrote the last unit
  store_out<C>(o_rmem, state, all_params, place.work, scaled.v_factor[threadIdx.x / 32]);
}

}  // namespace archflash::ada

// One entry point: its name is what plan.cpp asks for. The one parameter stays in constant memory.
#define ARCHFLASH_ADA_FP8_KERNEL(NAME, CONFIG)                                       \
  extern "C" __global__ void __launch_bounds__(CONFIG::THREADS, CONFIG::CTAS_PER_SM) \
      NAME(const __grid_constant__ archflash::ada::Params params) {                  \
    archflash::ada::attention_fwd<CONFIG>(params);                                   \
  }
