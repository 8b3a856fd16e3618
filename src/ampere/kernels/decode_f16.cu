// The kernels for few query rows in f16, with a KV cache or without. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/math/combine_shares.cuh"
#include "common/mma_sync/decode_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_DECODE_KERNEL(ampere_attention_fwd_f16_d64_decode, D64Decode<DType::F16>)
ARCHFLASH_DECODE_KERNEL(ampere_attention_fwd_f16_d128_decode, D128Decode<DType::F16>)
ARCHFLASH_DECODE_KERNEL(ampere_attention_fwd_f16_d256_decode, D256Decode<DType::F16>)
ARCHFLASH_COMBINE_SHARES_KERNEL(ampere_combine_f16_decode, DType::F16)
