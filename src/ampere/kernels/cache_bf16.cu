// The kernels for bf16 inputs with a KV cache. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/math/append_kv.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d64_cache, D64Cache<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d96_cache, D96Cache<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d128_cache, D128Cache<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d192_cache, D192Cache<DType::BF16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_bf16_d256_cache, D256Cache<DType::BF16>)
ARCHFLASH_APPEND_KERNEL(ampere_append_bf16, DType::BF16, uint16_t)
