// images: fwd_small_f16 fwd_small_bf16
// targets: 80:80,120,ptx
// one text
// The kernels of fwd.cu that GPUs of 9.0 and 10.0 have too much shared memory to need: two buffers,
// or more CTAs, fit them.
#include "ampere/config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_medium), mma_sync::attention_fwd, D96Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_medium), mma_sync::attention_fwd, D128Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_small), mma_sync::attention_fwd, D128Small)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d192_medium), mma_sync::attention_fwd, D192Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_medium), mma_sync::attention_fwd, D256Medium)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_small), mma_sync::attention_fwd, D256Small)
