// images: bwd_medium_f16 bwd_medium_bf16
// targets: 80:80,ptx
// one text
// The backward kernels for fp16 and bf16 inputs on GPUs with 163 KB of shared memory, without masks
// as data. backward_config.cuh has their tiles.
#include "ampere/backward_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_medium), mma_sync::fused_bwd, D64Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_medium), mma_sync::fused_bwd, D128Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_128_medium), mma_sync::fused_bwd, D192V128Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_medium), mma_sync::fused_bwd, D192Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_medium), mma_sync::fused_bwd, D256Medium)
