// The kernels for bf16 inputs with masks as data. masked_config.cuh has their tiles.
#include "hopper/masked_config.cuh"
#include "hopper/masked_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_bf16_d64_masked, D64Masked<DType::BF16>)
ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_bf16_d128_masked, D128Masked<DType::BF16>)
ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_bf16_d256_masked, D256Masked<DType::BF16>)
