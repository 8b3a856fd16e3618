// The kernels for bf16 inputs with dropout. dropout_config.cuh has their tiles.
#include "ampere/dropout_config.cuh"
#include "common/mma_sync/dropout_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_DROPOUT_KERNEL(ampere_attention_fwd_bf16_d64_large_dropout, D64LargeDropout<DType::BF16>)
ARCHFLASH_DROPOUT_KERNEL(ampere_attention_fwd_bf16_d64_medium_dropout,
                         D64MediumDropout<DType::BF16>)
ARCHFLASH_DROPOUT_KERNEL(ampere_attention_fwd_bf16_d128_dropout, D128Dropout<DType::BF16>)
ARCHFLASH_DROPOUT_KERNEL(ampere_attention_fwd_bf16_d256_dropout, D256Dropout<DType::BF16>)
