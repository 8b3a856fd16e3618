// Attention forward for approximate="int8", "int8_pv" and "fp16_accumulate": that of
// common/mma_sync/attention_fwd.cuh and masked_fwd.cuh with other products. The work of a CTA, its
// copies, barriers, masks and softmax are theirs.
//
//   Q K^T  with C::INT8_QK of int8, exact in 32 bits; else as it is, with fp32 sums
//   P V    in fp16 with fp16 sums, which are added to the fp32 outputs after every step of keys.
//          GeForce GPUs multiply twice as fast so. P is at most 2^8 (device/online_softmax.cuh) and
//          V at most 1, so that the sums of 64 keys stay below 2^14, far from the limit of fp16.
//          With C::INT8_PV in 8 bits, four times as fast: the largest weight of a row in a step of
//          keys is 255, whatever the row has elsewhere, and the sums are exact
//
// approximate_inputs.cuh makes what is multiplied, approximate_config.cuh has the tiles,
// plan_approximate.cpp the choice among them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "ampere/approximate_config.cuh"
#include "ampere/approximate_params.h"
#include "ampere/int8_pv.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/quad.cuh"
#include "common/mma_sync/attention_fwd.cuh"
#include "common/mma_sync/cta_context.cuh"
#include "common/mma_sync/main_loop.cuh"
#include "common/mma_sync/masked_fwd.cuh"
#include "common/mma_sync/tile.cuh"
#include "common/ptx/cp_async_4.cuh"
#include "common/ptx/mma_sync_f16.cuh"
#include "common/ptx/special_registers.cuh"

namespace archflash::ampere {

// The base of a row moves only where a weight would exceed 2^8 (device/online_softmax.cuh): that
// the largest weight is exactly 1 matters less here than registers do.
struct ApproximateWeights : device::Weights16 {
  static constexpr float RAISE_FRACTION = 0.0f;
  static constexpr float LARGE_BASE_LAG = 0.0f;
};

// O += P V for STEP_KEYS keys. kept(i): which halves of what is read from V count for the two keys
// 8i + 2*(lane%4) and the next one.
template <class C, class Kept>
__device__ __forceinline__ void multiply_pv_f16(device::Outputs<C>& o_rmem,
                                                const mma_sync::Probabilities<C>& p_rmem,
                                                uint32_t v_smem /* this lane's row */,
                                                const Kept& kept) {
  static_assert(C::V_PACK == 1 && C::STEP_KEYS <= 64, "sums of more keys could overflow");
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; n += 2) {
    // A barrier for the assembler, which otherwise reads more of V ahead than registers hold.
    if (!C::INT8_QK && C::HEAD_DIM_V > 128 && n % 16 == 0) __syncwarp();
    uint32_t sums_rmem[C::M_TILES][2][2] = {};
#pragma unroll
    for (int key = 0; key < C::STEP_KEYS; key += 16) {
      uint32_t v_rmem[4];
      ptx::ldmatrix_x4_trans(v_rmem, C::VTile::advance(v_smem, n) + key * C::VTile::ROW_BYTES);
#pragma unroll
      for (int i = 0; i < 4; ++i) v_rmem[i] &= kept(key / 8 + i % 2);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
        ptx::mma_m16n8k16_f16(sums_rmem[m][0], p_rmem[m][key / 16], v_rmem[0], v_rmem[1]);
        ptx::mma_m16n8k16_f16(sums_rmem[m][1], p_rmem[m][key / 16], v_rmem[2], v_rmem[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const uint32_t pair = sums_rmem[m][i][r];
          o_rmem[m][n + i][2 * r] += ptx::cvt_f32_f16(static_cast<uint16_t>(pair));
          o_rmem[m][n + i][2 * r + 1] += ptx::cvt_f32_f16(static_cast<uint16_t>(pair >> 16));
        }
      }
    }
  }
}

// What integers of rows of Q stand for, of this lane's rows.
template <class C>
struct LaneQRows {
  QRow rows[C::M_TILES][2];

