// The backward kernels with masks as data or dropout. backward_config.cuh has their tiles.
#include "common/kernel_entry.cuh"
#include "simt/attention_bwd.cuh"
#include "simt/backward_config.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_KERNEL(simt_attention_bwd_f32_d64_keys_masked, attention_bwd,
                 MaskedBackwardConfig<BackwardD64<Owns::Keys>>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d64_queries_masked, attention_bwd,
                 MaskedBackwardConfig<BackwardD64<Owns::Queries>>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d128_keys_masked, attention_bwd,
                 MaskedBackwardConfig<BackwardD128<Owns::Keys>>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d128_queries_masked, attention_bwd,
                 MaskedBackwardConfig<BackwardD128<Owns::Queries>>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d256_keys_masked, attention_bwd,
                 MaskedBackwardConfig<BackwardD256<Owns::Keys>>)
ARCHFLASH_KERNEL(simt_attention_bwd_f32_d256_queries_masked, attention_bwd,
                 MaskedBackwardConfig<BackwardD256<Owns::Queries>>)
