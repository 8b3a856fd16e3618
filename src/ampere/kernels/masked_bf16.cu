// The kernels for bf16 inputs with masks as data. masked_config.cuh has their tiles.
#include "ampere/masked_config.cuh"
#include "common/mma_sync/masked_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_MASKED_KERNEL(ampere_attention_fwd_bf16_d64_masked, D64Masked<DType::BF16>)
ARCHFLASH_MASKED_KERNEL(ampere_attention_fwd_bf16_d128_masked, D128Masked<DType::BF16>)
ARCHFLASH_MASKED_KERNEL(ampere_attention_fwd_bf16_d256_masked, D256Masked<DType::BF16>)
