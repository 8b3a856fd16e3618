// images: bwd_packed_f16 bwd_packed_bf16
// targets: 90:90
// one text
// The backward kernels of bwd_plain.cu for packed sequences. plain_config.cuh has their tiles.
#include "ampere/plain_config.cuh"
#include "common/instantiate.cuh"
#include "common/kernel_entry.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide_packed), mma_sync::fused_bwd,
                 D64WidePacked<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide_packed_bulk), mma_sync::fused_bwd,
                 D64WidePackedBulk<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide_packed_only), mma_sync::fused_bwd,
                 D64WidePackedOnly<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d96_packed), mma_sync::fused_bwd, D96Packed<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d96_packed_only), mma_sync::fused_bwd,
                 D96PackedOnly<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_packed), mma_sync::fused_bwd,
                 D128WidePacked<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_packed_bulk), mma_sync::fused_bwd,
                 D128WidePackedBulk<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_packed_only), mma_sync::fused_bwd,
                 D128WidePackedOnly<DTYPE>)
