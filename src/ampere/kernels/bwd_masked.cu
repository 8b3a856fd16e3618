// images: bwd_masked_f16 bwd_masked_bf16
// one text
// The backward kernels for fp16 and bf16 inputs with masks as data or dropout. backward_config.cuh
// has their tiles.
#include "ampere/backward_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_masked), mma_sync::fused_bwd, D64Masked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_masked), mma_sync::fused_bwd, D128Masked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_values_masked), mma_sync::attention_bwd,
                 D256ValuesMasked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_keys_masked), mma_sync::attention_bwd,
                 D256KeysMasked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_queries_masked), mma_sync::attention_bwd,
                 D256QueriesMasked)
