// attn_mask in a decoding call (decode_fwd.cuh). A lane loads its elements of a group when the
// copies of the group's K and V start, and reads them when these have landed.
//
// Scores are logarithms to base 2 here, as in mma_sync/masked_fwd.cuh.
#pragma once

#include <cstdint>

#include "common/device/attention_work.cuh"
#include "common/device/few_rows.cuh"
#include "common/device/masks.cuh"
#include "common/device/online_softmax.cuh"
#include "common/mask_params.h"
#include "common/mma_sync/decode_params.h"
#include "common/mma_sync/decode_query.cuh"

namespace archflash::mma_sync {

// The elements of a lane's scores: the keys 8n + 2 (lane % 4) and one more of a warp's group, of
// the rows lane / 4 and lane / 4 + 8.
template <class C, bool = C::MASKED>
struct DecodeMasks {
  static constexpr int GROUPS = C::WARP_KEYS / 8;
  // Two neighbouring elements: as floats, as halves of the first word, or as its lowest two bytes.
  struct Elements {
    uint32_t words[2][GROUPS][2];
  };

  // Which keys of a group some row sees.
  struct Seen {
    bool all, any;  // one answer a warp
    uint32_t bits;  // bit 2n + i is the key 8n + i from this lane's first one on
  };

  const MaskParams& params;
  int64_t first[2];  // the number of the element of key 0; below 0: the row does not exist
  bool both;         // whether the tile has rows behind the eighth; the same in all lanes
  int nk;

  __device__ __forceinline__ DecodeMasks(const MaskedDecodeParams& call, const CacheContext& cta)
      : params(call.masks), nk(cta.work.nk) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const device::FewRow row = few_row<C>(call.attention, cta, lane / 4 + 8 * r);
      first[r] =
          row.batch * params.mask_batch + row.head * params.mask_head + row.row * params.mask_row;
      if (!row.wanted) first[r] = -1;
    }
    both = __any_sync(device::FULL_WARP, first[1] >= 0);
  }

  // Loads the elements of the group from `key` on. Those that do not exist become 0.
  __device__ __forceinline__ void load(Elements& elements, int key) const {
    if (params.mask_element == MaskElement::Bool) {
      load_each<uint8_t, uint16_t>(elements, key);
    } else if (params.mask_element == MaskElement::F32) {
      load_each<float, float2>(elements, key);
    } else {
      load_each<uint16_t, uint32_t>(elements, key);
    }
  }

  // Adds what the mask adds to the rows that exist, and sets the scores of keys that it hides to
  // -inf. Selecting makes the old value irrelevant, even if it was NaN.
  __device__ __forceinline__ void apply(device::Scores<typename C::Warp>& s_rmem,
                                        const Elements& elements) const {
    if (params.mask_element == MaskElement::Bool) {
      apply_each(s_rmem, [&](int r, int n, int i) {
        const uint32_t x = elements.words[r][n][0] >> (8 * i) & 0xFF;
        return x != 0 ? 0.0f : device::MINUS_INFINITY;
      });
    } else if (params.mask_element == MaskElement::F32) {
      apply_each(s_rmem,
                 [&](int r, int n, int i) { return __uint_as_float(elements.words[r][n][i]); });
    } else {
      apply_each(s_rmem, [&](int r, int n, int i) {
        return device::added_of_half<C::DTYPE>(elements.words[r][n][0], i);
      });
    }
  }

  // Which keys some row sees, from scores that have been masked. Called by whole warps.
  __device__ __forceinline__ Seen
  keys_of_warp(const device::Scores<typename C::Warp>& s_rmem) const {
    const auto bits_of_row = [&](int r) {
      uint32_t bits = 0;
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (s_rmem[0][n][2 * r + i] != device::MINUS_INFINITY) bits |= 1u << (2 * n + i);
      }
      return first[r] >= 0 ? bits : 0;
    };
    constexpr uint32_t ALL = (1u << (2 * GROUPS)) - 1;
    Seen seen{true, true, bits_of_row(0)};
    if (both) seen.bits |= bits_of_row(1);
    // Mostly some row of each lane's keys sees all of them.
    if (__all_sync(device::FULL_WARP, first[0] < 0 || seen.bits == ALL)) return seen;
