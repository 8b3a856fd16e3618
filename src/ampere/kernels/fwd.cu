// images: fwd_f16 fwd_bf16
// one text
// The kernels for fp16 and bf16 inputs; fwd_small.cu has those for GPUs with less shared memory.
// config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/device/combine_splits.cuh"
#include "common/instantiate.cuh"
#include "common/kernel_entry.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_large), mma_sync::attention_fwd, D32Large<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_medium), mma_sync::attention_fwd,
                 D32Medium<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_few), mma_sync::attention_fwd, D32Few<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_large), mma_sync::attention_fwd, D64Large<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_medium), mma_sync::attention_fwd,
                 D64Medium<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_short), mma_sync::attention_fwd, D64Short<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_groups), mma_sync::attention_fwd,
                 D64Groups<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_few), mma_sync::attention_fwd, D64Few<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_large), mma_sync::attention_fwd, D96Large<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_few), mma_sync::attention_fwd, D96Few<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_large), mma_sync::attention_fwd,
                 D128Large<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_groups), mma_sync::attention_fwd,
                 D128Groups<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_groups_few), mma_sync::attention_fwd,
                 D128GroupsFew<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_few), mma_sync::attention_fwd, D128Few<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d192_large), mma_sync::attention_fwd,
                 D192Large<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d192_few), mma_sync::attention_fwd, D192Few<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_large), mma_sync::attention_fwd,
                 D256Large<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_few), mma_sync::attention_fwd, D256Few<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(ampere_combine), (32 * COMBINE_WARPS), device::combine_splits<DTYPE>)
