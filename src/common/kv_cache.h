// Where the rows of a KV cache lie, as kernels are told of it, and the parameter block of the
// kernel that appends rows to one. Lengths and page tables are on the device only.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/dtype.h"

namespace archflash {

// A cache is a number of blocks: the pages that a page table names, or without one the sequences
// themselves. Block and row of a block lie the batch stride and the row stride of k and v apart.
struct KvCache {
  const int32_t* seqlens_gmem;     // (batch,): rows of each sequence before the append
  const int32_t* page_table_gmem;  // (batch, pages of a sequence); null: contiguous sequences
  const int32_t* batch_idx_gmem;   // (batch,): the block of a sequence; null: its own number
  const int32_t* leftpad_gmem;     // (batch,): rows that are padding; null: none

  int64_t page_table_row;  // entries from one sequence to the next
  int32_t blocks;
  int32_t block_rows;
  int32_t capacity;  // rows that a sequence has room for
  int32_t n_new;     // rows that the call appends to each sequence
};

// alibi_slopes, where a call has them. The strides are 0 along a dimension that is broadcast.
struct AlibiSlopes {
  const float* gmem;  // (batch, heads_q); null: none
  int64_t batch, head;
};

// The parameter of the kernel that appends k_new and v_new to a cache, and copies q with its first
// columns rotated. A warp makes one row: of K, then of V, then of q.
struct AppendParams {
  AttentionParams attention;  // of the call as it was made: k_gmem and v_gmem are written
  KvCache cache;
  const void* k_new_gmem;       // (batch, n_new, heads_kv, d)
  const void* v_new_gmem;       // (batch, n_new, heads_kv, dv)
  const void* rotary_cos_gmem;  // (rotary_rows, rotary_dim / 2); null: nothing is rotated
  const void* rotary_sin_gmem;
  void* rotated_q_gmem;  // (rows of q, heads_q, d), contiguous; unused without rotation
  int64_t k_new_batch, k_new_head, k_new_row;
  int64_t v_new_batch, v_new_head, v_new_row;
  int64_t new_rows;  // batch * n_new * heads_kv
  int64_t q_rows;    // rows of q of all heads; 0 without rotation
  int32_t heads_kv;
  int32_t rotary_dim, rotary_rows;
  DType rotary_dtype;
  int32_t interleaved;  // columns 2i and 2i + 1 rotate together
  int32_t ordered;      // row i of q has position i behind the first, not the first's
  DType cache_dtype;
};

constexpr int APPEND_WARPS = 4;  // of a CTA of that kernel

}  // namespace archflash