#pragma unroll
    for (int rows = 4; rows < 32; rows *= 2)
      seen.bits |= __shfl_xor_sync(device::FULL_WARP, seen.bits, rows);
    seen.all = __all_sync(device::FULL_WARP, seen.bits == ALL);
    seen.any = __any_sync(device::FULL_WARP, seen.bits != 0);
    return seen;
  }

 private:
  template <class Element, class Pair>
  __device__ __forceinline__ void load_each(Elements& elements, int key) const {
    constexpr int WORDS = sizeof(Pair) == 8 ? 2 : 1;
    const bool pairs = params.mask_step != 0;
    const bool whole = pairs && key + C::WARP_KEYS <= nk;
    const int lane_key = key + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && !both) break;
      if (whole) {
        const Pair* const pairs_gmem =
            reinterpret_cast<const Pair*>(static_cast<const Element*>(params.mask_gmem) +
                                          (first[r] < 0 ? 0 : first[r]) + lane_key);
#pragma unroll
        for (int n = 0; n < GROUPS; ++n) {
          uint32_t (&words)[2] = elements.words[r][n];
          if constexpr (WORDS == 2) {
            const Pair pair = pairs_gmem[4 * n];
            words[0] = __float_as_uint(pair.x), words[1] = __float_as_uint(pair.y);
          } else {
            words[0] = pairs_gmem[4 * n];
          }
        }
        continue;
      }
      const Element* const row_gmem = static_cast<const Element*>(params.mask_gmem) + first[r];
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
        const int of = lane_key + 8 * n;
        uint32_t (&words)[2] = elements.words[r][n];
        words[0] = words[1] = 0;
        if (first[r] < 0 || of >= nk) continue;
        if (pairs) {
          const Pair pair = *reinterpret_cast<const Pair*>(row_gmem + of);
          if constexpr (WORDS == 2) {
            words[0] = __float_as_uint(pair.x), words[1] = __float_as_uint(pair.y);
          } else {
            words[0] = pair;
          }
          continue;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (of + i >= nk) continue;
          const Element x = row_gmem[(of + i) * params.mask_key];
          if constexpr (WORDS == 2) {
            words[i] = __float_as_uint(x);
          } else {
            words[0] |= static_cast<uint32_t>(x) << (8 * sizeof(Element) * i);
          }
        }
      }
    }
  }

  template <class AddedOf>
  __device__ __forceinline__ void apply_each(device::Scores<typename C::Warp>& s_rmem,
                                             const AddedOf& added_of) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r == 1 && !both) break;
#pragma unroll
      for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float x = added_of(r, n, i);
          float s = fmaf(x, device::LOG2_E, s_rmem[0][n][2 * r + i]);
          if (s < device::LOWEST_LOG2) s = device::LOWEST_LOG2;  // not fmaxf: a NaN stays one
          s_rmem[0][n][2 * r + i] = x == device::MINUS_INFINITY ? x : s;
        }
      }
    }
  }
};

template <class C>
struct DecodeMasks<C, false> {
  struct Elements {};
  struct Seen {
    static constexpr bool all = true, any = true;
    static constexpr uint32_t bits = 0;
  };
  __device__ __forceinline__ DecodeMasks(const DecodeParams&, const CacheContext&) {}
};

// Sets to 0, of a group's V as ldmatrix brings it, the keys that no row of the warp sees: their P
// is 0, but 0 * NaN would be NaN. k: a number of 16 keys.
__device__ __forceinline__ void clear_unseen_values(uint32_t (&v_rmem)[4], uint32_t seen, int k) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t bits = seen >> (2 * (2 * k + i % 2));
    v_rmem[i] &= (bits & 1 ? 0x0000FFFFu : 0) | (bits & 2 ? 0xFFFF0000u : 0);
  }
}

}  // namespace archflash::mma_sync
