// images: mla_gather_f16 mla_gather_bf16
// one text
// The kernels for chosen rows of latent caches in fp16 and bf16. mla_gather_config.cuh has their
// tile.
#include "common/device/combine_splits.cuh"
#include "common/instantiate.cuh"
#include "hopper/latent/mla_fwd.cuh"
#include "hopper/latent/mla_gather_config.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, mla_gather), mla_fwd, MlaGatherConfig<DTYPE>)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, mla_gather_capped), mla_fwd,
                 MlaGatherConfig<DTYPE, true>)
