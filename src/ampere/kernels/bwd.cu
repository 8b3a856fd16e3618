// images: bwd_f16 bwd_bf16
// targets: 80:80,ptx 90:90,100,120
// one text
// 80 as 90
// The backward kernels for fp16 and bf16 inputs. backward_config.cuh has their tiles.
#include "ampere/backward_config.cuh"
#include "common/device/backward_rows.cuh"
#include "common/device/backward_shares.cuh"
#include "common/device/backward_sums.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/attention_bwd.cuh"
#include "common/mma_sync/fused_bwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_BACKWARD_ROWS_KERNEL(KERNEL(ampere_backward_rows), DTYPE)
ARCHFLASH_ENTRY(KERNEL(ampere_backward_sinks), (BACKWARD_SINKS_THREADS), device::backward_sinks)
ARCHFLASH_ENTRY(KERNEL(ampere_backward_dq), (BACKWARD_DQ_THREADS), device::backward_dq<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(ampere_backward_shares), (BACKWARD_DQ_THREADS), device::add_shares<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d32), mma_sync::fused_bwd, D32)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d64), mma_sync::fused_bwd, D64)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d128), mma_sync::fused_bwd, D128)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d160), mma_sync::fused_bwd, D160)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d192_128), mma_sync::fused_bwd, D192V128)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_values), mma_sync::attention_bwd, D256Values)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_keys), mma_sync::attention_bwd, D256Keys)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_bwd, d256_queries), mma_sync::attention_bwd, D256Queries)
