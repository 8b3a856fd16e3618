// What masks as data and dropout make of a warp's scores in the backward pass on mma.sync.
//
// Scores are logarithms to base 2 here, as in mma_sync/masked_fwd.cuh: params.rule.tanh_scale and
// softcap include log2(e), and exp2_scale is 1.
#pragma once

#include <cstdint>

#include "common/device/backward_masks.cuh"
#include "common/device/dropout.cuh"
#include "common/device/lowest_rows.cuh"
#include "common/masked_backward_params.h"
#include "common/ptx/global_order.cuh"

namespace archflash::mma_sync {

// Answers that are known when the code is compiled.
struct Yes {
  ARCHFLASH_HOST_DEVICE constexpr operator bool() const { return true; }
};
struct No {
  ARCHFLASH_HOST_DEVICE constexpr operator bool() const { return false; }
};

// The elements of a lane by query and key: element b of query a is [m][n][2 * r + i].
template <class C>
struct LaneElements {
  static constexpr bool OWNS_KEYS = C::OWNS == Owns::Keys;
  static constexpr int ROWS = 2 * C::M_TILES, COLUMNS = C::BLOCK / 4;
  static constexpr int QUERIES = OWNS_KEYS ? COLUMNS : ROWS, KEYS = OWNS_KEYS ? ROWS : COLUMNS;
  static constexpr uint32_t ALL =
      QUERIES * KEYS == 32 ? 0xFFFFFFFFu : (1u << QUERIES * KEYS % 32) - 1;
  static_assert(QUERIES * KEYS <= 32, "an element is a bit");

  // Columns 8n + i and 8(n + 1) + i follow one another: their random bits come from one group.
  ARCHFLASH_HOST_DEVICE static constexpr int n_of(int column) {
    return OWNS_KEYS ? column / 4 * 2 + column % 2 : column / 2;
  }
  ARCHFLASH_HOST_DEVICE static constexpr int i_of(int column) {
    return OWNS_KEYS ? column / 2 % 2 : column % 2;
  }
  ARCHFLASH_HOST_DEVICE static constexpr int row_offset(int row) { return 8 * row; }
  ARCHFLASH_HOST_DEVICE static constexpr int column_offset(int column) {
    return 8 * n_of(column) + i_of(column);
  }
  ARCHFLASH_HOST_DEVICE static constexpr int query_offset(int a) {
    return OWNS_KEYS ? column_offset(a) : row_offset(a);
  }
  ARCHFLASH_HOST_DEVICE static constexpr int key_offset(int b) {
    return OWNS_KEYS ? row_offset(b) : column_offset(b);
  }
  ARCHFLASH_HOST_DEVICE static constexpr uint32_t bit(int a, int b) { return 1u << (a * KEYS + b); }

