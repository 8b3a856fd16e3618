// The kernels for bf16 inputs with masks as data. masked_config.cuh has their tiles.
#include "hopper/dense_config.cuh"
#include "hopper/dense_fwd.cuh"
#include "hopper/masked_config.cuh"
#include "hopper/masked_fwd.cuh"
#include "hopper/order_tiles.cuh"
#include "hopper/summarize_mask.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_bf16_d64_masked, D64Masked<DType::BF16>)
ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_bf16_d128_masked, D128Masked<DType::BF16>)
ARCHFLASH_HOPPER_MASKED_KERNEL(hopper_attention_fwd_bf16_d256_masked, D256Masked<DType::BF16>)
ARCHFLASH_HOPPER_ORDER_KERNEL(hopper_order_tiles_bf16)

// For a dense attn_mask, or key_ranges of many rows. dense_config.cuh has their tiles.
ARCHFLASH_HOPPER_DENSE_KERNEL(hopper_attention_fwd_bf16_d64_dense, D64Dense<DType::BF16>)
ARCHFLASH_HOPPER_DENSE_KERNEL(hopper_attention_fwd_bf16_d128_dense, D128Dense<DType::BF16>)
ARCHFLASH_HOPPER_SUMMARY_KERNEL(hopper_summarize_mask_bf16, DType::BF16)
ARCHFLASH_HOPPER_RANGES_KERNEL(hopper_summarize_ranges_bf16)
