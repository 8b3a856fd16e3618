// The kernels for bf16 inputs, which compute in fp32. config.cuh has their tiles.
#include "simt/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_bf16_d32, HalfD32<DType::BF16>)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_bf16_d64, HalfD64<DType::BF16>)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_bf16_d128, HalfD128<DType::BF16>)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_bf16_d256, HalfD256<DType::BF16>)
