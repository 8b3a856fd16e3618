// The kernels for fp32 inputs with lists of keys. They have the tiles of those with a KV cache.
#include "common/kernel_entry.cuh"
#include "simt/gather_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_KERNEL(simt_attention_fwd_f32_d64_gather, gather_fwd, F32D64Cache)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d128_gather, gather_fwd, F32D128Cache)
ARCHFLASH_KERNEL(simt_attention_fwd_f32_d256_gather, gather_fwd, F32D256Cache)
