// images: mla_gather_f16 mla_gather_bf16
// one text
// The kernel for lists of latent rows in fp16 and bf16. gather_config.cuh has its tile.
#include "ampere/gather_config.cuh"
#include "ampere/mla_gather_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, mla_gather), mla_gather_fwd, MlaGatherConfig<DTYPE>)
