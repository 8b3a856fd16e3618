// The kernels for fp16 inputs with a KV cache. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/math/append_kv.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_f16_d64_cache, D64Cache<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_f16_d96_cache, D96Cache<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_f16_d128_cache, D128Cache<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_f16_d192_cache, D192Cache<DType::F16>)
ARCHFLASH_ATTENTION_KERNEL(ampere_attention_fwd_f16_d256_cache, D256Cache<DType::F16>)
ARCHFLASH_APPEND_KERNEL(ampere_append_f16, DType::F16, uint16_t)
