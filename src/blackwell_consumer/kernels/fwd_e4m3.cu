// e4m3 inputs. Tiles: config.cuh.
#include "blackwell_consumer/attention_fwd.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::blackwell_consumer;

ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e4m3_d64_pair, attention_fwd,
                 Fp8D64Pair<DType::E4M3>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e4m3_d64_few, attention_fwd,
                 Fp8D64Few<DType::E4M3>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e4m3_d128_large, attention_fwd,
                 Fp8D128Large<DType::E4M3>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e4m3_d128_few, attention_fwd,
                 Fp8D128Few<DType::E4M3>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e4m3_d192, attention_fwd, Fp8D192<DType::E4M3>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e4m3_d256, attention_fwd, Fp8D256<DType::E4M3>)
