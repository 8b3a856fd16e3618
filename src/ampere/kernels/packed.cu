// images: packed_f16 packed_bf16
// targets: 80:80,ptx 90:90
// one text
// 80 as 90
// The kernels for fp16 and bf16 inputs of packed sequences whose rows see all keys up to one.
// bounded_config.cuh has their tiles.
#include "ampere/bounded_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/bounded_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_packed), mma_sync::packed_fwd, D32Packed)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_packed_large), mma_sync::packed_fwd,
                 D32PackedLarge)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_packed), mma_sync::packed_fwd, D64Packed)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_packed_large), mma_sync::packed_fwd,
                 D64PackedLarge)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d80_packed), mma_sync::packed_fwd, D80Packed)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d80_packed_large), mma_sync::packed_fwd,
                 D80PackedLarge)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_packed), mma_sync::packed_fwd, D96Packed)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_packed_large), mma_sync::packed_fwd,
                 D96PackedLarge)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_packed), mma_sync::packed_fwd, D128Packed)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_packed_large), mma_sync::packed_fwd,
                 D128PackedLarge)
