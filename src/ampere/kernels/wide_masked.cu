// images: wide_masked_f16 wide_masked_bf16
// one text
// The kernels for head dimensions above 256 with masks as data in fp16 and bf16. wide_config.cuh
// has their tile.
#include "ampere/wide_config.cuh"
#include "ampere/wide_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d512_masked), wide_fwd, D512Masked)
