// The one parameter of the hopper kernels that take mask tensors.
#pragma once

#include <cstdint>

#include "common/mask_params.h"
#include "common/tensor_map.h"
#include "hopper/params.h"

namespace archflash::hopper {

// The parameters of kernels whose lanes read the masks themselves.
struct MaskedParams {
  Params call;
  MaskParams masks;
  // The numbers of the last `ordered` tiles in the order in which they are taken, in the workspace.
  int32_t* order_gmem;
  int32_t ordered;
};

// The first and the last key in any range of the rows of a row block; first > last if there is
// none.
struct SeenKeys {
  int32_t first, last;
};

// The parameters of kernels that read a summary of the masks, (batch, heads, row blocks, key
// blocks). A dimension along which the mask is broadcast has size 1; of key_ranges row blocks have
// not.
struct SummarizedParams {
  Params call;
  MaskParams masks;
  uint8_t* states_gmem;      // a byte for each block, in the workspace
  uint32_t* bits_gmem;       // SUMMARY_WORDS for each block of attn_mask, in the workspace
  SeenKeys* seen_keys_gmem;  // of key_ranges: for each row block, in the workspace
  // HIGH_BYTES for each block of what is added, in the workspace; null: blocks of lowest elements
  // are computed, too.
  uint8_t* high_rows_gmem;
  // A copy of attn_mask that TMA can read, (batch, heads, rows, copied_row), in the workspace;
  // null: TMA reads attn_mask itself.
  uint32_t* copied_gmem;
  int64_t copied_row;   // in words of two elements
  int32_t copied_rows;  // of a head
  int32_t mask_batches, mask_heads, row_blocks, key_blocks;
  float factor;        // of elements that are added to scores before these are scaled
  TensorMap mask_map;  // attn_mask, where its elements are added
};

// The parameters of the kernel that copies an attn_mask of 16 bits to where TMA can read it:
// (batch, heads, rows, row_words), with size 1 along dimensions along which it is broadcast.
struct CopiedMaskParams {
  const uint16_t* mask_gmem;
  uint32_t* copied_gmem;  // in the workspace
  int32_t* taken_gmem;    // the counter of tiles, which the kernel clears; null: there is none
  int64_t mask_batch, mask_head, mask_row, mask_key;  // strides, in elements
  int64_t row_words;                                  // from one row of the copy to the next
  int32_t batches, heads, rows, keys;
};

}  // namespace archflash::hopper
