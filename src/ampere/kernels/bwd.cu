// images: bwd_f16 bwd_bf16
// The backward kernels for fp16 and bf16 inputs. backward_config.cuh has their tiles.
#include "ampere/backward_config.cuh"
#include "common/instantiate.cuh"
#include "common/math/backward_rows.cuh"
#include "common/math/backward_sums.cuh"
#include "common/mma_sync/attention_bwd.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_BACKWARD_ROWS_KERNEL(KERNEL(ampere_backward_rows), DTYPE)
ARCHFLASH_BACKWARD_SINKS_KERNEL(KERNEL(ampere_backward_sinks))
ARCHFLASH_BACKWARD_DQ_KERNEL(KERNEL(ampere_backward_dq), DTYPE)
ARCHFLASH_FUSED_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d64_wide), D64Wide<DTYPE>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d64), D64<DTYPE>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d128_wide), D128Wide<DTYPE>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d128), D128<DTYPE>)
ARCHFLASH_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d192_keys), D192Keys<DTYPE>)
ARCHFLASH_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d192_queries), D192Queries<DTYPE>)
ARCHFLASH_FUSED_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d256_wide), D256Wide<DTYPE>)
ARCHFLASH_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d256_values), D256Values<DTYPE>)
ARCHFLASH_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d256_keys), D256Keys<DTYPE>)
ARCHFLASH_BACKWARD_KERNEL(KERNEL(ampere_attention_bwd, d256_queries), D256Queries<DTYPE>)
