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

  const MaskParams& params;
  int64_t first[2];  // the number of the element of key 0; below 0: the row does not exist
  int nk;

  __device__ __forceinline__ DecodeMasks(const MaskedDecodeParams& call, const CacheContext& cta)
      : params(call.masks), nk(cta.work.nk) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const device::FewRow row(call.attention, cta.packed_heads, cta.work, lane / 4 + 8 * r);
      first[r] =
          row.batch * params.mask_batch + row.head * params.mask_head + row.row * params.mask_row;
      if (!row.wanted) first[r] = -1;
    }
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

  // Adds what the mask adds, and sets the scores of keys that it hides to -inf. Selecting makes the
  // old value irrelevant, even if it was NaN.
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

  // Which keys some row sees, from scores that have been masked: bit 2n + i is the key 8n + i from
  // this lane's first one on. Called by whole warps.
  __device__ __forceinline__ uint32_t
  keys_of_warp(const device::Scores<typename C::Warp>& s_rmem) const {
    uint32_t seen = 0;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float (&s)[4] = s_rmem[0][n];
        const bool of_first = first[0] >= 0 && s[i] != device::MINUS_INFINITY;
        const bool of_second = first[1] >= 0 && s[2 + i] != device::MINUS_INFINITY;
        if (of_first || of_second) seen |= 1u << (2 * n + i);
      }
    }
#pragma unroll
    for (int rows = 4; rows < 32; rows *= 2) seen |= __shfl_xor_sync(device::FULL_WARP, seen, rows);
    return seen;
  }

 private:
  template <class Element, class Pair>
  __device__ __forceinline__ void load_each(Elements& elements, int key) const {
    constexpr int WORDS = sizeof(Pair) == 8 ? 2 : 1;
    const bool pairs = params.mask_step != 0;
    const int lane_key = key + static_cast<int>(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
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
  __device__ __forceinline__ static void apply_each(device::Scores<typename C::Warp>& s_rmem,
                                                    const AddedOf& added_of) {
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = added_of(i / 2, n, i % 2);
        float s = fmaf(x, device::LOG2_E, s_rmem[0][n][i]);
        if (s < device::LOWEST_LOG2) s = device::LOWEST_LOG2;  // not fmaxf: a NaN stays one
        s_rmem[0][n][i] = x == device::MINUS_INFINITY ? x : s;
      }
    }
  }
};

template <class C>
struct DecodeMasks<C, false> {
  struct Elements {};
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
