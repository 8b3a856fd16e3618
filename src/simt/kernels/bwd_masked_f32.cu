// The backward kernels with masks as data or dropout. backward_config.cuh has their tiles.
#include "simt/attention_bwd.cuh"
#include "simt/backward_config.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d64_keys_masked,
                               MaskedBackwardConfig<BackwardD64<Owns::Keys>>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d64_queries_masked,
                               MaskedBackwardConfig<BackwardD64<Owns::Queries>>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d128_keys_masked,
                               MaskedBackwardConfig<BackwardD128<Owns::Keys>>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d128_queries_masked,
                               MaskedBackwardConfig<BackwardD128<Owns::Queries>>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d256_keys_masked,
                               MaskedBackwardConfig<BackwardD256<Owns::Keys>>)
ARCHFLASH_SIMT_BACKWARD_KERNEL(simt_attention_bwd_f32_d256_queries_masked,
                               MaskedBackwardConfig<BackwardD256<Owns::Queries>>)
