// The kernel for latent caches of 8-bit numbers in f16. mla_config.cuh has its tile.
#include "ampere/mla_config.cuh"
#include "ampere/mla_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_MLA_KERNEL(ampere_attention_fwd_f16_mla_fp8, MlaFp8Config<DType::F16>)
