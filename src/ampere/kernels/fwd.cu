// images: fwd_f16 fwd_bf16
// one text
// The kernels for fp16 and bf16 inputs; fwd_small.cu has those for GPUs with less shared memory.
// config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/device/combine_splits.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_large), mma_sync::attention_fwd, D32Large)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_medium), mma_sync::attention_fwd, D32Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_few), mma_sync::attention_fwd, D32Few)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_large), mma_sync::attention_fwd, D64Large)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_medium), mma_sync::attention_fwd, D64Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_short), mma_sync::attention_fwd, D64Short)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_groups), mma_sync::attention_fwd, D64Groups)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_few), mma_sync::attention_fwd, D64Few)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_large), mma_sync::attention_fwd, D96Large)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_few), mma_sync::attention_fwd, D96Few)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_large), mma_sync::attention_fwd, D128Large)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_groups), mma_sync::attention_fwd, D128Groups)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_groups_few), mma_sync::attention_fwd,
                 D128GroupsFew)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_few), mma_sync::attention_fwd, D128Few)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d192_large), mma_sync::attention_fwd, D192Large)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d192_few), mma_sync::attention_fwd, D192Few)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_large), mma_sync::attention_fwd, D256Large)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_few), mma_sync::attention_fwd, D256Few)
ARCHFLASH_ENTRY(KERNEL(ampere_combine), (32 * COMBINE_WARPS), device::combine_splits<DTYPE>)
