// The kernels for fp16 inputs with a KV cache and many query rows. config.cuh has their tiles.
#include "hopper/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d64_cache, D64Cache<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d64_few_cache, D64FewCache<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d128_cache, D128Cache<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d128_pages_cache, D128PagesCache<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d128_small_pages_cache,
                        D128SmallPagesCache<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d128_few_cache, D128FewCache<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d256_cache, D256Cache<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d256_pages_cache, D256PagesCache<DType::F16>)
ARCHFLASH_HOPPER_KERNEL(hopper_attention_fwd_f16_d256_few_cache, D256FewCache<DType::F16>)
