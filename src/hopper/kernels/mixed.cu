// images: mixed_f16 mixed_bf16
// one text
// The kernels for fp16 and bf16 inputs with a KV cache in pages and packed sequences of mixed
// lengths, and the one that finds their tiles. config.cuh has the tiles.
#include "common/instantiate.cuh"
#include "hopper/attention_fwd.cuh"
#include "hopper/cache/mixed_order.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_mixed), attention_fwd, D64Mixed)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_mixed), attention_fwd, D128Mixed)

ARCHFLASH_ENTRY(KERNEL(hopper_order_mixed), (ORDER_MIXED_THREADS), order_mixed)
