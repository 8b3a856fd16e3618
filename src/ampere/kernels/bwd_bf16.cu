// The backward kernels for bf16 inputs. backward_config.cuh has their tiles.
#include "ampere/backward_config.cuh"
#include "common/math/backward_rows.cuh"
#include "common/math/backward_sums.cuh"
#include "common/mma_sync/attention_bwd.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_BACKWARD_ROWS_KERNEL(ampere_backward_rows_bf16, DType::BF16)
ARCHFLASH_BACKWARD_SINKS_KERNEL(ampere_backward_sinks_bf16)
ARCHFLASH_BACKWARD_DQ_KERNEL(ampere_backward_dq_bf16, DType::BF16)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d64_wide, D64Wide<DType::BF16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d64, D64<DType::BF16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d128_wide, D128Wide<DType::BF16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d128, D128<DType::BF16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d192_keys, D192Keys<DType::BF16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d192_queries, D192Queries<DType::BF16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d256_wide, D256Wide<DType::BF16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d256_values, D256Values<DType::BF16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d256_keys, D256Keys<DType::BF16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_bf16_d256_queries, D256Queries<DType::BF16>)
