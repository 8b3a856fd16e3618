// The masks of a consumer warp's scores where a summary of them has been made
// (masks_summarized.cuh).
//
//   state of the block for a warpgroup   what the warpgroup does
//   0                                    waits, and hands the block back
//   SEEN alone                           the same step as in a call without masks; scores that are
//                                        transformed (softcap) take the masked step
//   HIDDEN, RANGED, BEYOND               selects scores by bits, ranges or position, which it finds
//                                        while products run
//   ADDED                                adds elements to scores that are not scaled yet: one FMA
//   HUGE                                 adds them to scaled scores, and keeps the sums finite
//   UNREAD                               looks at the elements while the products run: whether they
//                                        are HUGE; then those of -inf hide keys
//   SLOPED                               subtracts the slope times the distance, likewise
//
// Elements come by TMA and are counted at k_full of their block. Each consumer warp hands them back
// at mask_empty of their stage when it has read them, which may be before or after its products
// have read K.
#pragma once

#include <cstdint>

#include "common/math/lane_masks.cuh"
#include "common/math/masks.cuh"
#include "common/math/online_softmax.cuh"
#include "common/math/visible_keys.cuh"
#include "common/ptx/ldmatrix.cuh"
#include "common/ptx/special_registers.cuh"
#include "common/ptx/warp_roles.cuh"
#include "hopper/masked_config.cuh"
#include "hopper/masked_messages.cuh"
#include "hopper/masked_params.h"
#include "hopper/masks_summarized.cuh"
#include "hopper/summarize_mask.cuh"

namespace archflash::hopper::summarized {

// Selects the scores of a lane whose bits are set; the others become -inf, even if they were NaN.
// seen: a word for each block of the summary.
template <class C>
__device__ __forceinline__ void select_scores(math::Scores<C>& s_rmem,
                                              const uint32_t (&seen)[C::SUMMARY_BLOCKS]) {
  constexpr int GROUPS = MASK_BLOCK / 8;
#pragma unroll
  for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if ((seen[part] & 1u << (16 * r + 2 * n + i)) == 0)
            s_rmem[0][part * GROUPS + n][2 * r + i] = math::MINUS_INFINITY;
        }
      }
    }
  }
}

// What is kept of the elements that are added to a lane's scores, two in a word: four words for 16
// keys.
template <class C>
using Elements = uint32_t[C::KEEPS_ELEMENTS ? C::BLOCK_K / 16 : 1][4];

// row_smem: where the tile of elements has the row and chunk that this lane addresses for ldmatrix.
// n: a number of 16 keys.
template <class C>
__device__ __forceinline__ void load_elements(uint32_t (&words)[4], uint32_t row_smem, int n) {
  ptx::ldmatrix_x4(words, C::MaskTile::advance(row_smem, 2 * n));
}
// Does what load_elements() does, from the registers where elements are kept.
template <class C>
__device__ __forceinline__ void take_elements(uint32_t (&words)[4], const Elements<C>& kept,
                                              uint32_t row_smem, int n) {
  if constexpr (C::KEEPS_ELEMENTS) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = kept[n][i];
  } else {
    load_elements<C>(words, row_smem, n);
  }
}

// Calls add(s, x) with each score of a lane and the element that is added to it.
template <class C, class Add>
__device__ __forceinline__ void add_elements(math::Scores<C>& s_rmem, const Elements<C>& kept,
                                             uint32_t row_smem, const Add& add) {
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 16; ++n) {
    uint32_t words[4];
    take_elements<C>(words, kept, row_smem, n);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* s = &s_rmem[0][2 * n + i / 2][2 * (i % 2)];
      add(s[0], math::added_of_16_bits<C::DTYPE>(static_cast<uint16_t>(words[i])));
      add(s[1], math::added_of_16_bits<C::DTYPE>(static_cast<uint16_t>(words[i] >> 16)));
    }
  }
}

// Whether an element of the warp's rows may be not below LARGEST_ADDED, for a whole warp.
template <class C>
__device__ __forceinline__ bool any_huge(const Elements<C>& kept, uint32_t row_smem) {
  static_assert(NEXT_EXPONENT << 1 == HIGH_EXPONENT);
  uint32_t exponents = 0;
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 16; ++n) {
    uint32_t words[4];
    take_elements<C>(words, kept, row_smem, n);
#pragma unroll
    for (const uint32_t word : words) exponents |= word & word << 1;
  }
  return __any_sync(math::FULL_WARP, (exponents & (HIGH_EXPONENT << 16 | HIGH_EXPONENT)) != 0);
}

// Calls add(s, d) with each score of a lane and the distance of its key before its row. distance:
// that of the lane's first key and row.
template <class C, class Add>
__device__ __forceinline__ void add_distances(math::Scores<C>& s_rmem, float distance,
                                              const Add& add) {
#pragma unroll
  for (int n = 0; n < C::BLOCK_K / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      add(s_rmem[0][n][i], distance + static_cast<float>(8 * (i / 2) - 8 * n - i % 2));
  }
}

