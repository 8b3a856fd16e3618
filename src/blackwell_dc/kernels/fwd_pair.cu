// images: fwd_pair_f16 fwd_pair_bf16
// one text
// Pairs of CTAs that multiply together, for long sequences. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d128_pair), attention_fwd, D128Pair)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d192_pair), attention_fwd, D192Pair)
