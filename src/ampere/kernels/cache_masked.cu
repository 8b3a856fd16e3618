// images: cache_masked_f16 cache_masked_bf16
// one text
// The kernels for fp16 and bf16 inputs with a KV cache and masks as data. config.cuh has their
// tiles.
#include "ampere/config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/masked_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_cache_masked), mma_sync::masked_fwd,
                 D64MaskedCache)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_cache_masked), mma_sync::masked_fwd,
                 D128MaskedCache)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_cache_masked), mma_sync::masked_fwd,
                 D256MaskedCache)
