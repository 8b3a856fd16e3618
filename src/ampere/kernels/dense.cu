// images: dense_f16 dense_bf16
// targets: 80:80,ptx 90:90
// one text
// 80 as 90
// The kernels for fp16 and bf16 inputs of which every query sees every key. dense_config.cuh has
// their tiles.
#include "ampere/dense_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/dense_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_dense), mma_sync::dense_fwd, D32Dense)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_dense_medium), mma_sync::dense_fwd,
                 D32DenseMedium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_dense_few), mma_sync::dense_fwd, D32DenseFew)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_dense_short), mma_sync::dense_fwd, D64DenseShort)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_dense), mma_sync::dense_fwd, D64Dense)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_dense_few), mma_sync::dense_fwd, D64DenseFew)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d80_dense), mma_sync::dense_fwd, D80Dense)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d80_dense_few), mma_sync::dense_fwd, D80DenseFew)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_dense), mma_sync::dense_fwd, D96Dense)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_dense_few), mma_sync::dense_fwd, D96DenseFew)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_dense), mma_sync::dense_fwd, D128Dense)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_dense_few), mma_sync::dense_fwd, D128DenseFew)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d160_dense), mma_sync::dense_fwd, D160Dense)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d192_dense), mma_sync::dense_fwd, D192Dense)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_dense), mma_sync::dense_fwd, D256Dense)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_dense_dropout), mma_sync::dense_fwd,
                 D64DenseDropout)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_dense_few_dropout), mma_sync::dense_fwd,
                 D64DenseFewDropout)
