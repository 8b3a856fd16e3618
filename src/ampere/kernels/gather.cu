// images: gather_f16 gather_bf16
// one text
// The kernels for lists of keys in fp16 and bf16. gather_config.cuh has their tiles.
#include "ampere/gather_config.cuh"
#include "ampere/gather_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_gather), gather_fwd, D64Gather)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_gather), gather_fwd, D128Gather)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_gather), gather_fwd, D256Gather)
