// images: bwd_wide_f16 bwd_wide_bf16
// targets: 90:90,100,ptx
// one text
// The backward kernels for fp16 and bf16 inputs that need more shared memory than 8.x and 12.x
// have: without masks as data, and those with dropout. backward_config.cuh has their tiles.
#include "ampere/backward_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_wide), mma_sync::fused_bwd, D64Wide)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide), mma_sync::fused_bwd, D128Wide)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_wide), mma_sync::fused_bwd, D192Wide)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_wide), mma_sync::fused_bwd, D256Wide)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_wide_dropout), mma_sync::fused_bwd,
                 BackwardD128WideDropout)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_wide_dropout), mma_sync::fused_bwd,
                 BackwardD256WideDropout)
