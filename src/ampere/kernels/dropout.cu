// images: dropout_f16 dropout_bf16
// The kernels for fp16 and bf16 inputs with dropout. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d64_large_dropout), D64LargeDropout<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d64_medium_dropout),
                           D64MediumDropout<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d128_dropout), D128Dropout<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d256_dropout), D256Dropout<DTYPE>)