  // warp_row: the warp's first row of the tile.
  __device__ __forceinline__ LaneQRows(const unsigned char* shared, int warp_row) {
    const QRow* rows_smem = reinterpret_cast<const QRow*>(shared + C::ROWS_SMEM);
    const int lane = ptx::mov_tid_x_volatile() % 32;
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) rows[m][r] = rows_smem[warp_row + 16 * m + 8 * r + lane / 4];
    }
  }
};

// S = Q K^T of int8 rows, times the scales of the keys. A sum starts at the bits of 1.5 * 2^23, so
// that its bits are those of the float 1.5 * 2^23 + sum, without a conversion. change(m, r, s)
// makes a score of the result.
template <class C, class Change>
__device__ __forceinline__ void multiply_int8_qk(device::Scores<C>& s_rmem,
                                                 const mma_sync::QFragments<C>& q_rmem,
                                                 uint32_t q_smem, uint32_t k_smem,
                                                 const unsigned char* stage /* shared memory */,
                                                 const Change& change) {
  const float* scales_smem = reinterpret_cast<const float*>(stage + C::SCALES_SMEM);
  using Zero = device::WeightsOfIntegers;
  int32_t sums_rmem[C::M_TILES][C::STEP_KEYS / 8][4];
  mma_sync::multiply_qk<C>(sums_rmem, q_rmem, q_smem, k_smem, Zero::ZERO_BITS);
  const int lane = ptx::mov_tid_x_volatile() % 32;
#pragma unroll
  for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
    const float2 pair = *reinterpret_cast<const float2*>(&scales_smem[8 * n + lane % 4 * 2]);
    const float scales[2] = {pair.x, pair.y};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float zero = -Zero::ZERO * scales[i];  // exact: a scale has 16 significant bits
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float sum = __int_as_float(sums_rmem[m][n][2 * r + i]);
          s_rmem[m][n][2 * r + i] = change(m, r, fmaf(sum, scales[i], zero));
        }
      }
    }
  }
}

// What the main loop needs to know about its CTA, in shared memory: it leaves few registers.
template <class Cta>
struct ApproximateContext {
  Cta cta;
  const float* k_scales_gmem;  // of the sequence's first key; unused without int8
  // Four times the bits at which sums of P V in 8 bits start. From memory, because the assembler
  // makes a constant anew for each product.
  alignas(16) int32_t zero_bits[4];
};

// Starts the copy of the scales of BLOCK_K keys from `key` on, to the stage that the keys go to.
template <class C, class Cta>
__device__ __forceinline__ void start_key_scales(const ApproximateInputs& inputs,
                                                 const ApproximateContext<Cta>& context, int key,
                                                 uint32_t stage_smem) {
  const int row = ptx::mov_tid_x_volatile();
  if (row >= C::BLOCK_K) return;
  const bool valid = key + row < context.cta.visible.nk;
  const float* scales_gmem = context.k_scales_gmem + (valid ? key + row : 0);
#pragma unroll
  for (int i = 0; i < C::KEY_SCALES; ++i) {
    ptx::cp_async_ca_4(stage_smem + C::SCALES_SMEM + (i * C::BLOCK_K + row) * 4,
                       scales_gmem + i * inputs.keys, valid ? 4 : 0);
  }
}

// Where the scales of a tile's sequence start.
__device__ __forceinline__ const float* key_scales_of(const ApproximateInputs& inputs,
                                                      const AttentionParams& params,
                                                      const device::Work& work) {
  const int batch = inputs.batches == 1 ? 0 : work.batch_head / params.heads_q;
  const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
  const int sequence = work.batch_head / params.heads_q;
  return inputs.k_scales_gmem +
         static_cast<int64_t>(batch * inputs.heads_kv + kv_head) * inputs.nk +
         device::sequence_start(params.cu_seqlens_k_gmem, sequence, params.nk);
}

// What the numbers of V in a column of a tile's head stand for.
template <class C>
struct LaneVColumns {
  const ApproximateInputs& inputs;
  int64_t head;
  VScale of_head = {1.0f, 0.0f};

