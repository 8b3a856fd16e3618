// images: dense_small_f16 dense_small_bf16
// targets: 80:80,ptx
// one text
// The kernels beside those of dense.cu for GPUs of 8.x. dense_config.cuh has their tiles.
#include "ampere/dense_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/dense_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_dense_small), mma_sync::dense_fwd, D64DenseSmall)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d80_dense_small), mma_sync::dense_fwd, D80DenseSmall)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_dense_small), mma_sync::dense_fwd, D96DenseSmall)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_dense_small), mma_sync::dense_fwd,
                 D128DenseSmall)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_dense_medium), mma_sync::dense_fwd,
                 D128DenseMedium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_dense_medium), mma_sync::dense_fwd,
                 D256DenseMedium)
