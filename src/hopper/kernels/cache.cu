// images: cache_f16 cache_bf16
// one text
// The kernels for fp16 and bf16 inputs with a KV cache and many query rows, and those that write to
// a cache for any kernel. config.cuh has their tiles.
#include "common/device/append_kv.cuh"
#include "common/instantiate.cuh"
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_cache), attention_fwd, D64Cache)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_few_cache), attention_fwd, D64FewCache)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_cache), attention_fwd, D128Cache)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_pages_cache), attention_fwd, D128PagesCache)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_small_pages_cache), attention_fwd,
                 D128SmallPagesCache)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_few_cache), attention_fwd, D128FewCache)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_cache), attention_fwd, D256Cache)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_pages_cache), attention_fwd, D256PagesCache)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_few_cache), attention_fwd, D256FewCache)

// New keys and values of a call go into its cache first, also before a kernel for latent caches.
ARCHFLASH_ENTRY(KERNEL(hopper_append), (32 * APPEND_WARPS), device::append_kv<DTYPE, uint16_t>)
ARCHFLASH_ENTRY(KERNEL(hopper_append, fp8), (32 * APPEND_WARPS), device::append_kv<DTYPE, uint8_t>)
