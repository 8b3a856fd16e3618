// The kernels for few query rows in bf16, with a KV cache or without. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/math/combine_shares.cuh"
#include "common/mma_sync/decode_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_DECODE_KERNEL(ampere_attention_fwd_bf16_d64_decode, D64Decode<DType::BF16>)
ARCHFLASH_DECODE_KERNEL(ampere_attention_fwd_bf16_d128_decode, D128Decode<DType::BF16>)
ARCHFLASH_DECODE_KERNEL(ampere_attention_fwd_bf16_d256_decode, D256Decode<DType::BF16>)
ARCHFLASH_COMBINE_SHARES_KERNEL(ampere_combine_bf16_decode, DType::BF16)
