// images: fwd_f16 fwd_bf16
// one text
// fp16 and bf16 inputs. Tiles: config.cuh.
#include "blackwell_dc/attention_fwd.cuh"
#include "common/device/combine_splits.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::blackwell_dc;

ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d64), attention_fwd, D64)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d96), attention_fwd, D96)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d128), attention_fwd, D128)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d192), attention_fwd, D192)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d256), attention_fwd, D256)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d64_few), attention_fwd, D64Few)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d96_few), attention_fwd, D96Few)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d128_few), attention_fwd, D128Few)
ARCHFLASH_KERNEL(KERNEL(blackwell_dc_attention_fwd, d192_few), attention_fwd, D192Few)
ARCHFLASH_ENTRY(KERNEL(blackwell_dc_combine), (32 * COMBINE_WARPS), device::combine_splits<DTYPE>)
