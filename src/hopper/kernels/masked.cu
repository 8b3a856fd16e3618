// images: masked_f16 masked_bf16
// one text
// The kernels for fp16 and bf16 inputs with mask tensors. masked_config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "hopper/masks/masked_config.cuh"
#include "hopper/masks/masked_fwd.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_masked), masked_fwd, D64Masked)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_masked), masked_fwd, D128Masked)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_masked), masked_fwd, D256Masked)

// For a dense attn_mask, or key_ranges of many rows.
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_dense), masked_fwd, D64Dense)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_dense_short), masked_fwd, D64DenseShort)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_added), masked_fwd, D64Added)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_added_short), masked_fwd, D64AddedShort)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_shared), masked_fwd, D64Shared)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_windows), masked_fwd, D64Windows)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d96_windows), masked_fwd, D96Windows)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_dense), masked_fwd, D128Dense)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_dense), masked_fwd, D256Dense)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d64_wide), masked_fwd, D64Wide)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d128_wide), masked_fwd, D128Wide)
ARCHFLASH_KERNEL(KERNEL(hopper_attention_fwd, d256_wide), masked_fwd, D256Wide)
