// images: cache_fp8_f16 cache_fp8_bf16
// targets: 80:80,ptx 90:90,100,120
// The kernels for fp16 and bf16 queries with a KV cache of 8-bit numbers. config.cuh has their
// tiles. The second PTX text, for all but 8.x, converts 8-bit numbers with instructions of its own.
#include "ampere/config.cuh"
#include "common/device/append_kv.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/decode_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_cache_fp8), mma_sync::decode_fwd, D64CacheFp8)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_cache_fp8), mma_sync::decode_fwd, D128CacheFp8)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_cache_fp8), mma_sync::decode_fwd, D256CacheFp8)
ARCHFLASH_ENTRY(KERNEL(ampere_append, fp8), (32 * APPEND_WARPS), device::append_kv<DTYPE, uint8_t>)
