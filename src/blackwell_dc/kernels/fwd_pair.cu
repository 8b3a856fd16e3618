// Pairs of CTAs that multiply together, for long sequences. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d128_pair, D128Pair<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d128_pair, D128Pair<DType::BF16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_f16_d192_pair, D192Pair<DType::F16>)
ARCHFLASH_BLACKWELL_DC_KERNEL(blackwell_dc_attention_fwd_bf16_d192_pair, D192Pair<DType::BF16>)
