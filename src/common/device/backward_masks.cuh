// Masks as data in the backward pass: what they say of one score, and which blocks of the passing
// side have any score that counts.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/backward_work.cuh"
#include "common/device/dropout.cuh"
#include "common/device/masks.cuh"
#include "common/masked_backward_params.h"

namespace archflash::device {

// The masks of one head of q, and the lengths of its sequence.
struct HeadMasks {
  const MaskParams& params;
  int batch, head;
  int nq, nk;

  template <Owns OWNS>
  static __device__ __forceinline__ HeadMasks of(const MaskParams& params, const BackwardWork& cta,
                                                 int head) {
    const bool keys = OWNS == Owns::Keys;
    return {params, cta.batch, head, keys ? cta.passing_rows : cta.own_rows,
            keys ? cta.own_rows : cta.passing_rows};
  }

  __device__ __forceinline__ uint8_t block(int query, int key) const {
    return params.blocks_gmem[batch * params.blocks_batch + head * params.blocks_head +
                              query / MASK_BLOCK * params.blocks_row + key / MASK_BLOCK];
  }
  // Two numbers for each range of a query.
  __device__ __forceinline__ const int32_t* ranges(int query) const {
    return params.ranges_gmem + batch * params.ranges_batch + head * params.ranges_head +
           query * params.ranges_row;
  }
  // Whether a key lies in a range of a query.
  __device__ __forceinline__ bool in_ranges(int query, int key) const {
    const int32_t* ranges_gmem = ranges(query);
    bool found = false;
#pragma unroll 1
    for (int i = 0; i < params.ranges; ++i)
      found |= key >= ranges_gmem[2 * i] && key < ranges_gmem[2 * i + 1];
    return found;
  }
  __device__ __forceinline__ float slope() const {
    return params.slopes_gmem[batch * params.slopes_batch + head * params.slopes_head];
  }
  // What attn_mask adds to a score in natural logarithms: -inf for a key that is not seen.
  template <DType DTYPE>
  __device__ __forceinline__ float added_to(int query, int key) const {
    const int64_t element = batch * params.mask_batch + head * params.mask_head +
                            query * params.mask_row + key * params.mask_key;
    if (params.mask_element == MaskElement::Bool)
      return added(static_cast<const uint8_t*>(params.mask_gmem)[element]);
    if constexpr (DTYPE != DType::F32) {
      if (params.mask_element != MaskElement::F32)
        return added_of_half<DTYPE>(static_cast<const uint16_t*>(params.mask_gmem)[element]);
    }
    return static_cast<const float*>(params.mask_gmem)[element];
  }

  // Whether ranges and block_mask let any of `queries` queries from one on see any of `keys` keys.
  // Neither crosses a block of block_mask, if there is one.
  __device__ __forceinline__ bool any_seen(int query, int queries, int key, int keys) const {
    if (params.blocks_gmem != nullptr && block(query, key) == BLOCK_UNSEEN) return false;
    if (params.ranges_gmem == nullptr) return true;
    const int end = params.ranges_row == 0 ? query + 1 : min(query + queries, nq);
    const int keys_end = min(key + keys, nk);
    bool found = false;
#pragma unroll 1
    for (; query < end; ++query) {
      const int32_t* ranges_gmem = ranges(query);
#pragma unroll 1
      for (int i = 0; i < params.ranges; ++i) {
        const int first = max(ranges_gmem[2 * i], key);
        found |= first < min(ranges_gmem[2 * i + 1], keys_end);
      }
    }
    return found;
  }
};

// Position of query 0 among the keys, as find_visible_keys() takes it.
__device__ __forceinline__ int64_t find_q_offset(const AttentionParams& params,
                                                 const HeadMasks& masks) {
  Work work{};
  work.batch_head = masks.batch * params.heads_q;
  work.nq = masks.nq, work.nk = masks.nk;
  return find_q_offset(params, work);
}

// One score after its scale and softcap: what the masks make of it, as LOG2 says in logarithms to
// base 2 or in natural ones.
struct MaskedScore {
  float score;
  bool seen;
};
template <bool LOG2>
__device__ __forceinline__ MaskedScore masked_score(float score, bool seen, float bias, float slope,
                                                    float distance) {
  score = LOG2 ? fmaf(bias, LOG2_E, score) : score + bias;
  if (slope != 0.0f) score = fmaf(-slope, fabsf(distance), score);
  constexpr float LOWEST = LOG2 ? LOWEST_LOG2 : LOWEST_SCORE;
  if (score < LOWEST) score = LOWEST;  // not fmaxf: a NaN stays one
  return {score, seen && bias != MINUS_INFINITY};
}

// The blocks of the passing side that a CTA has to do with: `count` of them, numbered in the order
// in which they pass by. Those in which no score counts are left out. Called by whole warps, and
// the same in all of them.
template <class C>
struct SeenBlocks {
  const MaskParams& masks;
  const BackwardWork& cta;
  int heads_per_kv;
  int count;
  bool all;       // none is left out
  int base = -1;  // the first block that `bits` tells of; negative: none
  uint32_t bits = 0;

  // Whether a block of rows from `row` on has any score that counts, of any head that passes by.
  __device__ __forceinline__ bool is_seen(int row) const {
    const bool by_head = masks.ranges_head != 0 || masks.blocks_head != 0;
    const int heads = C::OWNS == Owns::Keys && by_head ? cta.heads : 1;
    const int first = C::OWNS == Owns::Keys ? cta.head * heads_per_kv : cta.head;
    bool seen = false;
#pragma unroll 1
    for (int head = 0; head < heads; ++head) {
      const HeadMasks of_head = HeadMasks::of<C::OWNS>(masks, cta, first + head);
      seen |= C::OWNS == Owns::Keys ? of_head.any_seen(row, C::BLOCK, cta.first_row, C::ROWS)
                                    : of_head.any_seen(cta.first_row, C::ROWS, row, C::BLOCK);
    }
    return seen;
  }

  // The first block from `number` on; `count` if there is none. row_of(number): its first row. Each
  // lane looks at one block, because looking at one takes a long time and at 32 not much more.
  template <class RowOf>
  __device__ __forceinline__ int next(int number, const RowOf& row_of) {
    if (all) return number;
#pragma unroll 1
    while (number < count) {
      if (base < 0 || number >= base + 32) {
        base = number;
        const int of_lane = base + static_cast<int>(threadIdx.x % 32);
        bits = __ballot_sync(0xFFFFFFFFu, of_lane < count && is_seen(row_of(of_lane)));
      }
      const uint32_t left = bits >> (number - base);
      if (left != 0) return number + __ffs(static_cast<int>(left)) - 1;
      number = base + 32;
    }
    return count;
  }
};

}  // namespace archflash::device
