// images: bwd_d96_f16 bwd_d96_bf16
// targets: 80:80,ptx 90:90,100
// one text
// 80 as 90
// The backward kernel for fp16 and bf16 inputs of head dimensions up to 96, which needs more shared
// memory than 8.6, 8.9 and 12.x have. backward_config.cuh has its tile.
#include "ampere/backward_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d96), mma_sync::fused_bwd, D96)
