// The backward kernels for fp32 inputs. backward_config.cuh has their tiles.
#include "common/device/backward_rows.cuh"
#include "common/device/backward_sums.cuh"
#include "common/kernel_entry.cuh"
#include "simt/attention_bwd.cuh"
#include "simt/tiled_bwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_BACKWARD_ROWS_KERNEL(simt_backward_rows_f32, DType::F32)
ARCHFLASH_ENTRY(simt_backward_sinks_f32, (BACKWARD_SINKS_THREADS), device::backward_sinks)
ARCHFLASH_ENTRY(simt_backward_dq_f32, (BACKWARD_DQ_THREADS), tiled_dq)
ARCHFLASH_ENTRY(simt_backward_shares_f32, (BACKWARD_DQ_THREADS), add_shares)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d64_keys, attention_bwd, BackwardD64<Owns::Keys>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d64_queries, attention_bwd, BackwardD64<Owns::Queries>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d128_keys, attention_bwd, BackwardD128<Owns::Keys>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d128_queries, attention_bwd, BackwardD128<Owns::Queries>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d256_keys, attention_bwd, BackwardD256<Owns::Keys>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d256_queries, attention_bwd, BackwardD256<Owns::Queries>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d64_large, tiled_bwd, TiledD64)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d128_large, tiled_bwd, TiledD128)
