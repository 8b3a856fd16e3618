// Descales in a kernel whose warps hold scores and outputs in the fragments of mma.sync. Those of q
// and k multiply the exponent's scale: one number for a warp and a block of keys. That of v
// multiplies the output; where each block of keys has its own, the outputs so far are brought to
// each block's unit first. C is a kernel's Config: see online_softmax.cuh; BLOCK_K divides
// SCALE_ROWS.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/math/attention_work.cuh"
#include "common/math/online_softmax.cuh"
#include "common/problem.h"

namespace archflash::math {

constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// Of a head's keys, where blocks of them have their own.
struct KeyDescales {
  const float* k_gmem;  // the first block's; null: all keys have the same, which is in WarpDescale
  const float* v_gmem;
  int64_t k_block, v_block;  // strides

  __device__ __forceinline__ float v(int key) const { return v_gmem[key / SCALE_ROWS * v_block]; }
  // What outputs are counted in: a block that stands for zeros takes any unit.
  __device__ __forceinline__ float v_unit(int key) const {
    const float descale = v(key);
    return descale == 0.0f ? 1.0f : descale;
  }
};

// Of a warp's rows.
struct WarpDescale {
  float qk;  // of the rows, and of the keys where all have the same
  float v;   // what the outputs are counted in
};

__device__ __forceinline__ const float* descale_of_head(const Descale& descale, int batch,
                                                        int head) {
  return descale.gmem + batch * descale.batch + head * descale.head;
}

__device__ __forceinline__ bool is_by_block(const Descale& descale) {
  return descale.gmem != nullptr && descale.block != 0;
}

__device__ __forceinline__ KeyDescales find_key_descales(const Descales& descales,
                                                         const AttentionParams& params,
                                                         const Work& work) {
  const int batch = work.batch_head / params.heads_q;
  const int kv_head = work.batch_head % params.heads_q / params.heads_per_kv;
  const float* k_gmem = descale_of_head(descales.k, batch, kv_head);
  const float* v_gmem = descale_of_head(descales.v, batch, kv_head);
  return {is_by_block(descales.k) ? k_gmem : nullptr, is_by_block(descales.v) ? v_gmem : nullptr,
          descales.k.block, descales.v.block};
}

// first_row: the warp's, counted from the sequence's first.
__device__ __forceinline__ WarpDescale find_warp_descale(const Descales& descales,
                                                         const AttentionParams& params,
                                                         const Work& work, int first_row) {
  const int batch = work.batch_head / params.heads_q;
  const int head = work.batch_head % params.heads_q;
  const int kv_head = head / params.heads_per_kv;
  WarpDescale result{1.0f, 1.0f};
  if (descales.q.gmem != nullptr) {
    const int block = min(first_row, work.nq - 1) / SCALE_ROWS;
    const int q_head = head / static_cast<int>(descales.heads_per_q_descale);
    result.qk = descale_of_head(descales.q, batch, q_head)[block * descales.q.block];
  }
  if (descales.k.gmem != nullptr && !is_by_block(descales.k))
    result.qk *= *descale_of_head(descales.k, batch, kv_head);
  if (descales.v.gmem != nullptr) result.v = *descale_of_head(descales.v, batch, kv_head);
  return result;
}

// Scores as they are stored -> scores that follow_maxima takes with the returned scale.
template <class C>
__device__ __forceinline__ float descale_scores(Scores<C>& s_rmem, const AttentionParams& params,
                                                const KeyDescales& of_keys,
                                                const WarpDescale& of_warp, int key) {
  float factor = of_warp.qk;
  if (of_keys.k_gmem != nullptr) factor *= of_keys.k_gmem[key / SCALE_ROWS * of_keys.k_block];
  const float exp2_scale = params.exp2_scale * factor;
  // An exponent scale must be positive and normal, or -inf would meet 0.
  if (!params.transform_scores && exp2_scale >= SMALLEST_NORMAL) return exp2_scale;
  transform_scores<C>(s_rmem, params.tanh_scale * factor, params.softcap);
  return LOG2_E;
}

// Brings a warp's outputs from the unit of the block before, which is one key block later, to that
// of this one. In its first block there are none.
template <class C>
__device__ __forceinline__ void change_unit(Outputs<C>& o_rmem, const KeyDescales& of_keys,
                                            WarpDescale& of_warp /* in shared memory */, int block,
                                            int blocks_last) {
  const float unit = of_keys.v_unit(block);
  const float before = of_keys.v_unit(min(block + C::BLOCK_K, blocks_last));
  if (threadIdx.x % 32 == 0) of_warp.v = unit;
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

}  // namespace archflash::math
