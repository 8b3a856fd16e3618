// images: decode_f16 decode_bf16
// targets: 80:80,ptx 90:90,100,120
// one text
// 80 as 90
// The kernels for few query rows in fp16 and bf16, with a KV cache or without. config.cuh has their
// tiles. The second PTX text, for all but 8.x, starts the next kernel early.
#include "ampere/config.cuh"
#include "common/device/combine_shares.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/decode_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_decode), mma_sync::decode_fwd, D64Decode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_decode), mma_sync::decode_fwd, D128Decode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_decode), mma_sync::decode_fwd, D256Decode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_decode_plain), mma_sync::decode_fwd,
                 D64PlainDecode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_decode_plain), mma_sync::decode_fwd,
                 D128PlainDecode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_decode_plain), mma_sync::decode_fwd,
                 D256PlainDecode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_decode_masked), mma_sync::decode_fwd,
                 D64MaskedDecode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_decode_masked), mma_sync::decode_fwd,
                 D128MaskedDecode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_decode_masked), mma_sync::decode_fwd,
                 D256MaskedDecode)
ARCHFLASH_ENTRY(KERNEL(ampere_combine, decode), (32 * COMBINE_WARPS),
                device::combine_shares<DTYPE, mma_sync::CombineUnlikeParams>)
