// The kernels for fp32 inputs with a KV cache. config.cuh has their tiles.
#include "common/device/append_kv.cuh"
#include "common/device/combine_shares.cuh"
#include "common/kernel_entry.cuh"
#include "simt/cache_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_KERNEL(simt_attention_fwd_f32_d64_cache, cache_fwd, F32D64Cache)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d128_cache, cache_fwd, F32D128Cache)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d256_cache, cache_fwd, F32D256Cache)
ARCHFLASH_ENTRY(simt_combine_f32, (32 * COMBINE_WARPS), device::combine_shares<DType::F32>)
ARCHFLASH_ENTRY(simt_append_f32, (32 * APPEND_WARPS), device::append_kv<DType::F32, float>)
