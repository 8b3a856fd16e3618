// The kernels for fp16 inputs, which compute in fp32. config.cuh has their tiles.
#include "simt/attention_fwd.cuh"

using namespace archflash;
using namespace archflash::simt;

ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f16_d32, HalfD32<DType::F16>)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f16_d64, HalfD64<DType::F16>)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f16_d128, HalfD128<DType::F16>)
ARCHFLASH_SIMT_KERNEL(simt_attention_fwd_f16_d256, HalfD256<DType::F16>)
