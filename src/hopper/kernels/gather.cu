// images: gather_f16 gather_bf16
// one text
// The kernels for listed rows of K and V in fp16 and bf16. gather_config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "hopper/lists/gather_config.cuh"
#include "hopper/lists/gather_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_gather), gather_fwd, D64Gather)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_gather_large), gather_fwd, D64GatherLarge)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_gather), gather_fwd, D128Gather)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_gather_large), gather_fwd, D128GatherLarge)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_gather), gather_fwd, D256Gather)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_gather_large), gather_fwd, D256GatherLarge)
