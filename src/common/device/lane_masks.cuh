// Masks as data, as one lane needs them for its scores of a block of keys: which of them count, and
// what attn_mask and alibi_slopes add. For kernels whose scores lie as mma.sync and wgmma leave
// them: a lane has the keys 8n + 2 (lane % 4) and one more, n = 0, 1, ..., of the rows lane / 4 and
// lane / 4 + 8 of its warp's 16.
//
// find_lane_masks() comes before the product Q K^T and apply_lane_masks() after it, so that the
// product hides the latency of attn_mask: its elements of 8 and 16 bits are kept as they were
// loaded until then. A bool mask whose rows are aligned is loaded 4, 8 or 16 keys at a time; the
// four lanes of a row then exchange them as bits.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/masks.cuh"
#include "common/device/online_softmax.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/visible_keys.cuh"
#include "common/mask_params.h"
#include "common/ptx/special_registers.cuh"

namespace archflash::device {

// Counts the keys of a lane that are among the first `keys` of a block, counted from the lane's
// first key.
__device__ __forceinline__ int lane_keys_below(int keys) {
  const int x = max(keys, 0);
  return 2 * (x >> 3) + min(x & 7, 2);
}

// Which of a lane's keys lie in [begin, end), counted from its first one: bit 2n + i is key 8n + i.
template <class C>
__device__ __forceinline__ uint32_t lane_bits(int begin, int end) {
  static_assert(C::STEP_KEYS < 128, "the bits fit a register");
  const auto below = [](int keys) { return (1u << lane_keys_below(min(keys, C::STEP_KEYS))) - 1; };
  return below(end) & ~below(begin);
}

// What the masks say of a lane's scores in a block of keys.
template <class C>
struct LaneMasks {
  static constexpr int GROUPS = C::STEP_KEYS / 8;
  // 32-bit words of a row that a lane holds of attn_mask. Of bool elements loaded several at a time
  // a lane has STEP_KEYS / 4 consecutive keys.
  static constexpr int BOOL_WORDS = C::STEP_KEYS / 16;
  // Whether elements of 16 bits are kept until they are added, else they are loaded then.
  static constexpr bool KEEPS_16_BITS = !C::LOADS_ADDED_LATE;
  static constexpr int MOST_WORDS = KEEPS_16_BITS ? GROUPS : BOOL_WORDS;

  uint32_t seen[2];               // lane_bits of row lane / 4 + 8r
  float slope[2];                 // of ALiBi, times log2(e); 0 without
  float distance[2];              // of the row's position from the lane's first key
  uint32_t words[2][MOST_WORDS];  // of what is loaded late: the number of the row's first element
  MaskElement loaded;  // what the lane has of attn_mask; None: nothing, or bits of `seen`
  // Whether any row of the warp sees any key, and whether some score changes: one answer a warp.
  bool any, changes;

  __device__ __forceinline__ int64_t element(int r) const {
    return static_cast<int64_t>(words[r][1]) << 32 | words[r][0];
  }
};

// Calls use(r, n, i, x) with each element of attn_mask that is seen.
template <class C, class Element, class Use>
__device__ __forceinline__ void load_each(const Element* const (&row_gmem)[2], int64_t key_step,
                                          const uint32_t (&seen)[2], const Use& use) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Element* x = row_gmem[r];
#pragma unroll
    for (int n = 0; n < C::STEP_KEYS / 8; ++n) {
      if (seen[r] >> (2 * n) & 1) use(r, n, 0, x[0]);
      if (seen[r] >> (2 * n + 1) & 1) use(r, n, 1, x[key_step]);
      x += 8 * key_step;
    }
  }
}

