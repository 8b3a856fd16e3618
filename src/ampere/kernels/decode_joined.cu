// images: decode_joined_f16 decode_joined_bf16
// targets: 90:90
// one text
// The kernels for few query rows in fp16 and bf16 without a KV cache whose shares of the keys are a
// cluster. config.cuh has their tiles.
#include "ampere/config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/decode_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_decode_joined), mma_sync::decode_fwd,
                 D64JoinedDecode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_decode_joined), mma_sync::decode_fwd,
                 D128JoinedDecode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_decode_joined), mma_sync::decode_fwd,
                 D256JoinedDecode)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_decode_joined_masked), mma_sync::decode_fwd,
                 D64JoinedMasked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_decode_joined_masked), mma_sync::decode_fwd,
                 D128JoinedMasked)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_decode_joined_masked), mma_sync::decode_fwd,
                 D256JoinedMasked)
