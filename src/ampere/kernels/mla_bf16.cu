// The kernels for latent caches in bf16. mla_config.cuh has their tile.
#include "ampere/mla_config.cuh"
#include "ampere/mla_fwd.cuh"
#include "common/math/combine_splits.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_MLA_KERNEL(ampere_attention_fwd_bf16_mla, MlaConfig<DType::BF16>)
ARCHFLASH_COMBINE_KERNEL(ampere_combine_bf16_mla, DType::BF16, MlaConfig<DType::BF16>::HEAD_DIM_V)
