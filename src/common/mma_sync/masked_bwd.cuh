// What masks as data and dropout make of a warp's scores in the backward pass on mma.sync.
//
// Scores are logarithms to base 2 here, as in mma_sync/masked_fwd.cuh: params.tanh_scale and softcap
// include log2(e), and exp2_scale is 1.
#pragma once

#include <cstdint>

#include "common/masked_backward_params.h"
#include "common/math/backward_masks.cuh"
#include "common/math/dropout.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/global_order.cuh"

namespace archflash::mma_sync {

// Turns the scores into P, dropped weights 0, and dP into dS, the gradient of the score before its
// scale; adds the gradients of attn_mask where they are wanted. What a query does not see is 0.
//   head                 of q
//   first_row            the lane's first owned row; it has the rows 8m from there on
//   first_column         the lane's first passing row; it has 8n and 8n + 1 from there on
//   terms_of(m, n, r, i) the RowTerms of the query of that element
template <class C, class Scores, class TermsOf>
__device__ __forceinline__ void weigh_masked(Scores& s_rmem, Scores& dp_rmem,
                                             const MaskedBackwardParams& params,
                                             const math::BackwardWork& cta, int head, int first_row,
                                             int first_column, const TermsOf& terms_of) {
  constexpr bool OWNS_KEYS = C::OWNS == Owns::Keys;
  constexpr int ROWS = 2 * C::M_TILES, COLUMNS = C::BLOCK / 4;  // of the lane
  constexpr int QUERIES = OWNS_KEYS ? COLUMNS : ROWS, KEYS = OWNS_KEYS ? ROWS : COLUMNS;
  const AttentionParams& attention = params.call.attention;
  const math::HeadMasks masks = math::HeadMasks::of<C::OWNS>(params.masks, cta, head);
  const int first_query = OWNS_KEYS ? first_column : first_row;
  const int first_key = OWNS_KEYS ? first_row : first_column;
  // All elements of a warp lie in one block of block_mask.
  uint8_t state = 1;
  if (params.masks.blocks_gmem != nullptr) state = masks.block(first_query, first_key);
  const bool reads = params.masks.mask_element != MaskElement::None && state != BLOCK_FULL;
  float slope = 0.0f, distance = 0.0f;  // of ALiBi: of query 0 from the lane's first key
  if (params.masks.slopes_gmem != nullptr) {
    slope = masks.slope() * math::LOG2_E;
    distance = static_cast<float>(math::find_q_offset(attention, masks) - first_key);
  }
  const bool drops = params.dropout.state_gmem != nullptr;
  const float uncap = attention.softcap == 0.0f ? 0.0f : 1.0f / attention.softcap;
  math::DropoutBits bits[2] = {};
#pragma unroll
  for (int a = 0; a < QUERIES; ++a) {
    // Queries whose random bits come from the same group follow one another.
    const int n_of_query = a / 4 * 2 + a % 2, i_of_query = a / 2 % 2;
    const int query = first_query + (OWNS_KEYS ? 8 * n_of_query + i_of_query : 8 * a);
    if (drops && a % 2 == 0) {
      const math::Dropout dropout(params.dropout, cta.batch * attention.heads_q + head);
      bits[0] = dropout.bits(query, first_key);
      if constexpr (!OWNS_KEYS) bits[1] = dropout.bits(query, first_key + 1);
    }
    uint32_t seen_keys = 0;  // bit b: key b of the lane
    if (query < masks.nq && state != BLOCK_UNSEEN) {
      seen_keys = params.masks.ranges_gmem == nullptr ? 0xFFFFFFFFu : 0;
#pragma unroll 1
      for (int number = 0; number < params.masks.ranges; ++number) {
        const int32_t* range_gmem = masks.ranges(query) + 2 * number;
        const int begin = range_gmem[0], end = range_gmem[1];
#pragma unroll
        for (int b = 0; b < KEYS; ++b) {
          const int key = first_key + (OWNS_KEYS ? 8 * b : b / 2 * 8 + b % 2);
          seen_keys |= (key >= begin && key < end ? 1u : 0u) << b;
        }
      }
    }
#pragma unroll
    for (int b = 0; b < KEYS; ++b) {
      const int m = OWNS_KEYS ? b / 2 : a / 2, r = OWNS_KEYS ? b % 2 : a % 2;
      const int n = OWNS_KEYS ? n_of_query : b / 2, i = OWNS_KEYS ? i_of_query : b % 2;
      const int key_of_lane = OWNS_KEYS ? 8 * b : 8 * n + i, key = first_key + key_of_lane;
      float& s = s_rmem[m][n][2 * r + i];
      bool seen = (seen_keys >> b & 1) != 0 && key < masks.nk &&
                  (OWNS_KEYS ? cta.visible.sees(key, query) : cta.visible.sees(query, key));
      float bias = 0.0f;
      if (seen && reads) bias = masks.added_to<C::DTYPE>(query, key);
      // The derivative of c * tanh(x / c) is 1 - tanh(x / c)^2.
      const float tanh = s * uncap;
      const auto masked = math::masked_score<true>(
          s, seen, bias, slope, distance + static_cast<float>(query) - key_of_lane);
      seen = masked.seen;
      const math::RowTerms terms = terms_of(m, n, r, i);
      const float exponent = masked.score - terms.lse_log2;
      // P is at most 1, as in weigh_backward().
      const float p = ptx::ex2_approx_ftz(exponent > 0.0f ? 0.0f : exponent);
      bool kept = true;
      if (drops)
        kept = bits[OWNS_KEYS ? 0 : i].of(query, key) >= params.dropout.threshold;
      if constexpr (C::NEEDS_DP) {
        float& dp = dp_rmem[m][n][2 * r + i];
        const float of_weight = kept ? dp * params.dropout.scale : 0.0f;
        const float ds = p * (of_weight - terms.delta);
        if constexpr ((C::GRADIENTS & DQ) != 0) {
          const MaskGradientParams& dmask = params.dmask;
          if (dmask.gmem != nullptr && seen) {
            ptx::red_add_f32(dmask.gmem + cta.batch * dmask.batch + head * dmask.head +
                                 query * dmask.row + key * dmask.key,
                             ds);
          }
        }
        dp = seen ? ds * fmaf(-tanh, tanh, 1.0f) : 0.0f;
      }
      s = seen && kept ? p : 0.0f;
    }
  }
}

}  // namespace archflash::mma_sync
