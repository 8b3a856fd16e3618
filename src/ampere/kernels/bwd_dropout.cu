// images: bwd_dropout_f16 bwd_dropout_bf16
// one text
// The backward kernels for fp16 and bf16 inputs with dropout and without masks as data.
// backward_config.cuh has their tiles.
#include "ampere/backward_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64_dropout), mma_sync::fused_bwd, BackwardD64Dropout)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128_dropout), mma_sync::fused_bwd,
                 BackwardD128Dropout)
