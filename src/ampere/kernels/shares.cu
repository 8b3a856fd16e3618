// images: shares_f16 shares_bf16
// targets: 80:80,ptx 90:90
// one text
// 80 as 90
// The kernels for fp16 and bf16 inputs whose CTAs share out the keys of row tiles, and the causal
// ones beside them. bounded_config.cuh has their tiles.
#include "ampere/bounded_config.cuh"
#include "common/instantiate.cuh"
#include "common/mma_sync/bounded_fwd.cuh"

using namespace archflash;
using namespace archflash::ampere;

ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d32_shares), mma_sync::shares_fwd, D32Shares)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_shares), mma_sync::shares_fwd, D64Shares)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_shares_three), mma_sync::shares_fwd,
                 D64SharesThree)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_shares), mma_sync::shares_fwd, D96Shares)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_shares), mma_sync::shares_fwd, D128Shares)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_shares_groups), mma_sync::shares_fwd,
                 D128SharesGroups)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d160_shares), mma_sync::shares_fwd, D160Shares)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d256_shares), mma_sync::shares_fwd, D256Shares)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d64_causal), mma_sync::shares_fwd, D64Causal)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d96_causal), mma_sync::shares_fwd, D96Causal)
ARCHFLASH_KERNEL(KERNEL(ampere_attention_fwd, d128_causal), mma_sync::shares_fwd, D128Causal)
ARCHFLASH_ENTRY(KERNEL(ampere_combine_shares), (32 * COMBINE_WARPS),
                mma_sync::combine_key_shares<DTYPE>)
