// The backward kernels for fp32 inputs. backward_config.cuh has their tiles.
#include "common/math/backward_rows.cuh"
#include "common/math/backward_sums.cuh"
#include "simt/attention_bwd.cuh"
#include "simt/tiled_bwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_BACKWARD_ROWS_KERNEL(simt_backward_rows_f32, DType::F32)
ARCHFLASH_BACKWARD_SINKS_KERNEL(simt_backward_sinks_f32)
ARCHFLASH_SIMT_BACKWARD_DQ_KERNEL(simt_backward_dq_f32)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d64_keys, BackwardD64<Owns::Keys>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d64_queries, BackwardD64<Owns::Queries>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d128_keys, BackwardD128<Owns::Keys>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d128_queries, BackwardD128<Owns::Queries>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d256_keys, BackwardD256<Owns::Keys>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d256_queries, BackwardD256<Owns::Queries>)
ARCHFLASH_SIMT_TILED_BACKWARD_KERNEL(simt_attention_bwd_f32_d64_large, TiledD64)
ARCHFLASH_SIMT_TILED_BACKWARD_KERNEL(simt_attention_bwd_f32_d128_large, TiledD128)
