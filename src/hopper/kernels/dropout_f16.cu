// The forward and backward kernels for fp16 inputs with dropout. Their tiles are in config.cuh and
// backward_config.cuh.
#include "hopper/attention_bwd.cuh"
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d64_dropout, D64Dropout<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d128_dropout, D128Dropout<DType::F16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_f16_d64_dropout,
                                 BackwardD64Dropout<DType::F16>)
ARCHFLASH_HOPPER_BACKWARD_KERNEL(hopper_attention_bwd_f16_d128_dropout,
                                 BackwardD128Dropout<DType::F16>)
