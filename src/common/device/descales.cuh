// Descales in a kernel whose scores and outputs are fragments of mma.sync. The descales of q and k
// multiply the scale of the exponent: one number for each warp and block of keys. The descale of v
// multiplies the output. If each block of keys has a descale of v of its own, the warp first
// rescales its outputs to the unit of that block. C is a kernel's Config (see online_softmax.cuh);
// its BLOCK_K divides SCALE_ROWS.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/device/attention_work.cuh"
#include "common/device/online_softmax.cuh"
#include "common/dtype.h"

namespace archflash::device {

constexpr float SMALLEST_NORMAL = 1.17549435e-38f;

// The descales of k and v of one head that are given per block of keys.
struct KeyDescales {
  // The descale of the first block; null if one descale serves all keys, which WarpDescale has.
  const float* k_gmem;
  const float* v_gmem;
  int64_t k_block, v_block;  // strides from one block to the next, in elements

  __device__ __forceinline__ float v(int key) const { return v_gmem[key / SCALE_ROWS * v_block]; }
  // The unit of the outputs while the block of `key` is added. A descale of 0 means that the whole
  // block is zeros; any unit will do, and 1 can be divided by.
  __device__ __forceinline__ float v_unit(int key) const {
    const float descale = v(key);
    return descale == 0.0f ? 1.0f : descale;
  }
};

// The descales that hold for all rows of a warp.
struct WarpDescale {
  float qk;  // descale of the rows of q, times that of k if one serves all keys
  float v;   // the unit of the outputs: they are multiplied by it when they are written
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

// first_row is the warp's first row, counted from the first row of the sequence.
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

// Prepares scores of stored (quantised) q and k for update_row_max, and returns the scale to give
// it. `key` is the first key of the step.
template <class C>
__device__ __forceinline__ float descale_scores(Scores<C>& s_rmem, const AttentionParams& params,
                                                const KeyDescales& key_descales,
                                                const WarpDescale& warp_descale, int key) {
  float factor = warp_descale.qk;
  if (key_descales.k_gmem != nullptr)
    factor *= key_descales.k_gmem[key / SCALE_ROWS * key_descales.k_block];
  const float exp2_scale = params.exp2_scale * factor;
  // A scale may stay in the exponent only if it is positive and normal: a subnormal one counts as
  // 0, and 0 * -inf is NaN.
  if (!params.transform_scores && exp2_scale >= SMALLEST_NORMAL) return exp2_scale;
  transform_scores<C>(s_rmem, params.rule.scaled(factor));
  return LOG2_E;
}

// Rescales a warp's outputs from the unit of the previously visited block to the unit of `block`.
// Blocks are visited from the last to the first, so the previous one begins BLOCK_K keys later.
// blocks_last is the block visited first, before which there are no outputs.
template <class C>
__device__ __forceinline__ void change_unit(Outputs<C>& o_rmem, const KeyDescales& key_descales,
                                            WarpDescale& warp_descale /* in shared memory */,
                                            int block, int blocks_last) {
  const float unit = key_descales.v_unit(block);
  const float before = key_descales.v_unit(min(block + C::BLOCK_K, blocks_last));
  if (threadIdx.x % 32 == 0) warp_descale.v = unit;
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

}  // namespace archflash::device
