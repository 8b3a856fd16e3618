// images: dropout_f16 dropout_bf16
// one text
// The forward and backward kernels for fp16 and bf16 inputs with dropout. Their tiles are in
// config.cuh and backward_config.cuh.
#include "common/instantiate.cuh"
#include "hopper/attention_bwd.cuh"
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_dropout), attention_fwd, D64Dropout)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_dropout), attention_fwd, D128Dropout)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d64_dropout), attention_bwd, BackwardD64Dropout)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_bwd, d128_dropout), attention_bwd, BackwardD128Dropout)