template <class C>
struct ScoreMasks {
  // What a warp finds out about a block while its products run: which scores count, a word for each
  // block of the summary, and the elements that are kept. As one struct they spill registers.
  using Seen = uint32_t[C::SUMMARY_BLOCKS];
  using Kept = Elements<C>;

  const SummarizedParams& params;
  const MaskParams& masks;
  const AttentionParams& attention;
  uint32_t shared_smem;
  int group;
  // What is added to scores before they are scaled has this factor.
  float factor;
  bool adds_late;  // whether all is added to scaled scores
  RingPosition<C::MASK_STAGES> ring;
  const SeekingTile* tile = nullptr;
  const Context* cta = nullptr;

  __device__ __forceinline__ ScoreMasks(const SummarizedParams& params, uint32_t shared_smem,
                                        int group, int)
      : params(params),
        masks(params.masks),
        attention(params.call.attention),
        shared_smem(shared_smem),
        group(group),
        factor(math::LOG2_E / attention.exp2_scale),
        adds_late(!(factor <= LARGEST_FACTOR)) {}
  __device__ __forceinline__ void begin_tile(const SeekingTile& of_cta, const Context& context) {
    tile = &of_cta;
    cta = &context;
  }

  // Called while the products run. Returns the state of the block for this warp.
  template <bool MAY_ADD>
  __device__ __forceinline__ uint32_t find(Seen& seen, Kept& kept, uint32_t state,
                                           const BlockMessage& block) {
    find_bits(seen, state, block.key);
    if constexpr (!MAY_ADD) return state;
    const bool unread = (state & STATE_UNREAD) != 0;
    if ((state & STATE_ADDED) != 0 && (C::KEEPS_ELEMENTS || unread)) {
      const uint32_t row_smem = find_elements();
      if constexpr (C::KEEPS_ELEMENTS) {
#pragma unroll
        for (int n = 0; n < C::BLOCK_K / 16; ++n) load_elements<C>(kept[n], row_smem, n);
      }
      if (unread && any_huge<C>(kept, row_smem)) state |= STATE_HUGE;
      if constexpr (C::KEEPS_ELEMENTS) ptx::fence_proxy_async_shared();
    }
    if constexpr (C::KEEPS_ELEMENTS) hand_back_elements(state, block.states);
    return state;
  }

  // What a block needs that is not clear. Returns the scale of scores that are finished.
  template <bool MAY_ADD>
  __device__ __forceinline__ float finish(math::Scores<C>& s_rmem, const Seen& seen,
                                          const Kept& kept, uint32_t state, int key) const {
    float scale = attention.exp2_scale;
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const unsigned lane = thread % 32;
    if (MAY_ADD && attention.transform_scores)
      math::transform_scores<C>(s_rmem, attention.tanh_scale, attention.softcap);
    if (MAY_ADD && (state & STATE_ADDED) != 0) {
      const uint32_t row_smem = C::KEEPS_ELEMENTS ? 0 : find_elements();
      const auto add_late = [&](float& x, float element) {
        x = fmaf(element, math::LOG2_E, __fmul_rn(x, scale));
        if (x < math::LOWEST_LOG2) x = math::LOWEST_LOG2;  // not fmaxf: a NaN stays one
      };
      if ((state & (STATE_HUGE | STATE_UNREAD)) == (STATE_HUGE | STATE_UNREAD)) {
        add_elements<C>(s_rmem, kept, row_smem, [&](float& x, float element) {
          add_late(x, element);
          if (element == math::MINUS_INFINITY) x = element;  // also where it is NaN
        });
        scale = 1.0f;
      } else if ((state & STATE_HUGE) != 0 || adds_late) {
        add_elements<C>(s_rmem, kept, row_smem, add_late);
        scale = 1.0f;
      } else {
        add_elements<C>(s_rmem, kept, row_smem,
                        [&](float& x, float element) { x = fmaf(element, factor, x); });
      }
    }
    if (MAY_ADD && (state & STATE_SLOPED) != 0) {
      const int64_t q_offset = cta->q_offset;
      const float slope = cta->slope;
      const float longest = fabsf(static_cast<float>(q_offset)) + static_cast<float>(attention.nq) +
                            static_cast<float>(attention.nk);
      const bool late = adds_late || !(fabsf(slope) * longest < LARGEST_ADDED);
      // The positions of the warpgroup's first and last row, from the block's first key on.
      const int64_t first = q_offset + tile->first_row + group * C::GROUP_ROWS - key;
      const int64_t last = first + C::GROUP_ROWS - 1;
      const auto lane_row = static_cast<int>(thread % C::WARPGROUP / 32 * 16 + lane / 4);
      const auto distance = static_cast<float>(first + lane_row - static_cast<int>(lane % 4 * 2));
      if (late) {
        const float step = slope * math::LOG2_E;
        add_distances<C>(s_rmem, distance, [&](float& x, float d) {
          x = fmaf(-step, fabsf(d), __fmul_rn(x, scale));
          if (x < math::LOWEST_LOG2) x = math::LOWEST_LOG2;  // not fmaxf: a NaN stays one
        });
        scale = 1.0f;
      } else if (first < C::BLOCK_K - 1 && last > 0) {
        const float step = slope * factor;
        add_distances<C>(s_rmem, distance,
                         [&](float& x, float d) { x = fmaf(-step, fabsf(d), x); });
      } else {  // all keys lie on one side of all rows
        const float step = last > 0 ? slope * factor : -slope * factor;
        add_distances<C>(s_rmem, distance, [&](float& x, float d) { x = fmaf(-step, d, x); });
      }
    }
    if ((state & (STATE_HIDDEN | STATE_RANGED | STATE_BEYOND)) != 0) select_scores<C>(s_rmem, seen);
    return scale;
  }

