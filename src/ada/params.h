// The one parameter of every ada kernel of its own. Those for 16-bit inputs take AttentionParams.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/problem.h"

namespace archflash::ada {

struct Params {
  // q, k and v are read in units of 16 bits: their strides count those. tanh_scale is always set.
  AttentionParams attention;
  Descales descales;
  DType out_dtype;  // F16 or BF16
};
static_assert(std::is_trivially_copyable_v<Params>);

// Of a block of K: what its integers are multiples of, and a bit for each key that is not finite:
// such keys spoil the rows that see them, and only those.
struct alignas(16) KeyScale {
  float scale;
  uint32_t any_odd;
  uint32_t odd[SCALE_ROWS / 32];
};

// Of the kernels that make Q and K int8, and of the one that computes with them.
struct Int8Params {
  // Of the last kernel: q and k are what the others wrote, (batch, heads, rows, columns) in rows of
  // whole 16 bytes, strides in units of 16 bits; v and out as the caller gave them.
  AttentionParams attention;
  // What the caller gave. Strides in elements.
  const void* q_gmem;  // (batch, heads_q, nq, d)
  const void* k_gmem;  // (batch, heads_kv, nk, d)
  int64_t q_batch, q_head, q_row;
  int64_t k_batch, k_head, k_row;
  // In the workspace. A block is SCALE_ROWS rows of a head.
  float* k_mean_gmem;       // (batch, heads_kv, d)
  int8_t* q_values_gmem;    // (batch, heads_q, nq, columns)
  int8_t* k_values_gmem;    // (batch, heads_kv, nk, columns)
  float* q_scales_gmem;     // (batch, heads_q, q_blocks)
  KeyScale* k_scales_gmem;  // (batch, heads_kv, k_blocks)
  float* shifts_gmem;       // (batch, heads_q, nq): what the mean of K adds to a row's scores
  int32_t d;                // columns given
  int32_t columns;          // stored: d rounded up to 16
  int32_t heads_q, heads_kv, nq, nk;
  int32_t q_blocks, k_blocks;  // of a head
  int32_t k_ctas;              // of the second kernel: those before the ones for Q
  float scale;
};
static_assert(std::is_trivially_copyable_v<Int8Params>);

constexpr int INT8_THREADS = 256;
constexpr int INT8_MEAN_KEYS = 512;  // the mean of K is that of at most so many

}  // namespace archflash::ada
