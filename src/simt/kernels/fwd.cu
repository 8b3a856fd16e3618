// images: fwd_f16 fwd_bf16
// The kernels for fp16 and bf16 inputs, which compute in fp32. config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "simt/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_SIMT_KERNEL(KERNEL(simt_attention_fwd, d32), HalfD32<DTYPE>)
ARCHFLASH_SIMT_KERNEL(KERNEL(simt_attention_fwd, d64), HalfD64<DTYPE>)
ARCHFLASH_SIMT_KERNEL(KERNEL(simt_attention_fwd, d128), HalfD128<DTYPE>)
ARCHFLASH_SIMT_KERNEL(KERNEL(simt_attention_fwd, d256), HalfD256<DTYPE>)
