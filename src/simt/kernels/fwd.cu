// images: fwd_f16 fwd_bf16
// targets: 75:75,80,90,100,120,ptx
// The kernels for fp16 and bf16 inputs, which compute in fp32. config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "simt/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_KERNEL(KERNEL(simt_attention_fwd, d32), attention_fwd, HalfD32)
ARCHFLASH_KERNEL(KERNEL(simt_attention_fwd, d64), attention_fwd, HalfD64)
ARCHFLASH_KERNEL(KERNEL(simt_attention_fwd, d128), attention_fwd, HalfD128)
ARCHFLASH_KERNEL(KERNEL(simt_attention_fwd, d256), attention_fwd, HalfD256)
