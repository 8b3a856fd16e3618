// images: masked_f16 masked_bf16
// one text
// The kernels for fp16 and bf16 inputs with masks as data. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/masked_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_masked), mma_sync::masked_fwd, D64Masked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_masked), mma_sync::masked_fwd, D128Masked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_masked), mma_sync::masked_fwd, D256Masked)
