// fp16 inputs. Tiles: config.cuh.
#include "blackwell_consumer/attention_fwd.cuh"
#include "common/math/combine_splits.cuh"

using namespace archflash;
using namespace archflash::blackwell_consumer;

ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d64_pair,
                                    D64Pair<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d64_large,
                                    D64Large<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d64_medium,
                                    D64Medium<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d64_short,
                                    D64Short<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d64_small,
                                    D64Small<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d64_few,
                                    D64Few<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d96_large,
                                    D96Large<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d96_few,
                                    D96Few<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d128_large,
                                    D128Large<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d128_medium,
                                    D128Medium<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d128_few,
                                    D128Few<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d192_large,
                                    D192Large<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d192_few,
                                    D192Few<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d256_pair,
                                    D256Pair<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d256_large,
                                    D256Large<DType::F16>)
ARCHFLASH_BLACKWELL_CONSUMER_KERNEL(blackwell_consumer_attention_fwd_f16_d256_few,
                                    D256Few<DType::F16>)
ARCHFLASH_COMBINE_KERNEL(blackwell_consumer_combine_f16, DType::F16)
