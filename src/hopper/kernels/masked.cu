// images: masked_f16 masked_bf16
// The kernels for fp16 and bf16 inputs with mask tensors. masked_config.cuh has their tiles.
#include "common/instantiate.cuh"
#include "hopper/masked_config.cuh"
#include "hopper/masked_fwd.cuh"
#include "hopper/order_tiles.cuh"
#include "hopper/summarize_mask.cuh"

using namespace archflash;
using namespace archflash::hopper;

ARCHFLASH_HOPPER_MASKED_KERNEL(KERNEL(hopper_attention_fwd, d64_masked), D64Masked<DTYPE>)
ARCHFLASH_HOPPER_MASKED_KERNEL(KERNEL(hopper_attention_fwd, d128_masked), D128Masked<DTYPE>)
ARCHFLASH_HOPPER_MASKED_KERNEL(KERNEL(hopper_attention_fwd, d256_masked), D256Masked<DTYPE>)
ARCHFLASH_HOPPER_ORDER_KERNEL(KERNEL(hopper_order_tiles))

// For a dense attn_mask, or key_ranges of many rows.
ARCHFLASH_HOPPER_MASKED_KERNEL(KERNEL(hopper_attention_fwd, d64_dense), D64Dense<DTYPE>)
ARCHFLASH_HOPPER_MASKED_KERNEL(KERNEL(hopper_attention_fwd, d128_dense), D128Dense<DTYPE>)
ARCHFLASH_HOPPER_SUMMARY_KERNEL(KERNEL(hopper_summarize_mask), DTYPE)
ARCHFLASH_HOPPER_RANGES_KERNEL(KERNEL(hopper_summarize_ranges))
