// The backward kernels for fp16 inputs. backward_config.cuh has their tiles.
#include "ampere/backward_config.cuh"
#include "common/math/backward_rows.cuh"
#include "common/math/backward_sums.cuh"
#include "common/mma_sync/attention_bwd.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_BACKWARD_ROWS_KERNEL(ampere_backward_rows_f16, DType::F16)
ARCHFLASH_BACKWARD_SINKS_KERNEL(ampere_backward_sinks_f16)
ARCHFLASH_BACKWARD_DQ_KERNEL(ampere_backward_dq_f16, DType::F16)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_f16_d64_wide, D64Wide<DType::F16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_f16_d64, D64<DType::F16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_f16_d128_wide, D128Wide<DType::F16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_f16_d128, D128<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d192_keys, D192Keys<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d192_queries, D192Queries<DType::F16>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(ampere_attention_bwd_f16_d256_wide, D256Wide<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d256_values, D256Values<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d256_keys, D256Keys<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d256_queries, D256Queries<DType::F16>)