  __device__ __forceinline__ LaneVColumns(const ApproximateInputs& inputs,
                                          const AttentionParams& params, const device::Work& work)
      : inputs(inputs) {
    const int batch = inputs.batches == 1 ? 0 : work.batch_head / params.heads_q;
    const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
    head = batch * inputs.heads_kv + kv_head;
    if (!C::INT8_PV && inputs.nk > 0) of_head = inputs.v_scales_gmem[head];
  }
  __device__ __forceinline__ VColumn operator()(int column) const {
    if constexpr (C::INT8_PV) {
      const bool valid = inputs.nk > 0 && column < inputs.v_columns;
      if (!valid) return {1.0f, 0.0f, 0.0f, 0.0f};
      const float4 x = *reinterpret_cast<const float4*>(
          &inputs.v_columns_gmem[head * inputs.v_columns + column]);
      return {x.x, x.y, x.z, x.w};
    } else {
      return {of_head.scale, 0.0f, of_head.largest * of_head.scale, 0.0f};
    }
  }
};

// Copies what the tile's rows of int8 Q stand for, times `factor`, to shared memory. Rows of no
// sequence count as zeros.
template <class C>
__device__ __forceinline__ void load_q_rows(QRow* rows_smem, const ApproximateInputs& inputs,
                                            const AttentionParams& params,
                                            const device::PackedHeads& packed_heads,
                                            const device::Work& work, float factor) {
  for (int index = threadIdx.x; index < C::BLOCK_Q; index += C::THREADS) {
    const device::FewRow row(params, packed_heads, work, index);
    const int batch = inputs.batches == 1 ? 0 : row.batch;
    const int64_t head = batch * inputs.heads_q + row.head;
    QRow found = {};
    if (row.wanted) found = inputs.q_rows_gmem[head * inputs.nq + row.packed];
    rows_smem[index] = {found.scale * factor, found.shift * factor};
  }
}

// Writes the rows of a CTA, in the dtype that the call asks for. The state is that of C's softmax;
// kept: by what the elements of P that dropout leaves are multiplied.
template <class C, class Weights>
__device__ __forceinline__ void store_rows(device::Outputs<C>& o_rmem,
                                           const device::RowState<Weights>& state,
                                           const ApproximateInputs& inputs, float kept,
                                           const AttentionParams& params, DType out_dtype,
                                           const device::Work& work, unsigned char* shared) {
  const LaneVColumns<C> v_columns(inputs, params, work);
  const int lane_column = threadIdx.x % 4 * 2;
  // A sum of P times V is at most the sum of P times the largest of V. Rounding
  // must not make it larger: the largest number of a type would become infinite. NaN stays.
  float sums[C::M_TILES][2];
#pragma unroll
  for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sums[m][r] = device::sum_of_quad(state.sum[m][r]);
    }
  }
#pragma unroll
  for (int n = 0; n < C::HEAD_DIM_V / 8; ++n) {
    // A barrier for the assembler, which otherwise loads more columns ahead than registers hold.
    if (C::INT8_PV && n % 4 == 0) __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const VColumn column = v_columns(8 * n + lane_column + i);
#pragma unroll
      for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float& o = o_rmem[m][n][2 * r + i];
          o *= column.scale;
          if constexpr (C::INT8_PV) o = fmaf(sums[m][r], column.centre, o);
          const float most = sums[m][r] * column.largest;
          o = (fabsf(o) > most ? copysignf(most, o) : o) * kept;
        }
      }
    }
  }
  const int warp_row = threadIdx.x / 32 * C::WARP_ROWS;
  // Output rows may be longer than those of Q, so they are staged in the space of Q, K and V.
  using OutTile = device::SwizzledTile<C::HEAD_DIM_V>;
  static_assert(C::BLOCK_Q * OutTile::ROW_BYTES <= C::CONTEXT_SMEM);
  unsigned char* rows_smem = shared + warp_row * OutTile::ROW_BYTES;
  __syncthreads();  // no warp reads Q, K or V any more, before any warp overwrites them
  const auto store = [&](auto config) {
    using Out = decltype(config);
    device::RowState<Out> of_out;
#pragma unroll
    for (int m = 0; m < C::M_TILES; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        of_out.base[m][r] = state.base[m][r];
        of_out.sum[m][r] = state.sum[m][r];
      }
    }
    device::store_out<Out, OutTile>(o_rmem, of_out, params, work, warp_row, rows_smem);
  };
  if (C::INT8_QK && out_dtype == DType::BF16) {
    store(WithDType<C, DType::BF16>());
  } else {
    store(WithDType<C, C::DTYPE>());
  }
}

