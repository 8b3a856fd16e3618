// The parameter blocks of ada's own kernels. Its kernel for 16-bit inputs takes AttentionParams.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/descales.h"
#include "common/dtype.h"

namespace archflash::ada {

// The kernel for 8-bit inputs.
struct Params {
  // The strides of q, k and v count units of 16 bits, because the kernel reads pairs of elements.
  // tanh_scale is always set.
  AttentionParams attention;
  Descales descales;
  DType out_dtype;  // F16 or BF16
};

// The scale of a block of int8 K, and its keys that have numbers which are not finite. Such a key
// makes the rows that see it NaN, and no other row.
struct alignas(16) KeyScale {
  float scale;                          // an integer times this is the number that it stands for
  uint32_t any_nonfinite;               // whether a bit of `nonfinite` is set
  uint32_t nonfinite[SCALE_ROWS / 32];  // one bit for each key
};

// The two kernels that convert Q and K to int8, and the one that computes attention.
struct Int8Params {
  // Read by the last kernel. Its q and k are what the other two wrote: (batch, heads, rows,
  // columns) in rows of whole 16 bytes, strides in units of 16 bits. v and out are the caller's.
  AttentionParams attention;
  // The caller's q and k. Strides in elements.
  const void* q_gmem;  // (batch, heads_q, nq, d)
  const void* k_gmem;  // (batch, heads_kv, nk, d)
  int64_t q_batch, q_head, q_row;
  int64_t k_batch, k_head, k_row;
  // The workspace. A block is SCALE_ROWS rows of a head.
  float* k_mean_gmem;       // (batch, heads_kv, d)
  int8_t* q_values_gmem;    // (batch, heads_q, nq, columns)
  int8_t* k_values_gmem;    // (batch, heads_kv, nk, columns)
  float* q_scales_gmem;     // (batch, heads_q, q_blocks)
  KeyScale* k_scales_gmem;  // (batch, heads_kv, k_blocks)
  float* shifts_gmem;       // (batch, heads_q, nq): what the mean of K adds to a row's scores
  int32_t d;                // columns of the caller's q and k
  int32_t columns;          // columns stored: d rounded up to a multiple of 16
  int32_t heads_q, heads_kv, nq, nk;
  int32_t q_blocks, k_blocks;  // blocks of a head
  int32_t k_ctas;              // the first CTAs of the second kernel convert K, the rest Q
  float scale;                 // multiplies q.k
};

constexpr int INT8_THREADS = 256;
constexpr int INT8_MEAN_KEYS = 512;  // most keys that enter the mean of K

}  // namespace archflash::ada
