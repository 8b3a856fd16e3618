// images: bwd_only_f16 bwd_only_bf16
// targets: 90:90
// one text
// The backward kernels of bwd_plain.cu for heads whose keys are one tile. plain_config.cuh has
// their tiles.
#include "ampere/plain_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d32_few_only), mma_sync::fused_bwd, D32FewOnly)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d32_only), mma_sync::fused_bwd, D32Only)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_few_only), mma_sync::fused_bwd, D64FewOnly)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_only), mma_sync::fused_bwd, D64Only)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_only_dropout), mma_sync::fused_bwd,
                 D64OnlyDropout)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d96_only), mma_sync::fused_bwd, D96Only)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_only), mma_sync::fused_bwd, D128WideOnly)