  template <class Scores>
  static __device__ __forceinline__ float& of(Scores& x_rmem, int a, int b) {
    const int row = OWNS_KEYS ? b : a, column = OWNS_KEYS ? a : b;
    return x_rmem[row / 2][n_of(column)][row % 2 * 2 + i_of(column)];
  }
  template <class TermsOf>
  static __device__ __forceinline__ device::RowTerms terms(const TermsOf& terms_of, int a) {
    if constexpr (OWNS_KEYS) return terms_of(0, n_of(a), 0, i_of(a));
    return terms_of(a / 2, 0, a % 2, 0);
  }
};

// A warp's place: its first owned and passing rows, and the lane's first query and key.
struct MaskedPlace {
  int warp_row, warp_column;
  int query, key;
};

// Which elements of the lane count, as bits, but for what attn_mask says.
template <class C>
__device__ __forceinline__ uint32_t find_seen(const MaskedBackwardParams& params,
                                              const device::BackwardWork& cta,
                                              const device::HeadMasks& masks,
                                              const MaskedPlace& place, uint8_t state) {
  using E = LaneElements<C>;
  if (state == BLOCK_UNSEEN) return 0;
  uint32_t seen = E::ALL;
  const int row_last = place.warp_row + 16 * C::M_TILES - 1;
  const int column_last = place.warp_column + C::BLOCK - 1;
  if (row_last >= cta.own_rows ||
      cta.visible.masks(place.warp_row, row_last, place.warp_column, column_last)) {
    seen = 0;
#pragma unroll
    for (int row = 0; row < E::ROWS; ++row) {
      const int owned = (E::OWNS_KEYS ? place.key : place.query) + E::row_offset(row);
      const int first_column = E::OWNS_KEYS ? place.query : place.key;
      const int first = cta.visible.first(owned) - first_column;
      const int last = owned < cta.own_rows ? cta.visible.last(owned) - first_column : -1;
#pragma unroll
      for (int column = 0; column < E::COLUMNS; ++column) {
        const int at = E::column_offset(column);
        if (at >= first && at <= last)
          seen |= E::OWNS_KEYS ? E::bit(column, row) : E::bit(row, column);
      }
    }
  }
  if (params.masks.ranges_gmem != nullptr) {
    uint32_t in_ranges = 0;
#pragma unroll
    for (int a = 0; a < E::QUERIES; ++a) {
      const int query = min(place.query + E::query_offset(a), masks.nq - 1);
      const int32_t* range_gmem = masks.ranges(query);
#pragma unroll 1
      for (int number = 0; number < params.masks.ranges; ++number) {
        const int begin = range_gmem[2 * number] - place.key;
        const int end = range_gmem[2 * number + 1] - place.key;
#pragma unroll
        for (int b = 0; b < E::KEYS; ++b) {
          if (E::key_offset(b) >= begin && E::key_offset(b) < end) in_ranges |= E::bit(a, b);
        }
      }
    }
    seen &= in_ranges;
  }
  return seen;
}

// Adds the elements of attn_mask to the scores that count, and clears the bits of those that it
// hides.
template <class C, class Element, class Scores, class Added>
__device__ __forceinline__ void add_mask_elements(Scores& s_rmem, uint32_t& seen,
                                                  const MaskParams& params, const Element* gmem,
                                                  const Added& added) {
  using E = LaneElements<C>;
#pragma unroll
  for (int a = 0; a < E::QUERIES; ++a) {
    const Element* row_gmem = gmem + E::query_offset(a) * params.mask_row;
#pragma unroll
    for (int b = 0; b < E::KEYS; ++b) {
      if ((seen & E::bit(a, b)) == 0) continue;
      const float bias = added(row_gmem[E::key_offset(b) * params.mask_key]);
      float& s = E::of(s_rmem, a, b);
      s = fmaf(bias, device::LOG2_E, s);
      if (s < device::LOWEST_LOG2) s = device::LOWEST_LOG2;  // not fmaxf: a NaN stays one
      if (bias == device::MINUS_INFINITY) seen &= ~E::bit(a, b);
    }
  }
}

// What exponentiate_masked() does behind the masks. CAPPED: with softcap, whose result had the
// derivatives `slopes` before anything was added to it.
template <class C, bool CAPPED, bool DROPS, class Scores, class TermsOf>
__device__ __forceinline__ void exponentiate_behind_masks(Scores& s_rmem, Scores& dp_rmem,
                                                          const MaskedBackwardParams& params,
                                                          const device::BackwardWork& cta, int head,
                                                          const MaskedPlace& place, uint32_t seen,
                                                          const float (&slopes)[32],
                                                          const TermsOf& terms_of) {
  using E = LaneElements<C>;
  device::DropoutBits bits[2] = {};
  const uint32_t threshold = params.dropout.threshold;
#pragma unroll
  for (int a = 0; a < E::QUERIES; ++a) {
    const device::RowTerms terms = E::terms(terms_of, a);
    const float most = device::most_weight(terms.lse_log2);
    const int query = place.query + E::query_offset(a);
    if (DROPS && a % 2 == 0) {
      const DroppedHeads& heads = params.dropped_heads;
      const device::Dropout dropout(params.dropout,
                                    heads.first + cta.batch * heads.of_sequence + head);
      bits[0] = dropout.bits(query, place.key);
      if constexpr (!E::OWNS_KEYS) bits[1] = dropout.bits(query, place.key + 1);
    }
    float* dmask_gmem = nullptr;
    if constexpr ((C::GRADIENTS & DQ) != 0) {
      const MaskGradientParams& dmask = params.dmask;
      if (dmask.gmem != nullptr) {
        dmask_gmem = dmask.gmem + cta.batch * dmask.batch + head * dmask.head + query * dmask.row +
                     place.key * dmask.key;
      }
    }
#pragma unroll
    for (int b = 0; b < E::KEYS; ++b) {
      const bool counts = (seen & E::bit(a, b)) != 0;
      float& s = E::of(s_rmem, a, b);
      const float p = device::probability_up_to(most, s - terms.lse_log2);
      bool kept = true;
      if constexpr (DROPS) {
        kept = bits[E::OWNS_KEYS ? 0 : b % 2].of(query, place.key + E::key_offset(b)) >= threshold;
      }
      if constexpr (C::NEEDS_DP) {
        float& dp = E::of(dp_rmem, a, b);
        if constexpr (DROPS) dp = kept ? dp * params.dropout.scale : 0.0f;
        float ds = p * (dp - terms.delta);
        if constexpr ((C::GRADIENTS & DQ) != 0) {
          if (dmask_gmem != nullptr && counts)
            ptx::red_add_f32(dmask_gmem + E::key_offset(b) * params.dmask.key, ds);
        }
        if constexpr (CAPPED) ds *= slopes[a * E::KEYS + b];
        dp = counts ? ds : 0.0f;
      }
      s = counts && kept ? p : 0.0f;
    }
  }
}

// Turns the scores into P, dropped weights 0, and dP into dS, the gradient of the score before its
// scale; adds the gradients of attn_mask where they are wanted. What a query does not see is 0.
//   head                    of q
//   warp_row, warp_column   the warp's first owned and passing rows
//   terms_of(m, n, r, i)    the RowTerms of the query of that element
template <class C, class Scores, class TermsOf>
__device__ __forceinline__ void exponentiate_masked(Scores& s_rmem, Scores& dp_rmem,
                                                    const MaskedBackwardParams& params,
                                                    const device::BackwardWork& cta, int head,
                                                    int warp_row, int warp_column, int lane,
                                                    const TermsOf& terms_of) {
  using E = LaneElements<C>;
  const AttentionParams& attention = params.call.attention;
  const device::HeadMasks masks = device::HeadMasks::of<C::OWNS>(params.masks, cta, head);
  const int row = warp_row + lane / 4, column = warp_column + lane % 4 * 2;
  const MaskedPlace place{warp_row, warp_column, E::OWNS_KEYS ? column : row,
                          E::OWNS_KEYS ? row : column};
  // All elements of a warp lie in one block of block_mask.
  uint8_t state = 1;
  if (params.masks.blocks_gmem != nullptr) state = masks.block(place.query, place.key);
  uint32_t seen = find_seen<C>(params, cta, masks, place, state);

  // The derivative of c * tanh(x / c) is 1 - tanh(x / c)^2.
  float slopes[32];
  const bool capped = C::NEEDS_DP && attention.rule.softcap != 0.0f;
  if (capped) {
    const float uncap = 1.0f / attention.rule.softcap;
#pragma unroll
    for (int a = 0; a < E::QUERIES; ++a) {
#pragma unroll
      for (int b = 0; b < E::KEYS; ++b) {
        const float tanh = E::of(s_rmem, a, b) * uncap;
        slopes[a * E::KEYS + b] = fmaf(-tanh, tanh, 1.0f);
      }
    }
  }
  if (params.masks.mask_element != MaskElement::None && state != BLOCK_FULL) {
    const MaskParams& mask = params.masks;
    const int64_t element = cta.batch * mask.mask_batch + head * mask.mask_head +
                            place.query * mask.mask_row + place.key * mask.mask_key;
    if (mask.mask_element == MaskElement::Bool) {
      const auto* gmem = static_cast<const uint8_t*>(mask.mask_gmem) + element;
      // Nothing is added to scores that count.
#pragma unroll
      for (int a = 0; a < E::QUERIES; ++a) {
        const uint8_t* row_gmem = gmem + E::query_offset(a) * mask.mask_row;
#pragma unroll
        for (int b = 0; b < E::KEYS; ++b) {
          if ((seen & E::bit(a, b)) != 0 && row_gmem[E::key_offset(b) * mask.mask_key] == 0)
            seen &= ~E::bit(a, b);
        }
      }
    } else if (mask.mask_element == MaskElement::F32) {
      add_mask_elements<C>(s_rmem, seen, mask, static_cast<const float*>(mask.mask_gmem) + element,
                           [](float x) { return x; });
    } else {
      add_mask_elements<C>(s_rmem, seen, mask,
                           static_cast<const uint16_t*>(mask.mask_gmem) + element,
                           [](uint16_t x) { return device::added_of_half<C::DTYPE>(x); });
    }
  }
  if (params.masks.slopes_gmem != nullptr) {
    const float slope = masks.slope() * device::LOG2_E;
    const float distance =
        static_cast<float>(device::find_q_offset(attention, masks) + place.query - place.key);
#pragma unroll
    for (int a = 0; a < E::QUERIES; ++a) {
#pragma unroll
      for (int b = 0; b < E::KEYS; ++b) {
        float& s = E::of(s_rmem, a, b);
        s = fmaf(-slope,
                 fabsf(distance + static_cast<float>(E::query_offset(a) - E::key_offset(b))), s);
        if (s < device::LOWEST_LOG2) s = device::LOWEST_LOG2;
      }
    }
  }
  const auto exponentiate = [&](auto with_cap, auto with_dropout) {
    exponentiate_behind_masks<C, with_cap, with_dropout>(s_rmem, dp_rmem, params, cta, head, place,
                                                         seen, slopes, terms_of);
  };
  const bool drops = params.dropout.state_gmem != nullptr;
  if (capped && drops)
    exponentiate(Yes{}, Yes{});
  else if (capped)
    exponentiate(Yes{}, No{});
  else if (drops)
    exponentiate(No{}, Yes{});
  else
    exponentiate(No{}, No{});
}

}  // namespace archflash::mma_sync
