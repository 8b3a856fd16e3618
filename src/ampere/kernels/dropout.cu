// images: dropout_f16 dropout_bf16
// one text
// The kernels for fp16 and bf16 inputs with dropout. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_large_dropout), mma_sync::attention_fwd,
                 D64LargeDropout)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_medium_dropout), mma_sync::attention_fwd,
                 D64MediumDropout)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_dropout), mma_sync::attention_fwd, D96Dropout)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_dropout), mma_sync::attention_fwd, D128Dropout)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_dropout), mma_sync::attention_fwd, D256Dropout)
