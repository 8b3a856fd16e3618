// Pairs of CTAs that multiply together, for long sequences. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_f16_d128_pair, attention_fwd, D128Pair<DType::F16>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_bf16_d128_pair, attention_fwd, D128Pair<DType::BF16>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_f16_d192_pair, attention_fwd, D192Pair<DType::F16>)
ARCHFLASH_KERNEL(blackwell_dc_attention_fwd_bf16_d192_pair, attention_fwd, D192Pair<DType::BF16>)