template <class C>
__device__ __forceinline__ void approximate_fwd(const ApproximateParams& all_params) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const AttentionParams& params = all_params.call.attention;
  using Weights = Fp16Weights<C>;
  using Context = ApproximateContext<mma_sync::CtaContext>;
  static_assert(sizeof(Context) <= C::CONTEXT_BYTES);
  Context& context = *reinterpret_cast<Context*>(shared + C::CONTEXT_SMEM);
  {
    const device::Work work = mma_sync::find_work<C>(all_params.call);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      context.cta = mma_sync::make_cta_context(params, work);
      for (int32_t& bits : context.zero_bits) bits = device::WeightsOfIntegers::ZERO_BITS;
      if constexpr (C::INT8_QK)
        context.k_scales_gmem = key_scales_of(all_params.inputs, params, work);
    }
    if constexpr (C::INT8_QK) {
      load_q_rows<C>(reinterpret_cast<QRow*>(shared + C::ROWS_SMEM), all_params.inputs, params,
                     {1, __builtin_ctz(C::BLOCK_Q)}, work, params.exp2_scale);
    }
  }
  __syncthreads();  // `context` and the rows of Q are written, before other threads read them
  const mma_sync::CtaContext& cta = context.cta;

  // Neighbouring blocks of keys have their scales in the two stages in turn.
  const auto stage_of = [](int key) {
    return C::STAGES == 2 ? key / C::BLOCK_K % 2 * C::STAGE_BYTES : 0;
  };
  const auto start_scales = [&](int key) {
    if constexpr (C::INT8_QK)
      start_key_scales<C>(all_params.inputs, context, key, shared_smem + stage_of(key));
  };
  const mma_sync::KeyBlocks<C, decltype(start_scales)> blocks(params, cta, shared_smem,
                                                              start_scales);
  blocks.start(shared);
  device::Outputs<C> o_rmem = {};
  device::RowState<Weights> state;
  state.large = false;
  device::clear(state);
  if constexpr (C::INT8_PV) {
    blocks.template visit<Probabilities8<C>>(
        [&](Probabilities8<C>& p, const mma_sync::QFragments<C>& q_rmem, uint32_t q_smem,
            uint32_t k_smem, int key_first) {
          device::Scores<C> s_rmem;
          multiply_int8_qk<C>(s_rmem, q_rmem, q_smem, k_smem, shared + stage_of(key_first),
                              [](int, int, float s) { return s; });
          mma_sync::mask_edges<C>(s_rmem, cta, key_first);
          const LaneQRows<C> of_lane(shared, device::warp_first_row<C>(ptx::mov_tid_x_volatile()));
          exponentiate_in_8_bits<C>(s_rmem, p, state, o_rmem, shared + stage_of(key_first),
                                    [&](int m, int r) { return of_lane.rows[m][r]; });
        },
        [&](const Probabilities8<C>& p, uint32_t v_smem) {
          multiply_pv_int8<C>(o_rmem, p, v_smem, context.zero_bits);
        });
  } else {
    blocks.visit(
        [&](mma_sync::Probabilities<C>& p_rmem, const mma_sync::QFragments<C>& q_rmem,
            uint32_t q_smem, uint32_t k_smem, int key_first) {
          device::Scores<C> s_rmem;
          if constexpr (C::INT8_QK) {
            const LaneQRows<C> of_lane(shared,
                                       device::warp_first_row<C>(ptx::mov_tid_x_volatile()));
            const unsigned char* stage = shared + stage_of(key_first);
            multiply_int8_qk<C>(s_rmem, q_rmem, q_smem, k_smem, stage, [&](int m, int r, float s) {
              return fmaf(s, of_lane.rows[m][r].scale, of_lane.rows[m][r].shift);
            });
          } else {
            mma_sync::multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
          }
          mma_sync::mask_edges<C>(s_rmem, cta, key_first);
          // Scores of int8 are logarithms to base 2 already.
          const float given = C::INT8_QK ? 1.0f : params.exp2_scale;
          const float exp2_scale = device::update_row_max<Weights, ApproximateWeights>(
              s_rmem, state, o_rmem, given, nullptr);
          device::exponentiate_all_scores<Weights>(s_rmem, p_rmem, state, exp2_scale);
        },
        [&](const mma_sync::Probabilities<C>& p_rmem, uint32_t v_smem) {
          multiply_pv_f16<C>(o_rmem, p_rmem, v_smem, [](int) { return 0xFFFFFFFFu; });
        });
  }
  store_rows<C>(o_rmem, state, all_params.inputs, 1.0f, params, all_params.call.out_dtype, cta.work,
                shared);
}

