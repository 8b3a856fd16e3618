// images: fwd_f16 fwd_bf16
// fp16 and bf16 inputs. Tiles: config.cuh.
#include "blackwell_consumer/attention_fwd.cuh"
#include "common/instantiate.cuh"
#include "common/math/combine_splits.cuh"

using namespace archflash;
using namespace archflash::blackwell_consumer;

ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_pair),
                                    D64Pair<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_large),
                                    D64Large<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_medium),
                                    D64Medium<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_short),
                                    D64Short<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_small),
                                    D64Small<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d64_few),
                                    D64Few<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d96_large),
                                    D96Large<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d96_few),
                                    D96Few<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d128_large),
                                    D128Large<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d128_medium),
                                    D128Medium<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d128_few),
                                    D128Few<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d192_large),
                                    D192Large<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d192_few),
                                    D192Few<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d256_pair),
                                    D256Pair<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d256_large),
                                    D256Large<DTYPE>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(KERNEL(blackwell_consumer_attention_fwd, d256_few),
                                    D256Few<DTYPE>)
ARCHFLASH_COMBINE_KERNEL(KERNEL(blackwell_consumer_combine), DTYPE)
