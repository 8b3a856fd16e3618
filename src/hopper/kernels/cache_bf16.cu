// The kernels for bf16 inputs with a KV cache and many query rows. config.cuh has their tiles.
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d64_cache, D64Cache<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d64_few_cache, D64FewCache<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d128_cache, D128Cache<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d128_pages_cache, D128PagesCache<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d128_small_pages_cache,
                        D128SmallPagesCache<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d128_few_cache, D128FewCache<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d256_cache, D256Cache<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d256_pages_cache, D256PagesCache<DType::BF16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_bf16_d256_few_cache, D256FewCache<DType::BF16>)
