// The one parameter of the kernels of decode_fwd.cuh.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "common/mma_sync/params.h"

namespace archflash::mma_sync {

struct DecodeParams : CacheParams {
  // Where sequences may differ in length: how many shares the keys of each row have, for the
  // combining kernel, in the order of PartialEnd. Rows of one share are not combined.
  int32_t* shares_gmem;
  static constexpr size_t SHARES = sizeof(CacheParams);  // where it lies
  // And so many CTAs share out the keys of all tiles, besides one for each tile
  // (unlike_lengths.cuh); partials.splits is the most shares that a tile has. 0: all tiles have
  // partials.splits shares.
  int32_t share_ctas;
};
static_assert(sizeof(DecodeParams) == DecodeParams::SHARES + 16);

struct MaskedDecodeParams : DecodeParams {
  MaskParams masks;  // attn_mask alone
  static constexpr size_t MASKS = sizeof(DecodeParams);
};
static_assert(sizeof(MaskedDecodeParams) == MaskedDecodeParams::MASKS + sizeof(MaskParams));

// The parameter of the kernel with Config C.
template <class C>
using DecodeParamsOf = std::conditional_t<C::MASKED, MaskedDecodeParams, DecodeParams>;

// The parameter of the combining kernel of such calls.
struct CombineUnlikeParams : CombineSharesParams {
  const int32_t* shares_gmem;  // of DecodeParams; null: partials.splits
  static constexpr size_t SHARES = sizeof(CombineSharesParams);
};
static_assert(sizeof(CombineUnlikeParams) == CombineUnlikeParams::SHARES + 8);

constexpr int FEWEST_SHARE_BLOCKS = 2;  // blocks of keys of a share, where there are so many CTAs

}  // namespace archflash::mma_sync
