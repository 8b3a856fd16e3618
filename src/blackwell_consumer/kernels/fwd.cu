// images: fwd_f16 fwd_bf16
// one text
// fp16 and bf16 inputs. Tiles: config.cuh.
#include "blackwell_consumer/attention_fwd.cuh"
#include "common/device/combine_splits.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::blackwell_consumer;

ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_large), attention_fwd, D64Large)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_medium), attention_fwd, D64Medium)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_short), attention_fwd, D64Short)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_small), attention_fwd, D64Small)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_few), attention_fwd, D64Few)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d96_large), attention_fwd, D96Large)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d96_few), attention_fwd, D96Few)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d128_large), attention_fwd, D128Large)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d128_medium), attention_fwd, D128Medium)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d128_few), attention_fwd, D128Few)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d192_large), attention_fwd, D192Large)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d192_few), attention_fwd, D192Few)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d256_pair), attention_fwd, D256Pair)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d256_large), attention_fwd, D256Large)
ARCHFLASH_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d256_few), attention_fwd, D256Few)
ARCHFLASH_ENTRY(KERNEL(blackwell_consumer_combine), (32 * COMBINE_WARPS),
                device::combine_splits<DTYPE>)
