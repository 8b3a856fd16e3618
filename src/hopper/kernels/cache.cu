// images: cache_f16 cache_bf16
// The kernels for fp16 and bf16 inputs with a KV cache and many query rows, and those that write to
// a cache or read it for any kernel. config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "common/math/append_kv.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/convert_cache.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d64_cache), D64Cache<DTYPE>)
ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d64_few_cache), D64FewCache<DTYPE>)
ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d128_cache), D128Cache<DTYPE>)
ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d128_pages_cache), D128PagesCache<DTYPE>)
ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d128_small_pages_cache),
                        D128SmallPagesCache<DTYPE>)
ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d128_few_cache), D128FewCache<DTYPE>)
ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d256_cache), D256Cache<DTYPE>)
ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d256_pages_cache), D256PagesCache<DTYPE>)
ARCHFLASH_HOPPER_KERNEL(KERNEL(hopper_attention_fwd, d256_few_cache), D256FewCache<DTYPE>)

// New keys and values of a call go into its cache first, also before a kernel for latent caches.
ARCHFLASH_APPEND_KERNEL(KERNEL(hopper_append), DTYPE, uint16_t)
ARCHFLASH_APPEND_KERNEL(KERNEL(hopper_append, fp8), DTYPE, uint8_t)

// A cache of 8-bit numbers becomes one of 16 bits before the kernels for many query rows.
ARCHFLASH_CONVERT_CACHE_KERNEL(KERNEL(hopper_convert_cache), DTYPE)