// Which of a lane's keys a bool mask keeps, from the consecutive elements that the four lanes of a
// row hold. Called by whole warps.
template <class C>
__device__ __forceinline__ uint32_t kept_bits(const uint32_t (&words)[LaneMasks<C>::MOST_WORDS]) {
  constexpr int WORDS = LaneMasks<C>::BOOL_WORDS;
  static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "the exchange below knows no other number");
  const int lane = ptx::mov_tid_x_volatile() % 4;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < WORDS; ++i) {
    // Bit 7 of a byte becomes whether it is not 0; the product collects the four of them at the
    // top.
    const uint32_t high = (((words[i] & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | words[i]) & 0x80808080u;
    bits |= (high * 0x00204081u >> 28) << (4 * i);
  }
  // Bits of 8 keys a byte: those of a lane's keys are 2 lane and 2 lane + 1 of each.
  const auto of_lane = [&](uint32_t of_32_keys) {
    return ((of_32_keys >> (2 * lane)) & 0x03030303u) * 0x01041040u >> 24;
  };
  if constexpr (WORDS <= 2) {
    bits <<= 4 * WORDS * lane;
    bits |= __shfl_xor_sync(FULL_WARP, bits, 1);
    bits |= __shfl_xor_sync(FULL_WARP, bits, 2);
    return of_lane(bits);
  } else {
    bits <<= 16 * (lane & 1);
    bits |= __shfl_xor_sync(FULL_WARP, bits, 1);
    const uint32_t other = __shfl_xor_sync(FULL_WARP, bits, 2);
    return of_lane(lane < 2 ? bits : other) | of_lane(lane < 2 ? other : bits) << 8;
  }
}

// Loads the elements of attn_mask that a lane needs, or that it exchanges with its neighbours.
// elements: of the lane's first key in both rows. keys: those from the block's first one on.
template <class C>
__device__ __forceinline__ void load_words(LaneMasks<C>& found, const MaskParams& params,
                                           const int64_t (&elements)[2], int keys) {
  constexpr int GROUPS = LaneMasks<C>::GROUPS, MOST = LaneMasks<C>::MOST_WORDS;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < MOST; ++i) found.words[r][i] = 0;
  }
  const int lane = ptx::mov_tid_x_volatile() % 4;  // of the row
  const bool whole = params.mask_step != 0;
  found.loaded = params.mask_element;
  if (params.mask_element == MaskElement::Bool) {
    constexpr int WORDS = LaneMasks<C>::BOOL_WORDS;
    const auto* start = static_cast<const uint8_t*>(params.mask_gmem);
    if (whole) {
      // Also a lane that sees none of these keys loads them: its neighbours may see them.
      const int lane_keys = keys - 4 * WORDS * lane;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint8_t* gmem = start + elements[r] + (4 * WORDS - 2) * lane;
        if (WORDS == 4 && params.mask_step == 16) {
          if (lane_keys <= 0) continue;
          const uint4 x = *reinterpret_cast<const uint4*>(gmem);
          found.words[r][0] = x.x, found.words[r][1] = x.y;
          found.words[r][2] = x.z, found.words[r][3] = x.w;
        } else {
#pragma unroll
          for (int i = 0; i < WORDS; ++i) {
            if (4 * i < lane_keys)
              found.words[r][i] = *reinterpret_cast<const uint32_t*>(gmem + 4 * i);
          }
        }
      }
      return;
    }
    const uint8_t* const row_gmem[2] = {start + elements[0], start + elements[1]};
    uint32_t kept[2] = {0, 0};
    load_each<C>(row_gmem, params.mask_key, found.seen, [&](int r, int n, int i, uint8_t x) {
      if (x != 0) kept[r] |= 1u << (2 * n + i);
    });
    found.seen[0] &= kept[0];
    found.seen[1] &= kept[1];
    found.loaded = MaskElement::None;
  } else if (LaneMasks<C>::KEEPS_16_BITS && params.mask_element == MaskElement::SixteenBits) {
    const auto* start = static_cast<const uint16_t*>(params.mask_gmem);
    const uint16_t* const row_gmem[2] = {start + elements[0], start + elements[1]};
    if (whole) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
          if ((found.seen[r] >> (2 * n) & 3) == 0) continue;
          found.words[r][n % MOST] = *reinterpret_cast<const uint32_t*>(row_gmem[r] + 8 * n);
        }
      }
    } else {
      load_each<C>(row_gmem, params.mask_key, found.seen, [&](int r, int n, int i, uint16_t x) {
        found.words[r][n % MOST] |= static_cast<uint32_t>(x) << (16 * i);
      });
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      found.words[r][0] = static_cast<uint32_t>(elements[r]);
      found.words[r][1] = static_cast<uint32_t>(elements[r] >> 32);
    }
  }
}

