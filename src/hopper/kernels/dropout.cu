// images: dropout_f16 dropout_bf16
// The forward and backward kernels for fp16 and bf16 inputs with dropout. Their tiles are in
// config.cuh and backward_config.cuh.
#include "common/instantiate.cuh"
#include "hopper/attention_bwd.cuh"
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d64_dropout), D64Dropout<DTYPE>)
ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d128_dropout), D128Dropout<DTYPE>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(KERNEL(hopper_attention_bwd, d64_dropout),
                                 BackwardD64Dropout<DTYPE>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(KERNEL(hopper_attention_bwd, d128_dropout),
                                 BackwardD128Dropout<DTYPE>)
