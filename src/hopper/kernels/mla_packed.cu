// images: mla_packed_bf16
// The kernels for lists of packed latent rows. mla_gather_config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "hopper/latent/mla_fwd.cuh"
#include "hopper/latent/mla_gather_config.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, mla_packed), mla_fwd, MlaPackedConfig<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, mla_packed_pair), mla_fwd, MlaPackedPairConfig<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, mla_packed_capped), mla_fwd,
                 MlaPackedConfig<DTYPE, true>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, mla_packed_pair_capped), mla_fwd,
                 MlaPackedPairConfig<DTYPE, true>)