// Finds the masks of this lane's scores for the STEP_KEYS keys from key_first on. Context has the
// members work, packed_heads, visible and q_offset of the CTA's tile; warp_row: the warp's first
// row of the tile. Called by whole warps.
template <class C, class Context>
__device__ __forceinline__ void find_lane_masks(LaneMasks<C>& found, const MaskParams& params,
                                                const AttentionParams& attention,
                                                const Context& cta, int warp_row, int key_first) {
  const TileMasks masks(params, attention, cta.work, cta.packed_heads);
  const int lane = ptx::mov_tid_x_volatile() % 32;
  const int lane_key = key_first + lane % 4 * 2;
  int heads[2], rows[2];
  bool reads = false, hidden = false;  // some element of attn_mask, or some key
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row_of_tile = warp_row + lane / 4 + 8 * r;
    const int head = cta.packed_heads.head(row_of_tile);
    const int row = cta.work.first_row + cta.packed_heads.row(row_of_tile);
    const bool wanted = head < cta.packed_heads.count && row < cta.work.nq;
    uint32_t seen = 0;
    found.slope[r] = found.distance[r] = 0.0f;
    if (wanted) {
      seen = lane_bits<C>(cta.visible.first(row) - lane_key, cta.visible.last(row) + 1 - lane_key);
      if (params.ranges_gmem != nullptr) {
        uint32_t in_ranges = 0;
#pragma unroll 1
        for (int number = 0; number < params.ranges; ++number) {
          const KeyRange keys = masks.range(head, row, number);
          in_ranges |= lane_bits<C>(keys.begin - lane_key, keys.end - lane_key);
        }
        seen &= in_ranges;
      }
      uint8_t state = 1;
      if (params.blocks_gmem != nullptr) {
        state = masks.block(head, row, key_first);
        if (state == BLOCK_UNSEEN) seen = 0;
      }
      reads |= state != BLOCK_FULL && seen != 0;
      if (params.slopes_gmem != nullptr) {
        found.slope[r] = masks.slope(head) * LOG2_E;
        found.distance[r] = static_cast<float>(cta.q_offset + row - lane_key);
      }
    }
    hidden |= seen != (1u << 2 * LaneMasks<C>::GROUPS) - 1;
    found.seen[r] = seen;
    heads[r] = wanted ? head : 0;
    rows[r] = wanted ? row : cta.work.first_row;
  }
  found.any = __any_sync(FULL_WARP, (found.seen[0] | found.seen[1]) != 0);
  const bool loads = params.mask_element != MaskElement::None && __any_sync(FULL_WARP, reads);
  found.changes = loads || params.slopes_gmem != nullptr || __any_sync(FULL_WARP, hidden);
  found.loaded = MaskElement::None;
  if (!loads) return;
  const int64_t elements[2] = {masks.element(heads[0], rows[0], lane_key),
                               masks.element(heads[1], rows[1], lane_key)};
  load_words<C>(found, params, elements, cta.work.nk - key_first);
}

// The elements of attn_mask that are added to a lane's scores of row r, where they are seen. All
// are loaded before any is used.
template <class C>
__device__ __forceinline__ void load_row(float (&row)[2 * LaneMasks<C>::GROUPS],
                                         const LaneMasks<C>& masks, const MaskParams& params,
                                         int r) {
  constexpr int GROUPS = LaneMasks<C>::GROUPS;
  const bool whole = params.mask_step == 2;
  const uint32_t seen = masks.seen[r];
  if (masks.loaded == MaskElement::F32) {
    const auto* gmem = static_cast<const float*>(params.mask_gmem) + masks.element(r);
#pragma unroll
    for (float& x : row) x = 0.0f;
    if (whole) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        float2 pair = {0.0f, 0.0f};
        if ((seen >> (2 * n) & 3) != 0) pair = *reinterpret_cast<const float2*>(gmem + 8 * n);
        row[2 * n] = pair.x, row[2 * n + 1] = pair.y;
      }
    } else {
#pragma unroll
      for (int key = 0; key < 2 * GROUPS; ++key) {
        if ((seen >> key & 1) != 0) row[key] = gmem[(8 * (key / 2) + key % 2) * params.mask_key];
      }
    }
    return;
  }
  uint32_t words[GROUPS];
  if constexpr (LaneMasks<C>::KEEPS_16_BITS) {
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) words[n] = masks.words[r][n];
  } else {
    const auto* gmem = static_cast<const uint16_t*>(params.mask_gmem) + masks.element(r);
#pragma unroll
    for (uint32_t& word : words) word = 0;
    if (whole) {
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        if ((seen >> (2 * n) & 3) != 0) words[n] = *reinterpret_cast<const uint32_t*>(gmem + 8 * n);
      }
    } else {
#pragma unroll
      for (int key = 0; key < 2 * GROUPS; ++key) {
        if ((seen >> key & 1) == 0) continue;
        const uint32_t x = gmem[(8 * (key / 2) + key % 2) * params.mask_key];
        words[key / 2] |= x << (16 * (key % 2));
      }
    }
  }
#pragma unroll
  for (int key = 0; key < 2 * GROUPS; ++key) {
    row[key] = added_of_half<C::DTYPE>(words[key / 2], key % 2);
  }
}

