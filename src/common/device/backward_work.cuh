// What a CTA of the backward pass works on: its own rows, the rows of the other side that pass by,
// and where both lie.
#pragma once

#include <cstdint>

#include "common/backward_params.h"
#include "common/device/attention_work.cuh"
#include "common/device/backward_rows.cuh"
#include "common/device/varlen_tiles.cuh"
#include "common/device/visible_keys.cuh"
#include "common/ptx/ex2.cuh"

namespace archflash::device {

struct BackwardWork {
  int batch, head;   // head of q if the CTA owns queries, of k if it owns keys
  int first_row;     // of the owned ones, counted from the sequence's first; negative: none
  int own_rows;      // length of the owned side's sequence
  int own_start;     // its first row in a packed tensor; 0 without cu_seqlens
  int passing_rows;  // the same of the passing side
  int passing_start;
  int heads;  // of the passing side, which are gone over one after another
  // The passing rows that each owned row has to do with: it sees them, or is seen by them.
  VisibleKeys visible;

  // The rows of either side that have to do with any of the other side. The others count as zeros:
  // their P and dS are 0, but 0 * NaN would be NaN.
  __device__ __forceinline__ int own_begin() const { return max(-visible.last_shift, 0); }
  __device__ __forceinline__ int own_end() const {
    return min(passing_rows - visible.first_shift, own_rows);
  }
  __device__ __forceinline__ int passing_begin() const { return visible.begin(); }
  __device__ __forceinline__ int passing_end() const { return visible.end(own_rows); }
};

// The queries that see a key, as if the key were a query and they its keys.
__device__ __forceinline__ VisibleKeys queries_that_see(const VisibleKeys& visible, int nq) {
  return {-visible.last_shift, -visible.first_shift, nq};
}

// The heads of K as CTAs see them, where several share out the query heads of one.
template <bool UNEVEN>
__device__ __forceinline__ int heads_of_ctas(const AttentionParams& params) {
  return (params.heads_q + (UNEVEN ? params.heads_per_kv - 1 : 0)) / params.heads_per_kv;
}

// The tile of ROWS rows for a CTA index. Called by whole warps. Tiles of keys come from the first
// one on, because under a causal mask the first keys are seen by the most queries. UNEVEN: the last
// CTA that shares out the heads of q may have fewer of them than the others.
template <Owns OWNS, int ROWS, bool UNEVEN = false>
__device__ __forceinline__ BackwardWork find_backward_work(const AttentionParams& params,
                                                           int index) {
  BackwardWork found{};
  Work work{};
  const int* cu_q = params.cu_seqlens_q_gmem;
  const int* cu_k = params.cu_seqlens_k_gmem;
  if constexpr (OWNS == Owns::Queries) {
    work = find_work<ROWS>(params, index);
    found.first_row = work.first_row;
    if (found.first_row < 0) return found;
    found.batch = work.batch_head / params.heads_q;
    found.head = work.batch_head % params.heads_q;
    found.heads = 1;
  } else {
    const int heads_kv = heads_of_ctas<UNEVEN>(params);
    found.head = index % heads_kv;
    found.heads = params.heads_per_kv;
    if constexpr (UNEVEN) found.heads = min(found.heads, params.heads_q - found.head * found.heads);
    if (cu_k == nullptr) {
      const int heads = params.batch * heads_kv;
      found.first_row = index / heads * ROWS;
      found.batch = index % heads / heads_kv;
      work.nq = params.nq;
      work.nk = params.nk;
    } else {
      const int tile = index / heads_kv;
      found.first_row = -1;
      found.batch = find_varlen_sequence(cu_k, params.batch, ROWS, tile);
      if (found.batch < 0) return found;
      const auto length = [&](const int* cu_seqlens, int rows) {
        return max(sequence_start(cu_seqlens, found.batch + 1, rows) -
                       sequence_start(cu_seqlens, found.batch, rows),
                   0);
      };
      work.nq = length(cu_q, params.nq);
      work.nk = length(cu_k, params.nk);
      const int first = (tile - varlen_tile_start(cu_k, found.batch, ROWS)) * ROWS;
      if (first >= work.nk) return found;  // fewer tiles than the sequence's share of the grid
      found.first_row = first;
    }
    work.batch_head = found.batch * params.heads_q;
  }
  const VisibleKeys visible = find_visible_keys(params, work);
  const int q_start = sequence_start(cu_q, found.batch, params.nq);
  const int k_start = sequence_start(cu_k, found.batch, params.nk);
  if constexpr (OWNS == Owns::Queries) {
    found.visible = visible;
    found.own_rows = work.nq, found.passing_rows = work.nk;
    found.own_start = q_start, found.passing_start = k_start;
  } else {
    found.visible = queries_that_see(visible, work.nq);
    found.own_rows = work.nk, found.passing_rows = work.nq;
    found.own_start = k_start, found.passing_start = q_start;
  }
  return found;
}

// P = 2^exponent. It is at most 1: the LSE of huge scores is rounded, which must not make P
// infinite. Not fminf, because a NaN stays one.
__device__ __forceinline__ float probability(float exponent) {
  return ptx::ex2_approx_ftz(exponent > 0.0f ? 0.0f : exponent);
}

// The rows of one side of a head, from one of them on: of Q and dO, or of K and V. Strides in
// elements.
template <class Element>
struct BackwardRows {
  const Element* first_gmem;
  const Element* second_gmem;
  int64_t first_row, second_row;
};

template <class Element>
__device__ __forceinline__ BackwardRows<Element> query_rows(const BackwardParams& params, int batch,
                                                            int head, int64_t row) {
  const AttentionParams& a = params.attention;
  return {
      static_cast<const Element*>(a.q_gmem) + batch * a.q_batch + head * a.q_head + row * a.q_row,
      static_cast<const Element*>(params.dout_gmem) + batch * params.dout_batch +
          head * params.dout_head + row * params.dout_row,
      a.q_row, params.dout_row};
}
template <class Element>
__device__ __forceinline__ BackwardRows<Element> key_rows(const BackwardParams& params, int batch,
                                                          int head, int64_t row) {
  const AttentionParams& a = params.attention;
  if (params.head_shares > 1) head /= params.head_shares;
  return {
      static_cast<const Element*>(a.k_gmem) + batch * a.k_batch + head * a.k_head + row * a.k_row,
      static_cast<const Element*>(a.v_gmem) + batch * a.v_batch + head * a.v_head + row * a.v_row,
      a.k_row, a.v_row};
}

// The RowTerms of a head's queries from row `row` of its tensor on.
__device__ __forceinline__ const RowTerms* terms_of(const BackwardParams& params, int batch,
                                                    int head, int64_t row) {
  return static_cast<const RowTerms*>(params.terms_gmem) + batch * params.attention.lse_batch +
         head * params.attention.lse_head + row;
}

// The block that passes by: `head` counts the heads that the CTA goes over.
struct Passing {
  int head, row;
};

// The head of q whose rows pass by, or of k.
template <Owns OWNS>
__device__ __forceinline__ int passing_head(const AttentionParams& params, const BackwardWork& work,
                                            const Passing& block) {
  return OWNS == Owns::Keys ? work.head * params.heads_per_kv + block.head
                            : work.head / params.heads_per_kv;
}

// Clears the gradients of keys in a packed tensor that belong to no sequence, because they come
// before the first or behind the last one. As in write_rows_of_no_sequence, CTA `index` checks the
// rows of a tile that are counted as if all keys were one sequence. Called by whole CTAs of `warps`
// warps.
template <int ROWS, int GRADIENTS>
__device__ __forceinline__ void clear_keys_of_no_sequence(const BackwardParams& params, int index,
                                                          int warps) {
  const AttentionParams& attention = params.attention;
  const int* cu_k = attention.cu_seqlens_k_gmem;
  if (cu_k == nullptr) return;
  const int heads_kv = attention.heads_q / attention.heads_per_kv;
  const int64_t first = static_cast<int64_t>(index / heads_kv) * ROWS;
  const int end = static_cast<int>(min(first + ROWS, static_cast<int64_t>(attention.nk)));
  const int owned_first = sequence_start(cu_k, 0, attention.nk);
  const int owned_end = sequence_start(cu_k, attention.batch, attention.nk);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int64_t row = first + warp; row < end; row += warps) {
    if (row >= owned_first && row < owned_end) continue;
    if constexpr ((GRADIENTS & DK) != 0)
      clear_gradient_row(params.dk, 0, index % heads_kv, row, attention.d, lane, 32);
    if constexpr ((GRADIENTS & DV) != 0)
      clear_gradient_row(params.dv, 0, index % heads_kv, row, attention.dv, lane, 32);
  }
}

}  // namespace archflash::device
