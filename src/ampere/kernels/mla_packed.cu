// images: mla_packed_bf16
// The kernel for lists of packed latent rows. gather_config.cuh has its tile.
#include "ampere/gather_config.cuh"
#include "ampere/mla_gather_fwd.cuh"
#include "common/instantiate.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, mla_packed), mla_gather_fwd,
                 MlaGatherConfig<DTYPE, true>)
