// The backward kernels for bf16 inputs with masks as data or dropout. backward_config.cuh has their
// tiles.
#include "ampere/backward_config.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d64_masked, D64Masked<DType::BF16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d128_masked, D128Masked<DType::BF16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d256_values_masked,
                          D256ValuesMasked<DType::BF16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d256_keys_masked, D256KeysMasked<DType::BF16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d256_queries_masked,
                          D256QueriesMasked<DType::BF16>)
