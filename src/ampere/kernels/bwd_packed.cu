// images: bwd_packed_f16 bwd_packed_bf16
// targets: 90:90
// one text
// The backward kernels of bwd_plain.cu for packed sequences. plain_config.cuh has their tiles.
#include "ampere/plain_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide_packed), mma_sync::fused_bwd, D64WidePacked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide_packed_bulk), mma_sync::fused_bwd,
                 D64WidePackedBulk)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide_packed_only), mma_sync::fused_bwd,
                 D64WidePackedOnly)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d96_packed), mma_sync::fused_bwd, D96Packed)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d96_packed_only), mma_sync::fused_bwd, D96PackedOnly)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_packed), mma_sync::fused_bwd,
                 D128WidePacked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_packed_bulk), mma_sync::fused_bwd,
                 D128WidePackedBulk)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_packed_only), mma_sync::fused_bwd,
                 D128WidePackedOnly)
