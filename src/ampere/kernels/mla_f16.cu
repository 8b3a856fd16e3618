// The kernels for latent caches in f16. mla_config.cuh has their tile.
#include "ampere/mla_config.cuh"
#include "ampere/mla_fwd.cuh"
#include "common/math/combine_splits.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_MLA_KERNEL(ampere_attention_fwd_f16_mla, MlaConfig<DType::F16>)
ARCHFLASH_COMBINE_KERNEL(ampere_combine_f16_mla, DType::F16, MlaConfig<DType::F16>::HEAD_DIM_V)