// Does what apply_lane_masks() does where elements are added, a row after the other: elements that
// each wait for the one before take as long as a block's products.
template <class C>
__device__ __forceinline__ void add_rows(Scores<C>& s_rmem, const LaneMasks<C>& masks,
                                         const MaskParams& params, float scale) {
  constexpr int GROUPS = LaneMasks<C>::GROUPS;
  const bool sloped = params.slopes_gmem != nullptr;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float row[2 * GROUPS];
    load_row<C>(row, masks, params, r);
#pragma unroll
    for (int key = 0; key < 2 * GROUPS; ++key) {
      float& score = s_rmem[0][key / 2][2 * r + key % 2];
      float s = fmaf(row[key], LOG2_E, __fmul_rn(score, scale));
      if (sloped)
        s = fmaf(-masks.slope[r], fabsf(masks.distance[r] - (8 * (key / 2) + key % 2)), s);
      if (s < LOWEST_LOG2) s = LOWEST_LOG2;  // not fmaxf: a NaN stays one
      const bool seen = (masks.seen[r] >> key & 1) != 0 && row[key] != MINUS_INFINITY;
      score = seen ? s : MINUS_INFINITY;
    }
  }
}

// Adds what the masks add, and sets the scores of keys that a row does not see to -inf. Selecting
// makes the old value irrelevant, even if it was NaN. Scores are logarithms to base 2, times
// 1 / scale: they are multiplied by `scale` first. Called by whole warps.
template <class C>
__device__ __forceinline__ void apply_lane_masks(Scores<C>& s_rmem, LaneMasks<C>& masks,
                                                 const MaskParams& params, float scale) {
  constexpr int GROUPS = LaneMasks<C>::GROUPS;
  if (masks.loaded == MaskElement::Bool) {
#pragma unroll
    for (int r = 0; r < 2; ++r) masks.seen[r] &= kept_bits<C>(masks.words[r]);
  }
  const bool sloped = params.slopes_gmem != nullptr;
  // s * scale, the slope's part, and -inf for what is not seen; in between add(r, n, i, s).
  const auto change = [&](const auto& add) {
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int r = i / 2, key = 8 * n + i % 2;
        float s = __fmul_rn(s_rmem[0][n][i], scale);
        bool seen = masks.seen[r] >> (2 * n + i % 2) & 1;
        add(r, n, i % 2, s, seen);
        if (sloped) s = fmaf(-masks.slope[r], fabsf(masks.distance[r] - key), s);
        if (s < LOWEST_LOG2) s = LOWEST_LOG2;  // not fmaxf: a NaN stays one
        s_rmem[0][n][i] = seen ? s : MINUS_INFINITY;
      }
    }
  };
  const auto add_nothing = [](int, int, int, float&, bool&) {};
  if constexpr (requires { C::LOADS_ROWS; }) {
    if (masks.loaded == MaskElement::F32 || masks.loaded == MaskElement::SixteenBits) {
      add_rows<C>(s_rmem, masks, params, scale);
    } else {
      change(add_nothing);
    }
    return;
  }
  const auto add = [](float bias, float& s, bool& seen) {
    s = fmaf(bias, LOG2_E, s);
    if (bias == MINUS_INFINITY) seen = false;
  };
  if (masks.loaded == MaskElement::F32) {
    change([&](int r, int n, int i, float& s, bool& seen) {
      const auto* row_gmem = static_cast<const float*>(params.mask_gmem) + masks.element(r);
      float bias = 0.0f;
      if (seen) bias = row_gmem[(8 * n + i) * params.mask_key];
      add(bias, s, seen);
    });
  } else if (masks.loaded == MaskElement::SixteenBits) {
    change([&](int r, int n, int i, float& s, bool& seen) {
      uint32_t word = 0;
      if constexpr (LaneMasks<C>::KEEPS_16_BITS) {
        word = masks.words[r][n];
      } else if (seen) {
        const auto* row_gmem = static_cast<const uint16_t*>(params.mask_gmem) + masks.element(r);
        // A word is loaded once for its two elements, which are neighbours in the loop.
        if (params.mask_step == 2) {
          word = *reinterpret_cast<const uint32_t*>(row_gmem + 8 * n);
        } else {
          word = static_cast<uint32_t>(row_gmem[(8 * n + i) * params.mask_key]) << (16 * i);
        }
      }
      add(added_of_half<C::DTYPE>(word, i), s, seen);
    });
  } else {
    change(add_nothing);
  }
}

}  // namespace archflash::device
