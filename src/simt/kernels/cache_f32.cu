// The kernels for fp32 inputs with a KV cache. config.cuh has their tiles.
#include "common/math/append_kv.cuh"
#include "common/math/combine_shares.cuh"
#include "simt/cache_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_SIMT_CACHE_KERNEL(simt_attention_fwd_f32_d64_cache, F32D64Cache)
ARCHFLASH_SIMT_CACHE_KERNEL(simt_attention_fwd_f32_d128_cache, F32D128Cache)
ARCHFLASH_SIMT_CACHE_KERNEL(simt_attention_fwd_f32_d256_cache, F32D256Cache)
ARCHFLASH_COMBINE_SHARES_KERNEL(simt_combine_f32, DType::F32)
ARCHFLASH_APPEND_KERNEL(simt_append_f32, DType::F32, float)
