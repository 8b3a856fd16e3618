// The backward kernels for fp16 inputs. backward_config.cuh has their tiles.
#include "ampere/backward_config.cuh"
#include "common/math/backward_rows.cuh"
#include "common/mma_sync/attention_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_BACKWARD_ROWS_KERNEL(ampere_backward_rows_f16, DType::F16)
ARCHFLASH_BACKWARD_SINKS_KERNEL(ampere_backward_sinks_f16)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d64_keys, D64Keys<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d64_queries, D64Queries<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d128_keys, D128Keys<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d128_queries, D128Queries<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d192_keys, D192Keys<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d192_queries, D192Queries<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d256_values, D256Values<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d256_keys, D256Keys<DType::F16>)
ARCHFLASH_BACKWARD_KERNEL(ampere_attention_bwd_f16_d256_queries, D256Queries<DType::F16>)
