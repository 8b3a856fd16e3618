// The kernels for fp16 inputs with masks as data. masked_config.cuh has their tiles.
#include "hopper/masked_config.cuh"
#include "hopper/masked_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_f16_d64_masked, D64Masked<DType::F16>)
ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_f16_d128_masked, D128Masked<DType::F16>)
ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_f16_d256_masked, D256Masked<DType::F16>)
