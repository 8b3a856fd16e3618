// images: wide_f16 wide_bf16
// one text
// The kernels for head dimensions above 256 in fp16 and bf16. wide_config.cuh has their tiles.
#include "ampere/wide_config.cuh"
#include "ampere/wide_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d384_large), wide_fwd, D384Large)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d384), wide_fwd, D384)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d512_large), wide_fwd, D512Large)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d512), wide_fwd, D512)
