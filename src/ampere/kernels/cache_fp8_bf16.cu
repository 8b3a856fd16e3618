// The kernels for bf16 queries with a KV cache of 8-bit numbers. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/math/append_kv.cuh"
#include "common/mma_sync/decode_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_DECODE_KERNEL(ampere_attention_fwd_bf16_d64_cache_fp8, D64CacheFp8<DType::BF16>)
ARCHFLASH_DECODE_KERNEL(ampere_attention_fwd_bf16_d128_cache_fp8, D128CacheFp8<DType::BF16>)
ARCHFLASH_DECODE_KERNEL(ampere_attention_fwd_bf16_d256_cache_fp8, D256CacheFp8<DType::BF16>)
ARCHFLASH_APPEND_KERNEL(ampere_append_bf16_fp8, DType::BF16, uint8_t)
