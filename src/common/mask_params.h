// The parameters of kernels that take masks as data: attn_mask, key_ranges, alibi_slopes and
// block_mask. core_set.cpp writes them, the kernels with MASKED in their Config read them.
#pragma once

#include <cstdint>

namespace archflash {

constexpr int MOST_RANGES = 4;  // ranges of keys that a query may have
constexpr int MASK_BLOCK = 64;  // rows and keys of a block of block_mask

// What a block of block_mask says of its rows and keys.
constexpr uint8_t BLOCK_UNSEEN = 0;  // no row sees any key
constexpr uint8_t BLOCK_FULL = 2;    // attn_mask keeps every key and adds nothing
// Everything else: attn_mask decides.

// The elements of attn_mask.
enum class MaskElement : int32_t { None = 0, Bool = 1, F32 = 2, SixteenBits = 3 };

// Strides are in elements, and 0 along a dimension that is broadcast.
struct MaskParams {
  const void* mask_gmem;       // attn_mask, (batch, heads_q, nq, nk); null: none
  const int32_t* ranges_gmem;  // key_ranges, (batch, heads_q, nq, ranges, 2); null: none
  const float* slopes_gmem;    // alibi_slopes, (batch, heads_q); null: none
  const uint8_t* blocks_gmem;  // block_mask, (batch, heads_q, row blocks, key blocks); null: none
  int64_t mask_batch, mask_head, mask_row, mask_key;
  int64_t ranges_batch, ranges_head, ranges_row;
  int64_t slopes_batch, slopes_head;
  int64_t blocks_batch, blocks_head, blocks_row;
  int32_t ranges;            // of each query, at most MOST_RANGES
  MaskElement mask_element;  // 16 bits: the dtype of the inputs
  // Neighbouring elements of attn_mask that can be read at once, the first at a multiple of as many
  // keys: 16 or 4 of bool, 2 of others; 0: each on its own.
  int32_t mask_step;
  int32_t unused;
};

}  // namespace archflash
