// The kernels for fp16 inputs with masks as data. masked_config.cuh has their tiles.
#include "ampere/masked_config.cuh"
#include "common/mma_sync/masked_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_MASKED_KERNEL(ampere_attention_fwd_f16_d64_masked, D64Masked<DType::F16>)
ARCHFLASH_MASKED_KERNEL(ampere_attention_fwd_f16_d128_masked, D128Masked<DType::F16>)
ARCHFLASH_MASKED_KERNEL(ampere_attention_fwd_f16_d256_masked, D256Masked<DType::F16>)