// The kernels of approximate calls with masks as data or dropout.
template <class C>
__device__ __forceinline__ void approximate_masked_fwd(const MaskedApproximateParams& given) {
  extern __shared__ __align__(128) unsigned char shared[];  // swizzles permute whole 128-byte lines
  const uint32_t shared_smem = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const mma_sync::MaskedParams& all_params = given.call;
  const mma_sync::FewRowsParams& call = all_params.call;
  const AttentionParams& params = call.attention;
  using Weights = Fp16Weights<C>;
  using Context = ApproximateContext<mma_sync::MaskedContext>;
  static_assert(sizeof(Context) <= C::CONTEXT_BYTES);
  Context& context = *reinterpret_cast<Context*>(shared + C::CONTEXT_SMEM);
  {
    const device::Work work = mma_sync::find_work<C>(call);
    if (work.first_row < 0) return;
    if (threadIdx.x == 0) {
      context.cta = mma_sync::make_masked_context(call, work);
      for (int32_t& bits : context.zero_bits) bits = device::WeightsOfIntegers::ZERO_BITS;
      if constexpr (C::INT8_QK) context.k_scales_gmem = key_scales_of(given.inputs, params, work);
    }
    if constexpr (C::INT8_QK) {
      load_q_rows<C>(reinterpret_cast<QRow*>(shared + C::ROWS_SMEM), given.inputs, params,
                     call.packed_heads, work, 1.0f);
    }
  }
  __syncthreads();  // `context` and the rows of Q are written, before other threads read them
  const mma_sync::MaskedContext& cta = context.cta;

  int next_stage = 0;
  const auto start_scales = [&](int key) {
    if constexpr (C::INT8_QK) {
      start_key_scales<C>(given.inputs, context, key, shared_smem + next_stage * C::STAGE_BYTES);
      next_stage ^= 1;
    }
  };
  mma_sync::KeyBlocks<C, decltype(start_scales)> blocks(params, cta, shared_smem, start_scales);
  const device::TileMasks masks(all_params.masks, params, cta.work, cta.packed_heads);
  const auto find_masks = [&] { return masks; };
  const device::SeenKeyBlocks<C, decltype(find_masks)> walk{find_masks, blocks.begin};
  blocks.last = walk.look_behind(blocks.last + C::BLOCK_K);
  if (walk.has(blocks.last)) blocks.start(shared);

  device::Outputs<C> o_rmem = {};
  device::RowState<Weights> state;
  state.large = false;
  device::clear(state);
  const auto stage_of = [&](uint32_t k_smem) {
    const bool second = C::STAGES == 2 && k_smem - shared_smem >= C::K_SMEM + C::STAGE_BYTES;
    return shared + (second ? C::STAGE_BYTES : 0);
  };
  struct Block {
    device::LaneMasks<C> of_lane;
    std::conditional_t<C::INT8_PV, Probabilities8<C>, mma_sync::Probabilities<C>> p_rmem;
    uint32_t seen;
  };
  blocks.template visit<Block>(
      walk,
      [&](Block& block, int key_first) {
        const int warp_row = mma_sync::first_row_of_warp<C>(ptx::mov_tid_x_volatile());
        device::find_lane_masks<C>(block.of_lane, all_params.masks, params, cta, warp_row,
                                   key_first);
        return block.of_lane.any;
      },
      [&](Block& block, const mma_sync::QFragments<C>& q_rmem, uint32_t q_smem, uint32_t k_smem,
          int key_first) {
        device::Scores<C> s_rmem;
        if constexpr (C::INT8_QK) {
          const int warp_row = mma_sync::first_row_of_warp<C>(ptx::mov_tid_x_volatile());
          const LaneQRows<C> of_lane(shared, warp_row);
          const unsigned char* stage = stage_of(k_smem);
          multiply_int8_qk<C>(s_rmem, q_rmem, q_smem, k_smem, stage, [&](int m, int r, float s) {
            return fmaf(s, of_lane.rows[m][r].scale, of_lane.rows[m][r].shift);
          });
        } else {
          mma_sync::multiply_qk<C>(s_rmem, q_rmem, q_smem, k_smem);
        }
        device::transform_scores<C>(s_rmem, params.rule);
        block.seen = mma_sync::ALL_KEYS<C>;
        if (block.of_lane.changes) {
          if (C::INT8_QK && call.out_dtype == DType::BF16) {  // elements of attn_mask have it, too
            using OfBf16 = device::LaneMasks<WithDType<C, DType::BF16>>;
            auto of_lane = __builtin_bit_cast(OfBf16, block.of_lane);
            device::apply_lane_masks<WithDType<C, DType::BF16>>(s_rmem, of_lane, all_params.masks,
                                                                1.0f);
          } else {
            device::apply_lane_masks<C>(s_rmem, block.of_lane, all_params.masks, 1.0f);
          }
          if constexpr (!C::INT8_PV) block.seen = mma_sync::keys_of_warp<C>(s_rmem);
        }
        if constexpr (C::INT8_PV) {
          exponentiate_in_8_bits<C>(s_rmem, block.p_rmem, state, o_rmem, stage_of(k_smem),
                                    [](int, int) { return QRow{1.0f, 0.0f}; });
        } else {
          const float exp2_scale =
              device::update_row_max<Weights>(s_rmem, state, o_rmem, params.exp2_scale, nullptr);
          device::exponentiate_all_scores<Weights>(s_rmem, block.p_rmem, state, exp2_scale);
          if (all_params.dropout.state_gmem != nullptr)
            mma_sync::drop_of_warp<C>(block.p_rmem, all_params.dropout, cta, key_first);
        }
      },
      [&](const Block& block, uint32_t v_smem) {
        if constexpr (C::INT8_PV) {
          multiply_pv_int8<C>(o_rmem, block.p_rmem, v_smem, context.zero_bits);
        } else {
          // Keys that no row of the warp sees count as 0 in V too: 0 * NaN would be NaN.
          uint32_t kept[C::STEP_KEYS / 8];
#pragma unroll
          for (int i = 0; i < C::STEP_KEYS / 8; ++i) {
            const uint32_t bits = block.seen >> (2 * i);
            kept[i] = (bits & 1 ? 0x0000FFFFu : 0) | (bits & 2 ? 0xFFFF0000u : 0);
          }
          multiply_pv_f16<C>(o_rmem, block.p_rmem, v_smem, [&](int i) { return kept[i]; });
        }
      });

  const float kept = all_params.dropout.state_gmem == nullptr ? 1.0f : all_params.dropout.scale;
  store_rows<C>(o_rmem, state, given.inputs, kept, params, call.out_dtype, cta.work, shared);
}

}  // namespace archflash::ampere
