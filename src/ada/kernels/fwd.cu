// images: fwd_f16 fwd_bf16
// targets: 89:89,90,ptx
// one text
// The kernels for fp16 and bf16 inputs. config.cuh has their tiles. They are made for 8.9
// and checked on 9.0; on newer GPUs other folders come first.
#include "ada/config.cuh"
#include "common/device/combine_splits.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ada;

ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d64), mma_sync::attention_fwd, D64)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d64_few), mma_sync::attention_fwd, D64Few)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d96), mma_sync::attention_fwd, D96)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d96_few), mma_sync::attention_fwd, D96Few)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d128), mma_sync::attention_fwd, D128)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d192), mma_sync::attention_fwd, D192)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d192_few), mma_sync::attention_fwd, D192Few)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d256), mma_sync::attention_fwd, D256)
ARCHFLASH_KERNEL(KERNEL(ada_attention_fwd, d256_few), mma_sync::attention_fwd, D256Few)
ARCHFLASH_ENTRY(KERNEL(ada_combine), (32 * COMBINE_WARPS), device::combine_splits<DTYPE>)
