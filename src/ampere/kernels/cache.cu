// images: cache_f16 cache_bf16
// The kernels for fp16 and bf16 inputs with a KV cache. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/instantiate.cuh"
#include "common/math/append_kv.cuh"
#include "common/mma_sync/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d64_cache), D64Cache<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d96_cache), D96Cache<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d128_cache), D128Cache<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d192_cache), D192Cache<DTYPE>)
ARCHFLASH_ATTENTION_KERNEL(KERNEL(ampere_attention_fwd, d256_cache), D256Cache<DTYPE>)
ARCHFLASH_APPEND_KERNEL(KERNEL(ampere_append), DTYPE, uint16_t)
