// images: mla_f16 mla_bf16
// one text
// The kernels for latent caches in fp16 and bf16. mla_config.cuh has their tile.
#include "common/device/combine_splits.cuh"
#include "common/instantiate.cuh"
#include "hopper/latent/mla_config.cuh"
#include "hopper/latent/mla_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, mla), mla_fwd, MlaConfig<DTYPE>)
ARCHFLASH_ENTRY(KERNEL(hopper_combine, mla), (32 * COMBINE_WARPS),
                device::combine_splits<DTYPE, MlaConfig<DTYPE>::HEAD_DIM_V>)
ARCHFLASH_ENTRY(KERNEL(hopper_combine, mla_f32_out), (32 * COMBINE_WARPS),
                device::combine_splits<DType::F32, MlaConfig<DTYPE>::HEAD_DIM_V>)
