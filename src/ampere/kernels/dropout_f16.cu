// The kernels for fp16 inputs with dropout. dropout_config.cuh has their tiles.
#include "ampere/dropout_config.cuh"
#include "common/mma_sync/dropout_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_DROPOUT_KERNEL(ampere_attention_fwd_f16_d64_large_dropout, D64LargeDropout<DType::F16>)
ARCHFLASH_DROPOUT_KERNEL(ampere_attention_fwd_f16_d64_medium_dropout, D64MediumDropout<DType::F16>)
ARCHFLASH_DROPOUT_KERNEL(ampere_attention_fwd_f16_d128_dropout, D128Dropout<DType::F16>)
ARCHFLASH_DROPOUT_KERNEL(ampere_attention_fwd_f16_d256_dropout, D256Dropout<DType::F16>)
