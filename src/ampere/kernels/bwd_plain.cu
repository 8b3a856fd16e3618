// images: bwd_plain_f16 bwd_plain_bf16
// targets: 90:90
// one text
// The backward kernels for fp16 and bf16 inputs without packed sequences, rules for scores, masks
// as data and dropout, whose CTAs may share out tiles, and the kernel that adds up what they leave.
// plain_config.cuh has their tiles.
#include "ampere/plain_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ENTRY(KERNEL(ampere_backward_dq, parts), (BACKWARD_DQ_THREADS),
                mma_sync::dq_and_parts<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d32_plain), mma_sync::fused_bwd, D32Plain)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide_plain), mma_sync::fused_bwd, D64WidePlain)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide_bulk), mma_sync::fused_bwd, D64WideBulk)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_plain), mma_sync::fused_bwd, D64Plain)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d96_plain), mma_sync::fused_bwd, D96Plain)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_plain), mma_sync::fused_bwd, D128WidePlain)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_bulk), mma_sync::fused_bwd, D128WideBulk)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_wide_plain), mma_sync::fused_bwd, D192WidePlain)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_wide_plain), mma_sync::fused_bwd, D256WidePlain)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_wide_bulk), mma_sync::fused_bwd, D192WideBulk)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d160_plain), mma_sync::fused_bwd, D160Plain)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_128_plain), mma_sync::fused_bwd, D192V128Plain)
