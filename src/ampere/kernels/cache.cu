// images: cache_f16 cache_bf16
// one text
// The kernels for fp16 and bf16 inputs with a KV cache. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/device/append_kv.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_cache), mma_sync::attention_fwd, D64Cache)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_cache), mma_sync::attention_fwd, D96Cache)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_cache), mma_sync::attention_fwd, D128Cache)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d192_cache), mma_sync::attention_fwd, D192Cache)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_cache), mma_sync::attention_fwd, D256Cache)
ARCHFLASH_ENTRY(KERNEL(ampere_append), (32 * APPEND_WARPS), device::append_kv<DTYPE, uint16_t>)
