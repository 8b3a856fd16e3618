// What every attention kernel does around its products: it finds the rows and keys that a CTA
// computes, finds where they lie, and turns a finished row into output and LSE.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/device/bfloat16.cuh"
#include "common/device/packed_heads.cuh"
#include "common/device/varlen_tiles.cuh"
#include "common/device/visible_keys.cuh"
#include "common/dtype.h"
#include "common/ptx/cvt.cuh"
#include "common/ptx/ex2.cuh"
#include "common/ptx/st_global.cuh"

namespace archflash::device {

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr float MINUS_INFINITY = -__builtin_huge_valf();

// What a CTA computes: a tile of rows of one head of one sequence, or of several packed heads.
struct Work {
  int batch_head;  // batch * heads_q + the first head, together in one register
  int first_row;   // counted from the sequence's first row; negative: nothing to compute
  int nq, nk;      // lengths of the sequence
};

// The first row of a sequence in a packed tensor of `rows` rows; 0 without cu_seqlens. cu_seqlens
// that point outside the tensor are an error of the caller; clamping keeps every access inside.
__device__ __forceinline__ int sequence_start(const int* cu_seqlens_gmem, int sequence, int rows) {
  return cu_seqlens_gmem == nullptr ? 0 : min(max(cu_seqlens_gmem[sequence], 0), rows);
}

// The row tile, head and batch for a CTA index, where a tile has block_q rows of each of
// `packed_heads` heads. Row tiles come from the last to the first, because under a causal mask the
// last ones see the most keys and should start first. (TileOrder says which of them come
// otherwise.)
__device__ __forceinline__ Work find_work(const AttentionParams& params, int index, int block_q,
                                          int packed_heads) {
  Work work{};
  int tile_from_last;
  if (params.cu_seqlens_q_gmem == nullptr) {
    work.nq = params.nq;
    work.nk = params.nk;
    // mutants: never-negative (tests/sim/tags.py)
    const int tiles = (work.nq + block_q - 1) / block_q;
    const int heads_per_group = params.order.heads_per_group / packed_heads;
    const int group = index / (heads_per_group * tiles);
    const int first_head = group * heads_per_group;
    const int heads =
        min(heads_per_group, params.batch * params.heads_q / packed_heads - first_head);
    index -= first_head * tiles;
    tile_from_last = params.order.from_last(index / heads);
    work.batch_head = (first_head + index % heads) * packed_heads;
  } else {
    const int* cu_q = params.cu_seqlens_q_gmem;
    const int* cu_k = params.cu_seqlens_k_gmem;
    const int tile = index / (params.heads_q / packed_heads);
    const int batch = find_varlen_sequence(cu_q, params.batch, block_q, tile);
    work.first_row = -1;
    // mutants: returns-at-once
    if (batch < 0) return work;
    tile_from_last = tile - varlen_tile_start(cu_q, batch, block_q);
    work.batch_head =
        batch * params.heads_q + index % (params.heads_q / packed_heads) * packed_heads;
    work.nq =
        max(sequence_start(cu_q, batch + 1, params.nq) - sequence_start(cu_q, batch, params.nq), 0);
    work.nk =
        max(sequence_start(cu_k, batch + 1, params.nk) - sequence_start(cu_k, batch, params.nk), 0);
  }
  // mutants: never-negative
  const int tiles = (work.nq + block_q - 1) / block_q;
  // Negative if the sequence has fewer tiles than its share of the grid.
  work.first_row = (tiles - 1 - tile_from_last) * block_q;
  return work;
}
template <int BLOCK_Q>
__device__ __forceinline__ Work find_work(const AttentionParams& params, int index) {
  return find_work(params, index, BLOCK_Q, 1);
}

// The attention sink of a head: one more logit in the softmax's denominator, in natural logarithms.
// -inf if there is none.
__device__ __forceinline__ float load_sink(const AttentionParams& params, int head) {
  if (params.sinks_gmem == nullptr) return MINUS_INFINITY;
  const DType dtype = static_cast<DType>(params.sinks_dtype);
  if (dtype == DType::F32) return static_cast<const float*>(params.sinks_gmem)[head];
  const uint16_t bits = static_cast<const uint16_t*>(params.sinks_gmem)[head];
  return dtype == DType::F16 ? ptx::cvt_f32_f16(bits)
                             : __uint_as_float(float_bits_of_bfloat16(bits));
}

// Writes the rows of a packed output that belong to no sequence, because they come before the first
// or after the last one: output 0, and the LSE of a row that sees no key. Otherwise the caller
// would see whatever the memory held. CTA `index` checks the block_q rows of tile number `index`,
// counted as if all rows were one sequence, whichever rows it computes: the grid has at least one
// CTA for each of these tiles. Where a tile has packed heads, a call checks the rows of one of
// them, number head_of_tile. If cu_seqlens decreases, which is an error of the caller, rows in
// between may stay unwritten. Called by `threads` threads, which need not be whole warps.
template <int ELEMENT_BYTES = 2>
__device__ __forceinline__ void write_rows_of_no_sequence(const AttentionParams& params, int index,
                                                          int thread, int threads, int block_q,
                                                          int packed_heads, int head_of_tile) {
  if (params.cu_seqlens_q_gmem == nullptr) return;
  const int64_t first = static_cast<int64_t>(index / (params.heads_q / packed_heads)) * block_q;
  const int end = static_cast<int>(min(first + block_q, static_cast<int64_t>(params.nq)));
  const int owned_first = sequence_start(params.cu_seqlens_q_gmem, 0, params.nq);
  const int owned_end = sequence_start(params.cu_seqlens_q_gmem, params.batch, params.nq);
  if (first >= end || (first >= owned_first && end <= owned_end)) return;
  const int head = index % (params.heads_q / packed_heads) * packed_heads + head_of_tile;
  const float sink = load_sink(params, head);
  const int chunks = params.dv * ELEMENT_BYTES / 16;  // 16-byte chunks of a row
  for (int row = static_cast<int>(first); row < end; ++row) {
    if (row >= owned_first && row < owned_end) continue;
    const int64_t start = (head * params.out_head + row * params.out_row) * ELEMENT_BYTES;
    unsigned char* row_gmem = static_cast<unsigned char*>(params.out_gmem) + start;
    for (int chunk = thread; chunk < chunks; chunk += threads)
      ptx::st_global_v4_b32(row_gmem + chunk * 16, 0, 0, 0, 0);
    if (params.lse_gmem != nullptr && thread == 0)
      params.lse_gmem[head * params.lse_head + row] = sink;
  }
}
template <int BLOCK_Q, int ELEMENT_BYTES = 2>
__device__ __forceinline__ void write_rows_of_no_sequence(const AttentionParams& params, int index,
                                                          int thread, int threads) {
  write_rows_of_no_sequence<ELEMENT_BYTES>(params, index, thread, threads, BLOCK_Q, 1, 0);
}

// Where a CTA's inputs start, as offsets in elements from the start of each tensor.
struct Offsets {
  int64_t q;     // the CTA's first row
  int64_t k, v;  // the first key of its sequence
};

__device__ __forceinline__ Offsets find_offsets(const AttentionParams& params, const Work& work) {
  const int batch = work.batch_head / params.heads_q;
  const int head = work.batch_head % params.heads_q;
  const int kv_head = head / params.heads_per_kv;
  const int64_t q_row = sequence_start(params.cu_seqlens_q_gmem, batch, params.nq) + work.first_row;
  const int64_t k_row = sequence_start(params.cu_seqlens_k_gmem, batch, params.nk);
  return {batch * params.q_batch + head * params.q_head + q_row * params.q_row,
          batch * params.k_batch + kv_head * params.k_head + k_row * params.k_row,
          batch * params.v_batch + kv_head * params.v_head + k_row * params.v_row};
}

__device__ __forceinline__ VisibleKeys find_visible_keys(const AttentionParams& params,
                                                         const Work& work) {
  int64_t q_offset = params.q_offset;
  if (params.offset_mode == OffsetMode::KeysMinusQueries) q_offset = work.nk - work.nq;
  if (params.offset_mode == OffsetMode::PerBatch)
    q_offset = params.q_offsets_gmem[work.batch_head / params.heads_q];
  return visible_keys(work.nq, work.nk, q_offset, params.window_left, params.window_right);
}

// How a row ends: out = (sum of p * v) * factor.
struct RowEnd {
  float factor;
  float lse;
};

// Adds the sink to a row's denominator and finds its RowEnd. keys_sum is the sum of
// exp(score - keys_max) over the keys that the row sees; keys_max is in natural logarithms. A row
// that sees no key has keys_sum 0 and keys_max -inf.
__device__ __forceinline__ RowEnd finish_row(float keys_max, float keys_sum, float sink) {
  const float max = fmaxf(keys_max, sink);
  const float base = max == MINUS_INFINITY ? 0.0f : max;
  const float correction = ptx::ex2_approx_ftz((keys_max - base) * LOG2_E);
  // An infinite sink takes the whole weight. Without the comparison, inf - inf would be NaN.
  const float of_sink = sink == base ? 1.0f : ptx::ex2_approx_ftz((sink - base) * LOG2_E);
  const float sum = fmaf(keys_sum, correction, of_sink);
  // Without a key the factor is 0. Without key and sink the LSE is -inf + log(0) = -inf.
  // mutants: denormals-in-logf
  return {keys_sum != 0.0f ? correction / sum : 0.0f, max + logf(sum)};
}

}  // namespace archflash::device
