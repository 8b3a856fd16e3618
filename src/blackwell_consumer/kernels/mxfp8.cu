// targets: 120f:120f
// 8-bit inputs with scales of 32 numbers (MXFP8). Tiles: config.cuh.
#include "blackwell_consumer/attention_fwd.cuh"
#include "common/kernel_entry.cuh"

using namespace archflash;
using namespace archflash::blackwell_consumer;

ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e4m3_mx_d64, attention_fwd, MxD64<DType::E4M3>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e4m3_mx_d128, attention_fwd, MxD128<DType::E4M3>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e4m3_mx_d256, attention_fwd, MxD256<DType::E4M3>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e5m2_mx_d64, attention_fwd, MxD64<DType::E5M2>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e5m2_mx_d128, attention_fwd, MxD128<DType::E5M2>)
ARCHFLASH_KERNEL(blackwell_consumer_attention_fwd_e5m2_mx_d256, attention_fwd, MxD256<DType::E5M2>)