  // Hands back the elements of a block, unless find<MAY_ADD>() has kept them and done so.
  template <bool MAY_ADD>
  __device__ __forceinline__ void hand_back(uint32_t state, const BlockMessage& block) {
    if constexpr (!C::KEEPS_ELEMENTS || !MAY_ADD) hand_back_elements(state, block.states);
  }

 private:
  // Where this lane's row of the elements lies for ldmatrix.
  __device__ __forceinline__ uint32_t find_elements() const {
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const unsigned lane = thread % 32;
    const auto row = static_cast<int>(thread / 32 * 16 + lane % 16);
    return mask_smem<C>(shared_smem, ring.stage) +
           C::MaskTile::offset(row, static_cast<int>(lane / 16));
  }
  // Hands back the elements of a block, if it has some for any warpgroup. `state`: for this warp,
  // which without ADDED has read none.
  __device__ __forceinline__ void hand_back_elements(uint32_t state, uint32_t states) {
    if ((states & ADDED_FOR_ANY) == 0) return;
    // These reads come before TMA's next write there. Kept elements have a fence where they are
    // read.
    if (!C::KEEPS_ELEMENTS && (state & STATE_ADDED) != 0) ptx::fence_proxy_async_shared();
    release(mask_empty<C>(shared_smem, ring.stage));
    ring.advance();
  }
  // Which scores of this lane count by attn_mask, ranges and position.
  __device__ __forceinline__ void find_bits(Seen& seen, uint32_t state, int key) const {
    const auto thread = static_cast<unsigned>(ptx::mov_tid_x_volatile());
    const unsigned lane = thread % 32;
#pragma unroll
    for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
      seen[part] = 0xFFFFFFFFu;
      if ((state & STATE_HIDDEN) == 0) continue;
      // Keys behind the last block of the summary are hidden by their position. Behind the last
      // row block no block is seen.
      const int number = min(key / MASK_BLOCK + part, params.key_blocks - 1);
      const int64_t block = static_cast<int64_t>(group) * params.key_blocks + number;
      seen[part] = __ldg(cta->bits_gmem + block * SUMMARY_WORDS + thread % C::WARPGROUP);
    }
    if ((state & (STATE_RANGED | STATE_BEYOND)) == 0) return;
    // The keys from `begin` to `end` of a row, as the lane's bits of one of its two rows.
    const auto bits_of = [&](int part, int r, int begin, int end) {
      const int lane_key = key + part * MASK_BLOCK + static_cast<int>(lane % 4 * 2);
      return math::lane_bits<SummaryConfig<C::DTYPE>>(begin - lane_key, end - lane_key) << (16 * r);
    };
    const int lane_row = tile->first_row + static_cast<int>(thread / 32 * 16 + lane / 4);
    if ((state & STATE_BEYOND) != 0) {
      const math::VisibleKeys visible = cta->visible;
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) {
        uint32_t of_rows = 0;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = lane_row + 8 * r;
          of_rows |= bits_of(part, r, visible.first(row), visible.last(row) + 1);
        }
        seen[part] &= of_rows;
      }
    }
    if ((state & STATE_RANGED) != 0) {
      uint32_t in_ranges[C::SUMMARY_BLOCKS] = {};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = min(lane_row + 8 * r, attention.nq - 1);
        const int32_t* range = cta->ranges_gmem + row * masks.ranges_row;
#pragma unroll 1
        for (int number = 0; number < masks.ranges; ++number, range += 2) {
          const int begin = max(range[0], 0), end = range[1];
#pragma unroll
          for (int part = 0; part < C::SUMMARY_BLOCKS; ++part)
            in_ranges[part] |= bits_of(part, r, begin, end);
        }
      }
#pragma unroll
      for (int part = 0; part < C::SUMMARY_BLOCKS; ++part) seen[part] &= in_ranges[part];
    }
  }
};

}  // namespace archflash::hopper::summarized

namespace archflash::hopper {

template <class C>
struct Summarized {
  using Params = SummarizedParams;
  using Context = summarized::Context;
  using Look = summarized::Look<C>;
  using ScoreMasks = summarized::ScoreMasks<C>;
};

}  // namespace archflash::hopper
