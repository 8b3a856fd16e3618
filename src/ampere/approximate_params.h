// The parameter blocks of the kernels for approximate=.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/dtype.h"
#include "common/mma_sync/params.h"

namespace archflash::ampere {

// What a row of int8 Q stands for: its integers times `scale`; and q.mean, where `mean` is what was
// subtracted from K, which is added to each score of the row.
struct QRow {
  float scale;
  float shift;
};

// How a column of K is changed before it is rounded: (k - mean) * factor. The column of Q is
// divided by the factor, a power of two.
struct KColumn {
  float mean;
  float factor;
};

// What a number of the converted V of a head stands for: it times `scale`, a power of two. The
// largest magnitude of them is at most 1.
struct VScale {
  float scale;
  float largest;
};

// What an integer of V in int8 stands for: it times `scale` of its column and the scale of its key,
// plus `centre` of its column. `largest` is the largest magnitude in the column.
struct VColumn {
  float scale, centre, largest, unused;
};

// The caller's q, k and v, and what the converting kernels make of them in the workspace. With
// cu_seqlens the rows of all sequences count as one batch there.
struct ApproximateInputs {
  const void *q_gmem, *k_gmem, *v_gmem;
  int64_t q_batch, q_head, q_row;  // strides in elements
  int64_t k_batch, k_head, k_row;
  int64_t v_batch, v_head, v_row;
  // The workspace. A head of K is one of (batches, heads_kv).
  // With V in fp16 (v_columns == 0):
  float* v_largest_gmem;    // (heads of K, chunks): the largest magnitude in STATS_ROWS rows of V
  VScale* v_scales_gmem;    // (heads of K,)
  uint16_t* v_values_gmem;  // (heads of K, nk, dv) in fp16
  // Else in int8:
  VColumn* v_columns_gmem;  // (heads of K, v_columns)
  int8_t* v_bytes_gmem;     // (heads of K, nk, v_columns)
  // With Q and K in int8:
  KColumn* k_columns_gmem;  // (heads of K, columns)
  int8_t* k_values_gmem;    // (heads of K, nk, columns)
  // (heads of K, nk). Where V is int8 there are three of them, `keys` floats apart: the scale of a
  // key's K, and the logarithm to base 2 and the reciprocal of that of its V, which is at most 1.
  float* k_scales_gmem;
  int8_t* q_values_gmem;  // (batches, heads_q, nq, columns)
  QRow* q_rows_gmem;      // (batches, heads_q, nq)
  int32_t batches, heads_q, heads_kv, nq, nk, d, dv;
  int64_t keys;            // of all heads of K
  int32_t columns;         // of int8 rows: 64, 128 or 256; 0: Q and K are not converted
  int32_t v_columns;       // of V in int8: dv, rounded up to whole V_GROUP
  int32_t chunks;          // of the rows of V in a head; in int8, groups of columns
  int32_t k_ctas, v_ctas;  // the first CTAs of convert() convert K, the next V, the rest Q
  DType dtype;             // of q, k and v
};

constexpr int CONVERT_THREADS = 256;
constexpr int CONVERT_ROWS = 64;   // rows that a CTA converts
constexpr int STATS_ROWS = 256;    // rows of V whose maximum a CTA finds
constexpr int V_GROUP = 16;        // columns of V in int8 that a thread converts together
constexpr int SAMPLED_ROWS = 512;  // most rows of K, and of Q, by which columns are judged

// The two converting kernels, and the kernels of attention with or without masks as data. The
// former read inputs and `call` as AttentionParams alone.
struct ApproximateParams {
  mma_sync::ManyRowsParams call;
  ApproximateInputs inputs;
};
struct MaskedApproximateParams {
  mma_sync::MaskedParams call;
  ApproximateInputs inputs;
};
struct ConvertParams {
  AttentionParams call;
  ApproximateInputs inputs;
};

}  // namespace archflash::ampere
