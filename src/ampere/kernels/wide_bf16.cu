// The kernels for head dimensions above 256 in bf16. wide_config.cuh has their tiles.
#include "ampere/wide_config.cuh"
#include "ampere/wide_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_WIDE_KERNEL(ampere_attention_fwd_bf16_d384_large, D384Large<DType::BF16>)
ARCHFLASH_WIDE_KERNEL(ampere_attention_fwd_bf16_d384, D384<DType::BF16>)
ARCHFLASH_WIDE_KERNEL(ampere_attention_fwd_bf16_d512_large, D512Large<DType::BF16>)
ARCHFLASH_WIDE_KERNEL(ampere_attention_fwd_bf16_d512, D512<DType::BF16>)
