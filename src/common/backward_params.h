// The parameter of every kernel that computes gradients: what the forward pass was told, and what
// the backward pass reads and writes beside it.
#pragma once

#include <cstdint>

#include "common/attention_params.h"
#include "common/dtype.h"

namespace archflash {

// Whose rows a CTA owns. Owned rows stay in shared memory and their gradients in registers, while
// the rows of the other side pass by in blocks: so no two CTAs add to the same gradient.
enum class Owns { Queries, Keys };

// Which gradients a kernel computes, as bits.
constexpr int DQ = 1, DK = 2, DV = 4;

// A gradient to be written: its address, strides in elements (the batch stride is 0 with
// cu_seqlens), and how.
struct GradientParams {
  void* gmem;
  int64_t batch, head, row;
  DType dtype;         // that of the inputs, or F32
  int32_t accumulate;  // 1: what is there already is added
};

// dQ in fp32, for kernels whose CTAs own keys and add to dQ: blocks of rows of each head of q.
// common/device/backward_sums.cuh says how a block lies in memory, and clears what must be zero.
struct DqSums {
  float* gmem;
  // How many tiles of keys have added to each block, where they take turns; null: they do not.
  int32_t* turns_gmem;
  int32_t blocks;      // of a head, or of a head's packed sequences together
  int32_t block_rows;  // of a block
  int32_t columns;     // of a row, at least those of dQ
};

// `attention` is that of the call whose gradients are wanted: its out_gmem and lse_gmem are read.
struct BackwardParams {
  AttentionParams attention;

  const void*
      dout_gmem;  // the gradient of the output: (batch, heads_q, nq, dv) or (tq, heads_q, dv)
  int64_t dout_batch, dout_head, dout_row;
  const float* dlse_gmem;  // the gradient of the LSE, laid out as the LSE; null: it is 0
  void* terms_gmem;        // RowTerms of each query row, laid out as the LSE
  float* dsinks_gmem;      // (heads_q,)

  GradientParams dq, dk, dv;
  float scale;  // the factor of q.k in a score before softcap
  // How many CTAs share out the query heads of a tile of keys. With more than one each counts as a
  // head of k of its own, whose dk and dv are shares in the workspace (SharedGradientsParams).
  int32_t head_shares;
  DqSums dq_sums;
};

// The parameter of the kernel that adds up the shares of dk and dv of CTAs that share out what one
// tile of keys has to do.
struct SharedGradientsParams {
  GradientParams dk, dv;  // to be written
  const float*
      dk_shares_gmem;  // (batch, heads_kv, shares, nk, d), or with cu_seqlens without batch
  const float* dv_shares_gmem;  // likewise, with dv columns
  int32_t shares, heads_kv, nk;
  int32_t d_chunks, chunks;  // of 8 columns: of a row of dk, and of dk and dv together
  int64_t all_chunks;
};

constexpr int BACKWARD_ROWS = 64;           // of a head, whose RowTerms a CTA makes
constexpr int BACKWARD_ROWS_THREADS = 256;  // of that CTA
constexpr int BACKWARD_ROWS_LANES = 8;      // that make those of a row
constexpr int BACKWARD_DQ_THREADS = 256;    // of a CTA that makes dQ of its sums
constexpr int BACKWARD_SINKS_THREADS =
    256;  // of the CTA that sums up a head's gradient of its sink

}  // namespace archflash
