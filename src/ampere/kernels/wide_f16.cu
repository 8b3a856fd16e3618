// The kernels for head dimensions above 256 in f16. wide_config.cuh has their tiles.
#include "ampere/wide_config.cuh"
#include "ampere/wide_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_WIDE_KERNEL(ampere_attention_fwd_f16_d384_large, D384Large<DType::F16>)
ARCHFLASH_WIDE_KERNEL(ampere_attention_fwd_f16_d384, D384<DType::F16>)
ARCHFLASH_WIDE_KERNEL(ampere_attention_fwd_f16_d512_large, D512Large<DType::F16>)
ARCHFLASH_WIDE_KERNEL(ampere_attention_fwd_f16_d512, D512<DType::F16>)
