// The lists of keys that queries see, as kernels are told of them: key_indices and topk_lengths.
#pragma once

#include <cstdint>

namespace archflash {

// Strides are in elements, `head` counts heads of K, `row` is the step from one list to the next;
// 0 along a dimension that is broadcast.
struct KeyLists {
  const int32_t* indices_gmem;  // key_indices, (batch, heads_kv, lists, topk)
  const int32_t* lengths_gmem;  // topk_lengths, (batch, heads_kv, lists); null: all entries count
  int64_t batch, head, row;
  int64_t lengths_batch, lengths_head, lengths_row;
  int32_t topk;       // entries of a list
  int32_t list_rows;  // neighbouring query rows that share a list
  int32_t physical;   // entries are places in the cache, block * block_rows + row: no positions
  int32_t unused;
};

}  // namespace archflash
