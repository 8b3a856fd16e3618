// The kernels for head dimensions above 256 with masks as data in bf16. wide_config.cuh has their
// tile.
#include "ampere/wide_config.cuh"
#include "ampere/wide_masked_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_WIDE_MASKED_KERNEL(ampere_attention_fwd_bf16_d512_masked, D512Masked<DType::BF16>)
