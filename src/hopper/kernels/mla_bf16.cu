// The kernels for latent caches in bf16. mla_config.cuh has their tile.
#include "common/math/append_kv.cuh"
#include "common/math/combine_splits.cuh"
#include "hopper/convert_cache.cuh"
#include "hopper/mla_config.cuh"
#include "hopper/mla_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_MLA_KERNEL(hopper_attention_fwd_bf16_mla, MlaConfig<DType::BF16>)
ARCHFLASH_COMBINE_KERNEL(hopper_combine_bf16_mla, DType::BF16, MlaConfig<DType::BF16>::HEAD_DIM_V)
ARCHFLASH_APPEND_KERNEL(hopper_append_bf16, DType::BF16, uint16_t)
ARCHFLASH_APPEND_KERNEL(hopper_append_bf16_fp8, DType::BF16, uint8_t)
ARCHFLASH_CONVERT_CACHE_KERNEL(hopper_convert_cache_bf16, DType::BF16)
